"""Damaged and hostile GGUF files: every one is a one-line error, with bounded time and memory."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eepo.model import gguf_convert
from eepo.model.gguf_file import open_gguf
from eepo.types import UserError

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

from .gguf_files import (  # noqa: E402  (it needs the package)
    byte_level_tokenizer,
    model_fields,
    model_tensors,
    tiny_model,
    tokenizer_fields,
    write_gguf,
)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "intact.gguf"
    model = tiny_model("qwen2", num_hidden_layers=1)
    fields = tokenizer_fields(byte_level_tokenizer(digits=1, normalize=True), 384)
    write_gguf(path, "qwen2", model_fields(model) | fields, model_tensors(model))
    return path.read_bytes()


def header(num_tensors: int, num_fields: int, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields) + body


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def array(type_id: int, count: int) -> bytes:
    return text("a") + struct.pack("<IIQ", 9, type_id, count)


def tensor(dimensions: list[int], type_id: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text("t") + sizes + struct.pack("<IQ", type_id, offset)


HUGE = 2**63 + 1  # negative as a signed integer
HOSTILE = {
    "empty": (b"", "not a GGUF file: it has 0 bytes"),
    "other": (b"PK" * 20, "does not start with GGUF"),
    "old_version": (header(0, 0, version=1), "GGUF version 1; supported: 2, 3"),
    "big_endian": (header(0, 0, version=3 << 24), "big-endian"),
    "tensors": (header(HUGE, 0), f"claims {HUGE} tensors"),
    "fields": (header(0, HUGE), f"claims {HUGE} metadata fields"),
    "long_key": (header(0, 1, struct.pack("<Q", HUGE)), f"a text of {HUGE} bytes"),
    "cut_key": (header(0, 1, struct.pack("<Q", 1000)), "truncated: its header needs 1000 bytes"),
    "not_utf8": (header(0, 1, struct.pack("<Q", 2) + b"\xff\xff"), "is not UTF-8"),
    "field_type": (header(0, 1, text("a") + struct.pack("<I", 77)), "unknown type 77"),
    "nested": (header(0, 1, array(9, 1)), "array of the unsupported type 9"),
    "numbers": (header(0, 1, array(4, HUGE)), "truncated"),
    "many_numbers": (header(0, 1, array(0, 2**40)), "truncated"),
    "texts": (header(0, 1, array(8, HUGE)), f"'a' has {HUGE} texts"),
    "many_texts": (header(0, 1, array(8, 3_000_000)), "truncated"),
    "twice": (header(0, 2, 2 * (text("a") + struct.pack("<IB", 0, 1))), "'a' appears twice"),
    "same_tensor": (header(2, 0, 2 * tensor([4])) + bytes(99), "'t' appears twice"),
    "dimensions": (header(1, 0, text("t") + struct.pack("<I", 2**31)), "2147483648 dimensions"),
    "no_dimensions": (header(1, 0, tensor([])), "has 0 dimensions"),
    "large_tensor": (header(1, 0, tensor([HUGE, HUGE])), "truncated: tensor 't' ends at byte"),
    "empty_tensor": (header(1, 0, tensor([0])), r"the shape \[0\]"),
    "far_tensor": (header(1, 0, tensor([4], offset=HUGE)), "truncated: tensor 't' ends at byte"),
    "tensor_type": (header(1, 0, tensor([4], type_id=999)), "'t' has the unknown type 999"),
    "blocks": (header(1, 0, tensor([33], type_id=2)), "not made of blocks of 32"),
    "alignment": (
        header(0, 1, text("general.alignment") + struct.pack("<II", 4, 3)),
        "general.alignment = 3 must be a power of two",
    ),
    "split": (
        header(0, 1, text("split.count") + struct.pack("<IH", 2, 65535)),
        "split.count = 65535 must be at most 1000",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_one_line_errors_in_little_memory(name: str, tmp_path: Path) -> None:
    content, message = HOSTILE[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=message) as error:
            open_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("share", [0.001, 0.02, 0.1, 0.3, 0.5, 0.9, 0.9999])
def test_a_truncated_file_is_a_one_line_error(share: float, intact: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(intact[: int(len(intact) * share)])
    with pytest.raises(UserError, match=r"truncated|not a GGUF file"):
        gguf_convert.convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_flipped_bytes_in_the_header_raise_no_other_error(
    intact: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_convert, "write_checksums", lambda folder: None)
    generator, path, num_converted = random.Random(0), tmp_path / "flipped.gguf", 0
    header_size = intact.index(b"output_norm.weight")
    for attempt in range(60):
        content = bytearray(intact)
        for _ in range(generator.choice([1, 3, 20])):
            content[generator.randrange(header_size)] = generator.randrange(256)
        path.write_bytes(content)
        with contextlib.suppress(UserError):
            gguf_convert.convert(path, tmp_path / f"out-{attempt}")
            num_converted += 1
    assert 0 < num_converted < 40


@pytest.mark.parametrize("name", ["folder", "absent"])
def test_a_path_that_is_not_a_file_is_a_one_line_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=f"{name} could not be read"):
        open_gguf(tmp_path / name)


def test_a_type_that_the_package_cannot_dequantize_is_a_one_line_error(tmp_path: Path) -> None:
    writer: Any = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("t", np.zeros((2, 4), np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match="tensor t has the type I32, which the package gguf cannot"):
        open_gguf(tmp_path / "x.gguf").tensors["t"].load()
