"""Lines over steps: several seeds become a mean and a band from the lowest to the highest seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from eepo.reports.measures import problem_values, value
from eepo.reports.palette import looks
from eepo.reports.records import Row, Run

SMOOTHED_FROM = 40  # with fewer points a line is drawn as it is
MOST_BANDED = 4  # methods; where there are more, their bands would bury the lines


@dataclass(frozen=True)
class Curve:
    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    num_seeds: int


def metric_curve(seeds: Sequence[Run], key: str) -> Curve | None:
    return over_seeds([run.series(key) for run in seeds], reach=min(run.last_step for run in seeds))


def evaluation_curve(seeds: Sequence[Run], name: str, measure: str) -> Curve | None:
    series = [_evaluated(run, name, measure) for run in seeds]
    return over_seeds(series, reach=min(max(values, default=0) for values in series))


def over_seeds(series: Sequence[Mapping[int, float]], reach: int) -> Curve | None:
    """Ends at `reach`, the last step all seeds came to: beyond it a mean over fewer seeds would jump for no reason.
    Before it a step may lack a seed, as unlearning metrics do where nothing was gated."""
    steps = sorted({step for values in series for step in values if step <= reach})
    if not steps:
        return None
    columns = [[values[step] for values in series if step in values] for step in steps]
    return Curve(
        steps=np.array(steps),
        mean=np.array([np.mean(column) for column in columns]),
        low=np.array([min(column) for column in columns]),
        high=np.array([max(column) for column in columns]),
        num_seeds=len(series),
    )


def smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving mean over about a twentieth of the points; at the ends over what there is."""
    half = len(values) // SMOOTHED_FROM
    if half == 0:
        return values
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def draw(
    axes: Axes,
    curve: Curve,
    colour: str,
    style: Any = "solid",
    marker: str | None = None,
    alone: bool = True,
) -> None:
    """The smoothed mean; behind it, if it is `alone` enough, the raw one, faint, and the seeds' band. Points with a
    marker are not smoothed. One point is no line: it is a dot, a hollow one where the line would be dashed."""
    mean = curve.mean if marker else smooth(curve.mean)
    if alone and mean is not curve.mean:
        axes.plot(curve.steps, curve.mean, color=colour, linewidth=0.4, alpha=0.3)
    if alone and curve.num_seeds > 1:
        axes.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=0.13, linewidth=0)
    dot = "o" if len(mean) == 1 else None
    inside = colour if marker or style == "solid" else "white"
    axes.plot(
        curve.steps,
        mean,
        color=colour,
        linestyle=style,
        marker=marker or dot,
        markerfacecolor=inside,
    )


def draw_methods(
    axes: Axes, methods: Mapping[str, Sequence[Run]], key: str, style: Any = "solid"
) -> None:
    """A metric over the steps, for each method that has it."""
    for method, (colour, _) in looks(methods).items():
        if curve := metric_curve(methods[method], key):
            draw(axes, curve, colour, style, alone=len(methods) <= MOST_BANDED)


def _evaluated(run: Run, name: str, measure: str) -> dict[int, float]:
    """By step, always over the same problems: a quick evaluation asks the first few of what a full one asks.

    Where both were made at a step, the full one counts: it drew more completions.
    """
    rows = [row for row in run.evaluations if row["set"] == name]
    fewest = min((row["num_problems"] for row in rows), default=0)
    chosen: dict[int, Row] = {}
    for row in rows:
        if row["kind"] == "full" or row["step"] not in chosen:
            chosen[row["step"]] = row
    found = {step: _over_first(row, measure, fewest) for step, row in sorted(chosen.items())}
    return {step: number for step, number in found.items() if number is not None}


def _over_first(row: Row, measure: str, number: int) -> float | None:
    """A measure over the row's first `number` problems, where it says how each one went."""
    values = problem_values(row, measure)[:number]
    return (
        float(np.mean(values))
        if number < row["num_problems"] and len(values) == number
        else value(row, measure)
    )
