"""Runs as they lie on disk. A run folder is all that a report knows: no trainer, no policy, no model is imported.

Only the recipe and the metrics are required. The rest may be missing: a run that was killed is still worth reading.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from eepo.types import UserError

Row = dict[str, Any]

MOST_COMPLETIONS = 1500  # kept of a file that can be far larger than memory is worth


@dataclass(frozen=True)
class Run:
    folder: Path
    name: str  # of the method; runs of one name differ only in their seed
    seed: int
    recipe: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[Row]
    evaluations: list[Row]
    alarms: list[Row]  # what the collapse alarm said, as it began and as it ended
    completions: list[Row]  # of steps spread over the run
    num_logged: int  # completions in the file they are from

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
        return next(
            (row for row in self.evaluations if _is_full(row, name) and row["step"] == 0), None
        )

    def seconds(self) -> float | None:
        """Wall-clock of all steps; evaluations and checkpoints are not in it."""
        return sum(self.series("seconds/total").values()) if self.series("seconds/total") else None

    def num_completions(self) -> int | None:
        """Sampled for training, in both stages: the budget that makes methods comparable."""
        prompts, group = (
            self.setting("training", "prompts_per_step"),
            self.setting("algorithm", "group_size"),
        )
        return len(self.metrics) * prompts * group if prompts and group else None


def run_folders(folder: Path) -> list[Path]:
    """A run as it is; of the folder of a comparison, a sweep or one method's seeds, the runs that it has begun.

    Methods stand by name, but the one that judged the start for all comes first: it is a comparison's baseline.
    """
    if (folder / "metrics.jsonl").exists():
        return [folder]
    inside = [
        path.parent
        for pattern in ("*/seed-*", "seed-*")
        for path in folder.glob(f"{pattern}/recipe.toml")
    ]
    judges = {path.parent for path in inside if _judged_start(path)}
    return sorted(inside, key=lambda path: (path.parent not in judges, path)) or [folder]


def read_runs(folders: Sequence[Path | str]) -> list[Run]:
    """Of folders of runs, and of folders that hold runs: of those, the runs with steps."""
    runs: list[Run] = []
    for folder in map(Path, folders):
        inside = run_folders(folder)
        begun = [path for path in inside if (path / "metrics.jsonl").is_file()]
        if not begun and inside != [folder]:
            raise UserError(f"{folder}: none of its {len(inside)} runs has finished a step yet")
        runs += [read_run(path) for path in begun or inside]
    return runs


def read_run(folder: Path | str) -> Run:
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run folder")
    for name in ("recipe.toml", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise UserError(
                f"{folder}: not a run folder, it has no {name}; give runs, or the folder of a comparison or a sweep"
            )
    recipe = _read_recipe(folder / "recipe.toml")
    logged = _Counted(_read_rows(folder / "completions.jsonl"))
    completions = spread_steps(logged, MOST_COMPLETIONS)
    return Run(
        folder=folder,
        name=str(recipe.get("name", folder.name)),
        seed=int(recipe.get("training", {}).get("seed", 0)),
        recipe=recipe,
        environment=_read_environment(folder / "environment.json"),
        metrics=list(_read_rows(folder / "metrics.jsonl")),
        evaluations=list(_read_rows(folder / "evaluations.jsonl")),
        alarms=list(_read_rows(folder / "alarms.jsonl")),
        completions=completions,
        num_logged=logged.number,
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


def spread_steps(rows: Iterable[Row], most: int) -> list[Row]:
    """Completions of whole steps, spread evenly and about `most` in all: when there are more, every other step goes.

    Three steps always stay: the first, the last, and the last one in which something was forgotten.
    """
    kept: dict[int, list[Row]] = {}
    last: dict[int, list[Row]] = {}
    forgot: dict[int, list[Row]] = {}
    stride = 1
    for place, (_, group) in enumerate(groupby(rows, key=lambda row: row["step"])):
        last = {place: list(islice(group, most))}
        if any(was_forgotten(row) for row in last[place]):
            forgot = last
        if place % stride == 0:
            kept |= last
        while len(kept) > 1 and sum(map(len, kept.values())) > most:
            stride *= 2
            kept = {place: found for place, found in kept.items() if place % stride == 0}
    return [row for _, found in sorted((kept | forgot | last).items()) for row in found]


def was_forgotten(row: Row) -> bool:
    """Does it say how likely the completion was before and after an unlearning step?"""
    return _is_finite(row.get("logprob")) and _is_finite(row.get("logprob_after"))


def _judged_start(folder: Path) -> bool:
    """A damaged recipe judged nothing: whoever reads the run says what is wrong with it."""
    try:
        recipe = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(recipe.get("evaluation", {}).get("start"))


def _is_full(row: Row, name: str) -> bool:
    return row["kind"] == "full" and row["set"] == name


class _Counted:
    """Rows that can be counted once they were gone through: the file may be too large to hold."""

    def __init__(self, rows: Iterator[Row]) -> None:
        self.rows, self.number = rows, 0

    def __iter__(self) -> Iterator[Row]:
        for row in self.rows:
            self.number += 1
            yield row


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
