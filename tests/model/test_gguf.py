"""GGUF files become model folders with the same logits as the original `transformers` models."""

from __future__ import annotations

import hashlib
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from eepo.cli import app
from eepo.config import ModelConfig
from eepo.model import gguf_convert, gguf_weights, loading
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

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


@pytest.fixture(scope="module")
def vocabulary() -> dict[str, Any]:
    return tokenizer_fields(byte_level_tokenizer(digits=1, normalize=True), 384)


@pytest.fixture
def write(tmp_path: Path, vocabulary: dict[str, Any]) -> Any:
    """Write a model as `model.gguf`, with changes, and return the path."""

    def write_model(model: Any, fields: Any = None, tensors: Any = None, types: Any = None) -> Path:
        path = tmp_path / "model.gguf"
        all_fields = model_fields(model) | vocabulary | (fields or {})
        kept = {key: value for key, value in all_fields.items() if value is not None}
        all_tensors = model_tensors(model) | (tensors or {})
        stored = {name: values for name, values in all_tensors.items() if values is not None}
        write_gguf(path, model.config.model_type, kept, stored, types)
        return path

    return write_model


def convert(path: Path) -> Path:
    folder = path.parent / "converted"
    gguf_convert.convert(path, folder)
    return folder


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(60)[None] * 6
    with torch.no_grad():
        return model(tokens).logits


def assert_same_model(folder: Path, original: Any) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert model.dtype == torch.float32
    torch.testing.assert_close(logits(model), logits(original), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_converted_models_have_the_logits_of_the_original(
    architecture: str, tied: bool, write: Any
) -> None:
    original = tiny_model(architecture, tie_word_embeddings=tied)
    folder = convert(write(original))
    assert_same_model(folder, original)
    assert loading.load_shape(ModelConfig(path=str(folder)))[0].tie_word_embeddings is tied


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 32}),
        ("llama", {"rope_parameters": LLAMA3, "head_dim": 64}),
        ("llama", {"rope_parameters": LINEAR}),
        ("qwen2", {"rope_parameters": YARN}),
        ("qwen2", {"num_key_value_heads": 4}),
    ],
    ids=["biases", "wide_heads", "llama3_rope", "linear_rope", "yarn_rope", "all_heads"],
)
def test_variants_have_the_logits_of_the_original(
    architecture: str, settings: dict[str, Any], write: Any
) -> None:
    original = tiny_model(architecture, **settings)
    fields, tensors = {}, {}
    if "head_dim" in settings:
        fields[f"{architecture}.attention.key_length"] = settings["head_dim"]
    if settings.get("rope_parameters") is LLAMA3:
        default = 1 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
        tensors["rope_freqs.weight"] = (default / original.model.rotary_emb.inv_freq).numpy()
    assert_same_model(convert(write(original, fields, tensors)), original)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_matrices_have_the_logits_of_the_dequantized_model(name: str, write: Any) -> None:
    kind = gguf.GGMLQuantizationType[name]
    original = tiny_model("llama")
    types = {key: kind for key, values in model_tensors(original).items() if values.ndim == 2}
    path = write(original, types=types)
    changed = False
    for weight in original.parameters():
        if weight.dim() == 2:  # quantizing row by row does not depend on the order of rows
            rounded = gguf.dequantize(gguf.quantize(weight.detach().numpy(), kind), kind)
            changed |= not np.array_equal(rounded, weight.detach().numpy())
            weight.data = torch.tensor(rounded)
    assert changed
    assert_same_model(convert(path), original)


@pytest.mark.parametrize(
    "kind", [kind for kind in gguf.GGMLQuantizationType if kind.name[0] in "BFIMNQT"]
)
def test_every_quantization_of_the_package_is_read(kind: Any, tmp_path: Path) -> None:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    # Bytes below 0x3c make scales in fp16 finite and smaller than 1.
    stored = np.random.default_rng(0).integers(0, 0x3B, (3, 2 * block_bytes), dtype=np.uint8)
    try:
        expected = gguf.dequantize(stored, kind)
    except NotImplementedError:
        pytest.skip(f"the package gguf cannot dequantize {kind.name}")
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("first", np.zeros(8, np.float32))
    writer.add_tensor("weights", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = open_gguf(tmp_path / "one.gguf").tensors["weights"]
    assert tensor.shape == (3, 2 * block_size)
    np.testing.assert_array_equal(tensor.load().numpy(), expected)


def test_embeddings_stored_in_two_quantizations_are_tied_and_the_finer_one_is_used(
    write: Any,
) -> None:
    original = tiny_model("qwen2")
    embedding = model_tensors(original)["token_embd.weight"]
    types = {
        "token_embd.weight": gguf.GGMLQuantizationType.Q4_0,
        "output.weight": gguf.GGMLQuantizationType.Q8_0,
    }
    path = write(original, tensors={"output.weight": embedding}, types=types)
    kind = types["output.weight"]
    finer = torch.tensor(gguf.dequantize(gguf.quantize(embedding, kind), kind))
    original.model.embed_tokens.weight.data = finer
    folder = convert(path)
    assert_same_model(folder, original)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_large_model_is_written_in_shards(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_weights, "SHARD_BYTES", 100_000)
    original = tiny_model("qwen2", tie_word_embeddings=False)
    folder = convert(write(original))
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert_same_model(folder, original)


def test_a_split_model_is_read_from_its_first_part(
    tmp_path: Path, vocabulary: dict[str, Any]
) -> None:
    original = tiny_model("llama")
    tensors = model_tensors(original)
    names = sorted(tensors)
    parts = [tmp_path / f"model-0000{index}-of-00002.gguf" for index in (1, 2)]
    fields = model_fields(original) | vocabulary | {"split.count": 2}
    write_gguf(parts[0], "llama", fields, {name: tensors[name] for name in names[:7]})
    rest = {name: tensors[name] for name in names[7:]}
    write_gguf(parts[1], "llama", {"split.count": 2}, rest)
    assert_same_model(convert(parts[0]), original)
    with pytest.raises(UserError, match="give the first one"):
        open_gguf(parts[1])
    with pytest.raises(UserError, match="--sha256 checks one file"):
        gguf_convert.convert(parts[0], tmp_path / "other", "0" * 64)
    parts[1].unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00002\.gguf could not be read"):
        open_gguf(parts[0])


def test_model_path_can_be_a_gguf_file(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setenv("EEPO_CACHE", str(tmp_path / "cache"))
    original = tiny_model("qwen2")
    config = ModelConfig(path=str(write(original)))
    model = loading.load_model(config, torch.device("cpu"))
    torch.testing.assert_close(logits(model), logits(original), rtol=1e-4, atol=1e-4)
    assert capfd.readouterr().err.count("converting model.gguf") == 1
    tokenizer = loading.load_tokenizer(config)
    assert tokenizer.decode(tokenizer("1234 = x").input_ids) == "1234 = x"
    first = loading.resolve(config.path)
    assert "converting" not in capfd.readouterr().err
    write(tiny_model("qwen2", num_hidden_layers=1))
    assert loading.resolve(config.path) != first
    assert loading.load_shape(config)[0].num_hidden_layers == 1


def test_a_missing_gguf_file_is_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'absent.gguf": no such GGUF file'):
        loading.resolve(str(tmp_path / "absent.gguf"))


def test_the_command_converts_and_checks_the_hash(write: Any, tmp_path: Path) -> None:
    path, out = write(tiny_model("llama")), tmp_path / "out"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    wrong = CliRunner().invoke(app, ["convert", str(path), "--out", str(out), "--sha256", "0" * 64])
    assert isinstance(wrong.exception, UserError)
    assert f"has the SHA-256 hash {digest}, not {'0' * 64}" in str(wrong.exception)
    assert not out.exists()
    command = ["convert", str(path), "--out", str(out), "--sha256", digest.upper()]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert AutoTokenizer.from_pretrained(out).chat_template
    again = CliRunner().invoke(app, command)
    assert "already exists; give a new folder" in str(again.exception)
    short = CliRunner().invoke(
        app, ["convert", str(path), "--out", str(out / "x"), "--sha256", "a"]
    )
    assert "must have 64 hexadecimal digits" in str(short.exception)


def test_without_the_package_the_error_says_how_to_install_it(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tiny_model("llama"))
    find_spec = gguf_convert.check_package.__globals__["importlib"].util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "gguf" else find_spec(name)
    )
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r'need the package gguf: pip install "eepo\[gguf\]"'):
        gguf_convert.convert(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        ({"llama.expert_count": 8}, {}, "mixture-of-experts models are not supported"),
        ({"llama.block_count": 2**30}, {}, "but the file has 20 tensors"),
        ({"llama.block_count": 3}, {}, r"has no tensor blk\.2\.attn_q\.weight"),
        ({"llama.block_count": 1}, {}, r"tensor 'blk\.1\..*' is not supported"),
        ({"llama.embedding_length": 65}, {}, "4 attention heads do not divide 65"),
        ({"llama.embedding_length": 60}, {}, "the head size must be even, got 15"),
        ({"llama.embedding_length": 128}, {}, r"has the shape \[384, 64\]; .* \[384, 128\]"),
        ({"llama.embedding_length": None}, {}, "has no llama.embedding_length"),
        ({"llama.embedding_length": "64"}, {}, "must be an integer, got str"),
        ({"llama.feed_forward_length": 0}, {}, "= 0 must be from 1 to"),
        ({"llama.attention.head_count": 3_000_000_000}, {}, "must be from 1 to"),
        ({"llama.attention.head_count_kv": 3}, {}, "cannot share 3 key-value heads"),
        ({"llama.attention.key_length": 2**31 - 2}, {}, "has the shape"),
        ({"llama.rope.dimension_count": 8}, {}, r"partial rotary .* \(head size 16\)"),
        ({"llama.rope.freq_base": float("nan")}, {}, "must be positive and finite"),
        ({"llama.rope.scaling.type": "longrope"}, {}, "supported: none, linear, yarn"),
        ({}, {"rope_freqs.weight": np.full(8, 3.0, np.float32)}, "not the factors of Llama 3"),
        ({}, {"output_norm.weight": None}, "has no tensor output_norm.weight"),
        ({}, {"token_embd.weight": None}, "has no tensor token_embd.weight"),
        ({}, {"blk.0.attn_q.bias": np.ones(64, np.float32)}, r"has no tensor blk\.0\.attn_k\.bias"),
        ({}, {"output_norm.weight": np.full(64, np.inf, np.float32)}, "not finite"),
    ],
)
def test_models_that_do_not_fit_are_one_line_errors(
    fields: dict[str, Any], tensors: dict[str, Any], message: str, write: Any, tmp_path: Path
) -> None:
    path = write(tiny_model("llama"), fields, tensors)
    with pytest.raises(UserError, match=message) as error:
        gguf_convert.convert(path, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("converting-*"))


def test_a_full_disk_is_a_one_line_error(write: Any, tmp_path: Path) -> None:
    path = write(tiny_model("llama"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # bytes per file
    try:
        with pytest.raises(UserError, match=r"out could not be written: .*File too large") as error:
            gguf_convert.convert(path, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(error.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.gguf"]


def test_an_unknown_architecture_is_a_one_line_error(
    tmp_path: Path, vocabulary: dict[str, Any]
) -> None:
    path = tmp_path / "model.gguf"
    tensors = {"token_embd.weight": np.ones((384, 8), np.float32)}
    write_gguf(path, "mamba", vocabulary, tensors)
    with pytest.raises(UserError, match="'mamba' is not supported; supported: llama, qwen2"):
        gguf_convert.convert(path, tmp_path / "out")
