"""Shares the evaluation of a starting policy among all runs that start from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from eepo.reports.records import Row, Run, evaluation_sets

# The settings that determine the accuracy of a starting policy. How often it was evaluated, and
# with how many samples, does not matter.
START_SETTINGS = (
    ("model", "path"),
    ("model", "revision"),
    ("reward", "name"),
    ("rollout", "stop"),
    ("algorithm", "max_new_tokens"),
    ("evaluation", "temperature"),
)


def share_start_evaluations(runs: Sequence[Run]) -> list[Run]:
    """Give every run the most thorough evaluation at step 0 among runs with the same start.

    A comparison evaluates the start in full once, in its first run. A quick evaluation of the same
    policy in another run would show another accuracy.
    """
    shared = []
    for run in runs:
        alike = [other for other in runs if has_same_start(run, other)]
        shared.append(dataclasses.replace(run, evaluations=_with_best_starts(run, alike)))
    return shared


def has_same_start(run: Run, other: Run) -> bool:
    """Compare recipes: the same weights, and the same problems sampled in the same way."""
    same_settings = all(run.setting(*key) == other.setting(*key) for key in START_SETTINGS)
    return same_settings and run.recipe.get("task") == other.recipe.get("task")


def _with_best_starts(run: Run, alike: Sequence[Run]) -> list[Row]:
    starts = [row for eval_set in evaluation_sets([run]) if (row := _best_start(alike, eval_set))]
    return starts + [row for row in run.evaluations if row["step"] > 0]


def _best_start(runs: Sequence[Run], eval_set: str) -> Row | None:
    evaluations = (row for run in runs for row in run.evaluations)
    rows = [row for row in evaluations if row["step"] == 0 and row["set"] == eval_set]
    return max(rows, key=_thoroughness, default=None)


def _thoroughness(row: Row) -> tuple[bool, int, int]:
    return row["kind"] == "full", row["num_samples"], row["num_problems"]
