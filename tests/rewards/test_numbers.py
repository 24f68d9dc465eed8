"""Checks that numbers are read exactly and compared by the documented tolerance."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eepo.rewards.numbers import read_base, read_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("-1,234.50", Fraction(-2469, 2)),
        ("10 000", 10_000),
        (".0000672", Fraction(672, 10**7)),
        ("5.", 5),
        ("+2", 2),
        ("4.5e33", 45 * 10**32),
        ("1E-3", Fraction(1, 1000)),
        (r"4.5 \times 10^{33}", 45 * 10**32),
        (r"4.5\cdot 10^{-2}", Fraction(45, 1000)),
        ("10^{-3}", Fraction(1, 1000)),
        ("-10^2", -100),
        ("3/4", Fraction(3, 4)),
        ("-1./3", Fraction(-1, 3)),
        (r"-\frac{1}{3}", Fraction(-1, 3)),
        (r"3\frac{1}{2}", Fraction(7, 2)),
        (r"-3\frac{1}{2}", Fraction(-7, 2)),
    ],
)
def test_numbers_are_read_exactly(text: str, value: Fraction | int) -> None:
    number = read_number(text)
    assert number is not None
    assert number.value == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "-",
        "x",
        "1,23",
        "1 2",
        "1/0",
        "1e999",
        "10^{99999}",
        "1/2/3",
        "9" * 500,
        "1.2.3",
        "٣",
        "１",
    ],
)
def test_other_texts_are_not_numbers(text: str) -> None:
    assert read_number(text) is None


@pytest.mark.parametrize(
    ("left_text", "right_text", "equal"),
    [
        (".0000672", ".0000673", False),
        ("12345678.5", "12345678.6", False),
        ("0.5", "1/2", True),
        ("1/3", "0.33333333", True),
        ("1/3", "0.3333", False),
        ("1.50", "1.5", True),
        ("2.7778e-6", "2.7779e-6", False),
        ("4.5e33", "4.5e34", False),
        ("0", "0.0000001", False),
        ("1000000", "1000001", False),
    ],
)
def test_tolerance_is_relative_and_keeps_every_digit(
    left_text: str, right_text: str, equal: bool
) -> None:
    left, right = read_number(left_text), read_number(right_text)
    assert left is not None
    assert right is not None
    assert left.equals(right) is equal
    assert right.equals(left) is equal


@given(
    st.decimals(
        allow_nan=False, allow_infinity=False, places=6, min_value=-(10**9), max_value=10**9
    )
)
def test_every_decimal_is_read_exactly(number) -> None:
    read = read_number(f"{number:f}")
    assert read is not None
    assert read.value == Fraction(number)


@given(st.integers(0, 10**9), st.integers(1, 9))
def test_a_changed_last_digit_is_a_different_number(number: int, change: int) -> None:
    text = f"0.{number:09d}"
    other = text[:-1] + str((int(text[-1]) + change) % 10)
    left, right = read_number(text), read_number(other)
    assert left is not None
    assert right is not None
    assert not left.equals(right)


@pytest.mark.parametrize(
    ("text", "digits", "base"),
    [
        ("52_8", "52", 8),
        ("152A_{11}", "152a", 11),
        (r"52_{\text{eight}}", "52", 8),
        ("(101)_2", "101", 2),
    ],
)
def test_numbers_in_a_base_are_read(text: str, digits: str, base: int) -> None:
    assert read_base(text) == (digits, base)


@pytest.mark.parametrize("text", ["89_8", "x_1", "52", "1_1", "5_99", "a_16", "52_x"])
def test_other_texts_are_not_numbers_in_a_base(text: str) -> None:
    assert read_base(text) is None
