"""Draws the figures on exploration, pass@k, cost and unlearning.

Each function takes runs and returns a matplotlib Figure, or None if the runs have no data for it.
Figures are created without pyplot, so no global state is left behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eepo.evaluation.results import set_title
from eepo.reports.curves import MAX_BANDED_METHODS, draw_methods
from eepo.reports.labels import name_label
from eepo.reports.measures import (
    START,
    estimate,
    full_evaluations,
    measure_value,
    pass_at_k_curve,
    start_evaluations,
)
from eepo.reports.palette import LINE_STYLES, PHASE_COLOURS, method_styles
from eepo.reports.panels import (
    WIDTH,
    add_legend,
    bar_panel_height,
    label_bars,
    label_k,
    label_steps,
    method_handles,
    new_panels,
    stage_handles,
    start_at_zero,
    styled,
    use_percent,
)
from eepo.reports.records import Row, Run, by_method, evaluation_sets

LOST = "stage2/lost_share"


@styled
def exploration_figure(runs: Sequence[Run]) -> Figure | None:
    """Draw entropy, reward and length of each stage over the steps."""
    runs = [run for run in runs if run.series("stage1/entropy")]  # not models without training
    if not runs:
        return None
    figure, panels = new_panels(3)
    titles = {
        "entropy": "entropy (nats per token)",
        "reward": "reward",
        "length": "length (tokens)",
    }
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        _draw_stages(axes, runs, key)
        label_steps(axes, title)
    if _spans_orders(panels[0]):
        panels[0].set_yscale("log")
        panels[0].yaxis.set_major_formatter("{x:g}")
        panels[0].set_title("entropy (nats per token, log scale)")
    else:
        start_at_zero(panels[0])
    add_legend(figure, method_handles(by_method(runs)) + stage_handles(runs))
    return figure


def _spans_orders(axes: Axes) -> bool:
    """Return whether most lines would be flat at the bottom, far below the highest one."""
    highest = sorted(float(np.max(line.get_ydata())) for line in axes.lines)
    lowest = min((float(np.min(line.get_ydata())) for line in axes.lines), default=0.0)
    return lowest > 0 and highest[-1] > 10 * highest[len(highest) // 2]


@styled
def pass_at_k_figure(runs: Sequence[Run]) -> Figure | None:
    """Draw pass@k against k, for every evaluation set with a full evaluation."""
    sets = [
        name
        for name in evaluation_sets(runs)
        if any(row["pass@k"] for row in full_evaluations(runs, name))
    ]
    if not sets:
        return None
    methods = by_method(runs)
    crowded = len(methods) > MAX_BANDED_METHODS
    width = WIDTH if crowded or len(sets) > 2 else 0.72 * WIDTH
    figure, panels = new_panels(len(sets), width=width)
    styles = method_styles([*methods, START])
    drawn: dict[str, None] = {}
    for axes, eval_set in zip(panels, sets, strict=True):
        evaluations = {
            name: [row for row in full_evaluations(seeds, eval_set) if row["pass@k"]]
            for name, seeds in methods.items()
        }
        starts = [row for row in start_evaluations(runs, eval_set) if row["pass@k"]]
        if len(starts) == 1:  # different starting policies cannot be one line
            evaluations[START] = starts
        for method, rows in evaluations.items():
            if rows:
                drawn[method] = None
                _draw_pass_at_k(axes, rows, styles[method], banded=not crowded)
        label_k(axes, [row for rows in evaluations.values() for row in rows])
        if axes.dataLim.y1 <= 0:  # no success: matplotlib would show negative shares
            start_at_zero(axes)
        axes.set_title(name_label(f"pass@k, {set_title(eval_set)}"))
    add_legend(figure, method_handles(drawn, markers=True))
    return figure


@styled
def cost_figure(runs: Sequence[Run]) -> Figure | None:
    """Draw the seconds of a step by phase, and length over the steps."""
    methods = by_method(runs)
    timed = {
        method: seeds
        for method, seeds in methods.items()
        if all(run.series("seconds/total") for run in seeds)
    }
    if not timed:
        return None
    figure, (bars, lengths) = new_panels(2, height=bar_panel_height(len(timed)))
    _draw_phases(bars, timed)
    draw_methods(lengths, methods, "length")
    label_steps(lengths, "mean length (tokens)")
    lengths.legend(handles=method_handles(methods), loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


@styled
def unlearning_figure(runs: Sequence[Run]) -> Figure | None:
    """Draw how far unlearning went, and how much of what stage 2 found reached the update."""
    methods = by_method(runs)
    staged = {
        method: seeds
        for method, seeds in methods.items()
        if any(run.series("stage2/entropy") for run in seeds)
    }
    if not staged:
        return None
    titles = {
        "gate_share": "share of stage-1 tokens unlearned",
        "unlearn/kl": "KL(θ‖θ′) (nats per token)",
        "unlearn/weights_changed_share": "share of rollout weights changed",
        "clip_share": "share of tokens clipped in the update",
    }
    if any(run.series(LOST) for run in runs):  # other trainers do not log it
        titles[LOST] = "share of stage-2 successes lost"
    figure, panels = new_panels(len(titles), columns=2)
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        if key == "clip_share":
            _draw_stages(axes, runs, key)
            draw_methods(axes, methods, key)  # of runs that do not log it for each stage
        else:
            draw_methods(axes, staged, key)
        label_steps(axes, title)
        if key != "unlearn/kl":
            use_percent(axes)
        if key != "unlearn/weights_changed_share":
            start_at_zero(axes)
    add_legend(figure, method_handles(methods) + stage_handles(runs))
    return figure


def _draw_stages(axes: Axes, runs: Sequence[Run], key: str) -> None:
    for stage, dashes in enumerate(LINE_STYLES, start=1):
        draw_methods(axes, by_method(runs), f"stage{stage}/{key}", dashes)


def _draw_pass_at_k(
    axes: Axes, evaluations: Sequence[Row], style: tuple[str, str], banded: bool
) -> None:
    colour, marker = style
    ks = pass_at_k_curve(evaluations)
    means = [sum(column) / len(column) for column in _pass_at_k_values(evaluations, ks)]
    axes.plot(ks, means, color=colour, marker=marker)
    band = _pass_at_k_band(evaluations, ks) if banded else None
    if band:
        axes.fill_between(ks, *band, color=colour, alpha=0.15, linewidth=0)


def _pass_at_k_band(
    evaluations: Sequence[Row], ks: Sequence[int]
) -> tuple[list[float], list[float]] | None:
    """Return the lowest and the highest seed; with one seed, the interval over its problems."""
    if len(evaluations) > 1:
        values = _pass_at_k_values(evaluations, ks)
        return list(map(min, values)), list(map(max, values))
    estimates = [estimate(evaluations, f"pass@{k}") for k in ks]
    low = [item.low for item in estimates if item and item.low is not None]
    high = [item.high for item in estimates if item and item.high is not None]
    return (low, high) if len(low) == len(high) == len(ks) else None


def _pass_at_k_values(evaluations: Sequence[Row], ks: Sequence[int]) -> list[list[float]]:
    """Return, for each k, the value of each evaluation."""
    values = [[measure_value(row, f"pass@{k}") for row in evaluations] for k in ks]
    return [[value for value in column if value is not None] for column in values]


def _draw_phases(axes: Axes, methods: Mapping[str, Sequence[Run]]) -> None:
    """Draw stacked bars. Time that no phase accounts for is "other"."""
    ends = [0.0] * len(methods)
    seconds_by_method = [_phase_seconds(seeds) for seeds in methods.values()]
    for phase, colour in PHASE_COLOURS.items():
        widths = [seconds.get(phase, 0.0) for seconds in seconds_by_method]
        if any(widths):
            axes.barh(
                range(len(methods)),
                widths,
                0.62,
                ends,
                color=colour,
                label=phase.replace("stage", "stage "),
                edgecolor="#555555",
                linewidth=0.3,
            )
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
    label_bars(axes, list(map(name_label, methods)))
    axes.set_title("seconds per step, by phase")
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.45, -0.1), ncol=4, handlelength=1.2, columnspacing=1.2
    )


def _phase_seconds(seeds: Sequence[Run]) -> dict[str, float]:
    """Average the seconds of each phase over all steps of all seeds."""
    num_steps = sum(len(run.series("seconds/total")) for run in seeds)
    sums = {
        phase: sum(sum(run.series(f"seconds/{phase}").values()) for run in seeds)
        for phase in PHASE_COLOURS
    }
    total = sum(sum(run.series("seconds/total").values()) for run in seeds)
    sums["other"] = max(0.0, total - sum(sums.values()))
    return {phase: seconds / num_steps for phase, seconds in sums.items()}
