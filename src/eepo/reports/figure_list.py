"""Lists the figures of a report in their order, with captions, and saves figures as bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.figure import Figure

from eepo.reports.captions import (
    describe_bands,
    describe_clipping,
    describe_num_samples,
    describe_single_steps,
    describe_smoothing,
)
from eepo.reports.collapse import collapse_figure
from eepo.reports.figures import (
    cost_figure,
    exploration_figure,
    pass_at_k_figure,
    unlearning_figure,
)
from eepo.reports.panels import STYLE, DrawFigure
from eepo.reports.records import Run
from eepo.reports.second_half import second_half_figure
from eepo.reports.strategies import strategies_figure
from eepo.reports.unlearning_examples import unlearning_examples_figure


@dataclass(frozen=True)
class FigureSpec:
    """Describes a figure of the report. The caption says what it shows and how to read it."""

    name: str  # of the file
    title: str
    caption: str
    draw: DrawFigure
    notes: tuple[Callable[[Sequence[Run]], str], ...] = ()  # sentences that depend on the runs

    def full_caption(self, runs: Sequence[Run]) -> str:
        notes = (note(runs) for note in self.notes)
        return " ".join([self.caption, *filter(None, notes)])


FIGURES = (
    FigureSpec(
        "strategies",
        "Strategies",
        "Reward of stage 1, which the policy samples, and the share of completions that use a "
        "strategy which was rare at the start. Stage 2 (dashed) is sampled after unlearning. A "
        "strategy that is common in stage 2 only is found, but not learned.",
        strategies_figure,
        (describe_smoothing, describe_bands),
    ),
    FigureSpec(
        "exploration",
        "Exploration",
        "Entropy, reward and length of the completions sampled in each step. Stage 2 (dashed) is "
        "sampled after unlearning. If its entropy is above that of stage 1 (solid), unlearning "
        "widened the search. If its reward is below that of stage 1, the difference is the cost.",
        exploration_figure,
        (describe_single_steps, describe_smoothing, describe_bands),
    ),
    FigureSpec(
        "collapse",
        "Accuracy and entropy",
        "Accuracy on problems that were not trained on, and the entropy of the policy. If entropy "
        "falls to 0 while mean accuracy rises to greedy accuracy, the policy has collapsed to one "
        "answer per problem. The last panels show accuracy against entropy; the large marker is "
        "the end of training. A path that goes left and down lost accuracy as it lost entropy. "
        "All points are over the same problems, and accuracies are not smoothed.",
        collapse_figure,
        (describe_num_samples, describe_smoothing, describe_bands),
    ),
    FigureSpec(
        "pass_at_k",
        "pass@k",
        "The probability that at least one of k sampled completions is correct. Small k shows how "
        "reliable a policy is, large k how many problems it can still solve. Lines that cross "
        "trade one for the other.",
        pass_at_k_figure,
        (describe_bands,),
    ),
    FigureSpec(
        "cost",
        "Cost",
        "Mean seconds per step, by phase, and the mean length of completions. Longer completions "
        "take more time in every phase, so read both panels together.",
        cost_figure,
        (describe_smoothing, describe_bands),
    ),
    FigureSpec(
        "unlearning",
        "Unlearning",
        "The share of stage-1 tokens that the gate selected, how far the unlearning step moved the "
        "rollout weights θ′ from the policy θ, and the share of tokens clipped in the update. If "
        "the KL or the share of changed weights is near 0, unlearning had no effect. "
        "Successes of stage 2 are lost if their smallest token ratio is below 0.01: θ almost never "
        "samples them, so they hardly count in the update. Full credit counts them.",
        unlearning_figure,
        (describe_clipping, describe_single_steps, describe_smoothing, describe_bands),
    ),
    FigureSpec(
        "second_half_recovery",
        "Second-half recovery",
        "Left: the share of groups whose first half earned no reward (solid), and of groups that "
        "were recovered in the second half (dashed), that is, only the second half earned reward. "
        "Right: recovered groups as a share of missed groups, over the whole run, with a dot for "
        "each seed. The halves of GRPO differ only by chance, so GRPO is the baseline: a longer "
        "bar means that stage 2 solved problems that stage 1 missed; a shorter bar means that "
        "unlearning made stage 2 worse.",
        second_half_figure,
        (describe_smoothing, describe_bands),
    ),
    FigureSpec(
        "unlearning_examples",
        "Unlearning examples",
        "Stage-1 completions of a few problems, the most likely first: the probability under the "
        "policy θ that sampled it, and under the rollout weights θ′ after unlearning. ✓ is "
        "correct, ✗ is wrong. If long bars shrink more than short ones, the dominant mode gives "
        "way to other completions.",
        unlearning_examples_figure,
    ),
)


def draw_figures(runs: Sequence[Run]) -> list[tuple[FigureSpec, Figure]]:
    """Draw the figures that the runs have data for.

    Folders of `eepo eval` have no steps, so only pass@k is drawn for them.
    """
    trained = [run for run in runs if not run.is_evaluation]
    drawn = (
        (spec, spec.draw(runs if spec.draw is pass_at_k_figure else trained))
        for spec in FIGURES
        if trained or spec.draw is pass_at_k_figure
    )
    return [(spec, figure) for spec, figure in drawn if figure is not None]


def image_bytes(figure: Figure, image_format: str) -> bytes:
    """Save a figure as "svg" or "png", without a date: the same runs give the same bytes."""
    buffer = io.BytesIO()
    metadata = {"Date": None} if image_format == "svg" else {"Software": None}
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=image_format, dpi=300, facecolor="white", metadata=metadata)
    return buffer.getvalue()
