"""Writes and checks the checksums of a folder of weights.

They find accidental damage: a truncated, zeroed or missing file, or a flipped bit. CRC-32 takes a
small part of the time that writing the weights takes. It does not protect from forgery.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eepo.runs.jsonl import parse_json
from eepo.types import UserError

CHECKSUMS = "checksums.json"
CHUNK_BYTES = 2**22


def write_checksums(folder: Path) -> None:
    """Write the size and the checksum of every file in `folder` to `checksums.json`."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "crc32": checksum(path),
        }
        for path in paths
    }
    (folder / CHECKSUMS).write_text(json.dumps({"files": files}, indent=2) + "\n")


def checksum(path: Path) -> str:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"


def find_damage(folder: Path, ignore: Iterable[str] = ()) -> str:
    """Return what is damaged in `folder`, or "". A folder without checksums is not checked."""
    path = folder / CHECKSUMS
    if not path.is_file():
        return ""
    try:
        files = parse_json(path.read_bytes(), CHECKSUMS)["files"]
        for name, expected in files.items():
            if name not in ignore and (damage := _file_damage(folder / name, expected)):
                return f"{name} {damage}"
    except (UserError, KeyError, TypeError, AttributeError):
        return f"{CHECKSUMS} cannot be read"
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read ({error.strerror})"
    return ""


def _file_damage(path: Path, expected: dict[str, Any]) -> str:
    if not path.is_file():
        return "is missing"
    if (size := path.stat().st_size) != expected["bytes"]:
        return f"has {size} bytes instead of {expected['bytes']}"
    return "" if checksum(path) == expected["crc32"] else "does not match its checksum"
