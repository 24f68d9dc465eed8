"""Grades with reasoning-gym's own scorers, in a grading process (`isolation.py`).

Only scorers that never evaluate what the model wrote are let in (`gym.py`). Many give a small score to an answer that
is wrong but well formed; the reward is that score.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from eepo.rewards import gym_datasets
from eepo.rewards.extraction import final_answer
from eepo.types import Verdict

gym_datasets.package()  # now, once for all grading: its import would take most of the first completion's time

# What scorers raise on an answer that they cannot read. A MemoryError goes on: the grading process ends by it.
UNREADABLE = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)


def judge(answer: Any, text: str) -> Verdict:
    """`answer`: {"dataset": its name, "entry": the problem as the data set made it}."""
    found = final_answer(text)
    if found is None:
        return Verdict(0.0, None, "no answer found")
    scorer, entry = _scorer(answer["dataset"]), answer["entry"]
    try:
        score = float(scorer.score_answer(answer=found, entry=entry))
    except UNREADABLE as error:
        return Verdict(0.0, found, f"the scorer cannot read it: {type(error).__name__}")
    if (
        not 0.0 <= score <= 1.0
    ):  # nan, too: nothing a completion says may pay more than the right answer
        return Verdict(0.0, found, f"the scorer gave {score}")
    return Verdict(score, found, f"score {score:.3g}")


@lru_cache(maxsize=8)
def _scorer(name: str) -> Any:
    return gym_datasets.open_dataset(name, size=1, seed=0)
