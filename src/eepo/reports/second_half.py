"""Does the second half of a group find what the first did not? What forgetting is for, beside what chance gives."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eepo.reports.curves import draw_methods
from eepo.reports.labels import name_text
from eepo.reports.palette import STAGE_STYLES, looks
from eepo.reports.panels import (
    PANEL_HEIGHT,
    add_legend,
    from_zero,
    in_percent,
    label_steps,
    method_lines,
    new_panels,
    style_lines,
    styled,
)
from eepo.reports.records import Run, by_method

SHARES = {
    "missed_share": "first half finds nothing",
    "second_half_recovery": "and the second half does",
}


@styled
def chances_figure(runs: Sequence[Run]) -> Figure | None:
    """Groups missed and rescued over the steps; and, of all those missed in a run, the share rescued."""
    shares = {
        method: found for method, seeds in by_method(runs).items() if (found := _rescued(seeds))
    }
    if not shares:
        return None
    figure, (lines, bars) = new_panels(2, height=max(PANEL_HEIGHT, 0.8 + 0.21 * len(shares)))
    for key, style in zip(SHARES, STAGE_STYLES, strict=False):
        draw_methods(lines, by_method(runs), key, style)
    label_steps(lines, "groups")
    in_percent(lines)
    from_zero(lines)
    _draw_shares(bars, shares)
    add_legend(figure, method_lines(by_method(runs)) + style_lines([*SHARES.values()]))
    return figure


def _rescued(seeds: Sequence[Run]) -> list[float]:
    """Of each seed that missed anything."""
    sums = [[sum(run.series(key).values()) for key in SHARES] for run in seeds]
    return [rescued / missed for missed, rescued in sums if missed]


def _draw_shares(axes: Axes, shares: dict[str, list[float]]) -> None:
    """A bar for each method, a dot for each seed; the first method on top."""
    for place, (method, seeds) in enumerate(shares.items()):
        colour, _ = looks(shares)[method]
        axes.barh(place, statistics.mean(seeds), 0.62, color=colour, alpha=0.6)
        axes.plot(seeds, [place] * len(seeds), ".", color="#222222")
    axes.set_yticks(range(len(shares)), [name_text(method) for method in shares])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    in_percent(axes, "x")
    axes.set_title("of the groups missed, rescued")
