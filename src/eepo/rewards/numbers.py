r"""Numbers read exactly: decimals, fractions, e-notation, bases, percent. No float, no library, no limit to trust.

Two numbers are equal when their exact values are. Where one is a decimal that stands for something longer (1/3 as
0.3333333), a relative difference of 1e-6 is allowed; two decimals with the same number of places must agree in all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 400
MAX_EXPONENT = 400
TOLERANCE = Fraction(1, 10**6)

_DECIMAL = r"(?:\d{1,3}(?:[, ]\d{3})+|\d+)?(?:\.\d*)?"
_POWER = r"(?:\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{?\s*([-+]?\d{1,4})\s*\}?|[eE]([-+]?\d{1,4}))"
_SIGNED = re.compile(rf"\s*([-+]?)\s*({_DECIMAL}){_POWER}?\s*", re.ASCII)
_TEN_POWER = re.compile(r"\s*([-+]?)\s*10\s*\^\s*\{?\s*([-+]?\d{1,4})\s*\}?\s*", re.ASCII)
_FRACTION = re.compile(
    r"\s*([-+]?)\s*(\d{0,9})\s*\\frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}\s*", re.ASCII
)
_MIXED = re.compile(r"\s*([-+]?)\s*(\d{1,9})\s+(\d{1,9})\s*/\s*([1-9]\d{0,8})\s*", re.ASCII)
_REPEATING = re.compile(
    r"\s*([-+]?)\s*(\d{0,20})\.(\d{0,20})\\(?:overline|bar)\s*\{?\s*(\d{1,20})\s*\}?\s*", re.ASCII
)
_BASE = re.compile(
    r"\(?\s*(-?[0-9A-Za-z]+(?:\.[0-9A-Za-z]+)?)\s*\)?\s*_\s*\{?\s*(?:\\text\{\s*)?(?:base\s*\}?\s*)?(\d{1,2}|[a-z]+)\s*\}?\s*\}?",
    re.ASCII,
)
_BASE_NAMES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
    "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Number:
    value: Fraction
    places: int | None = (
        None  # decimals as written; None: an exact form (a whole number, a fraction)
    )

    def same(self, other: Number) -> bool:
        if self.value == other.value:
            return True
        if self.places == other.places:  # both exact, or equally long decimals: every digit counts
            return False
        if any(number.places is None and number.value.denominator == 1 for number in (self, other)):
            return False  # a whole number is itself, and nothing near it
        return abs(self.value - other.value) <= TOLERANCE * min(abs(self.value), abs(other.value))


def read_number(text: str) -> Number | None:
    r"""A whole number, decimal, e-notation, `a/b`, `\frac{a}{b}` or a mixed number; None if it is anything else."""
    if len(text) > MAX_DIGITS:
        return None
    if match := _TEN_POWER.fullmatch(text):
        return _scaled(Number(Fraction(-1 if match[1] == "-" else 1)), int(match[2]))
    if match := _FRACTION.fullmatch(text):
        return _fraction(match)
    if match := _MIXED.fullmatch(text):
        value = int(match[2]) + Fraction(int(match[3]), int(match[4]))
        return Number(-value if match[1] == "-" else value)
    if match := _REPEATING.fullmatch(text):
        return _repeating(match)
    if text.count("/") == 1:
        above, below = text.split("/")
        return _quotient(read_decimal(above), read_decimal(below.strip(" .")))
    return read_decimal(text)


def read_decimal(text: str) -> Number | None:
    match = _SIGNED.fullmatch(text)
    if match is None or not any(character.isdigit() for character in match[2]):
        return None
    digits = match[2].replace(",", "").replace(" ", "")
    whole, point, decimals = digits.partition(".")
    value = Fraction(int((whole or "0") + decimals), 10 ** len(decimals))
    number = Number(
        -value if match[1] == "-" else value, len(decimals) if point and decimals else None
    )
    exponent = match[3] or match[4]
    return _scaled(number, int(exponent)) if exponent else number


def read_base(text: str) -> tuple[str, int] | None:
    """Digits and base of `52_8`, `1A_{16}` or `52_{\\text{eight}}`; None if it is no number in a base."""
    match = _BASE.fullmatch(text)
    if match is None or len(match[1]) > MAX_DIGITS:
        return None
    base = int(match[2]) if match[2].isdigit() else _BASE_NAMES.get(match[2], 0)
    if not 2 <= base <= 36 or not any(character.isdigit() for character in match[1]):
        return None
    return (match[1].lower(), base) if in_base(match[1], base) is not None else None


def in_base(digits: str, base: int) -> Fraction | None:
    """The value; None where a digit is too large for the base."""
    whole, _, decimals = digits.partition(".")
    try:
        return Fraction(int(whole + decimals, base), base ** len(decimals))
    except ValueError:
        return None


def _fraction(match: re.Match[str]) -> Number | None:
    quotient = _quotient(read_decimal(match[3]), read_decimal(match[4]))
    if quotient is None:
        return None
    value = quotient.value + int(match[2] or 0)  # 3\frac{1}{2} is three and a half
    return Number(-value if match[1] == "-" else value, quotient.places)


def _repeating(match: re.Match[str]) -> Number:
    """0.1666... as it is written with a bar: the digits under it go on forever."""
    fixed, period = match[3], match[4]
    tail = Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
    value = Fraction(int((match[2] or "0") + fixed), 10 ** len(fixed)) + tail
    return Number(-value if match[1] == "-" else value)


def _quotient(above: Number | None, below: Number | None) -> Number | None:
    if above is None or below is None or below.value == 0:
        return None
    return Number(above.value / below.value)


def _scaled(number: Number, exponent: int) -> Number | None:
    """Times a power of ten: 4.5e33 has its one decimal 33 places further left."""
    if abs(exponent) > MAX_EXPONENT:
        return None
    places = None if number.places is None else number.places - exponent
    return Number(number.value * Fraction(10) ** exponent, places)
