"""What all figures share: their style, their panels, their axes' labels and their legends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from eepo.reports.labels import FONT, name_text
from eepo.reports.palette import STAGE_STYLES, looks
from eepo.reports.records import Row, Run

WIDTH, PANEL_HEIGHT = (
    5.5,
    1.75,
)  # inches: a page's text width, so that text is as large in print as it says here
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


def styled(
    draw: Callable[[Sequence[Run]], Figure | None],
) -> Callable[[Sequence[Run]], Figure | None]:
    """matplotlib's settings are changed only while `draw` is at work. The layout is settled once, not at every save."""

    @functools.wraps(draw)
    def in_style(runs: Sequence[Run]) -> Figure | None:
        with matplotlib.rc_context(STYLE):
            figure = draw(runs)
            if figure is not None and (layout := figure.get_layout_engine()):
                layout.execute(figure)
                figure.set_layout_engine("none")
            return figure

    return in_style


def new_panels(
    number: int,
    columns: int = 3,
    height: float = PANEL_HEIGHT,
    width: float = WIDTH,
    left: float = 0.0,
) -> tuple[Figure, list[Axes]]:
    """Axes in rows of at most `columns`, one row of legend below. Sizes in inches; `left` stays free before them."""
    columns = min(columns, number)
    rows = -(-number // columns)
    layout = ConstrainedLayoutEngine(
        h_pad=0.05, w_pad=0.045, rect=(left / width, 0, 1 - left / width, 1)
    )
    figure = Figure(figsize=(width, rows * height + 0.35), layout=layout)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in panels[number:]:
        unused.set_visible(False)
    return figure, panels[:number]


def label_steps(axes: Axes, title: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(
        MaxNLocator(nbins=6, integer=True, min_n_ticks=1)
    )  # of one step, one tick


def label_k(axes: Axes, evaluations: Iterable[Row]) -> None:
    ks = sorted({int(k) for row in evaluations for k in row["pass@k"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.minorticks_off()
    axes.set_xlabel("k (log scale)")
    in_percent(axes)


def from_zero(axes: Axes) -> None:
    """The axis begins at 0 and ends a little above the highest line, however flat that is."""
    highest = axes.dataLim.y1
    axes.set_ylim(0, 1.1 * highest if highest > 0 else 1.0)


def in_percent(axes: Axes, side: str = "y") -> None:
    getattr(axes, f"{side}axis").set_major_formatter(
        FuncFormatter(lambda share, _: f"{100 * share:.4g} %")
    )


def method_lines(methods: Iterable[str], markers: bool = False) -> list[Line2D]:
    methods = list(methods)
    return [
        Line2D([], [], color=colour, marker=marker if markers else None, label=name_text(method))
        for method in methods
        for colour, marker in [looks(methods)[method]]
    ]


def stage_lines(runs: Sequence[Run]) -> list[Line2D]:
    """Nothing where all runs have one stage: then there is nothing to tell apart."""
    stages = range(1, len(STAGE_STYLES) + 1)
    found = [
        f"stage {stage}"
        for stage in stages
        if any(run.series(f"stage{stage}/entropy") for run in runs)
    ]
    return style_lines(found) if len(found) > 1 else []


def style_lines(labels: Sequence[str]) -> list[Line2D]:
    return [
        Line2D([], [], color="#444444", linewidth=1, linestyle=style, label=label)
        for label, style in zip(labels, STAGE_STYLES, strict=False)
    ]


def add_legend(figure: Figure, lines: list[Line2D]) -> None:
    """Below the panels, in as many columns as its longest label leaves room for."""
    longest = max(len(str(line.get_label())) for line in lines)
    columns = int(
        figure.get_figwidth() / (0.42 + 0.056 * longest)
    )  # inches: a line's handle, and a character
    columns = max(1, min(len(lines), columns))
    further = -(-len(lines) // columns) - 1  # rows beyond the one that there is room for
    figure.set_figheight(figure.get_figheight() + 0.15 * further)
    figure.legend(handles=lines, loc="outside lower center", ncol=columns)
