"""What the completions of an evaluation say: a function of its folder, and nothing else.

Each problem gives one value for each measure; a benchmark's number is their mean, with a 95 % bootstrap interval over
problems. The average is over benchmarks, each of equal weight as in the paper's tables, drawn anew within each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eepo.evaluation.estimates import grouped_bootstrap_interval, majority, pass_at_k, powers_of_two
from eepo.evaluation.store import Store
from eepo.runs.runlog import write_whole

RESULTS = "results.json"
Values = dict[str, list[float]]  # measure -> one value for each problem


def write_results(folder: Path) -> Path:
    write_whole(folder / RESULTS, json.dumps(results(folder), indent=2) + "\n")
    return folder / RESULTS


def results(folder: Path) -> dict[str, Any]:
    """Benchmarks that are not evaluated to the end are left out; so are samples that are not."""
    store = Store(folder)
    settings = store.settings()
    values: dict[str, Values] = {}
    for name, benchmark in settings["benchmarks"].items():
        found = benchmark_values(
            store.rows(name), benchmark["num_problems"], settings["num_samples"]
        )
        if found:
            values[name] = found
    return {
        "settings": {key: value for key, value in settings.items() if key != "benchmarks"},
        "benchmarks": {
            name: settings["benchmarks"][name]
            | {"measures": {key: estimate([column]) for key, column in values[name].items()}}
            for name in values
        },
        "average": average(list(values.values())),
    }


def benchmark_values(rows: Sequence[dict[str, Any]], num_problems: int, num_samples: int) -> Values:
    """From the lines of a benchmark: greedy ones, then the samples, problem by problem."""
    greedy, drawn = rows[:num_problems], rows[num_problems:]
    if len(greedy) < num_problems:
        return {}
    values = _columns(
        [{"greedy/accuracy": float(_right(row))} | _measures([row], "greedy") for row in greedy]
    )
    if num_samples and len(drawn) == num_problems * num_samples:
        groups = [drawn[first : first + num_samples] for first in range(0, len(drawn), num_samples)]
        values |= _columns([_sample_measures(group) for group in groups])
    return values


def average(benchmarks: Sequence[Values]) -> dict[str, dict[str, float]]:
    """Of the measures that all benchmarks have."""
    shared = (
        [key for key in benchmarks[0] if all(key in other for other in benchmarks)]
        if benchmarks
        else []
    )
    return {key: estimate([values[key] for values in benchmarks]) for key in shared}


def estimate(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    low, high = grouped_bootstrap_interval(groups)
    mean = sum(sum(group) / len(group) for group in groups) / len(groups)
    return {"mean": mean, "low": low, "high": high}


def _sample_measures(group: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of one problem's drawn completions."""
    number, right = len(group), [_right(row) for row in group]
    return {
        f"samples/mean@{number}": sum(right) / number,
        f"samples/majority@{number}": majority([row["answer"] for row in group], right),
        **{f"samples/pass@{k}": pass_at_k(number, sum(right), k) for k in powers_of_two(number)},
        **_measures(group, "samples"),
    }


def _measures(rows: Sequence[dict[str, Any]], kind: str) -> dict[str, float]:
    """What stands beside accuracy: gains are often only formatting, or fewer completions cut off."""
    return {
        f"{kind}/format_share": sum(row["answer"] is not None for row in rows) / len(rows),
        f"{kind}/truncated_share": sum(not row["finished"] for row in rows) / len(rows),
        f"{kind}/length": sum(row["num_tokens"] for row in rows) / len(rows),
    }


def _right(row: dict[str, Any]) -> bool:
    return row["reward"] >= 1


def _columns(problems: Sequence[dict[str, float]]) -> Values:
    return {key: [problem[key] for problem in problems] for key in problems[0]}
