"""Reports the results of a sweep: one row for each point, the best point, and how certain it is.

Only the sweep's folder is read: `recipes/POINT.toml` holds the knobs that a point changes, and
`POINT/seed-N` are its runs.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eepo.evaluation.estimates import powers_of_two, seed_interval
from eepo.evaluation.results import set_title
from eepo.recipe import read_tables
from eepo.reports.measures import (
    Estimate,
    comparison_rows,
    estimate,
    estimate_over_seeds,
    full_evaluations,
    measure_value,
    shown_measures,
)
from eepo.reports.records import Run, evaluation_sets, read_run
from eepo.reports.run_files import read_recipe
from eepo.reports.summary import summary_sentences
from eepo.reports.tables import markdown_lines, markdown_table, measure_text
from eepo.runs.writing import writing
from eepo.types import UserError

STAGE_METRIC = re.compile(r"(stage\d+/)?(reward|entropy)")


@dataclass(frozen=True)
class PointResult:
    """Holds the runs of one point of a sweep."""

    knobs: dict[str, Any]
    runs: list[Run]  # with a full evaluation after training, named by their knobs

    @property
    def label(self) -> str:
        return ", ".join(knob_assignments(self.knobs))


@dataclass(frozen=True)
class SweepResult:
    folder: Path
    name: str  # of the recipe that all points share
    points: list[PointResult]

    @property
    def runs(self) -> list[Run]:
        return [run for point in self.points for run in point.runs]


@dataclass(frozen=True)
class Criterion:
    """Scores runs by one measure, averaged over evaluation sets that all runs share."""

    measure: str
    sets: tuple[str, ...]

    def score(self, run: Run) -> float | None:
        """Return the mean over the sets, or None if the measure is missing on any of them."""
        rows = [row for name in self.sets if (row := run.full_evaluation(name))]
        values = [measure_value(row, self.measure) for row in rows]
        present = [value for value in values if value is not None]
        return sum(present) / len(present) if len(present) == len(self.sets) else None

    def estimate(self, runs: Sequence[Run]) -> Estimate | None:
        scores = [score for run in runs if (score := self.score(run)) is not None]
        return estimate_over_seeds(scores)

    def __str__(self) -> str:
        sets = ", ".join(map(set_title, self.sets))
        return f"{self.measure}, {'average of ' if len(self.sets) > 1 else ''}{sets}"


def read_sweep(folder: Path) -> SweepResult:
    if not (folder / "recipe.toml").is_file() or not (folder / "recipes").is_dir():
        raise UserError(f"{folder}: not the folder of a sweep (no recipe.toml, or no recipes/)")
    base = read_recipe(folder / "recipe.toml")
    changes = {file.stem: _read_knobs(file) for file in sorted((folder / "recipes").glob("*.toml"))}
    knobs = sorted({knob for changed in changes.values() for knob in changed})
    points = []
    for name, changed in changes.items():
        values = {
            knob: changed[knob] if knob in changed else _base_value(base, knob) for knob in knobs
        }
        points.append(_name_runs(PointResult(values, _finished_runs(folder / name))))
    points.sort(key=lambda point: [knob_sort_key(value) for value in point.knobs.values()])
    return SweepResult(folder, str(base.get("name", folder.name)), points)


def read_method(folder: Path) -> list[Run]:
    """Read a run, or a folder of seeds as `eepo compare` writes it."""
    seeds = sorted(folder.glob("seed-*"))
    return [read_run(seed) for seed in seeds] if seeds else [read_run(folder)]


def check_measure(measure: str, num_samples: int) -> None:
    allowed = ["greedy", "mean", "distinct", *(f"pass@{k}" for k in powers_of_two(num_samples))]
    if measure not in allowed:
        raise UserError(f"--measure {measure} must be one of {', '.join(allowed)}")


def make_criterion(runs: Sequence[Run], measure: str, on: str) -> Criterion:
    """Create a criterion that every run can be scored by.

    `on` names one evaluation set. If it is empty, all sets that every run was evaluated on count
    with equal weight.
    """
    shared = [
        name for name in evaluation_sets(runs) if all(run.full_evaluation(name) for run in runs)
    ]
    if not shared:
        raise UserError(
            "no evaluation set has a full evaluation in every run, so there is nothing to compare"
        )
    if on and on not in shared:
        raise UserError(f"--on {on} must be one of {', '.join(shared)}")
    criterion = Criterion(measure, (on,) if on else tuple(shared))
    if unscored := next((run for run in runs if criterion.score(run) is None), None):
        allowed = ", ".join(_recorded_measures(unscored, criterion.sets))
        raise UserError(
            f"--measure {measure} is not in the evaluations of {unscored.folder}; "
            f"allowed: {allowed}"
        )
    return criterion


def _recorded_measures(run: Run, sets: Sequence[str]) -> list[str]:
    """List the measures that the full evaluations of all sets have."""
    rows = [row for name in sets if (row := run.full_evaluation(name))]
    ks = sorted(map(int, rows[0].get("pass@k", {})))
    names = ["greedy", "mean", "distinct", *(f"pass@{k}" for k in ks)]
    return [name for name in names if all(measure_value(row, name) is not None for row in rows)]


def best_point(result: SweepResult, criterion: Criterion) -> PointResult:
    """Return the point with the highest mean over seeds."""
    points = (point for point in result.points if point.runs)
    return max(points, key=lambda point: _mean_score(criterion, point))


def sweep_sentences(
    result: SweepResult, criterion: Criterion, line_runs: Sequence[Run] = ()
) -> list[str]:
    """Name the best point and the points that are not significantly worse.

    `line_runs` are runs of other methods: compare them with the best point.
    """
    best = best_point(result, criterion)
    others = [point for point in result.points if point.runs and point is not best]
    score = measure_text(criterion.estimate(best.runs), criterion.measure)
    sentences = [
        f"Best of {len(others) + 1} points by {criterion}: {best.label} with {score}, "
        f"{_num_seeds_text(best)}."
    ]
    close = [point.label for point in others if not _is_better(criterion, best, point)]
    if close:
        sentences.append(f"No significant difference from: {'; '.join(close)}.")
    if others:
        sentences.append(
            "The score of the best point is biased upwards because it was selected: "
            "for an unbiased score, train it with new seeds."
        )
    most_seeds = max(len(point.runs) for point in result.points)
    if fewer := [point.label for point in result.points if 0 < len(point.runs) < most_seeds]:
        sentences.append(f"Fewer than {most_seeds} finished seeds: {'; '.join(fewer)}.")
    if missing := [point.label for point in result.points if not point.runs]:
        sentences.append(f"No finished run: {'; '.join(missing)}.")
    return sentences + (summary_sentences([*best.runs, *line_runs]) if line_runs else [])


def sweep_rows(result: SweepResult, criterion: Criterion) -> list[dict[str, Any]]:
    """Return the rows of `sweep.jsonl`: all numbers of the tables, and the end of training."""
    sets, measures = evaluation_sets(result.runs), shown_measures(result.runs)
    rows = []
    for point in result.points:
        evaluations = {name: full_evaluations(point.runs, name) for name in sets}
        end = end_of_training(point.runs)
        rows.append(
            {
                "knobs": point.knobs,
                "seeds": [run.seed for run in point.runs],
                "score": {"of": str(criterion)} | _as_json(criterion.estimate(point.runs)),
                "measures": {
                    name: {measure: _as_json(estimate(seeds, measure)) for measure in measures}
                    for name, seeds in evaluations.items()
                    if seeds
                },
                "end_of_training": {key: _as_json(value) for key, value in end.items()},
            }
        )
    return rows


def end_of_training(runs: Sequence[Run]) -> dict[str, Estimate]:
    """Estimate rewards and entropies of all stages over the last tenth of each seed's steps."""
    last_rows = (row for run in runs for row in run.metrics[-1:])
    keys = {key for row in last_rows for key in row if STAGE_METRIC.fullmatch(key)}
    estimates = {}
    for key in sorted(keys):
        means = [mean for run in runs if (mean := _mean_of_last_steps(run, key)) is not None]
        if means_estimate := estimate_over_seeds(means):
            estimates[key] = means_estimate
    return estimates


def write_sweep_tables(
    result: SweepResult, criterion: Criterion, line_runs: Sequence[Run] = ()
) -> list[Path]:
    """Write `sweep.md` for readers and `sweep.jsonl` for programs."""
    sentences = sweep_sentences(result, criterion, line_runs)
    summary = "\n".join(f"- {sentence}" for sentence in sentences)
    table = markdown_table(comparison_rows(result.runs))
    text = f"# {result.name}\n\n{summary}\n\n{table}\n## End of training\n\n{_end_table(result)}"
    lines = "".join(json.dumps(row) + "\n" for row in sweep_rows(result, criterion))
    files = [result.folder / "sweep.md", result.folder / "sweep.jsonl"]
    for file, content in zip(files, (text, lines), strict=True):
        with writing(file):
            file.write_text(content, encoding="utf-8")
    return files


def knob_assignments(knobs: dict[str, Any]) -> list[str]:
    """Return ["temperature=1.2"] for {"algorithm.temperature": 1.2}."""
    return [f"{knob_name(key)}={knob_text(value)}" for key, value in knobs.items()]


def knob_name(key: str) -> str:
    """Return "temperature" for "algorithm.temperature"."""
    return key.partition(".")[2]


def knob_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def knob_sort_key(value: Any) -> tuple[bool, float, str]:
    """Sort numbers by size, then words."""
    if isinstance(value, int | float):
        return False, float(value), ""
    return True, 0.0, str(value)


def _end_table(result: SweepResult) -> str:
    ends = {point.label: end_of_training(point.runs) for point in result.points if point.runs}
    keys = sorted({key for end in ends.values() for key in end})
    lines = [["point", *keys], ["---", *("---:" for _ in keys)]]
    lines += [[label, *(_end_text(end.get(key)) for key in keys)] for label, end in ends.items()]
    return (
        f"{markdown_lines(lines)}\n\n"
        "Means over the last tenth of the steps; brackets: 95 % t-interval over seeds.\n"
    )


def _end_text(end: Estimate | None) -> str:
    if end is None:
        return "–"
    if end.low is None or end.high is None:
        return f"{end.mean:.3f}"
    return f"{end.mean:.3f} [{end.low:.3f}, {end.high:.3f}]"


def _mean_of_last_steps(run: Run, key: str) -> float | None:
    values = list(run.series(key).values())
    last = values[-max(1, len(values) // 10) :]
    return sum(last) / len(last) if last else None


def _is_better(criterion: Criterion, best: PointResult, other: PointResult) -> bool:
    """Return whether the 95 % interval of the difference, paired by seed, is above 0."""
    scores = {run.seed: criterion.score(run) or 0.0 for run in best.runs}
    differences = [
        scores[run.seed] - (criterion.score(run) or 0.0) for run in other.runs if run.seed in scores
    ]
    interval = seed_interval(differences)
    return interval is not None and max(differences) - min(differences) > 1e-12 and interval[0] > 0


def _mean_score(criterion: Criterion, point: PointResult) -> float:
    score = criterion.estimate(point.runs)
    return score.mean if score else float("-inf")


def _num_seeds_text(point: PointResult) -> str:
    num_seeds = len(point.runs)
    return f"{num_seeds} seeds" if num_seeds > 1 else "one seed, so the spread is unknown"


def _as_json(value: Estimate | None) -> dict[str, Any]:
    return dataclasses.asdict(value) if value else {}


def _read_knobs(file: Path) -> dict[str, Any]:
    recipe = read_tables(file)
    sections = {name: table for name, table in recipe.items() if isinstance(table, dict)}
    return {
        f"{name}.{knob}": value for name, table in sections.items() for knob, value in table.items()
    }


def _base_value(base: dict[str, Any], knob: str) -> Any:
    section, _, name = knob.partition(".")
    return base.get(section, {}).get(name)


def _finished_runs(folder: Path) -> list[Run]:
    """Read the runs with a full evaluation: a run that failed or still trains has none."""
    folders = sorted(path.parent for path in folder.glob("seed-*/metrics.jsonl"))
    runs = [read_run(path) for path in folders]
    return [
        run for run in runs if any(run.full_evaluation(name) for name in evaluation_sets([run]))
    ]


def _name_runs(point: PointResult) -> PointResult:
    """Name the runs by the knobs of their point."""
    runs = [dataclasses.replace(run, name=point.label) for run in point.runs]
    return dataclasses.replace(point, runs=runs)
