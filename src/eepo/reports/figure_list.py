"""The figures of a report in their order, each with the words that go below it; and figures as bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.figure import Figure

from eepo.reports.captions import bands, dots, draws, smoothing
from eepo.reports.collapse import collapse_figure
from eepo.reports.figures import (
    cost_figure,
    exploration_figure,
    pass_at_k_figure,
    unlearning_figure,
)
from eepo.reports.forgetting import forgetting_figure
from eepo.reports.panels import STYLE
from eepo.reports.records import Run
from eepo.reports.second_half import chances_figure


@dataclass(frozen=True)
class Picture:
    """`name` is the file's name; `caption` says what one sees and how to read it."""

    name: str
    title: str
    caption: str
    figure: Callable[[Sequence[Run]], Figure | None]
    notes: tuple[Callable[[Sequence[Run]], str], ...] = ()  # sentences that depend on the runs


PICTURES = (
    Picture(
        "exploration",
        "Exploration",
        "Entropy, reward and length of the completions sampled in each step; stage 2 (dashed) is sampled after "
        "unlearning, so a dashed line above its solid one in the first panel means that unlearning widened the search, "
        "and one below it in the second is the reward that this cost.",
        exploration_figure,
        (dots, smoothing, bands),
    ),
    Picture(
        "collapse",
        "Accuracy and entropy",
        "Accuracy on problems that were not trained on, beside the entropy of what the policy samples; entropy that "
        "falls to nothing while a mean line climbs to its greedy line shows a policy that has settled on one way of "
        "answering. The last panels set one against the other: a path that goes left and down, to its large marker at "
        "the end of training, lost accuracy as it lost entropy. Every point is over the same problems, and "
        "no accuracy is smoothed.",
        collapse_figure,
        (draws, smoothing, bands),
    ),
    Picture(
        "pass_at_k",
        "pass@k",
        "The chance that at least one of k drawn completions is right: the left end shows how reliable a policy is, "
        "the right end how much it can still find, and lines that cross trade one for the other.",
        pass_at_k_figure,
        (bands,),
    ),
    Picture(
        "cost",
        "Cost",
        "Where the seconds of a mean step go, and how long completions are; longer completions cost time in every "
        "phase, so read the two together.",
        cost_figure,
        (smoothing, bands),
    ),
    Picture(
        "unlearning",
        "Unlearning",
        "How many stage-1 tokens the gate let through, how far one unlearning step moved the rollout model, and how "
        "much of each stage the update clipped; near-zero KL or changed weights mean that unlearning did nothing.",
        unlearning_figure,
        (dots, smoothing, bands),
    ),
    Picture(
        "second_half_recovery",
        "Second chances",
        "Groups whose first half of completions earned nothing (solid), and those of them whose second half did "
        "(dashed); the bars are the second as a share of the first, over the whole run, a dot for each seed. Without "
        "forgetting the halves differ by chance alone, so a longer bar than GRPO's is what stage 2 found and stage 1 "
        "did not; a shorter one, that θ′ was led astray.",
        chances_figure,
        (smoothing, bands),
    ),
    Picture(
        "forgetting",
        "What forgetting does",
        "Stage-1 completions of a few problems, the likeliest first: how likely each was under θ, the policy that "
        "sampled it, and how likely under θ′, the rollout model that had to forget it; ✓ marks right ones, ✗ wrong "
        "ones. Long bars that shrink more than short ones are a mode that gives way to others.",
        forgetting_figure,
    ),
)


def draw_pictures(runs: Sequence[Run]) -> list[tuple[Picture, Figure]]:
    """Those that the runs have data for."""
    return [
        (picture, figure) for picture in PICTURES if (figure := picture.figure(runs)) is not None
    ]


def image_bytes(figure: Figure, form: str) -> bytes:
    """As "svg" or "png", without a date: the same runs give the same file."""
    buffer = io.BytesIO()
    metadata = {"Date": None} if form == "svg" else {"Software": None}
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=form, dpi=300, facecolor="white", metadata=metadata)
    return buffer.getvalue()
