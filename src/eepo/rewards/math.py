"""Grades mathematics: compares the final answer of a completion with the gold answer.

Runs in a grading process (`isolation.py`).
"""

from __future__ import annotations

from typing import Any

from eepo.rewards.boxed import last_boxed
from eepo.rewards.equivalence import Unparsable, canonical, same_answer
from eepo.rewards.extraction import final_answer
from eepo.rewards.formulas import SYMPY_ERRORS
from eepo.types import Verdict


def grade(gold: Any, text: str) -> Verdict:
    """Give reward 1 if the final answer in `text` equals the gold answer.

    An answer that SymPy fails on gets reward 0.
    """
    answer = final_answer(text)
    if answer is None:
        return Verdict(0.0, None, "no answer found")
    gold = last_boxed(str(gold)) or str(gold)
    try:
        reason = same_answer(gold, answer)
    except (Unparsable, *SYMPY_ERRORS):
        return Verdict(0.0, canonical(answer), "unparsable")
    if reason is None:
        return Verdict(0.0, canonical(answer), "different")
    return Verdict(1.0, canonical(gold), reason)
