"""Computes the results of an evaluation from its folder alone.

Each problem has one value per measure. The result of a benchmark is their mean, with a 95 %
bootstrap interval over problems. The average gives every benchmark the same weight, as in the
paper's tables; its interval resamples problems within each benchmark.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eepo.config import BENCHMARK_TITLES
from eepo.evaluation.estimates import (
    grouped_bootstrap_interval,
    majority_accuracy,
    pass_at_k,
    powers_of_two,
)
from eepo.evaluation.store import Store
from eepo.runs.runlog import write_atomically

RESULTS = "results.json"
Values = dict[str, list[float]]  # measure -> one value per problem


def write_results(folder: Path) -> Path:
    write_atomically(folder / RESULTS, json.dumps(results(folder), indent=2) + "\n")
    return folder / RESULTS


def results(folder: Path) -> dict[str, Any]:
    """Return settings, the measures of each benchmark and their average.

    Benchmarks whose greedy pass is incomplete are left out, and so are incomplete samples.
    """
    store = Store(folder)
    settings = store.settings()
    values: dict[str, Values] = {}
    benchmarks: dict[str, dict[str, Any]] = {}
    for name, benchmark in settings["benchmarks"].items():
        rows, sizes = store.rows(name), _sizes(settings, benchmark)
        columns = benchmark_values(rows, sizes)
        if columns:
            values[name] = columns
            measures = {measure: estimate([column]) for measure, column in columns.items()}
            problems, num_samples = count_correct(rows, sizes)
            benchmarks[name] = benchmark | {
                "num_samples": num_samples,
                "num_sampled_problems": sizes.sampled_problems if num_samples else 0,
                "measures": measures,
                "problems": problems,
            }
    return {
        "settings": {key: value for key, value in settings.items() if key != "benchmarks"},
        "benchmarks": benchmarks,
        "average": average(list(values.values())),
    }


@dataclass(frozen=True)
class Sizes:
    """Says how many completions of a benchmark an evaluation has when it is complete."""

    problems: int
    samples: int  # per sampled problem
    sampled_problems: int  # the first ones


def _sizes(settings: dict[str, Any], benchmark: dict[str, Any]) -> Sizes:
    num_problems = benchmark["num_problems"]
    limit = settings.get("sample_limit") or num_problems
    return Sizes(num_problems, settings["num_samples"], min(num_problems, limit))


def benchmark_values(rows: Sequence[dict[str, Any]], sizes: Sizes) -> Values:
    """Return the values of each measure, or nothing if the greedy rows are incomplete.

    `rows` holds the greedy completions of all problems, then the samples, problem by problem.
    """
    greedy, samples = rows[: sizes.problems], rows[sizes.problems :]
    if len(greedy) < sizes.problems:
        return {}
    values = _columns(
        [{"greedy/accuracy": float(_correct(row))} | _measures([row], "greedy") for row in greedy]
    )
    if sizes.samples and len(samples) == sizes.sampled_problems * sizes.samples:
        starts = range(0, len(samples), sizes.samples)
        groups = [samples[start : start + sizes.samples] for start in starts]
        values |= _columns([_sample_measures(group) for group in groups])
    return values


def set_title(name: str) -> str:
    """Return the title of an evaluation set in tables."""
    return BENCHMARK_TITLES.get(name, name.replace("_", " "))


def count_correct(rows: Sequence[dict[str, Any]], sizes: Sizes) -> tuple[list[dict[str, Any]], int]:
    """Count the correct samples of each sampled problem, from which pass@k follows for every k.

    Also return the number of samples per problem: 0 as long as the samples are incomplete.
    """
    greedy, samples, num_samples = rows[: sizes.problems], rows[sizes.problems :], sizes.samples
    if len(samples) != sizes.sampled_problems * num_samples:
        samples, num_samples = [], 0
    problems = []
    for index, row in enumerate(greedy):
        problem = {"id": row["id"], "greedy": _correct(row)}
        if index < sizes.sampled_problems:
            group = samples[index * num_samples : (index + 1) * num_samples]
            correct = [sample["answer"] for sample in group if _correct(sample)]
            problem |= {"correct": len(correct), "distinct": len(set(correct))}
        problems.append(problem)
    return problems, num_samples


def average(benchmarks: Sequence[Values]) -> dict[str, dict[str, float]]:
    """Average the measures that all benchmarks have."""
    if not benchmarks:
        return {}
    shared = [key for key in benchmarks[0] if all(key in values for values in benchmarks)]
    return {key: estimate([values[key] for values in benchmarks]) for key in shared}


def estimate(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    low, high = grouped_bootstrap_interval(groups)
    mean = sum(sum(group) / len(group) for group in groups) / len(groups)
    return {"mean": mean, "low": low, "high": high}


def _sample_measures(group: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the measures of the sampled completions of one problem."""
    n, correct = len(group), [_correct(row) for row in group]
    answers = [row["answer"] for row in group]
    return {
        f"samples/mean@{n}": sum(correct) / n,
        f"samples/majority@{n}": majority_accuracy(answers, correct),
        **{f"samples/pass@{k}": pass_at_k(n, sum(correct), k) for k in powers_of_two(n)},
        **_measures(group, "samples"),
    }


def _measures(rows: Sequence[dict[str, Any]], kind: str) -> dict[str, float]:
    """Return measures beside accuracy.

    A gain in accuracy may come only from better formatting or from fewer truncated completions.
    """
    return {
        f"{kind}/format_share": sum(row["answer"] is not None for row in rows) / len(rows),
        f"{kind}/truncated_share": sum(not row["finished"] for row in rows) / len(rows),
        f"{kind}/length": sum(row["num_tokens"] for row in rows) / len(rows),
    }


def _correct(row: dict[str, Any]) -> bool:
    return row["reward"] >= 1


def _columns(problems: Sequence[dict[str, float]]) -> Values:
    return {key: [problem[key] for problem in problems] for key in problems[0]}
