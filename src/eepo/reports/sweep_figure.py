"""The hyperparameter figure: a measure against a knob, one panel for each sweep, other methods as dashed lines.

As in the paper, where every baseline is shown against its own knob and EEPO, with its knobs fixed, is a line across.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from eepo.reports.figure_list import image_bytes
from eepo.reports.palette import looks
from eepo.reports.panels import add_legend, in_percent, name_text, new_panels, styled
from eepo.reports.records import Run, by_method
from eepo.reports.sweep_tables import Scale, SweepResult, SweptPoint, knob_text, place, short
from eepo.reports.tables import plain
from eepo.types import UserError

Curve = dict[str, list[SweptPoint]]  # label → the points of one line


def hyper_figure(
    sweeps: Sequence[SweepResult], lines: Sequence[Run], scale: Scale
) -> Figure | None:
    """Bars and bands are 95 % intervals over seeds; with one seed there are none. Values stand evenly, by size."""
    shown = [sweep for sweep in sweeps if sweep.runs]

    @styled
    def draw(runs: Sequence[Run]) -> Figure | None:
        if not shown:
            return None
        figure, panels = new_panels(len(shown), columns=2 if len(shown) in (2, 4) else 3)
        swept, across = (
            [label for sweep in shown for label in curves(sweep, main_knob(sweep))],
            list(by_method(runs)),
        )
        styles = looks([*swept, *across])
        for axes, sweep in zip(panels, shown, strict=True):
            _draw_sweep(axes, sweep, scale, styles)
            _draw_lines(axes, runs, scale, styles)
            if scale.measure != "distinct":
                in_percent(axes)
        where = plain(scale.sets[0]) if len(scale.sets) == 1 else "average of sets"
        panels[0].set_ylabel(name_text(f"{scale.measure}, {where}"))
        add_legend(figure, _legend(swept, across, styles))
        return figure

    return draw(lines)


def write_hyper(
    sweeps: Sequence[SweepResult], lines: Sequence[Run], scale: Scale, out: Path
) -> list[Path]:
    """As PNG and as SVG, under one name; nothing where no run is finished."""
    figure = hyper_figure(sweeps, lines, scale)
    if figure is None:
        return []
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; give a file name such as {out / 'hyper.png'}")
    files = [out.with_suffix(".png"), out.with_suffix(".svg")]
    out.parent.mkdir(parents=True, exist_ok=True)
    for file in files:
        file.write_bytes(image_bytes(figure, file.suffix.removeprefix(".")))
    return files


def main_knob(sweep: SweepResult) -> str:
    """The one with the most values is the axis; the others tell lines apart."""
    points = [point for point in sweep.points if point.runs]
    return max(
        points[0].knobs, key=lambda knob: len({knob_text(point.knobs[knob]) for point in points})
    )


def curves(sweep: SweepResult, knob: str) -> Curve:
    """One for each choice of the other knobs; points that all failed are on none."""
    found: Curve = {}
    for point in (point for point in sweep.points if point.runs):
        others = [
            f"{short(key)}={knob_text(value)}" for key, value in point.knobs.items() if key != knob
        ]
        found.setdefault(", ".join([sweep.name, *others]), []).append(point)
    return found


def _draw_sweep(
    axes: Axes, sweep: SweepResult, scale: Scale, styles: dict[str, tuple[str, str]]
) -> None:
    knob = main_knob(sweep)
    values = sorted(
        {knob_text(point.knobs[knob]): point.knobs[knob] for point in sweep.points}.items(),
        key=_by_size,
    )
    places = {text: number for number, (text, _) in enumerate(values)}
    for label, points in curves(sweep, knob).items():
        found = [
            (places[knob_text(point.knobs[knob])], one)
            for point in points
            if (one := scale.estimate(point.runs))
        ]
        widths = [(one.high - one.mean if one.high is not None else 0.0) for _, one in found]
        colour, marker = styles[label]
        xs, ys = [x for x, _ in found], [one.mean for _, one in found]
        bars: Any = widths if any(widths) else None
        axes.errorbar(
            xs, ys, bars, color=colour, marker=marker, markersize=3.5, linewidth=1.2, capsize=2
        )
    axes.set_xticks(range(len(values)), [name_text(text) for text, _ in values])
    axes.set_xlim(-0.4, len(values) - 0.6)
    axes.set_xlabel(name_text(short(knob)))
    axes.set_title(name_text(sweep.name))


def _by_size(item: tuple[str, Any]) -> tuple[bool, float, str]:
    return place(item[1])


def _draw_lines(
    axes: Axes, runs: Sequence[Run], scale: Scale, styles: dict[str, tuple[str, str]]
) -> None:
    for method, seeds in by_method(runs).items():
        found = scale.estimate(seeds)
        if found is not None:
            axes.axhline(found.mean, color=styles[method][0], linestyle="dashed", linewidth=1.2)
            if found.low is not None and found.high is not None:
                axes.axhspan(
                    found.low, found.high, color=styles[method][0], alpha=0.12, linewidth=0
                )


def _legend(
    swept: Sequence[str], across: Sequence[str], styles: dict[str, tuple[str, str]]
) -> list[Line2D]:
    solid = [
        Line2D(
            [],
            [],
            color=styles[label][0],
            marker=styles[label][1],
            markersize=3.5,
            label=name_text(label),
        )
        for label in dict.fromkeys(swept)
    ]
    dashed = [
        Line2D([], [], color=styles[label][0], linestyle="dashed", label=name_text(label))
        for label in across
    ]
    return solid + dashed
