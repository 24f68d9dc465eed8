"""Draws mean accuracy against pass@k: which methods gain one without losing the other?

A lower learning rate also keeps pass@k, and so does a higher temperature at evaluation. A method
with every value of such a knob is drawn as a line, and a method helps only if it lies above it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from eepo.evaluation.estimates import seed_interval
from eepo.evaluation.results import set_title
from eepo.reports.palette import LINE_STYLES, method_styles
from eepo.reports.panels import WIDTH, add_legend, method_handles, new_panels, styled

# By value or by method: (mean, pass@k) of each seed.
Seeds = Mapping[str, Sequence[tuple[float, float]]]
GREY, DARK_GREY = "#808080", "#606060"


@dataclass(frozen=True)
class FrontierPanel:
    eval_set: str
    lines: Mapping[str, Seeds]  # method -> value -> seeds
    points: Seeds  # method -> seeds


def frontier_figure(panels: Sequence[FrontierPanel], measure: str) -> Figure | None:
    """Draw a panel per evaluation set.

    Lines are grey if there are points to compare with them, and coloured otherwise. If there are
    more methods than styles, points are discs with the number of their method.
    """
    points = list(dict.fromkeys(method for panel in panels for method in panel.points))
    numbered = len({*method_styles(points).values()}) < len(points)
    numbers = {method: f"{number}" for number, method in enumerate(points, 1) if numbered}

    @styled
    def draw(_: Sequence[Any]) -> Figure:
        figure, all_axes = new_panels(len(panels), height=2.6, width=WIDTH)
        for axes, panel in zip(all_axes, panels, strict=True):
            _draw_panel(axes, panel, method_styles(points), numbers)
            axes.set(title=set_title(panel.eval_set), xlabel="mean", ylabel=measure)
            # Fewer ticks: numbers are long where methods hardly differ.
            axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        lines = {
            method: _line_style(index, _line_colour(panel, method), method)
            for panel in panels
            for index, method in enumerate(panel.lines)
        }
        handles = method_handles(points, markers=True)
        for method, handle in zip(points, handles, strict=True):
            if method in numbers:
                handle.set_label(f"{numbers[method]} {handle.get_label()}")
                handle.set_marker("o")
        add_legend(figure, [*handles, *lines.values()])
        return figure

    return draw([]) if panels else None


def interval_arms(values: Sequence[float]) -> list[list[float]]:
    """Return the lengths of the 95 % interval of shares below and above the mean.

    An interval of few seeds may leave the range of a share, which is 0 to 1. It is cut there.
    """
    low, high = seed_interval(values) or (values[0], values[0])
    mean = statistics.mean(values)
    return [[max(0.0, mean - max(low, 0.0))], [max(0.0, min(high, 1.0) - mean)]]


def _draw_panel(
    axes: Axes,
    panel: FrontierPanel,
    styles: Mapping[str, tuple[str, str]],
    numbers: Mapping[str, str],
) -> None:
    first_line = next(iter(panel.lines.values()), {})
    for index, (method, values) in enumerate(panel.lines.items()):
        colour = _line_colour(panel, method)
        line = _line_style(index, colour)
        line.set_data(*zip(*map(_mean_point, values.values()), strict=True))
        line.set_zorder(1)
        axes.add_line(line)
        axes.autoscale_view()
        labelled = _labelled_values(values, first_line, all_lines_grey=bool(panel.points))
        _label_values(axes, labelled, DARK_GREY if panel.points else colour)
    for place, (method, seeds) in enumerate(panel.points.items()):
        colour, marker = styles[method]
        _draw_intervals(axes, seeds, colour)
        if method in numbers:  # the first method, which is usually the baseline, lies on top
            _draw_disc(axes, _mean_point(seeds), numbers[method], colour, 4 - place / 100)
        else:
            axes.plot(*_mean_point(seeds), color=colour, marker=marker, markersize=3.5)


def _draw_intervals(axes: Axes, seeds: Sequence[tuple[float, float]], colour: str) -> None:
    x, y = _mean_point(seeds)
    axes.errorbar(
        x, y, color=colour, linewidth=0.5, linestyle="none",
        xerr=interval_arms([mean for mean, _ in seeds]),
        yerr=interval_arms([pass_k for _, pass_k in seeds]),
    )  # fmt: skip


def _draw_disc(
    axes: Axes, place: tuple[float, float], number: str, colour: str, zorder: float
) -> None:
    axes.plot(
        *place, color=colour, marker="o", markersize=7, zorder=zorder,
        markeredgecolor="white", markeredgewidth=0.4,
    )  # fmt: skip
    axes.annotate(
        number, place, fontsize=4.5, color="white", weight="bold", zorder=zorder,
        ha="center", va="center_baseline",
    )  # fmt: skip


def _line_colour(panel: FrontierPanel, method: str) -> str:
    return GREY if panel.points else method_styles(panel.lines)[method][0]


def _line_style(index: int, colour: str, label: str = "") -> Line2D:
    style = LINE_STYLES[index % len(LINE_STYLES)]
    return Line2D([], [], color=colour, linestyle=style, marker=".", label=label)


def _labelled_values(values: Seeds, first: Seeds, all_lines_grey: bool) -> Seeds:
    """Label all values of the first line. For a line with the same values, label its ends."""
    if values is first or [*values] != [*first]:
        return values
    ends = [] if all_lines_grey else [*values][:: max(1, len(values) - 1)]
    return {value: values[value] for value in ends}


def _label_values(axes: Axes, values: Seeds, colour: str) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.3}
    for value, seeds in values.items():
        axes.annotate(
            value, _mean_point(seeds), fontsize=5, color=colour, bbox=box, zorder=1.5,
            xytext=(3, 3), textcoords="offset points",
        )  # fmt: skip


def _mean_point(seeds: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return statistics.mean(x for x, _ in seeds), statistics.mean(y for _, y in seeds)
