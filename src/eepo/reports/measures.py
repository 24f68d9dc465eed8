"""What is measured at the end of a run, and how wide each number is.

Over seeds when there are several: only that speaks about methods. Over the problems of a single seed otherwise, which
speaks about that one run and is marked so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from eepo.evaluation.estimates import bootstrap_interval, pass_at_k, seed_interval
from eepo.reports.records import Row, Run, by_method, evaluation_sets

START = "start"  # the policy before training stands in tables and figures under this name

LABELS = {"greedy": "greedy", "mean": "mean", "distinct": "distinct correct"}


@dataclass(frozen=True)
class Estimate:
    mean: float
    low: float | None = None
    high: float | None = None
    over: Literal["seeds", "problems"] | None = None  # what the interval is over


@dataclass(frozen=True)
class ComparisonRow:
    """One method on one evaluation set."""

    method: str
    set: str
    num_seeds: int
    measures: dict[str, Estimate | None]
    seconds: Estimate | None  # of training
    num_completions: Estimate | None  # sampled in training


def comparison_rows(runs: Sequence[Run]) -> list[ComparisonRow]:
    """Set after set, in each the starting policy (where it was evaluated) and then every method."""
    measures = shown_measures(runs)
    rows = []
    for name in evaluation_sets(runs) or [""]:
        if start := _start_row(runs, name, measures):
            rows.append(start)
        rows += [
            _method_row(method, name, seeds, measures) for method, seeds in by_method(runs).items()
        ]
    return rows


def shown_measures(runs: Sequence[Run]) -> list[str]:
    """pass@k is shown at 8 and 32, where every full evaluation has them, else at the largest k they share."""
    shared: set[int] | None = None
    for run in runs:
        for row in run.evaluations:
            if row["kind"] == "full":
                own = {int(k) for k in row.get("pass@k", {})}
                shared = own if shared is None else shared & own
    ks = shared or set()
    shown = sorted({k for k in (8, 32) if k in ks} | ({max(ks)} if ks and 32 not in ks else set()))
    return ["greedy", "mean", *(f"pass@{k}" for k in shown), "distinct"]


def value(evaluation: Row, measure: str) -> float | None:
    """A measure as the evaluation wrote it down."""
    if measure.startswith("pass@"):
        found = evaluation.get("pass@k", {}).get(measure.removeprefix("pass@"))
    else:
        found = evaluation.get(measure)
    return None if found is None else float(found)


def problem_values(evaluation: Row, measure: str) -> list[float]:
    """The same measure, problem by problem; empty when the evaluation did not keep them."""
    problems, num_samples = evaluation.get("problems") or [], evaluation["num_samples"]
    if measure.startswith("pass@"):
        k = int(measure.removeprefix("pass@"))
        return [pass_at_k(num_samples, problem["correct"], k) for problem in problems]
    if measure == "mean":
        return [problem["correct"] / num_samples for problem in problems]
    return [float(problem[measure]) for problem in problems]


def over_problems(evaluation: Row, measure: str) -> Estimate | None:
    mean = value(evaluation, measure)
    if mean is None:
        return None
    values = problem_values(evaluation, measure)
    return (
        Estimate(mean, *bootstrap_interval(values), over="problems") if values else Estimate(mean)
    )


def over_seeds(values: Sequence[float]) -> Estimate | None:
    if not values:
        return None
    interval = seed_interval(values)
    mean = sum(values) / len(values)
    return Estimate(mean, *interval, over="seeds") if interval else Estimate(mean)


def estimate(evaluations: Sequence[Row], measure: str) -> Estimate | None:
    """`evaluations`: one for each seed."""
    if len(evaluations) == 1:
        return over_problems(evaluations[0], measure)
    return over_seeds([found for row in evaluations if (found := value(row, measure)) is not None])


def full_evaluations(seeds: Sequence[Run], name: str) -> list[Row]:
    """One for each seed that has come to its end."""
    return [row for run in seeds if (row := run.full_evaluation(name))]


def start_evaluations(runs: Sequence[Run], name: str) -> list[Row]:
    """Of the starting policies, each once: seeds and methods that share a start do not make it surer."""
    found: list[Row] = []
    for run in runs:
        row = run.start_evaluation(name)
        if row and not any(_same_result(row, other) for other in found):
            found.append(row)
    return found


def _same_result(row: Row, other: Row) -> bool:
    keys = ("greedy", "mean", "pass@k", "distinct", "num_problems", "num_samples")
    return all(row.get(key) == other.get(key) for key in keys)


def _start_row(runs: Sequence[Run], name: str, measures: Sequence[str]) -> ComparisonRow | None:
    rows = start_evaluations(runs, name)
    if not rows:
        return None
    if len(rows) == 1:
        found = {measure: over_problems(rows[0], measure) for measure in measures}
    else:  # different starts are not seeds of anything: their mean has no interval
        found = {measure: _bare_mean(rows, measure) for measure in measures}
    return ComparisonRow(START, name, len(rows), found, None, None)


def _bare_mean(rows: Sequence[Row], measure: str) -> Estimate | None:
    values = [found for row in rows if (found := value(row, measure)) is not None]
    return Estimate(sum(values) / len(values)) if values else None


def _method_row(
    method: str, name: str, seeds: Sequence[Run], measures: Sequence[str]
) -> ComparisonRow:
    evaluations = full_evaluations(seeds, name)
    return ComparisonRow(
        method=method,
        set=name,
        num_seeds=len(evaluations) or len(seeds),
        measures={measure: estimate(evaluations, measure) for measure in measures},
        seconds=over_seeds([seconds for run in seeds if (seconds := run.seconds()) is not None]),
        num_completions=over_seeds(
            [float(number) for run in seeds if (number := run.num_completions()) is not None]
        ),
    )
