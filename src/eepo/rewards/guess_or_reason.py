r"""Grades mathematics as `math` does, and labels each completion: does it guess or reason?

- reason: before the last \boxed{} it calculates, or writes at least MIN_WORDS words.
- calculate: the box itself has a calculation, as in \boxed{3 + 4 = 7}. The grader accepts it.
- guess: a bare answer, "The answer is \boxed{5}.", or an answer with an explanation after it.
- no_answer: the grader finds no answer. So noise does not count as reasoning.

Runs in a grading process (`isolation.py`).
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any

from eepo.rewards import math
from eepo.rewards.boxed import last_boxed
from eepo.types import Verdict

GUESS, CALCULATE, REASON, NO_ANSWER = "guess", "calculate", "reason", "no_answer"
MIN_WORDS = 15  # "The final answer to the problem, in dollars, is" has 9
MAX_TEXT = 20_000  # characters that are searched

_OPERATION = re.compile(r"[-+*/×÷−]|\\times|\\cdot|\\div|\\frac")
_DIGIT = re.compile(r"\d")
_BOX = re.compile(r"\\(?:boxed|fbox)\b")
_SIGN = re.compile(r"\\(?:times|cdot|div)(?![a-z])|[×÷]")
_FRACTION = re.compile(r"\\[dt]?frac ?\{([^{}]*)\} ?\{([^{}]*)\}")
MAX_NESTED = 3  # fractions within fractions
# Units, currencies, spaces, and the comma in 1,200
_NO_NUMBER = re.compile(
    r"\\text ?\{[^{}]*\}|\\(?:left|right)(?![a-z])|\\?[$%]|\\[,; ]|[A-Za-z]{2,}"
    r"|(?<=\d),(?=\d{3})|\s"
)
_ARITHMETIC = re.compile(r"[-+*/−=.()\d]+")
# 3 + 4, or a division that is not only a fraction: 36/2 = 18, 36/2/3
_CALCULATION = re.compile(r"\d\)*[-+*−]\(*\d|\d\)*/\(*\d.*[/=]")


def grade(gold: Any, text: str) -> Verdict:
    """Give the reward of `math`, and a label."""
    verdict = math.grade(gold, text)
    label = NO_ANSWER if verdict.answer is None else strategy_of(text)
    return Verdict(verdict.reward, verdict.answer, verdict.reason, label)


def strategy_of(text: str) -> str:
    """Return whether a completion guesses, calculates in its answer, or reasons before it."""
    last_box = deque(_BOX.finditer(text), maxlen=1)
    before = text[: last_box[0].start() if last_box else len(text)][:MAX_TEXT]
    has_words = len(before.split(maxsplit=MIN_WORDS)) >= MIN_WORDS
    if has_words or _calculates(before):
        return REASON
    return CALCULATE if _is_calculation(last_boxed(text) or "") else GUESS


def _calculates(text: str) -> bool:
    """Return whether a line has a number, an operation, a number and an equals sign: 3 + 4 = 7."""
    sides = [side for line in text.splitlines() for side in line.split("=")[:-1]]
    return any(_is_operation(side) for side in sides)


def _is_operation(text: str) -> bool:
    first = _DIGIT.search(text)
    operation = _OPERATION.search(text, first.end()) if first else None
    return bool(operation and _DIGIT.search(text, operation.end()))


def _is_calculation(answer: str) -> bool:
    r"""Return whether an answer is a calculation with numbers: 3 + 4, 3 \times 4 = 12, (8 - 2)/3.

    A fraction such as 3/4, a point such as (1, -2), and formulas with letters are results.
    """
    for _ in range(MAX_NESTED):
        answer = _FRACTION.sub(r"((\1)/(\2))", answer)
    text = _NO_NUMBER.sub("", _SIGN.sub("*", answer))  # which operation it is does not matter
    return bool(_ARITHMETIC.fullmatch(text) and _CALCULATION.search(text))
