"""Reads the files of a run folder. Damaged lines of its records are skipped and counted."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eepo.recipe import read_toml
from eepo.runs.jsonl import read_records
from eepo.runs.runlog import ALARMS, COMPLETIONS, EVALUATIONS, METRICS
from eepo.types import UserError

Row = dict[str, Any]

NUMBER = (int, float)
# The columns that a report cannot do without, and their types. Every row also has a step.
COLUMNS: dict[str, dict[str, Any]] = {
    METRICS: {},
    EVALUATIONS: {
        "kind": str, "set": str, "num_problems": int, "num_samples": int, "pass@k": dict
    },
    COMPLETIONS: {
        "prompt_id": str, "prompt": str, "stage": int, "reward": NUMBER, "text": str,
        "finished": bool,
    },
    ALARMS: {"alarm": str, "state": str},
}  # fmt: skip
PROBLEM_COLUMNS = {"greedy": bool, "correct": int, "distinct": int}
MEASURES = ("greedy", "mean", "distinct")  # a number, or missing
MAX_COUNT = 10**6  # problems and samples of an evaluation
MAX_STEP = 10**12


class RunFiles:
    """Reads the records of one run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_damaged: Counter[str] = Counter()  # lines, by file name

    def rows(self, name: str) -> Iterator[Row]:
        """Yield the rows of a file that are not damaged; nothing if the file is missing."""
        path = self.folder / name
        if not path.is_file():
            return
        for row in read_records(path, lambda _: self.num_damaged.update([name])):
            if is_complete(name, row):
                yield row
            else:
                self.num_damaged[name] += 1

    def notes(self) -> list[str]:
        """Return one line for each damaged file."""
        return [f"{name}: {damage(number)}" for name, number in self.num_damaged.items()]


def damage(num_lines: int) -> str:
    return f"{num_lines} damaged {'line' if num_lines == 1 else 'lines'} skipped"


def is_complete(name: str, row: Row) -> bool:
    """Return whether a row of the file `name` has all columns that a report needs."""
    if not _has_columns(row, COLUMNS[name]) or not 0 <= row["step"] <= MAX_STEP:
        return False
    return name != EVALUATIONS or _is_evaluation(row)


def _is_evaluation(row: Row) -> bool:
    problems, estimates = row.get("problems", []), row["pass@k"]
    return (
        all(0 <= row[count] <= MAX_COUNT for count in ("num_problems", "num_samples"))
        and all(isinstance(row.get(measure), float | int | None) for measure in MEASURES)
        and all(k.isdecimal() and isinstance(value, NUMBER) for k, value in estimates.items())
        and not any(map(_is_huge, (*map(row.get, MEASURES), *estimates.values())))
        and isinstance(problems, list)
        and all(_has_columns(problem, PROBLEM_COLUMNS) for problem in problems)
    )


def _has_columns(row: Any, columns: dict[str, Any]) -> bool:
    return isinstance(row, dict) and all(
        isinstance(row.get(column), kind) and not _is_huge(row[column])
        for column, kind in columns.items()
    )


def _is_huge(value: Any) -> bool:
    """Return whether a number cannot be formatted or drawn: JSON allows integers of any size."""
    return isinstance(value, int) and abs(value) > sys.maxsize


def is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not _is_huge(value) and math.isfinite(value)


def read_recipe(path: Path) -> dict[str, Any]:
    """Read the recipe of a run, and check that its sections are sections."""
    tables = read_toml(path)
    for section in ("algorithm", "training", "evaluation", "task"):
        if not isinstance(tables.get(section, {}), dict):
            raise UserError(f"{path}: {section} must be a section")
    if not isinstance(tables.get("training", {}).get("seed", 0), int):
        raise UserError(f"{path}: training.seed must be a whole number")
    return tables


def read_environment(path: Path) -> dict[str, Any]:
    """Read the environment of a run; empty if the file is missing."""
    if not path.is_file():
        return {}
    try:
        environment = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable: {error}") from error
    return environment if isinstance(environment, dict) else {}
