"""The policy that runs start from: where it is the same, the evaluation of one run speaks for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from eepo.reports.records import Row, Run, evaluation_sets

# What the accuracy of a starting policy hangs on. How often and how well it was looked at does not belong to it.
STARTS = (
    ("model", "path"),
    ("model", "revision"),
    ("reward", "name"),
    ("rollout", "stop"),
    ("algorithm", "max_new_tokens"),
    ("evaluation", "temperature"),
)


def share_starts(runs: Sequence[Run]) -> list[Run]:
    """Every run with the most thorough evaluation at step 0 that runs from the same start have: a comparison evaluates
    it in full once, in its first run, and a quick look at it elsewhere would stand at another height."""
    return [
        dataclasses.replace(
            run, evaluations=_with_starts(run, [other for other in runs if same_start(run, other)])
        )
        for run in runs
    ]


def same_start(run: Run, other: Run) -> bool:
    """By their recipes: the same weights, asked the same problems in the same way."""
    settings = all(run.setting(*knob) == other.setting(*knob) for knob in STARTS)
    return settings and run.recipe.get("task") == other.recipe.get("task")


def _with_starts(run: Run, alike: Sequence[Run]) -> list[Row]:
    starts = [row for name in evaluation_sets([run]) if (row := _best_start(alike, name))]
    return starts + [row for row in run.evaluations if row["step"] > 0]


def _best_start(runs: Sequence[Run], name: str) -> Row | None:
    rows = [
        row for run in runs for row in run.evaluations if row["step"] == 0 and row["set"] == name
    ]
    return max(
        rows,
        key=lambda row: (row["kind"] == "full", row["num_samples"], row["num_problems"]),
        default=None,
    )
