"""Finds and reads runs of other trainers: verl's logs, and TRL's trainer states."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eepo.reports.trl_log import STATE, find_state, read_trl_log
from eepo.reports.verl_log import is_verl_log, read_verl_log
from eepo.types import UserError

Row = dict[str, Any]

LOGS = "logs"  # of a folder that `eepo export-verl` wrote
GENERIC_STEMS = ("metrics", "log", "train", "verl")  # file names that do not name a run
ALLOWED = "a verl log (.jsonl) or its folder, or a TRL folder with a trainer_state.json"


@dataclass(frozen=True)
class ForeignRun:
    """Holds the records of a run, in the form of our own."""

    folder: Path  # with the recipe, if `eepo export-verl` wrote the run's script
    name: str
    seed: int
    metrics: list[Row]
    evaluations: list[Row] = field(default_factory=list)


def is_foreign(path: Path) -> bool:
    """Return whether the path is a log of another trainer, or a folder with one."""
    return next(_logs(path), None) is not None


def read_foreign_runs(path: Path) -> list[ForeignRun]:
    """Read all runs at the path. It is empty if there are none."""
    return [_read(files) for files in _logs(path)]


def _logs(path: Path) -> Iterator[list[Path]]:
    """Yield the files of each run: several if a run of verl was continued."""
    if path.is_file():
        if path.name == STATE or is_verl_log(path):
            yield [path]
        return
    if (path / "recipe.toml").is_file():
        if (path / "metrics.jsonl").is_file():  # our own run
            return
        if files := [file for file in sorted((path / LOGS).glob("*.jsonl")) if is_verl_log(file)]:
            yield files
        return
    if state := find_state(path):
        yield [state]
        return
    yield from ([file] for file in sorted(path.glob("*.jsonl")) if is_verl_log(file))


def _read(files: list[Path]) -> ForeignRun:
    file = files[0]
    if file.name == STATE:
        folder = file.parent.parent if file.parent.name.startswith("checkpoint-") else file.parent
        metrics = read_trl_log(file)
        if not metrics:
            raise UserError(f"{file}: no step has been logged yet; set logging_steps=1 in TRL")
        return ForeignRun(folder, *_name_and_seed(folder), metrics)
    metrics, evaluations = read_verl_log(files)
    if not metrics:
        raise UserError(f"{files[-1]}: no step has been logged yet")
    folder = file.parent.parent if file.parent.name == LOGS else file.parent
    is_named = file.parent == folder and file.stem not in GENERIC_STEMS
    name, seed = (file.stem, 0) if is_named else _name_and_seed(folder)
    return ForeignRun(folder, name, seed, metrics, evaluations)


def _name_and_seed(folder: Path) -> tuple[str, int]:
    """Read METHOD/seed-N as our comparisons name folders. Other folders are a method, seed 0."""
    folder = folder.resolve()
    match = re.fullmatch(r"seed-(\d+)", folder.name)
    return (folder.parent.name, int(match[1])) if match else (folder.name, 0)
