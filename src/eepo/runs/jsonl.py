"""Reads JSON Lines files: the records of a run, and files that a user brings.

Every mistake in a file becomes a `UserError` that names the file and the line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eepo.types import UserError

MAX_LINE_BYTES = 16 * 2**20  # a longer line means that the file is damaged or not JSON Lines
OnDamage = Callable[[str], None]  # receives the error of a damaged line: `file:line: reason`


def read_records(path: Path, on_damage: OnDamage | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file that this package wrote.

    Skip an unfinished last line: the run was killed while it wrote it. A damaged line is an error.
    With `on_damage`, it is skipped instead, and `on_damage` gets the error. Then each row is a
    dictionary with an integer `step`, as in all records of a run.
    """
    if on_damage is None:
        return (row for _, row in _rows(path, skip_unfinished=True))
    return (row for _, row in read_lines(path, on_damage))


def read_lines(path: Path, on_damage: OnDamage) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each undamaged line of a run's records as its bytes and its row."""
    for where, line in _lines(path):
        try:
            if line.endswith(b"\n"):
                if line.strip():
                    yield line, _parse_record(line, where)
            elif b"\0" in line or len(line) > MAX_LINE_BYTES:  # no kill writes such a line
                raise _damaged_line(line, where)
        except UserError as error:
            on_damage(str(error))


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (`file:line`, value) for each line of a user's file. Skip blank lines."""
    return _rows(path, skip_unfinished=False)


def _rows(path: Path, skip_unfinished: bool) -> Iterator[tuple[str, Any]]:
    for where, line in _lines(path):
        if len(line) > MAX_LINE_BYTES:
            raise _damaged_line(line, where)
        if skip_unfinished and not line.endswith(b"\n"):
            return
        if line.strip():
            yield where, parse_json(line, where)


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (`file:line`, bytes). Of a line that is too long, yield only the beginning."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                yield f"{path}:{number}", line
                while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def _damaged_line(line: bytes, where: str) -> UserError:
    if len(line) > MAX_LINE_BYTES:
        return UserError(f"{where}: the line is longer than {MAX_LINE_BYTES} bytes")
    return UserError(f"{where}: the line contains zero bytes")


def _parse_record(line: bytes, where: str) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise _damaged_line(line, where)
    row = parse_json(line, where)
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise UserError(f"{where}: not an object with an integer step")
    return row


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
