"""Draws accuracy against pass@k: what a method trades, and what GRPO trades by its learning rate.

A lower learning rate also keeps pass@k, and so does a higher temperature at evaluation. So a method
helps only if it lies above these lines.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from eepo.evaluation.estimates import seed_interval
from eepo.reports.palette import LINE_STYLES, method_styles
from eepo.reports.panels import WIDTH, add_legend, method_handles, new_panels, styled

Points = Mapping[
    str, Sequence[tuple[float, float]]
]  # of a method or a value: mean and pass@k of each seed


def frontier_figure(
    sets: Mapping[str, tuple[Mapping[str, Points], Points]], measure: str
) -> Figure | None:
    """Draw a panel per evaluation set: methods with every value as lines, the others as points.

    Lines are grey if there are points to compare with them, and coloured otherwise.
    """

    @styled
    def draw(_runs: Sequence[object]) -> Figure:
        figure, panels = new_panels(len(sets), height=2.6, width=WIDTH)
        shown: dict[str, None] = {}
        lined: dict[str, Line2D] = {}
        for axes, (name, (lines, reported)) in zip(panels, sets.items(), strict=True):
            for place, (method, line) in enumerate(lines.items()):
                colour = "#808080" if reported else method_styles(lines)[method][0]
                lined[method] = _line(method, place, colour)
                _draw_line(axes, line, place, colour)
                named = _to_name(line, next(iter(lines.values())), coloured=not reported)
                _name_values(axes, named, "#606060" if reported else colour)
            for method, seeds in reported.items():
                shown[method] = None
                colour, marker = method_styles(reported)[method]
                x, y = _middle(seeds)
                axes.errorbar(
                    x, y, color=colour,
                    xerr=arms([s[0] for s in seeds]), yerr=arms([s[1] for s in seeds]),
                    marker=marker, markersize=3.5, linewidth=0.5, linestyle="none",
                )  # fmt: skip
                if len({*method_styles(reported).values()}) < len(reported):  # they repeat
                    axes.annotate(
                        method, (x, y), fontsize=4, xytext=(3, -3), textcoords="offset points"
                    )
            axes.set(title=name.replace("_", " "), xlabel="mean", ylabel=measure)
            axes.xaxis.set_major_locator(
                MaxNLocator(nbins=5)
            )  # long numbers where methods hardly differ
        add_legend(figure, [*method_handles(shown, markers=True), *lined.values()])
        return figure

    return draw([]) if sets else None


def _line(method: str, place: int, colour: str) -> Line2D:
    style = LINE_STYLES[place % len(LINE_STYLES)]
    return Line2D([], [], color=colour, linestyle=style, marker=".", label=method)


def _draw_line(axes: Axes, line: Points, place: int, colour: str) -> None:
    """Of one method, from value to value."""
    middles = [_middle(seeds) for seeds in line.values()]
    drawn = _line("", place, colour)
    drawn.set_data(*zip(*middles, strict=True))
    drawn.set_zorder(1)
    axes.add_line(drawn)
    axes.autoscale_view()


def _to_name(line: Points, first: Points, coloured: bool) -> Points:
    """Label all values of the first line; for a line with the same values, label its ends."""
    if line is first or [*line] != [*first]:
        return line
    ends = [*line][:: max(1, len(line) - 1)] if coloured else []
    return {value: line[value] for value in ends}


def _name_values(axes: Axes, line: Points, colour: str) -> None:
    paper = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.3}
    for value, seeds in line.items():
        axes.annotate(
            value, _middle(seeds), fontsize=5, color=colour, bbox=paper, zorder=1.5, xytext=(3, 3),
            textcoords="offset points",
        )  # fmt: skip


def _middle(seeds: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return statistics.mean(x for x, _ in seeds), statistics.mean(y for _, y in seeds)


def arms(values: Sequence[float]) -> list[list[float]]:
    """Half-widths of the 95 % interval over seeds, as matplotlib wants them."""
    low, high = seed_interval(values) or (values[0], values[0])
    middle = statistics.mean(values)
    return [[max(0.0, middle - low)], [max(0.0, high - middle)]]
