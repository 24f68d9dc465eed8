"""Tests that errors of the operating system name the file."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from eepo.runs.runlog import RunLog, write_atomically
from eepo.runs.writing import writing

Limit = Callable[[int], AbstractContextManager[None]]


@pytest.mark.parametrize("writer", ["python", "safetensors", "tokenizers"])
def test_a_file_that_cannot_be_written_is_an_os_error_with_its_name(
    writer: str, tmp_path: Path, tokenizer: Any, file_size_limit: Limit
) -> None:
    """Each of the libraries raises another type of error."""
    file = tmp_path / "file"
    weights = {"weights": torch.zeros(1000)}
    writers: dict[str, Callable[[], object]] = {
        "python": lambda: file.write_text("x" * 1000),
        "safetensors": lambda: save_file(weights, file),
        "tokenizers": lambda: tokenizer.backend_tokenizer.save(str(file)),
    }
    with pytest.raises(OSError) as caught, writing(Path("run/file")), file_size_limit(100):
        writers[writer]()
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, "run/file")


def test_an_error_that_names_a_file_keeps_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, writing(Path("other")):
        (tmp_path / "missing").read_text()
    assert caught.value.filename == str(tmp_path / "missing")


@pytest.mark.parametrize("error", [ValueError("os error 28"), SafetensorError("a bug"), KeyError()])
def test_other_errors_pass_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, writing(Path("file")):
        raise error
    assert caught.value is error


def test_a_record_that_cannot_be_written_names_its_file(
    tmp_path: Path, file_size_limit: Limit
) -> None:
    with pytest.raises(OSError) as caught, file_size_limit(100):
        RunLog(tmp_path).append("metrics.jsonl", {"step": 1, "text": "x" * 1000})
    assert caught.value.filename == str(tmp_path / "metrics.jsonl")


def test_a_failed_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, file_size_limit: Limit
) -> None:
    (tmp_path / "recipe.toml").write_text("old")
    with pytest.raises(OSError) as caught, file_size_limit(100):
        write_atomically(tmp_path / "recipe.toml", "x" * 1000)
    assert caught.value.filename == str(tmp_path / "recipe.toml")
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]
    assert (tmp_path / "recipe.toml").read_text() == "old"
