"""Converts a GGUF file into a model folder that `transformers` loads.

The weights are dequantized to fp32. The precision lost to quantization is not recovered.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from eepo.model.gguf_file import check_package, open_gguf
from eepo.model.gguf_tokenizer import end_token_ids, read_tokenizer, special_token_ids
from eepo.model.gguf_weights import read_config, write_generation_config, write_weights
from eepo.runs.checksums import write_checksums
from eepo.runs.writing import writing
from eepo.types import UserError, printable

PARTIAL_PREFIX = "converting-"
PARTIAL_MAX_AGE = 3600.0  # seconds; converting a model of 1.5 billion parameters takes a minute
FORMAT = 1  # raise it when the conversion changes, so that cached folders are converted again
CHUNK_BYTES = 2**22


def convert(source: Path, folder: Path, sha256: str = "") -> None:
    """Convert a file into `folder`, which must not exist. With `sha256`, check the file first."""
    if folder.exists() or folder.is_symlink():
        raise UserError(f"--out {folder} already exists; give a new folder")
    check_package()
    if sha256:
        check_hash(source, sha256)
    try:
        convert_atomically(source, folder)
    except OSError as error:
        raise UserError(f"--out {folder} could not be written: {error}") from error


def converted_folder(source: Path, name: str = "") -> Path:
    """Return the folder of a file in the cache; convert the file first if the folder is missing.

    A file that has changed is converted again.
    """
    folder = cache_folder() / (name or _cache_name(source))
    remove_stale_conversions(folder.parent)
    if folder.is_dir():
        return folder
    check_package()
    line = f"converting {source.name} into {folder} (once)"
    print(printable(line), file=sys.stderr, flush=True)
    try:
        convert_atomically(source, folder)
    except OSError as error:
        if not folder.is_dir():
            raise UserError(
                f"{folder} could not be written: {error}; set EEPO_CACHE to another folder"
            ) from error
    return folder


def cache_folder() -> Path:
    """Return the folder named by EEPO_CACHE, else `eepo` in the user's cache folder."""
    if folder := os.environ.get("EEPO_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "eepo"


def check_hash(source: Path, expected: str) -> None:
    """Raise an error if the SHA-256 hash of the file is not `expected`."""
    if not re.fullmatch(r"[0-9a-fA-F]{64}", expected):
        raise UserError(f"--sha256 {printable(expected[:80])} must have 64 hexadecimal digits")
    if open_gguf(source).size("split.count", 1) > 1:
        raise UserError(f"--sha256 checks one file, but {source} is one of several parts")
    digest = hashlib.sha256()
    with source.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != expected.lower():
        raise UserError(f"{source} has the SHA-256 hash {digest.hexdigest()}, not {expected}")


def convert_atomically(source: Path, folder: Path) -> None:
    """Convert into a temporary folder, then rename it: `folder` is complete as soon as it exists.

    If two processes convert at the same time, the first to finish wins.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=PARTIAL_PREFIX) as partial:
        model = Path(partial) / "model"
        model.mkdir()
        write_model(source, model)
        if not folder.is_dir():
            model.rename(folder)


def write_model(source: Path, folder: Path) -> None:
    """Write config, tokenizer, chat template and weights of a GGUF file into a folder."""
    file = open_gguf(source)
    config = read_config(file)
    tokenizer = read_tokenizer(file)
    ids = special_token_ids(file, len(tokenizer))
    config.bos_token_id, config.eos_token_id = ids["bos"], ids["eos"]
    config.pad_token_id = ids["pad"]
    end_tokens = end_token_ids(file, len(tokenizer))
    with writing(folder):
        write_weights(file, config, folder)
        write_generation_config(config, end_tokens, folder)
        tokenizer.save_pretrained(folder)
        write_checksums(folder)


def remove_stale_conversions(cache: Path) -> None:
    """Remove folders that killed conversions left. Recent ones may belong to a running process."""
    for partial in cache.glob(f"{PARTIAL_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process may remove it at the same time
            if time.time() - partial.stat().st_mtime > PARTIAL_MAX_AGE:
                shutil.rmtree(partial)


def _cache_name(source: Path) -> str:
    """Return a name that changes with the path, the size and the time of the file."""
    try:
        path, status = source.resolve(strict=True), source.stat()
    except OSError as error:
        raise UserError(f"{source} could not be read: {error.strerror or error}") from error
    key = f"{FORMAT} {path} {status.st_size} {status.st_mtime_ns}"
    return f"{source.stem[:80]}-{hashlib.sha256(key.encode(errors='replace')).hexdigest()[:12]}"
