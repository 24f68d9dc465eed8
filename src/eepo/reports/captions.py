"""What a reader of these runs' figures must know beside a caption: how lines were made, and of how many draws."""

from __future__ import annotations

from collections.abc import Sequence

from eepo.reports.curves import MOST_BANDED, SMOOTHED_FROM
from eepo.reports.records import Run, by_method


def bands(runs: Sequence[Run]) -> str:
    """What a shaded band is, in these runs."""
    if all(len(seeds) == 1 for seeds in by_method(runs).values()):
        return "One seed each: bands, where there are any, are 95 % intervals over the problems of that seed."
    sentence = "Lines are means over seeds, bands reach from the lowest to the highest seed."
    return sentence + " With this many methods, lines go without bands." * _is_crowded(runs)


def smoothing(runs: Sequence[Run]) -> str:
    """Nothing where all lines are as they were measured."""
    if max(len(run.metrics) for run in runs) < SMOOTHED_FROM:
        return ""
    sentence = f"What {SMOOTHED_FROM} steps or more measured is drawn as a centred moving mean over a twentieth of them"
    return sentence + ("." if _is_crowded(runs) else "; faint lines are the raw values.")


def dots(runs: Sequence[Run]) -> str:
    """A method with one step has no lines."""
    if min(run.last_step for run in runs) != 1:
        return ""
    staged = any(run.series("stage2/entropy") for run in runs)
    return f"A single step is a dot{', a hollow one of a later stage' * staged}."


def draws(runs: Sequence[Run]) -> str:
    """Of how many completions the accuracies are: points of few draws scatter more."""
    full, quick = (
        sorted(
            {row["num_samples"] for run in runs for row in run.evaluations if row["kind"] == kind}
        )
        for kind in ("full", "quick")
    )
    if not full or not quick or full == quick:
        return f"Mean accuracies are over {_either(full or quick)} draws of each problem."
    return (
        f"Mean accuracies are over {_either(quick)} draws of each problem, or over {_either(full)} where a full "
        "evaluation was made: at the end of training, and at the start, where it counts for all runs from that policy."
    )


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))


def _is_crowded(runs: Sequence[Run]) -> bool:
    return len(by_method(runs)) > MOST_BANDED
