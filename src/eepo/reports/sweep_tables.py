"""What came out of a sweep: one row for each point, which point is best, and how sure that is.

Read from the sweep's folder alone: `recipes/POINT.toml` says what a point changes, `POINT/seed-N` are its runs.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eepo.evaluation.estimates import powers_of_two, seed_interval
from eepo.reports.measures import (
    Estimate,
    comparison_rows,
    estimate,
    full_evaluations,
    over_seeds,
    shown_measures,
    value,
)
from eepo.reports.records import Run, evaluation_sets, read_run
from eepo.reports.summary import summary_sentences
from eepo.reports.tables import markdown_table, measure_text, plain
from eepo.types import UserError

STAGE_METRIC = re.compile(r"(stage\d+/)?(reward|entropy)")


@dataclass(frozen=True)
class SweptPoint:
    knobs: dict[str, Any]
    runs: list[Run]  # those that came to their full evaluation, named by their knobs

    @property
    def label(self) -> str:
        return ", ".join(f"{short(knob)}={knob_text(value)}" for knob, value in self.knobs.items())


@dataclass(frozen=True)
class SweepResult:
    folder: Path
    name: str  # of the recipe that all points share
    points: list[SweptPoint]

    @property
    def runs(self) -> list[Run]:
        return [run for point in self.points for run in point.runs]


@dataclass(frozen=True)
class Scale:
    """What points are judged by: one measure, averaged over evaluation sets that all runs share."""

    measure: str
    sets: tuple[str, ...]

    def score(self, run: Run) -> float | None:
        found = [
            value(row, self.measure) for name in self.sets if (row := run.full_evaluation(name))
        ]
        values = [one for one in found if one is not None]
        return sum(values) / len(values) if len(values) == len(self.sets) else None

    def estimate(self, runs: Sequence[Run]) -> Estimate | None:
        return over_seeds([score for run in runs if (score := self.score(run)) is not None])

    def __str__(self) -> str:
        sets = ", ".join(map(plain, self.sets))
        return f"{self.measure}, {'average of ' if len(self.sets) > 1 else ''}{sets}"


def read_sweep(folder: Path) -> SweepResult:
    if not (folder / "recipe.toml").is_file() or not (folder / "recipes").is_dir():
        raise UserError(
            f"{folder}: not a sweep's folder, it has no recipe.toml beside a folder recipes"
        )
    base = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))
    changes = {file.stem: _knobs(file) for file in sorted((folder / "recipes").glob("*.toml"))}
    knobs = sorted({knob for changed in changes.values() for knob in changed})
    points = []
    for name, changed in changes.items():
        filled = {
            knob: changed[knob] if knob in changed else _in_base(base, knob) for knob in knobs
        }
        points.append(SweptPoint(filled, _finished_runs(folder / name)))
    points = [_named(point) for point in points]
    return SweepResult(folder, str(base.get("name", folder.name)), sorted(points, key=_place))


def read_method(folder: Path) -> list[Run]:
    """A run, or a folder of its seeds as `eepo compare` leaves it."""
    seeds = sorted(folder.glob("seed-*"))
    return [read_run(seed) for seed in seeds] if seeds else [read_run(folder)]


def check_measure(measure: str, num_samples: int) -> None:
    allowed = ["greedy", "mean", "distinct", *(f"pass@{k}" for k in powers_of_two(num_samples))]
    if measure not in allowed:
        raise UserError(f"--measure {measure} must be one of {', '.join(allowed)}")


def make_scale(runs: Sequence[Run], measure: str, on: str) -> Scale:
    """`on`: one evaluation set; empty: all that every run was evaluated on, each with the same weight."""
    shared = [
        name for name in evaluation_sets(runs) if all(run.full_evaluation(name) for run in runs)
    ]
    if not shared:
        raise UserError(
            "no evaluation set has a full evaluation in every run, so there is nothing to compare"
        )
    if on and on not in shared:
        raise UserError(f"--on {on} must be one of {', '.join(shared)}")
    scale = Scale(measure, (on,) if on else tuple(shared))
    if lacking := next((run for run in runs if scale.score(run) is None), None):
        allowed = ", ".join(_measures_of(lacking, scale.sets))
        raise UserError(
            f"--measure {measure} is not in the evaluations of {lacking.folder}; allowed: {allowed}"
        )
    return scale


def _measures_of(run: Run, sets: Sequence[str]) -> list[str]:
    """Those that its evaluation of every set has."""
    rows = [row for name in sets if (row := run.full_evaluation(name))]
    names = [
        "greedy",
        "mean",
        "distinct",
        *(f"pass@{k}" for k in sorted(map(int, rows[0].get("pass@k", {})))),
    ]
    return [name for name in names if all(value(row, name) is not None for row in rows)]


def best_point(result: SweepResult, scale: Scale) -> SweptPoint:
    """The highest mean over seeds."""
    return max(
        (point for point in result.points if point.runs), key=lambda point: _mean(scale, point)
    )


def sweep_sentences(result: SweepResult, scale: Scale, lines: Sequence[Run] = ()) -> list[str]:
    """Which point is best, from which others it cannot be told apart, and the lines against it."""
    best = best_point(result, scale)
    others = [point for point in result.points if point.runs and point is not best]
    found = measure_text(scale.estimate(best.runs), scale.measure)
    sentences = [
        f"Best of {len(others) + 1} points by {scale}: {best.label} with {found}, {_seeds(best)}."
    ]
    close = [point.label for point in others if not _told_apart(scale, best, point)]
    if close:
        sentences.append(f"The data do not tell it apart from: {'; '.join(close)}.")
    if others:
        sentences.append(
            "The best of several is flattered by the choice: for its own number, train it with seeds not used here."
        )
    most = max(len(point.runs) for point in result.points)
    if fewer := [point.label for point in result.points if 0 < len(point.runs) < most]:
        sentences.append(f"With fewer finished seeds than the others' {most}: {'; '.join(fewer)}.")
    if missing := [point.label for point in result.points if not point.runs]:
        sentences.append(f"Without a finished run: {'; '.join(missing)}.")
    return sentences + (summary_sentences([*best.runs, *lines]) if lines else [])


def sweep_rows(result: SweepResult, scale: Scale) -> list[dict[str, Any]]:
    """For programs: everything that the tables show, and the end of training."""
    sets, measures = evaluation_sets(result.runs), shown_measures(result.runs)
    return [
        {
            "knobs": point.knobs,
            "seeds": [run.seed for run in point.runs],
            "score": {"of": str(scale)} | _numbers(scale.estimate(point.runs)),
            "measures": {
                name: {
                    one: _numbers(estimate(full_evaluations(point.runs, name), one))
                    for one in measures
                }
                for name in sets
                if full_evaluations(point.runs, name)
            },
            "end_of_training": {
                key: _numbers(found) for key, found in end_of_training(point.runs).items()
            },
        }
        for point in result.points
    ]


def end_of_training(runs: Sequence[Run]) -> dict[str, Estimate]:
    """Rewards and entropies of all stages, over the last tenth of the steps of each seed."""
    keys = {
        key
        for run in runs
        for row in run.metrics[-1:]
        for key in row
        if STAGE_METRIC.fullmatch(key)
    }
    found = {
        key: over_seeds([late for run in runs if (late := _late_mean(run, key)) is not None])
        for key in keys
    }
    return {key: one for key in sorted(found) if (one := found[key]) is not None}


def write_tables(result: SweepResult, scale: Scale, lines: Sequence[Run] = ()) -> list[Path]:
    """`sweep.md` to read, `sweep.jsonl` for programs."""
    words = "\n".join(f"- {sentence}" for sentence in sweep_sentences(result, scale, lines))
    table = markdown_table(comparison_rows(result.runs))
    text = f"# {result.name}\n\n{words}\n\n{table}\n## End of training\n\n{_end_table(result)}"
    files = [result.folder / "sweep.md", result.folder / "sweep.jsonl"]
    files[0].write_text(text, encoding="utf-8")
    files[1].write_text(
        "".join(json.dumps(row) + "\n" for row in sweep_rows(result, scale)), encoding="utf-8"
    )
    return files


def short(knob: str) -> str:
    return knob.partition(".")[2]


def knob_text(found: Any) -> str:
    return (
        found
        if isinstance(found, str)
        else f"{found:g}"
        if isinstance(found, float)
        else json.dumps(found)
    )


def _end_table(result: SweepResult) -> str:
    found = {point.label: end_of_training(point.runs) for point in result.points if point.runs}
    keys = sorted({key for one in found.values() for key in one})
    lines = [["point", *keys], ["---", *("---:" for _ in keys)]]
    lines += [[label, *(_end_text(one.get(key)) for key in keys)] for label, one in found.items()]
    text = "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )
    return (
        f"{text}\n\nMeans over the last tenth of the steps; brackets: 95 % t-interval over seeds.\n"
    )


def _end_text(found: Estimate | None) -> str:
    if found is None:
        return "–"
    width = (
        f" [{found.low:.3f}, {found.high:.3f}]"
        if found.low is not None and found.high is not None
        else ""
    )
    return f"{found.mean:.3f}{width}"


def _late_mean(run: Run, key: str) -> float | None:
    values = list(run.series(key).values())
    late = values[-max(1, len(values) // 10) :]
    return sum(late) / len(late) if late else None


def _told_apart(scale: Scale, best: SweptPoint, other: SweptPoint) -> bool:
    """Paired by seed, as points of one sweep are: the 95 % interval of the difference lies above 0."""
    own = {run.seed: scale.score(run) or 0.0 for run in best.runs}
    differences = [
        own[run.seed] - (scale.score(run) or 0.0) for run in other.runs if run.seed in own
    ]
    interval = seed_interval(differences)
    return interval is not None and max(differences) - min(differences) > 1e-12 and interval[0] > 0


def _mean(scale: Scale, point: SweptPoint) -> float:
    found = scale.estimate(point.runs)
    return found.mean if found else float("-inf")


def _seeds(point: SweptPoint) -> str:
    return (
        f"{len(point.runs)} seeds"
        if len(point.runs) > 1
        else "one seed, which says nothing of the spread"
    )


def _numbers(found: Estimate | None) -> dict[str, Any]:
    return dataclasses.asdict(found) if found else {}


def _knobs(file: Path) -> dict[str, Any]:
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    sections = {name: table for name, table in tables.items() if isinstance(table, dict)}
    return {
        f"{name}.{knob}": found for name, table in sections.items() for knob, found in table.items()
    }


def _in_base(base: dict[str, Any], knob: str) -> Any:
    section, _, name = knob.partition(".")
    return base.get(section, {}).get(name)


def _finished_runs(folder: Path) -> list[Run]:
    """A run that failed, or is under way, has no full evaluation after training began."""
    begun = [seed for seed in sorted(folder.glob("seed-*")) if (seed / "metrics.jsonl").is_file()]
    runs = [read_run(seed) for seed in begun]
    return [
        run for run in runs if any(run.full_evaluation(name) for name in evaluation_sets([run]))
    ]


def _named(point: SweptPoint) -> SweptPoint:
    return dataclasses.replace(
        point, runs=[dataclasses.replace(run, name=point.label) for run in point.runs]
    )


def _place(point: SweptPoint) -> list[tuple[bool, float, str]]:
    """Numbers by size, then words."""
    return [place(found) for found in point.knobs.values()]


def place(found: Any) -> tuple[bool, float, str]:
    number = isinstance(found, int | float)
    return (not number, float(found) if number else 0.0, "" if number else str(found))
