"""Checksums find every kind of accidental damage in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eepo.runs.checksums import CHECKSUMS, find_damage, write_checksums


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.bin").write_bytes(bytes(range(256)) * 40_000)  # more than one chunk
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.json").write_text("{}")
    write_checksums(tmp_path)
    return tmp_path


def test_an_intact_folder_has_no_damage(folder: Path) -> None:
    assert find_damage(folder) == ""
    (folder / "new.txt").write_text("a file that was added later")
    assert find_damage(folder) == ""


def test_every_single_bit_counts(folder: Path) -> None:
    path = folder / "deep" / "b.json"
    data = path.read_bytes()
    for position in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        path.write_bytes(flipped)
        assert find_damage(folder) == "deep/b.json does not match its checksum"
        assert find_damage(folder, ignore=["deep/b.json"]) == ""


def test_a_bit_in_the_last_chunk_counts(folder: Path) -> None:
    data = bytearray((folder / "a.bin").read_bytes())
    data[-1] ^= 128
    (folder / "a.bin").write_bytes(data)
    assert find_damage(folder) == "a.bin does not match its checksum"


def test_size_and_absence_are_named(folder: Path) -> None:
    (folder / "empty.txt").write_text("x")
    assert find_damage(folder) == "empty.txt has 1 bytes instead of 0"
    (folder / "empty.txt").unlink()
    assert find_damage(folder) == "empty.txt is missing"


def test_a_folder_without_checksums_is_not_checked(folder: Path) -> None:
    (folder / CHECKSUMS).unlink()
    (folder / "a.bin").unlink()
    assert find_damage(folder) == ""


UNREADABLE = [b"", b"\0" * 9, b"[]", b"{}", b'{"files": []}', b'{"files": {"a.bin": 3}}', b"\xff"]


@pytest.mark.parametrize("text", UNREADABLE)
def test_unreadable_checksums_are_damage(text: bytes, folder: Path) -> None:
    (folder / CHECKSUMS).write_bytes(text)
    assert find_damage(folder) == f"{CHECKSUMS} cannot be read"


def test_the_file_does_not_list_itself(folder: Path) -> None:
    files = json.loads((folder / CHECKSUMS).read_text())["files"]
    assert sorted(files) == ["a.bin", "deep/b.json", "empty.txt"]
