"""Compares two folders that commands have written: everything but times must be equal."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

# These name the machine, show times, or are drawn from files that are compared.
NOT_COMPARED = ("environment.json", "log.txt", "*.png", "*.svg", "*.html", "*.md", "*.tex")
# Runs of a sweep finish in any order.
UNORDERED = ("report.jsonl",)
TIMES = ("seconds", "tokens_per_second", "memory/")


def differences(reference: Path, folder: Path) -> list[str]:
    """Return one line for each file that is missing, left over or different."""
    expected, found = files(reference), files(folder)
    lines = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    lines += [f"{name} is left over" for name in sorted(found.keys() - expected.keys())]
    for name in sorted(expected.keys() & found.keys()):
        if not any(fnmatch.fnmatch(Path(name).name, pattern) for pattern in NOT_COMPARED):
            difference = _difference(expected[name], found[name])
            lines += [f"{name}: {difference}"] if difference else []
    return lines


def files(folder: Path) -> dict[str, Path]:
    """Return all files by their path in `folder`, hidden ones too."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path for path in paths}


def _difference(expected: Path, found: Path) -> str:
    if expected.read_bytes() == found.read_bytes():
        return ""
    try:
        if expected.suffix == ".safetensors":
            return _tensor_difference(expected, found)
        if expected.suffix == ".jsonl":
            return _row_difference(_rows(expected), _rows(found))
        if expected.suffix == ".json":
            left, right = (_without_times(json.loads(p.read_bytes())) for p in (expected, found))
            return "" if left == right else "other values"
    except (ValueError, OSError, SafetensorError) as error:
        return f"cannot be read: {error}"
    return "other bytes"


def _tensor_difference(expected: Path, found: Path) -> str:
    import torch

    with safe_open(expected, "pt") as left, safe_open(found, "pt") as right:
        if set(left.keys()) != set(right.keys()):
            return "other tensors"
        for name in left.keys():  # noqa: SIM118 (not a dictionary)
            if not torch.equal(left.get_tensor(name), right.get_tensor(name)):
                return f"{name} differs"
    return ""


def _rows(path: Path) -> list[Any]:
    rows = [_without_times(json.loads(line)) for line in path.read_bytes().splitlines()]
    return sorted(rows, key=repr) if path.name in UNORDERED else rows


def _row_difference(expected: list[Any], found: list[Any]) -> str:
    if len(expected) != len(found):
        return f"{len(found)} rows, not {len(expected)}"
    for number, (left, right) in enumerate(zip(expected, found, strict=True), 1):
        if left != right:
            return f"row {number} differs"
    return ""


def _without_times(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_times(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_times(item) for key, item in value.items() if not key.startswith(TIMES)}
