r"""Grades mathematics: the final answer of a completion against the gold answer. Runs in a worker (`isolation.py`)."""

from __future__ import annotations

from typing import Any

from mpmath.libmp import NoConvergence
from sympy.polys.polyerrors import BasePolynomialError

from eepo.rewards.boxed import last_boxed
from eepo.rewards.equivalence import Unparsable, canonical, same_answer
from eepo.rewards.extraction import final_answer
from eepo.types import Verdict

# On strange input. Not MemoryError: the worker must end then.
SYMPY_RAISES = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError,
    BasePolynomialError, NoConvergence,
)  # fmt: skip


def judge(gold: Any, text: str) -> Verdict:
    """1 if the last stated answer is the gold answer. Whatever SymPy trips over is the completion's fault, not ours."""
    answer = final_answer(text)
    if answer is None:
        return Verdict(0.0, None, "no answer found")
    gold = last_boxed(str(gold)) or str(gold)
    try:
        match = same_answer(gold, answer)
    except (Unparsable, *SYMPY_RAISES):
        return Verdict(0.0, canonical(answer), "unparsable")
    return (
        Verdict(1.0, canonical(gold), match)
        if match
        else Verdict(0.0, canonical(answer), "different")
    )
