"""Formats how fast runs reach 90 % reward: steps of every seed, completions and seconds."""

from __future__ import annotations

from collections.abc import Sequence

from eepo.reports.run_lines import Line

HEAD = ("", "reached", "steps of each seed", "median", "completions", "seconds")
NEVER = "–"


def reaches_reward(lines: Sequence[Line]) -> bool:
    """Return whether any of the runs has reached 90 % reward."""
    return any(line.get("steps_to_90") for line in lines)


def speed_cells(title: str, lines: Sequence[Line]) -> list[str]:
    """Return the row of one method; completions and seconds are those of the median run.

    A run that never gets there counts as slower than all others, so there is a median only if more
    than half of the runs have reached 90 %.
    """
    ordered = sorted(lines, key=lambda line: line["seed"])
    steps = [line.get("steps_to_90") for line in ordered]
    reached = [line for line in ordered if line.get("steps_to_90")]
    medians = [NEVER] * 3
    if 2 * len(reached) > len(steps):
        # An even number of runs has two middle ones: the slower one decides.
        middle = sorted(reached, key=lambda line: line["steps_to_90"])[len(steps) // 2]
        median, count = middle["steps_to_90"], middle.get("completions_per_step")
        completions = f"{median * count:,}" if count else ""
        medians = [str(median), completions, f"{seconds_to_reward(middle):.0f}"]
    shown = ", ".join(NEVER if step is None else str(step) for step in steps)
    return [title, f"{len(reached)} of {len(steps)}", shown, *medians]


def seconds_to_reward(line: Line) -> float:
    """Sum the seconds of the steps until 90 % reward. A row of metrics averages several steps."""
    total, done = 0.0, 0
    for row in line["metrics"]:
        steps = min(row["step"], line["steps_to_90"]) - done
        total += steps * row["seconds/total"]
        done += steps
    return total
