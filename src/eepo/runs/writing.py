"""Writes to disk: flushes files, and names the file in errors such as a full disk."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RUST_ERROR = re.compile(r"\(os error (\d+)\)")  # how Rust ends the text of such an error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise every error of the operating system as an OSError with a file name.

    Python does not name the file if the disk is full. safetensors and tokenizers, which are written
    in Rust, raise errors of other types.
    """
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    except Exception as error:
        number = RUST_ERROR.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def flush_to_disk(path: Path) -> None:
    """Wait until the contents of a file or a folder are on the disk (`fsync`)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_name(path: Path) -> Path:
    """Return the first of `path-1`, `path-2` and so on that does not exist."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(1))
    return next(name for name in numbered if not name.exists())
