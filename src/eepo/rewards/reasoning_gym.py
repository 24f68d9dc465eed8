"""Grades with the scorers of reasoning-gym, in a grading process (`isolation.py`).

Only scorers that never evaluate the model's text are allowed (`gym_datasets.py`). Many scorers give
a small score to a wrong but well-formed answer. The reward is that score.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from eepo.rewards import gym_datasets
from eepo.rewards.extraction import final_answer
from eepo.types import Verdict

# Import the package before grading starts: the import would use up the first completion's time.
gym_datasets.import_package()

# What scorers raise on malformed answers. MemoryError is not listed: it must end the process.
SCORER_ERRORS = (
    ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError,
)  # fmt: skip


def grade(gold: Any, text: str) -> Verdict:
    """Give the scorer's score as reward.

    `gold` is {"dataset": the data set's name, "entry": the problem as the data set generated it}.
    """
    answer = final_answer(text)
    if answer is None:
        return Verdict(0.0, None, "no answer found")
    scorer = _scorer(gold["dataset"])
    try:
        score = float(scorer.score_answer(answer=answer, entry=gold["entry"]))
    except SCORER_ERRORS as error:
        return Verdict(0.0, answer, f"the scorer cannot read it: {type(error).__name__}")
    # Also catches nan. No completion may earn more than the gold answer does.
    if not 0.0 <= score <= 1.0:
        return Verdict(0.0, answer, f"the scorer gave {score}")
    return Verdict(score, answer, f"score {score:.3g}")


@lru_cache(maxsize=8)
def _scorer(dataset: str) -> Any:
    return gym_datasets.open_dataset(dataset, size=1, seed=0)
