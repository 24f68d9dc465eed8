"""Draws accuracy on unseen problems and entropy, over steps and against each other.

Accuracy and entropy have separate panels. On two axes of one panel, the point where lines cross
has no meaning but looks as if it had one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eepo.evaluation.results import set_title
from eepo.reports.curves import (
    MAX_BANDED_METHODS,
    LineStyle,
    draw_curve,
    draw_methods,
    evaluation_curve,
    metric_curve,
    smooth,
)
from eepo.reports.labels import name_label
from eepo.reports.palette import LINE_STYLES, method_styles
from eepo.reports.panels import (
    add_legend,
    dash_handles,
    label_steps,
    method_handles,
    new_panels,
    start_at_zero,
    styled,
    use_percent,
)
from eepo.reports.records import Run, by_method, evaluation_sets
from eepo.reports.shared_start import share_start_evaluations

# Entropy of stage 1: the policy sampled it. Later stages are sampled from other weights.
ENTROPY_LABEL = "policy entropy (nats per token)"


@styled
def collapse_figure(runs: Sequence[Run]) -> Figure | None:
    """Draw accuracy on every evaluation set, entropy, then accuracy against entropy."""
    runs = share_start_evaluations(runs)
    sets = [name for name in evaluation_sets(runs) if _has_two_evaluations(runs, name)]
    if not sets:
        return None
    methods = by_method(runs)
    figure, panels = new_panels(2 * len(sets) + 1)
    entropy_panel, path_panels = panels[len(sets)], panels[len(sets) + 1 :]
    for axes, eval_set in zip(panels, sets, strict=False):
        _draw_accuracy(axes, methods, eval_set)
        label_steps(axes, f"accuracy, {name_label(set_title(eval_set))}")
    draw_methods(entropy_panel, methods, "stage1/entropy")
    label_steps(entropy_panel, ENTROPY_LABEL)
    start_at_zero(entropy_panel)
    for axes, eval_set in zip(path_panels, sets, strict=True):
        _draw_paths(axes, methods, eval_set)
        axes.set_title(f"mean accuracy, {name_label(set_title(eval_set))}")
        axes.set_xlabel(ENTROPY_LABEL)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
    add_legend(figure, method_handles(methods, markers=True) + dash_handles(["greedy", "mean"]))
    return figure


def _draw_accuracy(axes: Axes, methods: Mapping[str, Sequence[Run]], eval_set: str) -> None:
    crowded = len(methods) > MAX_BANDED_METHODS
    for method, (colour, marker) in method_styles(methods).items():
        for measure, dashes in zip(("greedy", "mean"), LINE_STYLES, strict=False):
            if curve := evaluation_curve(methods[method], eval_set, measure):
                draw_curve(axes, curve, LineStyle(colour, dashes, marker, crowded))
    use_percent(axes)


def _draw_paths(axes: Axes, methods: Mapping[str, Sequence[Run]], eval_set: str) -> None:
    """Draw mean accuracy against entropy, with a large marker at the end of training."""
    for method, (colour, marker) in method_styles(methods).items():
        path = accuracy_by_entropy(methods[method], eval_set)
        if path:
            entropies, accuracies = zip(*path, strict=True)
            axes.plot(
                entropies,
                accuracies,
                color=colour,
                linestyle=LINE_STYLES[1],  # as the mean in the accuracy panels
                lw=0.8,
                marker=marker,
                markersize=2.2,
            )
            axes.plot(entropies[-1], accuracies[-1], color=colour, marker=marker, markersize=5)
    use_percent(axes)


def accuracy_by_entropy(seeds: Sequence[Run], eval_set: str) -> list[tuple[float, float]]:
    """Return (entropy, mean accuracy) at each evaluation.

    The policy after step s is the one that step s + 1 samples from, so its entropy is that of step
    s + 1. After the last step, the entropy of the last step is used.
    """
    accuracy = evaluation_curve(seeds, eval_set, "mean")
    entropy = metric_curve(seeds, "stage1/entropy")
    if accuracy is None or entropy is None:
        return []
    entropy_at = dict(zip(entropy.steps.tolist(), smooth(entropy.mean).tolist(), strict=True))
    last_step = max(entropy_at)
    path = []
    for step, mean in zip(accuracy.steps.tolist(), accuracy.mean.tolist(), strict=True):
        sampled_at = min(step + 1, last_step)
        if sampled_at in entropy_at:
            path.append((entropy_at[sampled_at], mean))
    return path


def _has_two_evaluations(runs: Sequence[Run], eval_set: str) -> bool:
    """Return whether a run was evaluated at two steps: a single point does not make a curve."""
    return any(
        len({row["step"] for row in run.evaluations if row["set"] == eval_set}) > 1 for run in runs
    )
