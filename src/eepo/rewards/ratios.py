"""Compares ratios and clock times, which are both written with a colon: 1:2 equals 2:4.

8:30 is a time, so 16:60 does not equal it. A gold answer is a time if it has two digits after the
colon, from 00 to 59, and at most 24 hours. Then it is never scaled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from eepo.rewards.latex import split_top_level
from eepo.rewards.numbers import read_number

_COLON = re.compile(":")
_TIME = re.compile(r"(\d|[01]\d|2[0-4]):([0-5]\d)(?::([0-5]\d))?", re.ASCII)


def same_ratio(gold: str, answer: str, same_formula: Callable[[str, str], bool]) -> bool | None:
    """Return whether two ratios or times are the same; None if that is not decided here.

    `same_formula` compares the parts that are no numbers.
    """
    gold_parts, answer_parts = split_top_level(gold, _COLON), split_top_level(answer, _COLON)
    if len(gold_parts) == 1 and len(answer_parts) == 1:
        return None
    if not all(gold_parts) or not all(answer_parts):
        return False
    if time := _TIME.fullmatch("".join(gold.split())):
        if len(answer_parts) > 1:
            other = _TIME.fullmatch("".join(answer.split()))
            return other is not None and _clock(time) == _clock(other)
        if math.gcd(int(time[1]), int(time[2])) > 1:
            return False  # a ratio would be in lowest terms
    if len(gold_parts) != len(answer_parts):
        # A ratio of two numbers is a fraction.
        return None if max(len(gold_parts), len(answer_parts)) == 2 else False
    return _proportional(gold_parts, answer_parts, same_formula)


def _clock(time: re.Match[str]) -> tuple[int, ...]:
    return tuple(int(part) for part in time.groups() if part is not None)


def _proportional(
    gold: list[str], answer: list[str], same_formula: Callable[[str, str], bool]
) -> bool:
    """Return whether the parts of one ratio are a multiple of the parts of the other."""
    gold_numbers, answer_numbers = (
        [read_number(part) for part in parts] for parts in (gold, answer)
    )
    if all(gold_numbers) and all(answer_numbers):
        left = [number.value for number in gold_numbers if number]
        right = [number.value for number in answer_numbers if number]
        first = next((index for index, value in enumerate(left) if value), None)
        if first is None or right[first] == 0:
            return False
        pairs = zip(left, right, strict=True)
        return all(a * right[first] == b * left[first] for a, b in pairs)
    return all(
        same_formula(
            rf"\frac{{{gold[index]}}}{{{gold[0]}}}", rf"\frac{{{answer[index]}}}{{{answer[0]}}}"
        )
        for index in range(1, len(gold))
    )
