r"""A maths reward that does not accept a calculation as the answer, such as \boxed{(16 - 3) * 2}.

The built-in grader does: it compares values. A policy may then learn to write calculations that it
cannot carry out. Use it from the folder that contains `examples`:

    eepo train RECIPE --set reward.name=examples/strict_maths.py:grade --out runs/strict
"""

from __future__ import annotations

from dataclasses import replace

from eepo import Verdict
from eepo.rewards.guess_or_reason import CALCULATE
from eepo.rewards.guess_or_reason import grade as lenient_grade


def grade(completion: str, gold: str) -> Verdict:
    """Grade as `guess_or_reason` does, but give 0 for an answer that is a calculation."""
    verdict = lenient_grade(gold, completion)
    if verdict.label == CALCULATE:
        return replace(verdict, reward=0.0, reason="a calculation")
    return verdict
