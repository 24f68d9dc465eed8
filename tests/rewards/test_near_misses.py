r"""Checks pairs of answers that differ by very little, and pairs that only look different.

Both directions are checked unless the roles of gold and answer matter.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from sympy import Symbol, expand

from eepo.rewards.math import grade
from eepo.rewards.points import draw_points, seeded_by

# the same in both directions
SAME = [
    # floor and ceiling
    (r"\lceil x \rceil", r"-\lfloor -x \rfloor"),
    (r"\lfloor x + 1 \rfloor", r"\lfloor x \rfloor + 1"),
    (r"\lfloor 2x \rfloor", r"\lfloor x \rfloor + \lfloor x + \frac{1}{2} \rfloor"),
    (r"\lceil n/2 \rceil", r"\lfloor (n+1)/2 \rfloor"),
    (r"\lfloor \frac{2n-1}{5} \rfloor", r"\lceil \frac{2n-5}{5} \rceil"),
    (r"m - \lfloor m/2 \rfloor", r"\lceil m/2 \rceil"),
    ("0", r"\lfloor \tanh 1000 \rfloor"),
    ("2", r"\lfloor 2.9999999999999999999999 \rfloor"),
    # exact values
    ("0", r"\sin(\pi)"),
    ("0", r"\sin^2 1 + \cos^2 1 - 1"),
    ("0", r"\sqrt{2}+\sqrt{3}-\sqrt{5+2\sqrt{6}}"),
    (r"\frac{\pi}{4}", r"\arctan\frac{1}{2}+\arctan\frac{1}{3}"),
    ("((((((((((5))))))))))", "5"),
    (r"\tanh 100", r"\frac{e^{200}-1}{e^{200}+1}"),
    (r"2\sinh 1000", r"e^{1000}-e^{-1000}"),
    ("e^{-1000}", r"\frac{1}{e^{1000}}"),
    ("10^{20}+1", "100000000000000000001"),
    (r"2^{n+1}", r"2 \cdot 2^n"),
    ("n!", "n(n-1)!"),
    (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"),
    (r"\binom{1000000}{2}", "499999500000"),
    ("y = e^{500x}", "e^{500x} - y = 0"),
    (r"\tan\frac{x}{2}", r"\frac{\sin x}{1+\cos x}"),
    (r"\sqrt{x^2}", "|x|"),
    (r"0.5x", r"\frac{x}{2}"),
    (r"\frac{1}{3}x", "0.33333333x"),
    (r"3.14159265 r^2", r"\pi r^2"),
    ("y = x", "2y = 2x"),
    ("f(x) + 1", "1 + f(x)"),
    # letters
    ("mghR", "Rhgm"),
    ("mghR", r"m \cdot g \cdot h \cdot R"),
    (r"\frac{mghR}{2}", r"\frac{1}{2} R h g m"),
    ("abcd", "dcba"),
    ("2abcd + 1", "1 + 2dcab"),
    ("2abxy", "2yxba"),
    ("wxyz", "zyxw"),
    ("qvBL", "BLqv"),
    ("y' = ry", "ry = y'"),
    (r"\gamma x", r"x \gamma"),
    # ratios and times
    ("1:2", "2:4"),
    ("1:2:3", "2:4:6"),
    (r"\sqrt{2}:1", r"2:\sqrt{2}"),
    ("a:b", "2a:2b"),
    ("1:2", r"\frac{1}{2}"),
    ("1:10", "1/10"),
    ("3:4", "3{:}4"),
    ("3:4", r"3\mathbin{:}4"),
    ("4:30", "4{:}30"),
    ("05:00", "5:00"),
    (r"4:51:06 \text{ p.m.}", r"4{:}51{:}06 \text{ p.m.}"),
    ("8:30", r"8:30 \text{ a.m.}"),
    # currencies
    (r"\$5", "5"),
    (r"\$5", "5 USD"),
    (r"\$5", r"5\$"),
    ("5 euros", "€5"),
    (r"5 \text{ euros}", "5"),
    ("£5", "5 pounds"),
    ("5 lbs", "5 pounds"),
    # domains
    ("x^2 + 1", r"x^2 + 1 \text{ for all } x \in \mathbb{R}"),
    ("x^2", r"x^2, x \in \mathbb{R}"),
    ("f(x) = x^2", r"f(x) = x^2 \text{ for all real } x"),
    ("cx", r"f(x) = cx, \quad \forall x \in \mathbb{R}"),
    (r"f(x)=x \text{ for all } x \in \mathbb{R}", r"f(x)=x \text{ for all real numbers } x"),
    (r"f(n) = n \text{ for all integers } n", "n"),
    (r"\frac{\pi}{2} + k\pi, k \in \mathbb{Z}", r"\frac{\pi}{2} + k\pi"),
    (r"k\pi", r"\pi k \text{ where } k \in \mathbb{Z}"),
    # names
    (r"\frac{3}{10}", r"P(\text{both red}) = \frac{3}{10}"),
    ("0.3", r"\text{P}(\text{both red}) = \frac{3}{10}"),
    ("5", r"n(\text{red}) = 5"),
    ("5", r"\text{Area} = 5"),
    ("5", r"\text{Area}(ABC) = 5"),
    (r"\frac{1}{3}", r"P(X = 2) = \frac{1}{3}"),
    (r"\frac{1}{3}", r"P(A \cap B) = \frac{1}{3}"),
]

# different in both directions
DIFFERENT = [
    # floor and ceiling
    (r"\lfloor x \rfloor", r"\lceil x \rceil"),
    (r"\lfloor x \rfloor", "x"),
    (r"x - \lfloor x \rfloor", "0"),
    ("x^2", r"\lfloor x \rfloor^2"),
    (r"\lfloor 2x \rfloor", r"2\lfloor x \rfloor"),
    (r"\lceil x \rceil", r"\lfloor x \rfloor + 1"),
    ("-1", r"\lfloor x \rfloor + \lfloor -x \rfloor"),
    (r"\lfloor n \rfloor", r"\lceil n \rceil"),
    (r"\lfloor 2n \rfloor", r"2\lfloor n \rfloor"),
    ("0", r"\lfloor \frac{x}{1000} \rfloor"),
    ("0", r"\lfloor x / 10^9 \rfloor"),
    (r"\lfloor n/2 \rfloor", r"\lfloor n/2 \rfloor + (n-2)(n-3)(n-4)(n-5)(n-6)"),
    (r"\lfloor n/2 \rfloor", r"\lceil n/2 \rceil"),
    ("1", r"\lfloor \tanh 1000 \rfloor"),
    ("3", r"\lfloor 2.9999999999999999999999 \rfloor"),
    # a value that is only close
    ("0", "e^{-1000}"),
    ("0", "e^{-10^6}"),
    ("0", r"\frac{1}{1000!}"),
    ("0", r"\sin(10^{-100})"),
    ("1", r"\tanh 100"),
    ("1", r"\tanh(10^5)"),
    ("1", r"\tanh(100.5)"),
    ("1", r"\frac{\sinh 1000}{\cosh 1000}"),
    ("1", "1 + e^{-5000}"),
    ("1", r"\cos(10^{-300})"),
    ("1", r"\sin(\frac{\pi}{2} + 10^{-300})"),
    ("1", r"\sqrt{0.9999999}"),
    ("2", r"\sum_{n=0}^{1000} 2^{-n}"),
    ("e", r"\sum_{n=0}^{100} \frac{1}{n!}"),
    (r"\frac{\pi}{2}", r"\arctan(e^{1000})"),
    (r"\frac{\sqrt{\pi}}{2}", r"\int_0^{100} e^{-x^2} dx"),
    ("262537412640768744", r"e^{\pi\sqrt{163}}"),
    ("x", "x + 10^{-100}"),
    ("x", r"x \cos(10^{-30})"),
    ("x", r"x \tanh(1000 + x^2)"),
    ("x", r"x \tanh(10^6)"),
    ("y = x", "y = x + 10^{-20}"),
    ("y = x", "y = (1 + 10^{-20})x"),
    ("x > 0", "x > e^{-1000}"),
    ("x > 0", "x > 10^{-20}"),
    (r"(0, \infty)", "x > e^{-1000}"),
    ("x < 1", r"x < \tanh 100"),
    # equal only at some points
    ("x", r"x + \sin(997 \pi x)"),
    ("x^2", r"x^2 + \prod_{k=1}^{20}(x-k)"),
    ("100 - x", "|x - 100|"),
    ("100 - x", r"\sqrt{(x-100)^2}"),
    ("100", r"\max(x, 100)"),
    ("e^x + 100 - x", "e^x + |x - 100|"),
    ("x", r"\arctan(\tan x)"),
    ("|x|", "x"),
    # letters
    ("R - r", "0"),
    (r"\pi R^2", r"\pi r^2"),
    ("kT/2", "kt/2"),
    ("A + a", "2a"),
    ("nRT", "nrt"),
    ("mghR", "mghr"),
    ("mghR", "mgh"),
    ("y' - y", "0"),
    ("y'' = y'", "y' = y"),
    (r"\Gamma - \gamma", "0"),
    ("east", "seat"),
    ("east", "e a s t"),
    (r"\text{north}", "thorn"),
    ("north", "thorn"),
    ("ABCD", "DCBA"),
    ("John beats Mary", "Mary beats John"),
    ("2 cats 3 ants", "3 cats 2 ants"),
    ("3 xyz", "3"),
    ("3 abc", "3"),
    ("1", "1^{wrong}"),
    # ratios and times
    ("8:30", "8:31"),
    ("8:30", "8:30:01"),
    ("8:15", "16:30"),
    ("3:4", "4:3"),
    ("3:4", "3:4:5"),
    ("1:2", "0:0"),
    ("1:2:3", "2:4:7"),
    ("a:b", "b:a"),
    # currencies
    (r"\$5", r"5\text{ euros}"),
    (r"\$5", "€5"),
    ("$5", "5 euros"),
    ("£5", r"\$5"),
    ("£5", "5 lbs"),
    ("¥5", "5 dollars"),
    (r"\$5", "5 cents"),
    # domains
    (r"x^2 \text{ for all } x \in \mathbb{R}", r"x^2 \text{ for all } x \in \mathbb{Z}"),
    ("x^2", r"x^3 \text{ for all } x \in \mathbb{R}"),
    ("42", r"42 \text{ for all } x, 43 \text{ otherwise}"),
    ("42", r"42 \text{ for all } x \text{ but not here}"),
    (r"x = 1, y \in \mathbb{R}", "x = 1"),
    ("5", r"5 \text{ for some } x"),
    # names
    (r"P(\text{both red}) = \frac{3}{10}", r"P(\text{both blue}) = \frac{3}{10}"),
    (r"\frac{3}{10}", r"P(\text{both red}) = \frac{3}{11}"),
    ("5", r"\text{not} = 5"),
]
# Here the gold answer decides how the other one is read.
SAME_FOR_GOLD = [("16:60", "4:15"), ("3:4", "15:20"), ("19:60", "38:120")]
DIFFERENT_FROM_GOLD = [
    ("8:30", "16:60"),
    ("8:30", "4/15"),
    ("8:30", "4:15"),
    ("4:15", "16:60"),
    ("9:24", "3:8"),
    ("9:24", "3/8"),
]


def both_directions(pairs: list[tuple[str, str]]) -> list[Any]:
    """Return the pairs, and with exchanged roles for the slow lane."""
    return [*pairs, *(pytest.param(*pair[::-1], marks=pytest.mark.slow) for pair in pairs)]


@pytest.mark.parametrize(("gold", "answer"), both_directions(SAME) + SAME_FOR_GOLD)
def test_answers_that_only_look_different_are_accepted(gold: str, answer: str) -> None:
    assert grade(gold, rf"\boxed{{{answer}}}").correct


@pytest.mark.parametrize(("gold", "answer"), both_directions(DIFFERENT) + DIFFERENT_FROM_GOLD)
def test_near_misses_are_rejected(gold: str, answer: str) -> None:
    assert not grade(gold, rf"\boxed{{{answer}}}").correct


def test_a_polynomial_with_the_points_as_roots_is_rejected() -> None:
    """The points for (x, x) are known. An answer that is wrong elsewhere gets other points."""
    x = Symbol("x", real=True)
    points = [p[x] for p in draw_points(x, x, seeded_by("x", "x")) if p[x].is_Rational]
    factors = "".join(f"(x-{p.p}/{p.q})".replace("--", "+") for p in points)
    assert len(points) > 5
    assert not grade("x", rf"\boxed{{x+{factors}}}").correct
    assert grade(f"x+{factors}", rf"\boxed{{{factors}+x}}").correct


def test_points_depend_on_both_texts_and_are_repeatable() -> None:
    x = Symbol("x", real=True)
    draws = [list(draw_points(x, x, seeded_by(*pair))) for pair in ("ab", "ab", "ac", "cb")]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2] != draws[3] != draws[0]


def test_points_are_rational_and_irrational_of_both_signs() -> None:
    x = Symbol("x", real=True)
    values = [point[x] for point in draw_points(x, x + 1, random.Random(0))]
    assert {value.is_rational for value in values} == {True, False}
    assert {value.is_positive for value in values} == {True, False}


@pytest.mark.parametrize("seed", range(6))
def test_expanded_polynomials_are_accepted_and_changed_ones_rejected(seed: int) -> None:
    rng = random.Random(seed)
    x, y = Symbol("x"), Symbol("y")
    product = 1
    for _ in range(3):
        product *= rng.randint(1, 9) * x + rng.randint(-9, 9) * y + rng.randint(1, 9)
    gold = str(product).replace("**", "^")
    right, wrong = (
        str(polynomial).replace("**", "^") for polynomial in (expand(product), expand(product + x))
    )
    assert grade(gold, rf"\boxed{{{right}}}").correct
    assert not grade(gold, rf"\boxed{{{wrong}}}").correct


@pytest.mark.parametrize("num_digits", [400, 401, 1000, 4000])
def test_golds_with_hundreds_of_digits_are_graded(num_digits: int) -> None:
    gold = "7" * num_digits
    fits_in_a_box = num_digits < 2000
    for typed_gold in (gold, int(gold)):
        assert not grade(typed_gold, r"\boxed{5}").correct
        assert not grade(typed_gold, rf"\boxed{{{gold[:-1]}8}}").correct
        assert grade(typed_gold, rf"\boxed{{{gold}}}").correct == fits_in_a_box
    assert not grade("5", rf"\boxed{{{gold}}}").correct
