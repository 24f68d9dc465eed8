"""Formats how fast runs reach a goal, and how much reward they earn at equal time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from eepo.reports.run_lines import Line

HEAD = ("", "reached", "steps of each seed", "median", "completions", "seconds")
NEVER = "–"
WINDOW = 5  # steps that a reward is averaged over

Goal = Callable[[Line], int | None]  # the step in which a run reached it


def reward_of_90(line: Line) -> int | None:
    return line.get("steps_to_90")


def half_of(label: str) -> Goal:
    """Return the goal that half of the stage-1 completions have a label of the grader."""
    return lambda line: line.get("steps_to_half", {}).get(label, {}).get("step")


def speed_cells(title: str, lines: Sequence[Line], goal: Goal = reward_of_90) -> list[str]:
    """Return the row of one method; completions and seconds are those of the median run.

    A run that never gets there counts as slower than all others, so there is a median only if more
    than half of the runs have reached the goal.
    """
    ordered = sorted(lines, key=lambda line: line["seed"])
    steps = [goal(line) for line in ordered]
    reached = [(step, line) for step, line in zip(steps, ordered, strict=True) if step]
    medians = [NEVER] * 3
    if 2 * len(reached) > len(steps):
        # An even number of runs has two middle ones: the slower one decides.
        median, middle = sorted(reached, key=lambda each: each[0])[len(steps) // 2]
        count = middle.get("completions_per_step")
        completions = f"{median * count:,}" if count else ""
        medians = [str(median), completions, f"{seconds_until(middle, median):.0f}"]
    shown = ", ".join(str(step) if step else NEVER for step in steps)
    return [title, f"{len(reached)} of {len(steps)}", shown, *medians]


def seconds_until(line: Line, last: int) -> float:
    """Sum the seconds of the steps until the last one. A row of metrics averages several steps."""
    total, done = 0.0, 0
    for row in line["metrics"]:
        steps = min(row["step"], last) - done
        total += steps * row["seconds/total"]
        done += steps
    return total


def reward_after(line: Line, seconds: float) -> float | None:
    """Return the stage-1 reward when a run has trained for some seconds: a mean over a few steps.

    A run that has ended before keeps its last reward. None: its first steps took longer, or its
    line is older than this metric.
    """
    done: list[tuple[int, float]] = []  # step, reward
    spent, last = 0.0, 0
    for row in line["metrics"]:
        spent += (row["step"] - last) * row["seconds/total"]
        last = row["step"]
        if spent > seconds:
            break
        if "stage1/reward" in row:
            done.append((last, row["stage1/reward"]))
    recent = [reward for step, reward in done if step > done[-1][0] - WINDOW]
    return statistics.fmean(recent) if recent else None
