"""Draws how often the second half of a group recovers what the first half missed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eepo.reports.curves import draw_methods
from eepo.reports.labels import name_label
from eepo.reports.palette import LINE_STYLES, method_styles
from eepo.reports.panels import (
    add_legend,
    bar_panel_height,
    dash_handles,
    label_bars,
    label_steps,
    method_handles,
    new_panels,
    start_at_zero,
    styled,
    use_percent,
)
from eepo.reports.records import Run, by_method

# Both are shares of all groups.
SHARES = {
    "missed_share": "no reward in the first half",
    "second_half_recovery": "recovered in the second half",
}


@styled
def second_half_figure(runs: Sequence[Run]) -> Figure | None:
    """Draw both shares over the steps, and the recovered share of the missed groups as bars."""
    methods = by_method(runs)
    recovered = {
        method: shares for method, seeds in methods.items() if (shares := recovered_shares(seeds))
    }
    if not recovered:
        return None
    figure, (lines, bars) = new_panels(2, height=bar_panel_height(len(recovered)))
    for key, dashes in zip(SHARES, LINE_STYLES, strict=False):
        draw_methods(lines, methods, key, dashes)
    label_steps(lines, "share of groups")
    use_percent(lines)
    start_at_zero(lines)
    _draw_bars(bars, recovered)
    add_legend(figure, method_handles(methods) + dash_handles([*SHARES.values()]))
    return figure


def recovered_shares(seeds: Sequence[Run]) -> list[float]:
    """Return, for each seed, the recovered share of all groups missed in the run.

    Seeds without any missed group are omitted.
    """
    sums = [[sum(run.series(key).values()) for key in SHARES] for run in seeds]
    return [recovered / missed for missed, recovered in sums if missed]


def _draw_bars(axes: Axes, recovered: dict[str, list[float]]) -> None:
    """Draw a bar for each method and a dot for each seed."""
    styles = method_styles(recovered)
    for index, (method, shares) in enumerate(recovered.items()):
        colour, _ = styles[method]
        axes.barh(index, statistics.mean(shares), 0.62, color=colour, alpha=0.6)
        axes.plot(shares, [index] * len(shares), ".", color="#222222")
    label_bars(axes, list(map(name_label, recovered)))
    use_percent(axes, "x")
    axes.set_title("recovered / missed groups")
