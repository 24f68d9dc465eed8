"""Provides what all figures share: style, panels, axis labels and legends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from eepo.reports.labels import FONT, name_label
from eepo.reports.palette import LINE_STYLES, method_styles
from eepo.reports.records import Row, Run

# In inches. The text width of a page, so that font sizes are exact in print.
WIDTH, PANEL_HEIGHT = 5.5, 1.75
TEXT_SIZE, TITLE_SIZE = 6.5, 7  # points
STYLE = {
    "font.family": FONT,
    "font.size": TEXT_SIZE,
    "axes.titlesize": TITLE_SIZE,
    "lines.linewidth": 1.1,
    "lines.markersize": 2.8,
    "axes.linewidth": 0.6,
    "grid.linewidth": 0.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "eepo",  # the same runs give the same bytes
}

DrawFigure = Callable[[Sequence[Run]], Figure | None]


def styled(draw: DrawFigure) -> DrawFigure:
    """Decorate a figure function: apply STYLE while it runs, and compute the layout once."""

    @functools.wraps(draw)
    def draw_styled(runs: Sequence[Run]) -> Figure | None:
        with matplotlib.rc_context(STYLE):
            figure = draw(runs)
            if figure is not None and (layout := figure.get_layout_engine()):
                layout.execute(figure)
                figure.set_layout_engine("none")
            return figure

    return draw_styled


def new_panels(
    num_panels: int,
    columns: int = 3,
    height: float = PANEL_HEIGHT,
    width: float = WIDTH,
    left: float = 0.0,
) -> tuple[Figure, list[Axes]]:
    """Create a figure with panels in rows of at most `columns` and one row for a legend.

    Sizes are in inches. `left` is the margin before the panels.
    """
    columns = min(columns, num_panels)
    rows = -(-num_panels // columns)
    layout = ConstrainedLayoutEngine(
        h_pad=0.05, w_pad=0.045, rect=(left / width, 0, 1 - left / width, 1)
    )
    figure = Figure(figsize=(width, rows * height + 0.35), layout=layout)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in panels[num_panels:]:
        unused.set_visible(False)
    return figure, panels[:num_panels]


def bar_panel_height(num_bars: int) -> float:
    """Return the height in inches of a panel with horizontal bars."""
    return max(PANEL_HEIGHT, 0.8 + 0.21 * num_bars)


def label_steps(axes: Axes, title: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("step")
    # min_n_ticks=1: a single step has a single tick
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))


def label_k(axes: Axes, evaluations: Iterable[Row]) -> None:
    ks = sorted({int(k) for row in evaluations for k in row["pass@k"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.minorticks_off()
    axes.set_xlabel("k (log scale)")
    use_percent(axes)


def label_bars(axes: Axes, labels: Sequence[str]) -> None:
    """Label horizontal bars at 0, 1, ... and put the first one on top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


def start_at_zero(axes: Axes) -> None:
    """Let the y-axis start at 0 and end slightly above the highest line."""
    highest = axes.dataLim.y1
    axes.set_ylim(0, 1.1 * highest if highest > 0 else 1.0)


def use_percent(axes: Axes, side: str = "y") -> None:
    formatter = FuncFormatter(lambda share, _: f"{100 * share:.4g} %")
    getattr(axes, f"{side}axis").set_major_formatter(formatter)


def method_handles(methods: Iterable[str], markers: bool = False) -> list[Line2D]:
    """Return a legend entry for each method."""
    methods = list(methods)
    styles = method_styles(methods)
    return [
        Line2D(
            [],
            [],
            color=styles[method][0],
            marker=styles[method][1] if markers else None,
            label=name_label(method),
        )
        for method in methods
    ]


def stage_handles(runs: Sequence[Run]) -> list[Line2D]:
    """Return a legend entry for each stage, or none if all runs have one stage."""
    labels = [
        f"stage {stage}"
        for stage in range(1, len(LINE_STYLES) + 1)
        if any(run.series(f"stage{stage}/entropy") for run in runs)
    ]
    return dash_handles(labels) if len(labels) > 1 else []


def dash_handles(labels: Sequence[str]) -> list[Line2D]:
    """Return a legend entry for each line style: solid, dashed, ..."""
    return [
        Line2D([], [], color="#444444", linewidth=1, linestyle=dashes, label=label)
        for label, dashes in zip(labels, LINE_STYLES, strict=False)
    ]


def add_legend(figure: Figure, handles: list[Line2D]) -> None:
    """Add a legend below the panels, with as many columns as the longest label allows."""
    longest = max(len(str(handle.get_label())) for handle in handles)
    column_width = 0.42 + 0.056 * longest  # inches: the line, then 0.056 for each character
    columns = max(1, min(len(handles), int(figure.get_figwidth() / column_width)))
    extra_rows = -(-len(handles) // columns) - 1  # the figure has space for one row
    figure.set_figheight(figure.get_figheight() + 0.15 * extra_rows)
    figure.legend(handles=handles, loc="outside lower center", ncol=columns)
