"""Reads JSON Lines files: the records of a run, and files that a user brings.

Every mistake in a file becomes a `UserError` that names the file and the line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eepo.types import UserError

MAX_LINE_BYTES = 16 * 2**20  # a longer line means that the file is damaged or not JSON Lines


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file that this package wrote.

    Skip an unfinished last line: the run was killed while it wrote it.
    """
    for _, row in _rows(path, skip_unfinished=True):
        yield row


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (`file:line`, value) for each line of a user's file. Skip blank lines."""
    return _rows(path, skip_unfinished=False)


def _rows(path: Path, skip_unfinished: bool) -> Iterator[tuple[str, Any]]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    with file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{path}:{number}"
            if len(line) > MAX_LINE_BYTES:
                raise UserError(f"{where}: the line is longer than {MAX_LINE_BYTES} bytes")
            if skip_unfinished and not line.endswith(b"\n"):
                return
            if line.strip():
                yield where, parse_json(line, where)


def parse_json(raw: bytes, where: str) -> Any:
    """Parse UTF-8 JSON; `where` names the place in error messages."""
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON at character {error.pos}: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # an integer of 5,000 digits, deep nesting
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{where}: not JSON that can be read: {line}") from None
