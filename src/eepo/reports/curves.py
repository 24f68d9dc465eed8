"""Draws lines over training steps.

Several seeds become their mean, with a band from the lowest to the highest seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from eepo.reports.measures import measure_value, problem_values
from eepo.reports.palette import method_styles
from eepo.reports.records import Row, Run

MIN_SMOOTHED_STEPS = 40  # lines with fewer points are not smoothed
MAX_BANDED_METHODS = 4  # with more methods, bands would hide the lines


@dataclass(frozen=True)
class Curve:
    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    num_seeds: int


@dataclass(frozen=True)
class LineStyle:
    colour: str
    dashes: Any = "solid"  # any line style of matplotlib
    marker: str | None = None  # points with a marker are not smoothed
    crowded: bool = False  # draw only the mean: bands and raw values would hide other lines


def metric_curve(seeds: Sequence[Run], key: str) -> Curve | None:
    last_step = min(run.last_step for run in seeds)
    return curve_over_seeds([run.series(key) for run in seeds], last_step)


def evaluation_curve(seeds: Sequence[Run], eval_set: str, measure: str) -> Curve | None:
    series = [_evaluation_series(run, eval_set, measure) for run in seeds]
    return curve_over_seeds(series, last_step=min(max(values, default=0) for values in series))


def curve_over_seeds(series: Sequence[Mapping[int, float]], last_step: int) -> Curve | None:
    """Average over seeds up to `last_step`, the last step that all seeds reached.

    Beyond it, a mean over fewer seeds would jump. Before it, a seed may lack a step, such as
    unlearning metrics of steps in which nothing was gated: the mean is then over the other seeds.
    """
    steps = sorted({step for values in series for step in values if step <= last_step})
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
    """Apply a centred moving mean over about 5 % of the points, over fewer at both ends."""
    half = len(values) // MIN_SMOOTHED_STEPS
    if half == 0:
        return values
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def draw_curve(axes: Axes, curve: Curve, style: LineStyle) -> None:
    """Draw the smoothed mean; behind it, unless crowded, the raw mean and the band over seeds.

    A single point is drawn as a dot, hollow where the line would be dashed.
    """
    colour, marker = style.colour, style.marker
    mean = curve.mean if marker else smooth(curve.mean)
    if not style.crowded and mean is not curve.mean:
        axes.plot(curve.steps, curve.mean, color=colour, linewidth=0.4, alpha=0.3)
    if not style.crowded and curve.num_seeds > 1:
        axes.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=0.13, linewidth=0)
    axes.plot(
        curve.steps,
        mean,
        color=colour,
        linestyle=style.dashes,
        marker=marker or ("o" if len(mean) == 1 else None),
        markerfacecolor=colour if marker or style.dashes == "solid" else "white",
    )


def draw_methods(
    axes: Axes, methods: Mapping[str, Sequence[Run]], key: str, dashes: Any = "solid"
) -> None:
    """Draw a metric over the steps, for each method that has it."""
    crowded = len(methods) > MAX_BANDED_METHODS
    for method, (colour, _) in method_styles(methods).items():
        if curve := metric_curve(methods[method], key):
            draw_curve(axes, curve, LineStyle(colour, dashes, crowded=crowded))


def _evaluation_series(run: Run, eval_set: str, measure: str) -> dict[int, float]:
    """Map step to measure, always over the same problems.

    A quick evaluation uses the first few problems of a full one. If both exist at a step, the full
    one is used: it has more samples.
    """
    rows = [row for row in run.evaluations if row["set"] == eval_set]
    num_problems = min((row["num_problems"] for row in rows), default=0)
    chosen: dict[int, Row] = {}
    for row in rows:
        if row["kind"] == "full" or row["step"] not in chosen:
            chosen[row["step"]] = row
    values = {
        step: _mean_of_first(row, measure, num_problems) for step, row in sorted(chosen.items())
    }
    return {step: value for step, value in values.items() if value is not None}


def _mean_of_first(row: Row, measure: str, num_problems: int) -> float | None:
    """Average over the first problems if the row records each problem."""
    values = problem_values(row, measure)[:num_problems]
    if num_problems < row["num_problems"] and len(values) == num_problems:
        return float(np.mean(values))
    return measure_value(row, measure)
