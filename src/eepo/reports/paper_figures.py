"""Draws the paper's figures from runs. Every function returns None without data for it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from eepo.evaluation.results import set_title
from eepo.reports.collapse import collapse_figure
from eepo.reports.curves import LineStyle, draw_curve, evaluation_curve
from eepo.reports.figures import cost_figure, exploration_figure
from eepo.reports.labels import name_label
from eepo.reports.measures import (
    estimate_over_seeds,
    full_evaluations,
    measure_value,
    pass_at_k_curve,
)
from eepo.reports.palette import method_styles
from eepo.reports.panels import (
    WIDTH,
    add_legend,
    label_k,
    label_steps,
    method_handles,
    new_panels,
    styled,
    use_percent,
)
from eepo.reports.paper_numbers import EEPO, GRPO
from eepo.reports.paper_table import IN_DISTRIBUTION, table_sets
from eepo.reports.records import Run, by_method, evaluation_sets
from eepo.reports.unlearning_examples import unlearning_examples_figure

OUT_OF_DISTRIBUTION = "amc23"  # the paper's example of an unseen benchmark


@dataclass(frozen=True)
class HyperPanel:
    """Holds the scores of a baseline at every value of its knob."""

    method: str
    knob: str
    scores: Mapping[str, Sequence[float]]  # value -> a score for each seed
    default: str  # the value of GRPO


@dataclass(frozen=True)
class PaperData:
    """Holds what the figures need."""

    runs: Sequence[Run]  # trained ones; their names are those of methods
    panels: Sequence[HyperPanel] = ()
    lines: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)

    def of(self, *names: str) -> list[Run]:
        return [run for name in names for run in self.runs if run.name == name]


@dataclass(frozen=True)
class PaperFigure:
    """Describes a figure. The caption says what it shows and how the paper's differs."""

    number: int
    caption: str
    draw: Callable[[PaperData], Figure | None]

    @property
    def file(self) -> str:
        return f"figure{self.number}.png"


def shown_set(runs: Sequence[Run]) -> str:
    """Return AMC 23, or the first evaluation set that is not held out of the training set."""
    sets = table_sets(by_method(runs))
    return OUT_OF_DISTRIBUTION if OUT_OF_DISTRIBUTION in sets else sets[0] if sets else ""


def draw_collapse(data: PaperData) -> Figure | None:
    """Draw accuracy in and out of distribution, and entropy, of GRPO."""
    runs = data.of(GRPO)
    sets: tuple[str, ...] = (IN_DISTRIBUTION, shown_set(runs))
    if IN_DISTRIBUTION not in evaluation_sets(runs):
        sets = (*sets[1:], *(name for name in evaluation_sets(runs) if name != sets[1]))[:2]
    return collapse_figure([_with_sets(run, sets) for run in runs]) if runs else None


def draw_unlearning(data: PaperData) -> Figure | None:
    return unlearning_examples_figure(data.of(EEPO))


def draw_exploration(data: PaperData) -> Figure | None:
    return exploration_figure(data.of(GRPO, EEPO))


def draw_cost(data: PaperData) -> Figure | None:
    return cost_figure(data.runs)


def draw_hyperparameters(data: PaperData) -> Figure | None:
    """Draw the average accuracy of each baseline against its knob, and EEPO as a dashed line."""
    panels = [panel for panel in data.panels if panel.scores]
    if not panels:
        return None

    @styled
    def draw(_: Sequence[Run]) -> Figure:
        columns = 2 if len(panels) in (2, 4) else 3
        figure, all_axes = new_panels(len(panels), columns=columns, width=WIDTH)
        for axes, panel in zip(all_axes, panels, strict=True):
            _draw_panel(axes, panel, data.lines)
        _share_limits(all_axes)
        all_axes[0].set_ylabel("greedy, average of sets")
        add_legend(figure, _hyper_handles(panels, data.lines))
        return figure

    return draw([])


def draw_generalization(data: PaperData) -> Figure | None:
    """Draw greedy accuracy over the steps, and pass@k at the end, of GRPO and EEPO on one set."""
    runs = data.of(GRPO, EEPO)
    eval_set = shown_set(runs)
    if not runs or not full_evaluations(runs, eval_set):
        return None

    @styled
    def draw(runs: Sequence[Run]) -> Figure:
        figure, (steps, samples) = new_panels(2, columns=2, width=0.8 * WIDTH)
        methods = by_method(runs)
        for method, (colour, marker) in method_styles(methods).items():
            if curve := evaluation_curve(methods[method], eval_set, "greedy"):
                draw_curve(steps, curve, LineStyle(colour, marker=marker))
            _draw_pass_at_k(samples, methods[method], eval_set, (colour, marker))
        label_steps(steps, name_label(f"greedy accuracy, {set_title(eval_set)}"))
        use_percent(steps)
        label_k(samples, full_evaluations(runs, eval_set))
        samples.set_title(name_label(f"pass@k, {set_title(eval_set)}"))
        add_legend(figure, method_handles(methods, markers=True))
        return figure

    return draw(runs)


FIGURES = (
    PaperFigure(
        2,
        "Accuracy of GRPO on held-out training problems and on a benchmark, its entropy, and "
        "accuracy against entropy.",
        draw_collapse,
    ),
    PaperFigure(
        4,
        "Stage-1 completions of a few problems: their probability before and after unlearning. "
        "The paper's figure is a sketch; this one is measured.",
        draw_unlearning,
    ),
    PaperFigure(
        5,
        "Average greedy accuracy of each baseline against its hyperparameter, and of EEPO with "
        "fixed hyperparameters (dashed). Blue: GRPO, which has the default value. The values of "
        "tuned baselines are from the tuning runs, which have other seeds than GRPO and EEPO.",
        draw_hyperparameters,
    ),
    PaperFigure(
        6,
        "Entropy, reward and length of the completions of GRPO and of both stages of EEPO.",
        draw_exploration,
    ),
    PaperFigure(
        7,
        "Greedy accuracy over the steps, and pass@k after training. Bands: lowest to highest seed.",
        draw_generalization,
    ),
    PaperFigure(
        8,
        "Seconds per step by phase, and mean length of completions. The paper shows Qwen3-8B-Base "
        "on B200 GPUs.",
        draw_cost,
    ),
)


def _with_sets(run: Run, sets: Sequence[str]) -> Run:
    rows = [row for row in run.evaluations if row["set"] in sets]
    return dataclasses.replace(run, evaluations=rows)


def _draw_panel(axes: Axes, panel: HyperPanel, lines: Mapping[str, Sequence[float]]) -> None:
    scores = dict(panel.scores)
    if GRPO in lines and panel.default not in scores:
        scores[panel.default] = lines[GRPO]
    ticks = sorted(scores, key=float)
    styles = method_styles([panel.method, GRPO, EEPO])
    means = [statistics.fmean(scores[tick]) for tick in ticks]
    axes.plot(range(len(ticks)), means, color=styles[panel.method][0])
    for index, tick in enumerate(ticks):
        colour, marker = styles[panel.method if tick in panel.scores else GRPO]
        mean = estimate_over_seeds(scores[tick])
        arms = None
        if mean and mean.low is not None and mean.high is not None:
            arms = [[mean.mean - mean.low], [mean.high - mean.mean]]
        axes.errorbar(
            [index], [means[index]], arms, color=colour, marker=marker, markersize=3.5, capsize=2
        )
    if EEPO in lines:
        mean_accuracy, colour = statistics.fmean(lines[EEPO]), styles[EEPO][0]
        axes.axhline(mean_accuracy, color=colour, linestyle="dashed", linewidth=1.2)
    axes.set_xticks(range(len(ticks)), [_short_number(tick) for tick in ticks])
    axes.set_xlim(-0.4, len(ticks) - 0.6)
    axes.set_title(name_label(panel.knob.partition(".")[2].replace("_", " ")))
    use_percent(axes)


def _share_limits(panels: Sequence[Axes]) -> None:
    """Give all panels the same y-axis, within 0 and 100 %."""
    low = min(axes.dataLim.y0 for axes in panels)
    high = max(axes.dataLim.y1 for axes in panels)
    margin = 0.08 * (high - low) or 0.05
    for axes in panels:
        axes.set_ylim(max(-0.02, low - margin), min(1.02, high + margin))


def _short_number(text: str) -> str:
    """Return 1e-5 for 1e-05."""
    return name_label(text.replace("e-0", "e-"))


def _hyper_handles(
    panels: Sequence[HyperPanel], lines: Mapping[str, Sequence[float]]
) -> list[Line2D]:
    shown = [panel.method for panel in panels] + ([GRPO] if GRPO in lines else [])
    handles = method_handles(shown, markers=True)
    if EEPO in lines:
        colour = method_styles([EEPO])[EEPO][0]
        handles.append(Line2D([], [], color=colour, linestyle="dashed", label=EEPO))
    return handles


def _draw_pass_at_k(axes: Axes, runs: Sequence[Run], eval_set: str, style: tuple[str, str]) -> None:
    rows = [row for row in full_evaluations(runs, eval_set) if row.get("pass@k")]
    if not rows:
        return
    ks = pass_at_k_curve(rows)
    columns = [[measure_value(row, f"pass@{k}") or 0.0 for row in rows] for k in ks]
    axes.plot(ks, list(map(statistics.fmean, columns)), color=style[0], marker=style[1])
    if len(rows) > 1:
        low, high = list(map(min, columns)), list(map(max, columns))
        axes.fill_between(ks, low, high, color=style[0], alpha=0.13, linewidth=0)
