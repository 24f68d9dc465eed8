"""Draws the steps until a run earns 90 % reward: by method, or against the number of its regime."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eepo.reports.palette import method_styles
from eepo.reports.panels import (
    add_legend,
    bar_panel_height,
    label_bars,
    method_handles,
    new_panels,
    styled,
)
from eepo.reports.run_lines import Line
from eepo.types import UserError

REGIME = re.compile(r"(.+)_([0-9.]+(?:e[+-]?[0-9]+)?)")
TICKS = (20, 40, 60, 100)


def steps_to_reward_figure(lines: Sequence[Line], labels: Mapping[str, str]) -> Figure:
    """Draw every seed, and the median of each method. Runs that never get there are on top.

    The axis of regimes p_1e-2, p_1e-3, ... is labelled by `labels["p"]`.
    """
    numbers = {line["regime"]: regime_number(line["regime"]) for line in lines}
    methods = list(dict.fromkeys(line["method"] for line in lines))
    limit = max(line["num_steps"] for line in lines)

    @styled
    def draw(_: Sequence[Any]) -> Figure:
        figure, (axes,) = new_panels(1, height=2.6)
        for index, method in enumerate(methods):
            seeds = [line for line in lines if line["method"] == method]
            # Methods are side by side, and so are their failures.
            shift, failed = 1.07 ** (index - len(methods) / 2), limit * (1.15 + 0.045 * index)
            positions = {regime: number * shift for regime, number in numbers.items()}
            _draw_method(axes, seeds, positions, failed, method_styles(methods)[method])
        axes.axhline(limit * 1.05, color="#888888", linewidth=0.6, linestyle="dotted")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_yticks(TICKS, [*map(str, TICKS)])
        axes.minorticks_off()
        name = _regime_name(lines[0]["regime"])
        axes.set_xlabel(labels.get(name, name))
        axes.set_title(f"steps to 90 % reward (above the dotted line: not within {limit} steps)")
        add_legend(figure, method_handles(methods, markers=True))
        return figure

    figure = draw([])
    assert figure is not None
    return figure


def steps_by_method_figure(lines: Sequence[Line]) -> Figure:
    """Draw a row per method, the fastest on top: every seed, and a bar at the median.

    Runs that never get there are crosses on the right.
    """
    limit = max(line["num_steps"] for line in lines)
    failed = 1.08 * limit  # where the crosses begin
    steps: dict[str, list[float]] = {}
    for line in lines:
        steps.setdefault(line["method"], []).append(line.get("steps_to_90") or failed)
    methods = sorted(steps, key=lambda method: statistics.mean(steps[method]))

    @styled
    def draw(_: Sequence[Any]) -> Figure:
        figure, (axes,) = new_panels(1, height=bar_panel_height(len(methods)))
        for row, method in enumerate(methods):
            _draw_row(axes, row, steps[method], failed, method_styles(methods)[method][0])
        axes.axvline(1.04 * limit, color="#888888", linewidth=0.6, linestyle="dotted")
        axes.set_xlim(left=0)
        label_bars(axes, methods)
        axes.set_title(f"steps to 90 % reward (crosses: not within {limit} steps)")
        return figure

    figure = draw([])
    assert figure is not None
    return figure


def _draw_row(axes: Axes, row: int, steps: list[float], failed: float, colour: str) -> None:
    reached = [step for step in steps if step < failed]
    crosses = [failed * (1 + 0.02 * index) for index in range(len(steps) - len(reached))]
    axes.plot(reached, [row] * len(reached), "o", color=colour, markersize=4, alpha=0.6)
    axes.plot(crosses, [row] * len(crosses), "x", color=colour, markersize=4)
    if len(reached) > len(crosses):
        axes.plot([statistics.median(steps)], [row], "|", color=colour, markersize=11)


def regime_number(regime: str) -> float:
    """Return 1e-5 for p_1e-5."""
    match = REGIME.fullmatch(regime)
    if not match or float(match[2]) <= 0:
        raise UserError(
            f"regime {regime}: the figure steps_to_reward needs names that end with a number > 0, "
            "such as p_1e-5"
        )
    return float(match[2])


def _regime_name(regime: str) -> str:
    match = REGIME.fullmatch(regime)
    return match[1] if match else regime


def _draw_method(
    axes: Axes,
    lines: Sequence[Line],
    positions: dict[str, float],
    failed: float,
    style: tuple[str, str],
) -> None:
    colour, marker = style
    medians = []
    for regime, x in sorted(positions.items(), key=lambda item: item[1]):
        seeds = [line["steps_to_90"] for line in lines if line["regime"] == regime]
        steps = [failed if step is None else step for step in seeds]
        axes.plot([x] * len(steps), steps, ".", color=colour, markersize=3, alpha=0.6)
        if sum(step is not None for step in seeds) > len(seeds) / 2:
            medians.append((x, statistics.median(steps)))
    if medians:
        axes.plot(*zip(*medians, strict=True), color=colour, marker=marker, markersize=4)
