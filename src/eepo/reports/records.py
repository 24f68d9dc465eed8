"""Reads run folders. Reports use nothing else: no trainer, policy or model is imported here.

Only the recipe and the metrics are required. All other files may be missing, so that a run that
was killed can still be read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from eepo.reports import evaluation_folders, foreign_runs
from eepo.reports.run_files import Row, RunFiles, is_finite, read_environment, read_recipe
from eepo.runs.runlog import ALARMS, COMPLETIONS, EVALUATIONS, METRICS
from eepo.types import UserError

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
    is_foreign: bool = False  # from the log of another trainer
    is_evaluation: bool = False  # from a folder of eepo eval: it has no steps
    weights: str = ""  # digest of the evaluated weights, for a folder of eepo eval
    notes: Sequence[str] = ()  # about damaged records

    @property
    def last_step(self) -> int:
        return max((row["step"] for row in self.metrics), default=0)

    def setting(self, section: str, key: str) -> Any:
        """Return a setting of the recipe, or None if the recipe does not have it."""
        return self.recipe.get(section, {}).get(key)

    def series(self, key: str) -> dict[int, float]:
        """Map step to metric. Omit steps without a finite value: they cannot be drawn."""
        return {row["step"]: row[key] for row in self.metrics if is_finite(row.get(key))}

    def full_evaluation(self, eval_set: str) -> Row | None:
        """Return the last full evaluation after training began.

        Among several of the same step, take the one with the most problems and samples.
        """
        rows = self._full_evaluations(eval_set)
        trained = [row for row in rows if row["step"] > 0 or self.is_evaluation]
        return max(trained, key=_thoroughness, default=None)

    def start_evaluation(self, eval_set: str) -> Row | None:
        """Return the full evaluation of the policy that this run started from."""
        if self.is_evaluation:
            return None
        rows = [row for row in self._full_evaluations(eval_set) if row["step"] == 0]
        return max(rows, key=_thoroughness, default=None)

    def final_evaluation(self, eval_set: str) -> Row | None:
        """Return the evaluation at the end; of a model that is not trained, that at the start."""
        return self.full_evaluation(eval_set) or self.start_evaluation(eval_set)

    def _full_evaluations(self, eval_set: str) -> Iterator[Row]:
        return (row for row in self.evaluations if row["kind"] == "full" and row["set"] == eval_set)

    def seconds(self) -> float | None:
        """Sum the time of all steps, without evaluations and checkpoints.

        A row of another trainer may be the mean over several steps.
        """
        seconds = self.series("seconds/total")
        if not seconds:
            return None
        steps_per_row = self.last_step / len(seconds) if self.is_foreign else 1
        return sum(seconds.values()) * steps_per_row

    def num_completions(self) -> int | None:
        """Count the completions sampled for training, in all stages."""
        num_prompts = self.setting("training", "prompts_per_step")
        group_size = self.setting("algorithm", "group_size")
        if not num_prompts or not group_size or self.is_evaluation:
            return None
        return len(self.metrics) * num_prompts * group_size


def run_folders(folder: Path) -> list[Path]:
    """Return the run folders inside the folder of a comparison, a sweep or one method's seeds.

    Return a run folder itself as it is. Folders of `eepo eval` count as runs, and come last.
    Methods are sorted by name, but the method that evaluated the starting policy comes first: it is
    the baseline of a comparison.
    """
    if _has_steps(folder) or evaluation_folders.is_evaluation(folder):
        return [folder]
    folders = [
        path.parent
        for pattern in ("*/seed-*", "seed-*")
        for path in folder.glob(f"{pattern}/recipe.toml")
    ]
    baselines = {path.parent for path in folders if _evaluates_start(path)}
    folders.sort(key=lambda path: (path.parent not in baselines, path))
    evaluations = sorted(path.parent for path in folder.glob(f"*/{evaluation_folders.RESULTS}"))
    return [*folders, *evaluations] or [folder]


def read_runs(folders: Sequence[Path | str]) -> list[Run]:
    """Read run folders, and the runs with finished steps from folders that contain runs.

    Folders of `eepo eval` and logs of verl and TRL are read as well. The evaluations of a run that
    is also given are added to that run.
    """
    runs: list[Run] = []
    for folder in map(Path, folders):
        candidates = run_folders(folder)
        started = [
            path
            for path in candidates
            if _has_steps(path) or evaluation_folders.is_evaluation(path)
        ]
        if not started and candidates != [folder]:
            raise UserError(f"{folder}: none of its {len(candidates)} runs has finished a step yet")
        for path in started or candidates:
            runs += _read_any(path)
    return merge_evaluations(runs)


def _read_any(path: Path) -> list[Run]:
    if evaluation_folders.is_evaluation(path):
        return [_from_evaluation(evaluation_folders.read_evaluation(path))]
    foreign = foreign_runs.read_foreign_runs(path)
    return [_from_foreign(run) for run in foreign] if foreign else [read_run(path)]


def merge_evaluations(runs: Sequence[Run]) -> list[Run]:
    """Add the rows of `eepo eval` to the run that was evaluated, if it is among the runs.

    Several evaluations of the same weights become one run.
    """
    merged: list[Run] = []
    for run in sorted(runs, key=lambda run: run.is_evaluation):
        index = next((i for i, other in enumerate(merged) if _was_evaluated(other, run)), None)
        if index is None:
            merged.append(run)
        else:
            rows = merged[index].evaluations + run.evaluations
            merged[index] = dataclasses.replace(merged[index], evaluations=rows)
    first = {run.name: number for number, run in reversed(list(enumerate(runs)))}
    return sorted(merged, key=lambda run: first[run.name])


def _was_evaluated(run: Run, evaluation: Run) -> bool:
    """Return whether `evaluation` has the weights of `run`, or those of another evaluation."""
    if not evaluation.is_evaluation or run.name != evaluation.name:
        return False
    if run.is_evaluation:
        return bool(run.weights) and run.weights == evaluation.weights
    return run.recipe == evaluation.recipe


def read_run(folder: Path | str) -> Run:
    folder = Path(folder)
    if folder.is_file():
        raise UserError(f"{folder}: not a run; give a run folder, {foreign_runs.ALLOWED}")
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run folder")
    for name in ("recipe.toml", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise UserError(
                f"{folder}: not a run folder (no {name}); "
                "give run folders, the folder of a comparison or a sweep, "
                f"{evaluation_folders.ALLOWED}, {foreign_runs.ALLOWED}"
            )
    recipe = read_recipe(folder / "recipe.toml")
    files = RunFiles(folder)
    logged = _CountingIterator(files.rows(COMPLETIONS))
    completions = thin_steps(logged, MAX_COMPLETIONS)
    return Run(
        folder=folder,
        name=str(recipe.get("name", folder.name)),
        seed=int(recipe.get("training", {}).get("seed", 0)),
        recipe=recipe,
        environment=read_environment(folder / "environment.json"),
        metrics=list(files.rows(METRICS)),
        evaluations=list(files.rows(EVALUATIONS)),
        alarms=list(files.rows(ALARMS)),
        completions=completions,
        num_logged=logged.count,
        notes=files.notes(),
    )


def _from_evaluation(evaluation: evaluation_folders.EvaluationFolder) -> Run:
    return Run(
        folder=evaluation.folder,
        name=evaluation.method,
        seed=evaluation.seed,
        recipe=evaluation.recipe,
        environment=read_environment(evaluation.folder / "environment.json"),
        metrics=[],
        evaluations=evaluation.rows(),
        alarms=[],
        completions=[],
        num_logged=0,
        is_evaluation=True,
        weights=str(evaluation.settings.get("weights", "")),
    )


def _thoroughness(row: Row) -> tuple[int, int, int]:
    return row["step"], row["num_problems"], row["num_samples"]


def _has_steps(path: Path) -> bool:
    return (path / "metrics.jsonl").is_file() or foreign_runs.is_foreign(path)


def _from_foreign(run: foreign_runs.ForeignRun) -> Run:
    """Use the recipe of an exported run. Other runs have no recipe."""
    path = run.folder / "recipe.toml"
    recipe = read_recipe(path) if path.is_file() else {}
    return Run(
        folder=run.folder,
        name=str(recipe.get("name", run.name)),
        seed=int(recipe.get("training", {}).get("seed", run.seed)),
        recipe=recipe,
        environment={},
        metrics=run.metrics,
        evaluations=run.evaluations,
        alarms=[],
        completions=[],
        num_logged=0,
        is_foreign=True,
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
    return is_finite(row.get("logprob")) and is_finite(row.get("logprob_after"))


def _evaluates_start(folder: Path) -> bool:
    """Read `evaluation.start` of a recipe.

    A damaged recipe counts as false: `read_run` reports the damage.
    """
    try:
        recipe = read_recipe(folder / "recipe.toml")
    except UserError:
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
