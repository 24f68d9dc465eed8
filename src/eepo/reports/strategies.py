"""Draws reward and the share of a strategy over the steps, for graders that label completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from eepo.reports.curves import draw_methods
from eepo.reports.labels import name_label
from eepo.reports.palette import LINE_STYLES
from eepo.reports.panels import (
    add_legend,
    label_steps,
    method_handles,
    new_panels,
    stage_handles,
    start_at_zero,
    styled,
    use_percent,
)
from eepo.reports.records import Run, by_method

MAX_LABELS = 2  # panels besides that of reward
MIN_GROWTH = 0.1  # of a label's share, below which it gets no panel


@styled
def strategies_figure(runs: Sequence[Run]) -> Figure | None:
    """Draw reward, and the share of each label that was rare at the start, in every stage."""
    labels = new_labels(runs)
    if not labels:
        return None
    methods = by_method(with_all_labels(runs))
    figure, panels = new_panels(1 + len(labels))
    draw_methods(panels[0], methods, "stage1/reward")
    label_steps(panels[0], "reward of the policy (stage 1)")
    # Two panels with labels leave less room for their titles.
    share = "share of completions:" if len(labels) == 1 else "share labelled"
    for axes, label in zip(panels[1:], labels, strict=True):
        for stage, dashes in enumerate(LINE_STYLES[:2], 1):
            draw_methods(axes, methods, f"stage{stage}/label/{label}", dashes)
        label_steps(axes, f"{share} {name_label(label)}")
    for axes in panels:
        use_percent(axes)
        start_at_zero(axes)
    add_legend(figure, method_handles(methods) + stage_handles(runs))
    return figure


def new_labels(runs: Sequence[Run]) -> list[str]:
    """Return the labels that grew most, without the most common one of the first step."""
    growth: dict[str, float] = {}
    for run in with_all_labels(runs):
        first = _shares(run, "first")
        most_common = max(first, key=lambda label: first[label], default=None)
        for label, share in _shares(run, "largest").items():
            if label not in ("other", most_common):
                growth[label] = max(growth.get(label, 0.0), share - first[label])
    grown = [label for label, change in growth.items() if change >= MIN_GROWTH]
    return sorted(grown, key=lambda label: -growth[label])[:MAX_LABELS]


def with_all_labels(runs: Sequence[Run]) -> list[Run]:
    """Set the share of a label to 0 in the steps of labelled stages that did not have it."""
    names = {key.partition("/label/")[2] for run in runs for row in run.metrics for key in row}
    filled = []
    for run in runs:
        rows = []
        for row in run.metrics:
            stages = sorted({key.partition("/label/")[0] for key in row if "/label/" in key})
            zeros = {f"{stage}/label/{name}": 0.0 for stage in stages for name in names - {""}}
            rows.append(zeros | row)
        filled.append(replace(run, metrics=rows))
    return filled


def _shares(run: Run, which: str) -> dict[str, float]:
    """Return the first or the largest share of every label in any stage."""
    shares: dict[str, float] = {}
    for key in run.metrics[0] if run.metrics else ():
        _, _, label = key.partition("/label/")
        if label:
            values = list(run.series(key).values())
            share = values[0] if which == "first" else max(values)
            shares[label] = max(shares.get(label, 0.0), share)
    return shares
