"""Cuts a file of records back to a step. Damaged lines are dropped, counted and kept in a copy."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from eepo.runs.jsonl import read_lines
from eepo.runs.writing import flush_to_disk, free_name, writing


@dataclass
class Rewound:
    """Describes what was found in a file of records and what was done with it."""

    path: Path
    step: int
    num_expected: int  # rows up to `step` that the file had when the checkpoint was saved
    num_rows: int = 0  # rows up to `step` that were found
    damage: list[str] = field(default_factory=list)  # one error per unreadable line
    num_repeated: int = 0  # rows that repeat a step
    copy: Path | None = None  # of the file as it was

    @property
    def is_damaged(self) -> bool:
        return bool(self.damage or self.num_repeated) or self.num_rows < self.num_expected

    def line(self) -> str:
        """Describe the damage for the user."""
        parts = []
        if not self.path.exists():
            parts.append("the file is missing")
        if self.damage:
            number, _, reason = self.damage[0].removeprefix(f"{self.path}:").partition(": ")
            more = f" and {len(self.damage) - 1} more" if len(self.damage) > 1 else ""
            parts.append(f"line {number}{more} cannot be read: {reason}")
        if self.num_repeated:
            parts.append(f"{self.num_repeated} rows repeat a step")
        if self.num_rows < self.num_expected:
            rows = f"{self.num_rows} of {self.num_expected}"
            parts.append(f"it has {rows} rows up to step {self.step}")
        if self.copy:
            parts.append(f"it is kept as {self.copy.name}")
        return f"{self.path} is damaged: {'; '.join(parts)}; training continues without these rows"


def rewind(
    path: Path, step: int, num_expected: int, once_per_step: bool, keep_copy: bool
) -> Rewound:
    """Drop the lines after `step`, unfinished lines and damaged lines.

    With `once_per_step`, also drop rows that repeat a step. Keep a copy of the file if `keep_copy`
    is set or if it is damaged, and if it changes at all.
    """
    found = Rewound(path, step, num_expected)
    if not path.exists():
        return found
    num_bytes = 0
    for line in _kept_lines(found, once_per_step):
        num_bytes += len(line)
        found.num_rows += 1
    if num_bytes == path.stat().st_size:
        return found
    if keep_copy or found.is_damaged:
        found.copy = back_up(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path), temporary.open("wb") as file:
        file.writelines(_kept_lines(Rewound(path, step, num_expected), once_per_step))
    flush_to_disk(temporary)
    os.replace(temporary, path)
    return found


def back_up(path: Path) -> Path:
    """Copy a file to `NAME.bak-N` next to it. Never overwrite an earlier copy."""
    copy = free_name(path.with_name(f"{path.name}.bak"))
    temporary = path.with_name(f".{copy.name}.{os.getpid()}")
    with writing(copy):
        shutil.copy2(path, temporary)
    flush_to_disk(temporary)
    os.rename(temporary, copy)
    return copy


def _kept_lines(found: Rewound, once_per_step: bool) -> Iterator[bytes]:
    """Yield the lines to keep, and count the damage in `found`."""
    seen: set[int] = set()
    for line, row in read_lines(found.path, found.damage.append):
        if once_per_step and row["step"] in seen:
            found.num_repeated += 1
        elif row["step"] <= found.step:
            seen.add(row["step"])
            yield line
