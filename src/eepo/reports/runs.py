"""Runs as they lie on disk. A run folder is all that a report knows: no trainer, no policy, no model is imported.

Only the recipe and the metrics are required. The rest may be missing: a run that was killed is still worth reading.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from eepo.types import UserError

Row = dict[str, Any]

EARLY_COMPLETIONS, LATE_COMPLETIONS = 64, 200  # kept of a file that can be far larger than memory is worth


@dataclass(frozen=True)
class Run:
    folder: Path
    name: str  # of the method; runs of one name differ only in their seed
    seed: int
    recipe: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[Row]
    evaluations: list[Row]
    completions: list[Row]  # the first few and the last few

    @property
    def last_step(self) -> int:
        return max((row["step"] for row in self.metrics), default=0)

    def setting(self, section: str, key: str) -> Any:
        """From the recipe; None where it is silent."""
        return self.recipe.get(section, {}).get(key)

    def series(self, key: str) -> dict[int, float]:
        """A metric by step. Steps without it, or where it is not finite, are left out: a figure has no place there."""
        return {row["step"]: row[key] for row in self.metrics if _is_finite(row.get(key))}

    def full_evaluation(self, name: str) -> Row | None:
        """The last full one after training began."""
        return max(
            (row for row in self.evaluations if _is_full(row, name) and row["step"] > 0),
            key=lambda row: row["step"],
            default=None,
        )

    def start_evaluation(self, name: str) -> Row | None:
        """The full one of the policy this run started from."""
        return next((row for row in self.evaluations if _is_full(row, name) and row["step"] == 0), None)

    def seconds(self) -> float | None:
        """Wall-clock of all steps; evaluations and checkpoints are not in it."""
        return sum(self.series("seconds/total").values()) if self.series("seconds/total") else None

    def num_completions(self) -> int | None:
        """Sampled for training, in both stages: the budget that makes methods comparable."""
        prompts, group = self.setting("training", "prompts_per_step"), self.setting("algorithm", "group_size")
        return len(self.metrics) * prompts * group if prompts and group else None


def read_run(folder: Path | str) -> Run:
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run folder")
    for name in ("recipe.toml", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: not a run folder, it has no {name}")
    recipe = _read_recipe(folder / "recipe.toml")
    return Run(
        folder=folder,
        name=str(recipe.get("name", folder.name)),
        seed=int(recipe.get("training", {}).get("seed", 0)),
        recipe=recipe,
        environment=_read_environment(folder / "environment.json"),
        metrics=list(_read_rows(folder / "metrics.jsonl")),
        evaluations=list(_read_rows(folder / "evaluations.jsonl")),
        completions=_first_and_last(_read_rows(folder / "completions.jsonl")),
    )


def by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of one name are seeds of one method; methods stand in the order in which they first appear."""
    methods: dict[str, list[Run]] = {}
    for run in runs:
        seeds = methods.setdefault(run.name, [])
        for other in seeds:
            if other.seed == run.seed:
                raise UserError(
                    f"{other.folder} and {run.folder} are both {run.name} with seed {run.seed}: "
                    "counted twice they would look like evidence; leave one out, or give it another name"
                )
        seeds.append(run)
    return {name: sorted(seeds, key=lambda run: run.seed) for name, seeds in methods.items()}


def evaluation_sets(runs: Sequence[Run]) -> list[str]:
    """Names of what the runs were evaluated on, in the order of their first appearance."""
    return list(dict.fromkeys(str(row["set"]) for run in runs for row in run.evaluations))


def _is_full(row: Row, name: str) -> bool:
    return row["kind"] == "full" and row["set"] == name


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _read_recipe(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable recipe: {error}") from error


def _read_environment(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not readable: {error}") from error
    return found if isinstance(found, dict) else {}


def _read_rows(path: Path) -> Iterator[Row]:
    """A torn last line is what a killed run leaves, and is passed over; a broken line before it is damage."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield json.loads(line)
            except ValueError as error:
                if not line.endswith("\n"):
                    return
                raise UserError(f"{path}: line {number} is not JSON: {error}") from error


def _first_and_last(rows: Iterator[Row]) -> list[Row]:
    return [*islice(rows, EARLY_COMPLETIONS), *deque(rows, maxlen=LATE_COMPLETIONS)]
