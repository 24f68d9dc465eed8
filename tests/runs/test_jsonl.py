"""Both readers of JSON Lines: a run's records, and files that a user brings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eepo.runs import jsonl
from eepo.runs.jsonl import read_lines, read_records, read_rows
from eepo.types import UserError

READERS = pytest.mark.parametrize("read", [read_records, read_rows], ids=["records", "rows"])


def write(folder: Path, data: bytes) -> Path:
    path = folder / "file.jsonl"
    path.write_bytes(data)
    return path


def values(rows: Iterator[Any], read: Any) -> list[Any]:
    """Return the values alone: `read_rows` also yields `file:line`."""
    return [row[1] if read is read_rows else row for row in rows]


def error_of(read: Any, path: Path) -> str:
    with pytest.raises(UserError) as caught:
        list(read(path))
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    return line


def test_rows_of_a_user_have_file_and_line_number(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"a": 1}\n\n[2]\n"three"')
    assert list(read_rows(path)) == [
        (f"{path}:1", {"a": 1}),
        (f"{path}:3", [2]),
        (f"{path}:4", "three"),
    ]


@READERS
def test_blank_lines_are_skipped(read: Any, tmp_path: Path) -> None:
    path = write(tmp_path, b'\n{"a": 1}\n  \t\r\n\n{"a": 2}\r\n\n')
    assert values(read(path), read) == [{"a": 1}, {"a": 2}]


@READERS
def test_an_empty_file_has_no_rows(read: Any, tmp_path: Path) -> None:
    assert list(read(write(tmp_path, b""))) == []


@READERS
def test_a_byte_order_mark_is_ignored(read: Any, tmp_path: Path) -> None:
    path = write(tmp_path, b'\xef\xbb\xbf{"a": "\xce\xb8"}\n')
    assert values(read(path), read) == [{"a": "θ"}]


@READERS
def test_unicode_line_separators_do_not_end_a_line(read: Any, tmp_path: Path) -> None:
    path = write(tmp_path, '{"a": "x\u2028y\x85z"}\n'.encode())
    assert values(read(path), read) == [{"a": "x\u2028y\x85z"}]


@pytest.mark.parametrize("last", [b'{"a": 2, "b', b'{"a": 2}', b"{", b"\xce", b"nul"])
def test_an_unfinished_last_line_of_a_record_is_skipped(last: bytes, tmp_path: Path) -> None:
    assert list(read_records(write(tmp_path, b'{"a": 1}\n' + last))) == [{"a": 1}]


def test_an_unfinished_last_line_of_a_user_is_read_or_is_an_error(tmp_path: Path) -> None:
    assert values(read_rows(write(tmp_path, b'{"a": 1}\n{"a": 2}')), read_rows)[1] == {"a": 2}
    path = write(tmp_path, b'{"a": 1}\n{"a": 2')
    assert error_of(read_rows, path).startswith(f"{path}:2: not JSON at character 7:")


MISTAKES = {
    "invalid UTF-8": (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "not UTF-8 at byte 0"),
    "not JSON": (b'{"a": }', "not JSON at character 6: Expecting value"),
    "two values": (b'{"a": 1} {"a": 2}', "not JSON at character 9: Extra data"),
    "Python literal": (b"{'a': 1}", "not JSON at character 1"),
    "deep nesting": (b"[" * 100_000, "not JSON that can be read: "),
    "integer of 5,000 digits": (b'{"a": 1' + b"0" * 4999 + b"}", "not JSON that can be read: "),
}


@READERS
@pytest.mark.parametrize(("line", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_with_file_and_line_number(
    line: bytes, message: str, read: Any, tmp_path: Path
) -> None:
    path = write(tmp_path, b'{"a": 1}\n\n' + line.replace(b"\n", b"") + b"\n")
    assert error_of(read, path).startswith(f"{path}:3: {message}")


@READERS
def test_rows_before_a_mistake_are_yielded(read: Any, tmp_path: Path) -> None:
    rows = read(write(tmp_path, b'{"a": 1}\n{"a": \n'))
    assert values([next(rows)], read) == [{"a": 1}]
    with pytest.raises(UserError):
        next(rows)


@READERS
def test_a_line_that_is_too_long_is_an_error(
    read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 20)
    longest = b'"' + b"x" * 17 + b'"\n'  # 20 bytes
    assert values(read(write(tmp_path, longest)), read) == ["x" * 17]
    path = write(tmp_path, b"1\n" + b'"' + b"x" * 18 + b'"\n')
    assert error_of(read, path) == f"{path}:2: the line is longer than 20 bytes"


@READERS
def test_a_file_without_line_breaks_is_not_read_whole(read: Any, tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    with path.open("wb") as file:
        file.truncate(2**34)  # sparse: it takes no disk space, but its lines would fill the memory
    assert error_of(read, path) == f"{path}:1: the line is longer than {16 * 2**20} bytes"


@READERS
def test_a_missing_file_is_an_error(read: Any, tmp_path: Path) -> None:
    path = tmp_path / "missing.jsonl"
    assert error_of(read, path) == f"{path}: No such file or directory"
    assert error_of(read, tmp_path) == f"{tmp_path}: Is a directory"


DAMAGE = {
    **{name: line for name, (line, _) in MISTAKES.items()},
    "zero bytes": b"\0" * 30,
    "zero bytes before a row": b"\0" * 30 + b'{"step": 2}',
    "half a line": b'{"step": 2, "rew',
    "number": b"2",
    "row without step": b'{"a": 2}',
    "step that is text": b'{"step": "2"}',
    "step that is NaN": b'{"step": NaN}',
    "step that is true": b'{"step": true}',
}


@pytest.mark.parametrize("line", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_line_of_a_record_can_be_skipped_and_reported(
    line: bytes, tmp_path: Path
) -> None:
    path = write(tmp_path, b'{"step": 1}\n' + line.replace(b"\n", b"") + b'\n\n{"step": 3}\n{"st')
    damage: list[str] = []
    assert list(read_records(path, damage.append)) == [{"step": 1}, {"step": 3}]
    assert len(damage) == 1
    assert damage[0].startswith(f"{path}:2: ")
    assert len(damage[0].splitlines()) == 1


def test_zero_bytes_at_the_end_of_a_record_are_damage(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"step": 1}\n' + b"\0" * 100)
    damage: list[str] = []
    assert list(read_records(path, damage.append)) == [{"step": 1}]
    assert damage == [f"{path}:2: the line contains zero bytes"]


def test_a_damaged_line_that_is_too_long_is_skipped_as_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 20)
    path = write(tmp_path, b"x" * 21 * 5 + b'\n{"step": 2}\n' + b"y" * 50)
    damage: list[str] = []
    assert list(read_records(path, damage.append)) == [{"step": 2}]
    assert damage == [f"{path}:{line}: the line is longer than 20 bytes" for line in (1, 3)]


def test_undamaged_lines_are_returned_with_their_bytes(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"step":1 }\r\n\xff\n{"step": 2}\n{"step": 3}')
    damage: list[str] = []
    assert list(read_lines(path, damage.append)) == [
        (b'{"step":1 }\r\n', {"step": 1}),
        (b'{"step": 2}\n', {"step": 2}),
    ]
    assert len(damage) == 1
