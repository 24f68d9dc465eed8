"""What methods give up of pass@k for their mean, or the other way round, beside what GRPO trades by its learning rate.

A slower learning rate also keeps pass@k, so a method is worth its trouble only above that line.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from eepo.estimates import seed_interval
from eepo.reports.palette import SPARE, looks
from eepo.reports.panels import WIDTH, add_legend, method_lines, new_panels, styled

Points = Mapping[str, Sequence[tuple[float, float]]]  # of a method or a value: mean and pass@k of each seed


def frontier_figure(sets: Mapping[str, tuple[Sequence[Points], Points]], measure: str) -> Figure | None:
    """For each evaluation set: lines, what a method reaches with each value of its knob; and others as points."""

    @styled
    def draw(_runs: Sequence[object]) -> Figure:
        figure, panels = new_panels(len(sets), height=2.6, width=WIDTH)
        shown: dict[str, None] = {}
        for axes, (name, (lines, reported)) in zip(panels, sets.items(), strict=True):
            for line in lines:
                places = [_middle(seeds) for seeds in line.values()]
                axes.plot(*zip(*places, strict=True), color="#808080", marker=".", zorder=1)
                for value, place in zip(line, places, strict=True):
                    axes.annotate(value, place, fontsize=5, color="#606060", xytext=(2, 2), textcoords="offset points")
            for method, seeds in reported.items():
                shown[method] = None
                colour, marker = looks(reported)[method]
                x, y = _middle(seeds)
                axes.errorbar(
                    x, y, xerr=_arms([s[0] for s in seeds]), yerr=_arms([s[1] for s in seeds]), color=colour,
                    marker=marker, markersize=3.5, linewidth=0.5, linestyle="none",
                )  # fmt: skip
                if len(reported) > len(SPARE):  # looks repeat
                    axes.annotate(method, (x, y), fontsize=4, xytext=(3, -3), textcoords="offset points")
            axes.set(title=name.replace("_", " "), xlabel="mean", ylabel=measure)
        add_legend(figure, method_lines(shown, markers=True))
        return figure

    return draw([]) if sets else None


def _middle(seeds: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return statistics.mean(x for x, _ in seeds), statistics.mean(y for _, y in seeds)


def _arms(values: Sequence[float]) -> list[list[float]]:
    """Half-widths of the 95 % interval over seeds, as matplotlib wants them."""
    low, high = seed_interval(values) or (values[0], values[0])
    middle = statistics.mean(values)
    return [[max(0.0, middle - low)], [max(0.0, high - middle)]]
