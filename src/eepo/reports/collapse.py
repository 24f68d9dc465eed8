"""Entropy collapse: accuracy on unseen problems and the entropy of what is sampled, over steps and against each other.

In panels of their own, not on two axes of one panel: where such lines cross says nothing, but the eye believes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eepo.reports.curves import (
    MOST_BANDED,
    draw,
    draw_methods,
    evaluation_curve,
    metric_curve,
    smooth,
)
from eepo.reports.labels import name_text
from eepo.reports.palette import STAGE_STYLES, looks
from eepo.reports.panels import (
    add_legend,
    from_zero,
    in_percent,
    label_steps,
    method_lines,
    new_panels,
    style_lines,
    styled,
)
from eepo.reports.records import Run, by_method, evaluation_sets
from eepo.reports.shared_start import share_starts
from eepo.reports.tables import plain

ENTROPY = "policy entropy (nats per token)"  # of stage 1, which the policy sampled: later stages are another model's


@styled
def collapse_figure(runs: Sequence[Run]) -> Figure | None:
    """Accuracy on every evaluation set over the steps, entropy beside it, then one against the other."""
    runs = share_starts(runs)
    sets = [name for name in evaluation_sets(runs) if _evaluated_twice(runs, name)]
    if not sets:
        return None
    methods = by_method(runs)
    figure, panels = new_panels(2 * len(sets) + 1)
    for axes, name in zip(panels, sets, strict=False):
        _draw_accuracy(axes, methods, name)
        label_steps(axes, f"accuracy, {name_text(plain(name))}")
    draw_methods(panels[len(sets)], methods, "stage1/entropy")
    label_steps(panels[len(sets)], ENTROPY)
    from_zero(panels[len(sets)])
    for axes, name in zip(panels[len(sets) + 1 :], sets, strict=True):
        _draw_paths(axes, methods, name)
        axes.set_title(f"mean accuracy, {name_text(plain(name))}")
        axes.set_xlabel(ENTROPY)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
    add_legend(figure, method_lines(methods, markers=True) + style_lines(["greedy", "mean"]))
    return figure


def _draw_accuracy(axes: Axes, methods: Mapping[str, Sequence[Run]], name: str) -> None:
    for method, (colour, marker) in looks(methods).items():
        for measure, style in zip(("greedy", "mean"), STAGE_STYLES, strict=False):
            if curve := evaluation_curve(methods[method], name, measure):
                draw(axes, curve, colour, style, marker, alone=len(methods) <= MOST_BANDED)
    in_percent(axes)


def _draw_paths(axes: Axes, methods: Mapping[str, Sequence[Run]], name: str) -> None:
    """Dashed as the mean is in the panels above; the end of training has the large marker."""
    for method, (colour, marker) in looks(methods).items():
        path = accuracy_by_entropy(methods[method], name)
        if path:
            entropies, accuracies = zip(*path, strict=True)
            axes.plot(
                entropies,
                accuracies,
                color=colour,
                linestyle=STAGE_STYLES[1],
                lw=0.8,
                marker=marker,
                markersize=2.2,
            )
            axes.plot(entropies[-1], accuracies[-1], color=colour, marker=marker, markersize=5)
    in_percent(axes)


def accuracy_by_entropy(seeds: Sequence[Run], name: str) -> list[tuple[float, float]]:
    """(entropy, mean accuracy) at each evaluation. What step s made, step s + 1 sampled from; the last one nobody did,
    so there the last step's entropy stands in."""
    accuracy, entropy = evaluation_curve(seeds, name, "mean"), metric_curve(seeds, "stage1/entropy")
    if accuracy is None or entropy is None:
        return []
    by_step = dict(zip(entropy.steps.tolist(), smooth(entropy.mean).tolist(), strict=True))
    places = [min(step + 1, max(by_step)) for step in accuracy.steps.tolist()]
    return [
        (by_step[place], mean)
        for place, mean in zip(places, accuracy.mean.tolist(), strict=True)
        if place in by_step
    ]


def _evaluated_twice(runs: Sequence[Run], name: str) -> bool:
    """One point is no course of training."""
    return any(
        len({row["step"] for row in run.evaluations if row["set"] == name}) > 1 for run in runs
    )
