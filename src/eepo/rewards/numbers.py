r"""Reads numbers as exact fractions: decimals, fractions, e-notation, repeating decimals, bases.

No floats are used, and the size of every number is bounded.

`Number.equals` decides which numbers are the same:
- Equal exact values are the same: 0.5 and 1/2.
- Two exact forms (whole numbers, fractions) are never rounded: unequal values are different.
- Two decimals with the same number of digits after the point must agree in every digit.
- A whole number equals only itself.
- Otherwise a decimal may be a rounded value, such as 0.3333333 for 1/3. A relative difference of
  1e-6 is allowed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 400
MAX_EXPONENT = 400
TOLERANCE = Fraction(1, 10**6)

_DIGITS = r"(?:\d{1,3}(?:[, ]\d{3})+|\d+)?(?:\.\d*)?"
_POWER = r"(?:\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{?\s*([-+]?\d{1,4})\s*\}?|[eE]([-+]?\d{1,4}))"
_DECIMAL = re.compile(rf"\s*([-+]?)\s*({_DIGITS}){_POWER}?\s*", re.ASCII)
_POWER_OF_TEN = re.compile(r"\s*([-+]?)\s*10\s*\^\s*\{?\s*([-+]?\d{1,4})\s*\}?\s*", re.ASCII)
_FRACTION = re.compile(
    r"\s*([-+]?)\s*(\d{0,9})\s*\\frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}\s*", re.ASCII
)
_MIXED = re.compile(r"\s*([-+]?)\s*(\d{1,9})\s+(\d{1,9})\s*/\s*([1-9]\d{0,8})\s*", re.ASCII)
_REPEATING = re.compile(
    r"\s*([-+]?)\s*(\d{0,20})\.(\d{0,20})\\(?:overline|bar)\s*\{?\s*(\d{1,20})\s*\}?\s*", re.ASCII
)
_BASE = re.compile(
    r"\(?\s*(-?[0-9A-Za-z]+(?:\.[0-9A-Za-z]+)?)\s*\)?\s*"
    r"_\s*\{?\s*(?:\\text\{\s*)?(?:base\s*\}?\s*)?(\d{1,2}|[a-z]+)\s*\}?\s*\}?",
    re.ASCII,
)
_BASE_NAMES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15,
    "sixteen": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Number:
    """Holds an exact value and the precision with which it was written."""

    value: Fraction
    # Digits after the decimal point as written. None for exact forms: whole numbers and fractions.
    decimals: int | None = None

    def equals(self, other: Number) -> bool:
        """Return whether two numbers are the same, by the rules in the module docstring."""
        if self.value == other.value:
            return True
        if self.decimals == other.decimals:
            return False
        if any(number.is_whole() for number in (self, other)):
            return False
        return abs(self.value - other.value) <= TOLERANCE * min(abs(self.value), abs(other.value))

    def is_whole(self) -> bool:
        """Return whether the number was written as a whole number: 3, but not 3.0."""
        return self.decimals is None and self.value.denominator == 1


def read_number(text: str) -> Number | None:
    r"""Read a number in any notation; return None for any other text.

    Accepts whole numbers, decimals, e-notation, `a/b`, `\frac{a}{b}`, mixed numbers and
    `0.1\overline{6}`.
    """
    if len(text) > MAX_DIGITS:
        return None
    if match := _POWER_OF_TEN.fullmatch(text):
        return _times_power_of_ten(Number(Fraction(-1 if match[1] == "-" else 1)), int(match[2]))
    if match := _FRACTION.fullmatch(text):
        return _fraction(match)
    if match := _MIXED.fullmatch(text):
        value = int(match[2]) + Fraction(int(match[3]), int(match[4]))
        return Number(-value if match[1] == "-" else value)
    if match := _REPEATING.fullmatch(text):
        return _repeating(match)
    if text.count("/") == 1:
        numerator, denominator = text.split("/")
        return _quotient(read_decimal(numerator), read_decimal(denominator.strip(" .")))
    return read_decimal(text)


def read_decimal(text: str) -> Number | None:
    """Read a whole number or a decimal, with or without a power of ten."""
    match = _DECIMAL.fullmatch(text)
    if match is None or not any(character.isdigit() for character in match[2]):
        return None
    digits = match[2].replace(",", "").replace(" ", "")
    whole, _, decimals = digits.partition(".")
    value = Fraction(int((whole or "0") + decimals), 10 ** len(decimals))
    number = Number(-value if match[1] == "-" else value, len(decimals) or None)
    exponent = match[3] or match[4]
    return _times_power_of_ten(number, int(exponent)) if exponent else number


def read_base(text: str) -> tuple[str, int] | None:
    """Return (digits, base) of `52_8`, `1A_{16}` or `52_{\\text{eight}}`; None for other texts."""
    match = _BASE.fullmatch(text)
    if match is None or len(match[1]) > MAX_DIGITS:
        return None
    base = int(match[2]) if match[2].isdigit() else _BASE_NAMES.get(match[2], 0)
    if not 2 <= base <= 36 or not any(character.isdigit() for character in match[1]):
        return None
    return (match[1].lower(), base) if value_in_base(match[1], base) is not None else None


def value_in_base(digits: str, base: int) -> Fraction | None:
    """Return the value of the digits; None if a digit is too large for the base."""
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
    return Number(-value if match[1] == "-" else value)


def _repeating(match: re.Match[str]) -> Number:
    r"""Read a repeating decimal: 0.1\overline{6} is 0.1666..."""
    fixed, period = match[3], match[4]
    tail = Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
    value = Fraction(int((match[2] or "0") + fixed), 10 ** len(fixed)) + tail
    return Number(-value if match[1] == "-" else value)


def _quotient(numerator: Number | None, denominator: Number | None) -> Number | None:
    if numerator is None or denominator is None or denominator.value == 0:
        return None
    return Number(numerator.value / denominator.value)


def _times_power_of_ten(number: Number, exponent: int) -> Number | None:
    """Multiply by a power of ten, which moves the decimal point: 4.5e-3 has 4 decimals."""
    if abs(exponent) > MAX_EXPONENT:
        return None
    decimals = None if number.decimals is None else number.decimals - exponent
    return Number(number.value * Fraction(10) ** exponent, decimals)
