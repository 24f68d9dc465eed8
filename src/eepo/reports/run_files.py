"""Reads the files of a run folder. Damaged lines of its records are skipped and counted."""

from __future__ import annotations

import json
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
    problems = row.get("problems", []) if name == EVALUATIONS else []
    return (
        _has_columns(row, COLUMNS[name])
        and isinstance(problems, list)
        and all(_has_columns(problem, PROBLEM_COLUMNS) for problem in problems)
    )


def _has_columns(row: Any, columns: dict[str, Any]) -> bool:
    return isinstance(row, dict) and all(
        isinstance(row.get(column), kind) for column, kind in columns.items()
    )


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
