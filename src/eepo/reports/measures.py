"""Computes the measures at the end of a run, with intervals.

With several seeds, an interval is over seeds and describes the method. With one seed, it is over
the problems of that seed, describes that run only, and is marked as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from eepo.evaluation.estimates import (
    bootstrap_interval,
    pass_at_k,
    powers_of_two,
    seed_interval,
)
from eepo.reports.records import Row, Run, by_method, evaluation_sets

START = "start"  # the method name of the policy before training, in tables and figures

LABELS = {"greedy": "greedy", "mean": "mean", "distinct": "distinct correct"}


@dataclass(frozen=True)
class Estimate:
    """Holds a mean and, where one can be computed, its 95 % interval."""

    mean: float
    low: float | None = None
    high: float | None = None
    over: Literal["seeds", "problems"] | None = None  # what the interval is over


@dataclass(frozen=True)
class ComparisonRow:
    """Holds the results of one method on one evaluation set."""

    method: str
    eval_set: str
    num_seeds: int
    measures: dict[str, Estimate | None]
    seconds: Estimate | None  # training time
    num_completions: Estimate | None  # sampled for training


def comparison_rows(runs: Sequence[Run]) -> list[ComparisonRow]:
    """Return, for each evaluation set, the starting policy (if evaluated) and every method."""
    measures = shown_measures(runs)
    rows = []
    for eval_set in evaluation_sets(runs) or [""]:
        if start := _start_row(runs, eval_set, measures):
            rows.append(start)
        rows += [
            _method_row(method, eval_set, seeds, measures)
            for method, seeds in by_method(runs).items()
        ]
    return rows


def shown_measures(runs: Sequence[Run]) -> list[str]:
    """List the measures that tables show.

    pass@k is shown at 8 and 32 if every full evaluation has so many samples, otherwise at the
    largest k that all full evaluations share. Evaluations without samples do not count. More
    samples find more distinct answers, so these are shown only for equal numbers of samples.
    """
    rows = [row for run in runs for row in run.evaluations if row["kind"] == "full"]
    sampled = [row for row in rows if row.get("pass@k")]
    ks = _shared_ks(sampled)
    distinct = ["distinct"] if len({row["num_samples"] for row in sampled}) <= 1 else []
    shown = sorted({k for k in (8, 32) if k in ks} | ({max(ks)} if ks and 32 not in ks else set()))
    return ["greedy", "mean", *(f"pass@{k}" for k in shown), *distinct]


def pass_at_k_curve(evaluations: Sequence[Row]) -> list[int]:
    """Return the values of k of a curve over these evaluations: powers of two, and the largest."""
    shared = _shared_ks(evaluations)
    return [k for k in powers_of_two(max(shared)) if k in shared] if shared else []


def _shared_ks(evaluations: Sequence[Row]) -> set[int]:
    """Return every k for which all evaluations have pass@k: recorded, or from their problems."""
    available = [
        set(range(1, row["num_samples"] + 1))
        if row.get("problems")
        else set(map(int, row["pass@k"]))
        for row in evaluations
    ]
    return set.intersection(*available) if available else set()


def measure_value(evaluation: Row, measure: str) -> float | None:
    """Return a measure as the evaluation recorded it; pass@k for any k, if it has problems."""
    if measure.startswith("pass@"):
        k = measure.removeprefix("pass@")
        value = evaluation.get("pass@k", {}).get(k)
        is_possible = k.isdecimal() and 1 <= int(k) <= evaluation["num_samples"]
        if value is None and is_possible and evaluation.get("problems"):
            values = problem_values(evaluation, measure)
            value = sum(values) / len(values)
    else:
        value = evaluation.get(measure)
    return None if value is None else float(value)


def problem_values(evaluation: Row, measure: str) -> list[float]:
    """Return the measure for each problem that has it; empty if no problems were recorded.

    `eepo eval --sample-limit` samples only some problems.
    """
    problems, num_samples = evaluation.get("problems") or [], evaluation["num_samples"]
    if measure != "greedy":
        problems = [problem for problem in problems if "correct" in problem]
    if measure.startswith("pass@"):
        k = int(measure.removeprefix("pass@"))
        return [pass_at_k(num_samples, problem["correct"], k) for problem in problems]
    if measure == "mean":
        return [problem["correct"] / num_samples for problem in problems]
    return [float(problem[measure]) for problem in problems]


def estimate_over_problems(evaluation: Row, measure: str) -> Estimate | None:
    mean = measure_value(evaluation, measure)
    if mean is None:
        return None
    values = problem_values(evaluation, measure)
    if not values:
        return Estimate(mean)
    return Estimate(mean, *bootstrap_interval(values), over="problems")


def estimate_over_seeds(values: Sequence[float]) -> Estimate | None:
    if not values:
        return None
    interval = seed_interval(values)
    mean = sum(values) / len(values)
    return Estimate(mean, *interval, over="seeds") if interval else Estimate(mean)


def estimate(evaluations: Sequence[Row], measure: str) -> Estimate | None:
    """Estimate a measure. `evaluations` holds one evaluation for each seed."""
    if len(evaluations) == 1:
        return estimate_over_problems(evaluations[0], measure)
    return estimate_over_seeds(_values(evaluations, measure))


def full_evaluations(seeds: Sequence[Run], eval_set: str) -> list[Row]:
    """Return the final evaluation of each seed that has one."""
    return [row for run in seeds if (row := run.full_evaluation(eval_set))]


def start_evaluations(runs: Sequence[Run], eval_set: str) -> list[Row]:
    """Return the evaluation of each different starting policy once.

    Seeds and methods that share a starting policy do not add evidence about it.
    """
    starts: list[Row] = []
    for run in runs:
        row = run.start_evaluation(eval_set)
        if row and not any(_same_result(row, other) for other in starts):
            starts.append(row)
    return starts


def _values(evaluations: Sequence[Row], measure: str) -> list[float]:
    values = (measure_value(row, measure) for row in evaluations)
    return [value for value in values if value is not None]


def _same_result(row: Row, other: Row) -> bool:
    keys = ("greedy", "mean", "pass@k", "distinct", "num_problems", "num_samples")
    return all(row.get(key) == other.get(key) for key in keys)


def _start_row(runs: Sequence[Run], eval_set: str, measures: Sequence[str]) -> ComparisonRow | None:
    rows = start_evaluations(runs, eval_set)
    if not rows:
        return None
    if len(rows) == 1:
        estimates = {measure: estimate_over_problems(rows[0], measure) for measure in measures}
    else:  # different starting policies are not seeds of one method: their mean has no interval
        estimates = {measure: _mean_without_interval(rows, measure) for measure in measures}
    return ComparisonRow(START, eval_set, len(rows), estimates, None, None)


def _mean_without_interval(rows: Sequence[Row], measure: str) -> Estimate | None:
    values = _values(rows, measure)
    return Estimate(sum(values) / len(values)) if values else None


def _method_row(
    method: str, eval_set: str, seeds: Sequence[Run], measures: Sequence[str]
) -> ComparisonRow:
    evaluations = full_evaluations(seeds, eval_set)
    seconds = [value for run in seeds if (value := run.seconds()) is not None]
    completions = [float(count) for run in seeds if (count := run.num_completions()) is not None]
    return ComparisonRow(
        method=method,
        eval_set=eval_set,
        num_seeds=len(evaluations) or len(seeds),
        measures={measure: estimate(evaluations, measure) for measure in measures},
        seconds=estimate_over_seeds(seconds),
        num_completions=estimate_over_seeds(completions),
    )
