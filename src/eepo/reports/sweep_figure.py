"""Draws the hyperparameter figure: a measure against a knob, one panel for each sweep.

Other methods are dashed horizontal lines. In the paper, each baseline is shown against its knob,
and EEPO with fixed knobs is such a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from eepo.evaluation.results import set_title
from eepo.reports.figure_list import image_bytes
from eepo.reports.labels import name_label
from eepo.reports.palette import method_styles
from eepo.reports.panels import add_legend, new_panels, styled, use_percent
from eepo.reports.records import Run, by_method
from eepo.reports.sweep_tables import (
    Criterion,
    PointResult,
    SweepResult,
    knob_assignments,
    knob_name,
    knob_sort_key,
    knob_text,
)
from eepo.runs.writing import writing
from eepo.types import UserError

Styles = dict[str, tuple[str, str]]  # label → (colour, marker)


def sweep_figure(
    sweeps: Sequence[SweepResult], line_runs: Sequence[Run], criterion: Criterion
) -> Figure | None:
    """Draw the sweeps that have finished runs.

    Error bars and bands are 95 % intervals over seeds; one seed has none. The values of a knob are
    evenly spaced, in ascending order.
    """
    shown = [sweep for sweep in sweeps if sweep.runs]

    @styled
    def draw(line_runs: Sequence[Run]) -> Figure | None:
        if not shown:
            return None
        figure, panels = new_panels(len(shown), columns=2 if len(shown) in (2, 4) else 3)
        solid = [label for sweep in shown for label in points_by_line(sweep, main_knob(sweep))]
        dashed = list(by_method(line_runs))
        styles = method_styles([*solid, *dashed])
        for axes, sweep in zip(panels, shown, strict=True):
            _draw_sweep(axes, sweep, criterion, styles)
            _draw_line_runs(axes, line_runs, criterion, styles)
            if criterion.measure != "distinct":
                use_percent(axes)
        single_set = len(criterion.sets) == 1
        sets = set_title(criterion.sets[0]) if single_set else "average of sets"
        panels[0].set_ylabel(name_label(f"{criterion.measure}, {sets}"))
        add_legend(figure, _legend_handles(solid, dashed, styles))
        return figure

    return draw(line_runs)


def write_sweep_figure(
    sweeps: Sequence[SweepResult], line_runs: Sequence[Run], criterion: Criterion, out: Path
) -> list[Path]:
    """Write the figure as PNG and as SVG, or nothing if no run is finished."""
    figure = sweep_figure(sweeps, line_runs, criterion)
    if figure is None:
        return []
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; give a file name such as {out / 'hyper.png'}")
    files = [out.with_suffix(".png"), out.with_suffix(".svg")]
    out.parent.mkdir(parents=True, exist_ok=True)
    for file in files:
        with writing(file):
            file.write_bytes(image_bytes(figure, file.suffix.removeprefix(".")))
    return files


def main_knob(sweep: SweepResult) -> str:
    """Return the knob with the most values: it is the x-axis."""
    points = [point for point in sweep.points if point.runs]
    return max(
        points[0].knobs, key=lambda knob: len({knob_text(point.knobs[knob]) for point in points})
    )


def points_by_line(sweep: SweepResult, knob: str) -> dict[str, list[PointResult]]:
    """Group the points with finished runs by the values of the other knobs: label → points."""
    lines: dict[str, list[PointResult]] = {}
    for point in sweep.points:
        if point.runs:
            others = {key: value for key, value in point.knobs.items() if key != knob}
            label = ", ".join([sweep.name, *knob_assignments(others)])
            lines.setdefault(label, []).append(point)
    return lines


def _draw_sweep(axes: Axes, sweep: SweepResult, criterion: Criterion, styles: Styles) -> None:
    knob = main_knob(sweep)
    values = {knob_text(point.knobs[knob]): point.knobs[knob] for point in sweep.points}
    ticks = sorted(values, key=lambda text: knob_sort_key(values[text]))
    for label, points in points_by_line(sweep, knob).items():
        xs, ys, widths = [], [], []
        for point in points:
            if score := criterion.estimate(point.runs):
                xs.append(ticks.index(knob_text(point.knobs[knob])))
                ys.append(score.mean)
                widths.append(score.high - score.mean if score.high is not None else 0.0)
        error_bars: Any = widths if any(widths) else None
        colour, marker = styles[label]
        axes.errorbar(
            xs,
            ys,
            error_bars,
            color=colour,
            marker=marker,
            markersize=3.5,
            linewidth=1.2,
            capsize=2,
        )
    axes.set_xticks(range(len(ticks)), list(map(name_label, ticks)))
    axes.set_xlim(-0.4, len(ticks) - 0.6)
    axes.set_xlabel(name_label(knob_name(knob)))
    axes.set_title(name_label(sweep.name))


def _draw_line_runs(
    axes: Axes, line_runs: Sequence[Run], criterion: Criterion, styles: Styles
) -> None:
    for method, seeds in by_method(line_runs).items():
        score = criterion.estimate(seeds)
        if score is None:
            continue
        colour, _ = styles[method]
        axes.axhline(score.mean, color=colour, linestyle="dashed", linewidth=1.2)
        if score.low is not None and score.high is not None:
            axes.axhspan(score.low, score.high, color=colour, alpha=0.12, linewidth=0)


def _legend_handles(solid: Sequence[str], dashed: Sequence[str], styles: Styles) -> list[Line2D]:
    handles = []
    for label in dict.fromkeys(solid):
        colour, marker = styles[label]
        text = name_label(label)
        handles.append(Line2D([], [], color=colour, marker=marker, markersize=3.5, label=text))
    for label in dashed:
        colour, _ = styles[label]
        handles.append(Line2D([], [], color=colour, linestyle="dashed", label=name_label(label)))
    return handles
