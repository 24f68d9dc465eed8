"""Reads run folders. Reports use nothing else: no trainer, policy or model is imported here.

Only the recipe and the metrics are required. All other files may be missing, so that a run that
was killed can still be read.
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

from eepo.runs.jsonl import read_records
from eepo.types import UserError

Row = dict[str, Any]

MAX_COMPLETIONS = 1500  # kept in memory per run; the file can be far larger


@dataclass(frozen=True)
class Run:
    """Holds the records of one run folder."""

    folder: Path
    name: str  # of the method; runs with the same name differ only in their seed
    seed: int
    recipe: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[Row]
    evaluations: list[Row]
    alarms: list[Row]  # one row for each time the collapse alarm starts or ends
    completions: list[Row]  # from steps spread evenly over the run
    num_logged: int  # completions in the file

    @property
    def last_step(self) -> int:
        return max((row["step"] for row in self.metrics), default=0)

    def setting(self, section: str, key: str) -> Any:
        """Return a setting of the recipe, or None if the recipe does not have it."""
        return self.recipe.get(section, {}).get(key)

    def series(self, key: str) -> dict[int, float]:
        """Map step to metric. Omit steps without a finite value: they cannot be drawn."""
        return {row["step"]: row[key] for row in self.metrics if _is_finite(row.get(key))}

    def full_evaluation(self, eval_set: str) -> Row | None:
        """Return the last full evaluation after training began."""
        rows = [row for row in self._full_evaluations(eval_set) if row["step"] > 0]
        return max(rows, key=lambda row: row["step"], default=None)

    def start_evaluation(self, eval_set: str) -> Row | None:
        """Return the full evaluation of the policy that this run started from."""
        rows = (row for row in self._full_evaluations(eval_set) if row["step"] == 0)
        return next(rows, None)

    def _full_evaluations(self, eval_set: str) -> Iterator[Row]:
        return (row for row in self.evaluations if row["kind"] == "full" and row["set"] == eval_set)

    def seconds(self) -> float | None:
        """Sum the time of all steps, without evaluations and checkpoints."""
        seconds = self.series("seconds/total")
        return sum(seconds.values()) if seconds else None

    def num_completions(self) -> int | None:
        """Count the completions sampled for training, in all stages."""
        num_prompts = self.setting("training", "prompts_per_step")
        group_size = self.setting("algorithm", "group_size")
        if not num_prompts or not group_size:
            return None
        return len(self.metrics) * num_prompts * group_size


def run_folders(folder: Path) -> list[Path]:
    """Return the run folders inside the folder of a comparison, a sweep or one method's seeds.

    Return a run folder itself as it is. Methods are sorted by name, but the method that evaluated
    the starting policy comes first: it is the baseline of a comparison.
    """
    if (folder / "metrics.jsonl").exists():
        return [folder]
    folders = [
        path.parent
        for pattern in ("*/seed-*", "seed-*")
        for path in folder.glob(f"{pattern}/recipe.toml")
    ]
    baselines = {path.parent for path in folders if _evaluates_start(path)}
    return sorted(folders, key=lambda path: (path.parent not in baselines, path)) or [folder]


def read_runs(folders: Sequence[Path | str]) -> list[Run]:
    """Read run folders, and the runs with finished steps from folders that contain runs."""
    runs: list[Run] = []
    for folder in map(Path, folders):
        candidates = run_folders(folder)
        started = [path for path in candidates if (path / "metrics.jsonl").is_file()]
        if not started and candidates != [folder]:
            raise UserError(f"{folder}: none of its {len(candidates)} runs has finished a step yet")
        runs += [read_run(path) for path in started or candidates]
    return runs


def read_run(folder: Path | str) -> Run:
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run folder")
    for name in ("recipe.toml", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise UserError(
                f"{folder}: not a run folder (no {name}); "
                "give run folders, or the folder of a comparison or a sweep"
            )
    recipe = _read_recipe(folder / "recipe.toml")
    logged = _CountingIterator(_read_rows(folder / "completions.jsonl"))
    completions = thin_steps(logged, MAX_COMPLETIONS)
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
        num_logged=logged.count,
    )


def by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs by name: method → its runs sorted by seed.

    Methods keep the order in which they first appear.
    """
    methods: dict[str, list[Run]] = {}
    for run in runs:
        seeds = methods.setdefault(run.name, [])
        for other in seeds:
            if other.seed == run.seed:
                raise UserError(
                    f"{other.folder} and {run.folder} are both {run.name} with seed {run.seed}; "
                    "remove one of them, or give it another name"
                )
        seeds.append(run)
    return {name: sorted(seeds, key=lambda run: run.seed) for name, seeds in methods.items()}


def evaluation_sets(runs: Sequence[Run]) -> list[str]:
    """List the names of the evaluation sets, in the order of their first appearance."""
    return list(dict.fromkeys(str(row["set"]) for run in runs for row in run.evaluations))


def thin_steps(rows: Iterable[Row], max_rows: int) -> list[Row]:
    """Keep the completions of whole, evenly spaced steps: about `max_rows` in all.

    While there are too many, every other step is dropped. Three steps are always kept: the first,
    the last, and the last one with an unlearning step.
    """
    kept: dict[int, list[Row]] = {}
    last: dict[int, list[Row]] = {}
    last_unlearned: dict[int, list[Row]] = {}
    stride = 1
    for index, (_, step_rows) in enumerate(groupby(rows, key=lambda row: row["step"])):
        last = {index: list(islice(step_rows, max_rows))}
        if any(map(has_logprob_after, last[index])):
            last_unlearned = last
        if index % stride == 0:
            kept |= last
        while len(kept) > 1 and sum(map(len, kept.values())) > max_rows:
            stride *= 2
            kept = {other: rows for other, rows in kept.items() if other % stride == 0}
    chosen = kept | last_unlearned | last
    return [row for index in sorted(chosen) for row in chosen[index]]


def has_logprob_after(row: Row) -> bool:
    """Return whether the log-probability is known before and after the unlearning step."""
    return _is_finite(row.get("logprob")) and _is_finite(row.get("logprob_after"))


def _evaluates_start(folder: Path) -> bool:
    """Read `evaluation.start` of a recipe.

    A damaged recipe counts as false: `read_run` reports the damage.
    """
    try:
        recipe = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(recipe.get("evaluation", {}).get("start"))


class _CountingIterator:
    """Counts the rows that pass through: the file may be too large to keep."""

    def __init__(self, rows: Iterator[Row]) -> None:
        self.rows, self.count = rows, 0

    def __iter__(self) -> Iterator[Row]:
        for row in self.rows:
            self.count += 1
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
        environment = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not readable: {error}") from error
    return environment if isinstance(environment, dict) else {}


def _read_rows(path: Path) -> Iterator[Row]:
    """Yield nothing if the file is missing."""
    if path.is_file():
        yield from read_records(path)
