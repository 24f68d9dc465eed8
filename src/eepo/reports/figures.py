"""The figures: each a function from runs to a matplotlib Figure, or None when the runs have nothing for it.

Figures are made without pyplot, so drawing leaves nothing behind in the process that asked for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eepo.reports.curves import MOST_BANDED, draw_methods
from eepo.reports.labels import name_text
from eepo.reports.measures import START, estimate, full_evaluations, start_evaluations
from eepo.reports.palette import PHASES, STAGE_STYLES, looks
from eepo.reports.panels import (
    PANEL_HEIGHT,
    WIDTH,
    add_legend,
    from_zero,
    in_percent,
    label_k,
    label_steps,
    method_lines,
    new_panels,
    stage_lines,
    styled,
)
from eepo.reports.records import Row, Run, by_method, evaluation_sets
from eepo.reports.tables import plain


@styled
def exploration_figure(runs: Sequence[Run]) -> Figure | None:
    """Entropy, reward and length of each stage over the steps."""
    if not any(run.series("stage1/entropy") for run in runs):
        return None
    figure, panels = new_panels(3)
    names = {"entropy": "entropy (nats per token)", "reward": "reward", "length": "length (tokens)"}
    for axes, (key, title) in zip(panels, names.items(), strict=True):
        _draw_stages(axes, runs, key)
        label_steps(axes, title)
    from_zero(panels[0])
    add_legend(figure, method_lines(by_method(runs)) + stage_lines(runs))
    return figure


@styled
def pass_at_k_figure(runs: Sequence[Run]) -> Figure | None:
    """pass@k against k, for every evaluation set with a full evaluation."""
    sets = [name for name in evaluation_sets(runs) if full_evaluations(runs, name)]
    if not sets:
        return None
    crowded = len(by_method(runs)) > MOST_BANDED
    figure, panels = new_panels(
        len(sets), width=WIDTH if crowded or len(sets) > 2 else 0.72 * WIDTH
    )
    shown: dict[str, None] = {}
    for axes, name in zip(panels, sets, strict=True):
        groups = {
            method: full_evaluations(seeds, name) for method, seeds in by_method(runs).items()
        }
        starts = start_evaluations(runs, name)
        groups[START] = starts if len(starts) == 1 else []  # several starts are not one line
        for method, evaluations in groups.items():
            if evaluations:
                shown[method] = None
                _draw_pass_at_k(axes, evaluations, *looks([*groups])[method], banded=not crowded)
        label_k(axes, evaluations=[row for rows in groups.values() for row in rows])
        axes.set_title(name_text(f"pass@k, {plain(name)}"))
    add_legend(figure, method_lines(shown, markers=True))
    return figure


@styled
def cost_figure(runs: Sequence[Run]) -> Figure | None:
    """Seconds of a step by phase, and length over the steps."""
    timed = {
        method: seeds
        for method, seeds in by_method(runs).items()
        if all(run.series("seconds/total") for run in seeds)
    }
    if not timed:
        return None
    figure, (bars, lengths) = new_panels(2, height=max(PANEL_HEIGHT, 0.8 + 0.21 * len(timed)))
    _draw_phases(bars, timed)
    draw_methods(lengths, by_method(runs), "length")
    label_steps(lengths, "mean length (tokens)")
    lengths.legend(
        handles=method_lines(by_method(runs)), loc="center left", bbox_to_anchor=(1.0, 0.5)
    )
    return figure


@styled
def unlearning_figure(runs: Sequence[Run]) -> Figure | None:
    """What the unlearning step did: how much was gated, how far it moved, and what clipping took back."""
    staged = {
        method: seeds
        for method, seeds in by_method(runs).items()
        if any(run.series("stage2/entropy") for run in seeds)
    }
    if not staged:
        return None
    figure, panels = new_panels(4, columns=2)
    names = {
        "gate_share": "share of stage-1 tokens unlearned",
        "unlearn/kl": "KL of policy to rollout model (nats per token)",
        "unlearn/weights_changed_share": "share of rollout weights changed",
    }
    for axes, (key, title) in zip(panels, names.items(), strict=False):
        draw_methods(axes, staged, key)
        label_steps(axes, title)
    _draw_stages(panels[3], runs, "clip_share")
    label_steps(panels[3], "share of tokens clipped in the update")
    for axes in (panels[0], panels[2], panels[3]):
        in_percent(axes)
    for axes in (panels[0], panels[1], panels[3]):
        from_zero(axes)
    add_legend(figure, method_lines(by_method(runs)) + stage_lines(runs))
    return figure


def _draw_stages(axes: Axes, runs: Sequence[Run], key: str) -> None:
    for stage, style in enumerate(STAGE_STYLES, start=1):
        draw_methods(axes, by_method(runs), f"stage{stage}/{key}", style)


def _draw_pass_at_k(
    axes: Axes, evaluations: Sequence[Row], colour: str, marker: str, banded: bool
) -> None:
    """Band: lowest to highest seed; with one seed, the interval over its problems."""
    ks = sorted(set.intersection(*({int(k) for k in row["pass@k"]} for row in evaluations)))
    values = [[row["pass@k"][str(k)] for row in evaluations] for k in ks]
    axes.plot(ks, [sum(column) / len(column) for column in values], color=colour, marker=marker)
    if not banded:
        return
    if len(evaluations) > 1:
        axes.fill_between(
            ks,
            list(map(min, values)),
            list(map(max, values)),
            color=colour,
            alpha=0.15,
            linewidth=0,
        )
        return
    found = [estimate(evaluations, f"pass@{k}") for k in ks]
    low = [one.low for one in found if one and one.low is not None]
    high = [one.high for one in found if one and one.high is not None]
    if len(low) == len(high) == len(ks):
        axes.fill_between(ks, low, high, color=colour, alpha=0.15, linewidth=0)


def _draw_phases(axes: Axes, methods: dict[str, list[Run]]) -> None:
    """Stacked, the first method on top. What no phase accounts for is "other"."""
    left = [0.0] * len(methods)
    spent = [_phase_seconds(seeds) for seeds in methods.values()]
    for phase, colour in PHASES.items():
        widths = [seconds.get(phase, 0.0) for seconds in spent]
        if any(widths):
            places, label = range(len(methods)), phase.replace("stage", "stage ")
            axes.barh(
                places,
                widths,
                0.62,
                left,
                color=colour,
                label=label,
                edgecolor="#555555",
                linewidth=0.3,
            )
            left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(methods)), [name_text(method) for method in methods])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_title("seconds per step, by phase")
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.45, -0.1), ncol=4, handlelength=1.2, columnspacing=1.2
    )


def _phase_seconds(seeds: Sequence[Run]) -> dict[str, float]:
    """Of a step, over all steps of all seeds."""
    num_steps = sum(len(run.series("seconds/total")) for run in seeds)
    spent = {
        phase: sum(sum(run.series(f"seconds/{phase}").values()) for run in seeds)
        for phase in PHASES
    }
    total = sum(run.seconds() or 0.0 for run in seeds)
    spent["other"] = max(0.0, total - sum(spent.values()))
    return {phase: seconds / num_steps for phase, seconds in spent.items()}
