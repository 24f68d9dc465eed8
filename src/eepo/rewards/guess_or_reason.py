r"""Grades mathematics as `math` does, and labels each completion: does it guess or reason?

The label looks only at the text before the final answer, that is, before the last \boxed{}. A
completion reasons if it calculates there, or writes at least MIN_WORDS words. Everything else is a
guess: a bare answer, "The answer is \boxed{5}.", or an answer with an explanation after it. A
completion without an answer has a label of its own, so that noise does not count as reasoning.

Runs in a grading process (`isolation.py`).
"""

from __future__ import annotations

import re
from typing import Any

from eepo.rewards import math
from eepo.types import Verdict

GUESS, REASON, NO_ANSWER = "guess", "reason", "no_answer"
MIN_WORDS = 15  # "The final answer to the problem, in dollars, is" has 9
MAX_TEXT = 20_000  # characters that are searched

_OPERATION = re.compile(r"[-+*/×÷−]|\\times|\\cdot|\\div|\\frac")
_DIGIT = re.compile(r"\d")
_BOX = re.compile(r"\\(?:boxed|fbox)\b")


def grade(gold: Any, text: str) -> Verdict:
    """Give the reward of `math`, and the label "guess", "reason" or "no_answer"."""
    verdict = math.grade(gold, text)
    label = NO_ANSWER if verdict.answer is None else strategy_of(text)
    return Verdict(verdict.reward, verdict.answer, verdict.reason, label)


def strategy_of(text: str) -> str:
    """Return whether a completion guesses or reasons before its final answer."""
    boxes = list(_BOX.finditer(text))
    before = text[: boxes[-1].start() if boxes else len(text)][:MAX_TEXT]
    has_words = len(before.split(maxsplit=MIN_WORDS)) >= MIN_WORDS
    return REASON if has_words or _calculates(before) else GUESS


def _calculates(text: str) -> bool:
    """Return whether a line has a number, an operation, a number and an equals sign: 3 + 4 = 7."""
    sides = [side for line in text.splitlines() for side in line.split("=")[:-1]]
    return any(_is_operation(side) for side in sides)


def _is_operation(text: str) -> bool:
    first = _DIGIT.search(text)
    operation = _OPERATION.search(text, first.end()) if first else None
    return bool(operation and _DIGIT.search(text, operation.end()))
