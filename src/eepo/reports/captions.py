"""Writes the sentences of a caption that depend on the runs: smoothing, bands, sample counts."""

from __future__ import annotations

from collections.abc import Sequence

from eepo.reports.curves import MAX_BANDED_METHODS, MIN_SMOOTHED_STEPS
from eepo.reports.records import Run, by_method


def describe_bands(runs: Sequence[Run]) -> str:
    if all(len(seeds) == 1 for seeds in by_method(runs).values()):
        return "One seed per method: bands are 95 % intervals over the problems of that seed."
    sentence = "Lines are means over seeds; bands reach from the lowest to the highest seed."
    if _is_crowded(runs):
        sentence += " Bands are omitted for this many methods."
    return sentence


def describe_smoothing(runs: Sequence[Run]) -> str:
    """Return an empty text if no line is smoothed."""
    if max(len(run.metrics) for run in runs) < MIN_SMOOTHED_STEPS:
        return ""
    sentence = (
        f"Lines over {MIN_SMOOTHED_STEPS} steps or more are centred moving means over about 5 % "
        "of the steps"
    )
    return sentence + ("." if _is_crowded(runs) else "; faint lines are the raw values.")


def describe_single_steps(runs: Sequence[Run]) -> str:
    """Return an empty text if every method has more than one step."""
    if min(run.last_step for run in runs) != 1:
        return ""
    has_stages = any(run.series("stage2/entropy") for run in runs)
    return f"A single step is a dot{' (hollow for later stages)' * has_stages}."


def describe_clipping(runs: Sequence[Run]) -> str:
    """Return an empty text if all runs log clipping for each stage."""
    names = dict.fromkeys(run.name for run in runs if run.series("clip_share"))
    if not names:
        return ""
    return f"The share of clipped tokens is over all stages for {', '.join(names)}."


def describe_num_samples(runs: Sequence[Run]) -> str:
    """Say how many samples the accuracies are over: points with few samples are noisier."""
    full, quick = (_num_samples(runs, kind) for kind in ("full", "quick"))
    if not full or not quick or full == quick:
        return f"Mean accuracies are over {_join_or(full or quick)} samples per problem."
    return (
        f"Mean accuracies are over {_join_or(quick)} samples per problem (quick evaluations) or "
        f"{_join_or(full)} (full evaluations, at the end of training and at step 0). All runs that "
        "start from the same policy share its full evaluation at step 0."
    )


def _num_samples(runs: Sequence[Run], kind: str) -> list[int]:
    rows = (row for run in runs for row in run.evaluations if row["kind"] == kind)
    return sorted({row["num_samples"] for row in rows})


def _join_or(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))


def _is_crowded(runs: Sequence[Run]) -> bool:
    return len(by_method(runs)) > MAX_BANDED_METHODS
