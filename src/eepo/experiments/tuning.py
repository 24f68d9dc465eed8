"""Chooses the best value of a method from the lines of its tuning runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from eepo.reports.run_lines import Line, final_value, line_sets
from eepo.types import UserError

SPEED = "speed"


def best_value(lines: Sequence[Line], objective: Sequence[str]) -> str:
    """Return the value with the highest mean score over seeds; of equal ones, the first."""
    scores: dict[str, list[float]] = {}
    for line in lines:
        scores.setdefault(line["value"], []).append(score(line, objective))
    return max(scores, key=lambda value: statistics.mean(scores[value]))


def score(line: Line, objective: Sequence[str]) -> float:
    """Return the mean of the measures in `objective`.

    "in_range/greedy" is greedy accuracy on one evaluation set, "greedy" the average of all sets.
    "speed" is the negative number of steps to 90 % reward; a run that fails counts twice its steps.
    """
    return statistics.mean(_measure(line, name) for name in objective)


def needs_benchmarks(objective: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether `objective` has a measure of a benchmark.

    A measure without a set, such as "greedy", is the average of all sets, also of benchmarks.
    """
    sets = {name.rpartition("/")[0] for name in objective if name != SPEED}
    return not sets.isdisjoint({"", *names})


def _measure(line: Line, name: str) -> float:
    if name == SPEED:
        return -float(line["steps_to_90"] or 2 * line["num_steps"])
    eval_set, slash, measure = name.rpartition("/")
    if slash:
        return final_value(line, eval_set, measure)
    sets = line_sets([line])
    if not sets:
        raise UserError(f"objective {name!r}: {line['method']} has no evaluation")
    return statistics.mean(final_value(line, one, measure) for one in sets)
