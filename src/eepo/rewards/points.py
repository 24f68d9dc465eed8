"""Draws the points at which two formulas are compared.

The points depend on both texts, so no answer can be built that is right only at the points.
They have rational and irrational coordinates of both signs, near zero and beyond the largest number
in the formulas: |x - 100| equals 100 - x only up to 100. Formulas with floor or ceiling are also
compared at whole numbers, where ⌈x⌉ equals ⌊x⌋ but not ⌊x⌋ + 1.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from sympy import (
    Expr,
    Mod,
    Pow,
    Rational,
    Symbol,
    ceiling,
    default_sort_key,
    exp,
    floor,
    postorder_traversal,
    preorder_traversal,
    sqrt,
)
from sympy.functions.combinatorial.factorials import CombinatorialFunction

Point = dict[Symbol, Expr]

NUM_POINTS = 10
NUM_STEP_POINTS = 30  # for formulas with floor or ceiling
MAX_SCALE = 10**30  # of coordinates
MAX_EXPONENT = 20_000  # larger powers and factorials are not computed

STEP_FUNCTIONS = (floor, ceiling, Mod)
# By convention these are whole numbers in formulas with floor or ceiling, such as ⌊n/2⌋.
WHOLE_NUMBER_NAMES = ("k", "m", "n", "K", "M", "N")


def seeded_by(gold: str, answer: str) -> random.Random:
    """Return the random numbers of a comparison: always the same for the same texts."""
    return random.Random(f"{gold}\0{answer}".encode("utf-8", "surrogatepass"))


def draw_points(gold: Expr, answer: Expr, rng: random.Random) -> Iterator[Point]:
    """Yield points for the variables of two formulas; a single empty one without variables."""
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=default_sort_key)
    if not symbols:
        yield {}
        return
    far = 3 * (1 + min(max(_largest_number(gold), _largest_number(answer)), MAX_SCALE))
    has_steps = gold.has(*STEP_FUNCTIONS) or answer.has(*STEP_FUNCTIONS)
    whole = _whole_numbers(gold, answer) if has_steps else set()
    whole |= _factorial_arguments(gold) | _factorial_arguments(answer)
    for index in range(NUM_STEP_POINTS if has_steps else NUM_POINTS):
        point: Point = {}
        for symbol in symbols:
            if symbol in whole:
                point[symbol] = _whole_coordinate(rng, index, far)
            else:
                draw = _step_coordinate if has_steps else _coordinate
                point[symbol] = draw(rng, index, far)
        if not is_too_large(gold, point) and not is_too_large(answer, point):
            yield point


def _coordinate(rng: random.Random, index: int, far: int) -> Expr:
    """Draw a coordinate, mostly between 0 and 3, where powers stay small."""
    sign = rng.choice((1, -1))
    near = _irrational(rng) if index in (2, 6, 9) else _rational(rng)
    return (near, -near, near, sign * near, 7 * near, far * near, -near, sign * far * near,
            near, sign * 7 * near)[index]  # fmt: skip


def _whole_coordinate(rng: random.Random, index: int, far: int) -> Expr:
    return Rational(rng.randrange(*((2, 40), (300, 2700), (far, 10**6 * far))[index % 3]))


def _step_coordinate(rng: random.Random, index: int, far: int) -> Expr:
    """Draw whole numbers and others in turn, of three orders of magnitude."""
    sign = rng.choice((1, -1))
    scale = (1, 10, far)[index // 2 % 3]
    if index % 2:
        return Rational(sign * rng.randrange(1, 10 * scale))
    return sign * scale * (_irrational(rng) if index % 4 else _rational(rng))


def _rational(rng: random.Random) -> Rational:
    """Draw a fraction between 0.3 and 2.7."""
    denominator = rng.randrange(10**5, 10**6)
    return Rational(rng.randrange(3 * denominator, 27 * denominator), 10 * denominator)


def _irrational(rng: random.Random) -> Expr:
    """Draw a square root between 0.5 and 2.7. No square ends in 7."""
    return sqrt(10 * rng.randrange(25_000, 700_000) + 7) / 1000


def _largest_number(formula: Expr) -> int:
    numbers = (abs(node) for node in preorder_traversal(formula) if isinstance(node, Rational))
    return max((max(number.p, number.q) for number in numbers), default=1)


def _whole_numbers(gold: Expr, answer: Expr) -> set[Symbol]:
    """Return the variables that stand for whole numbers.

    There are none if floor or ceiling has no effect on whole numbers, as in ⌊2n⌋.
    """
    symbols: set[Any] = gold.free_symbols | answer.free_symbols
    named = {symbol for symbol in symbols if symbol.name in WHOLE_NUMBER_NAMES}
    as_integers = {symbol: Symbol(symbol.name, integer=True) for symbol in named}
    for formula in (gold, answer):
        steps = formula.atoms(*STEP_FUNCTIONS)
        if len(formula.xreplace(as_integers).atoms(*STEP_FUNCTIONS)) < len(steps):
            return set()
    return named


def _factorial_arguments(formula: Expr) -> set[Any]:
    """Return the variables in factorials and binomial coefficients: they are whole numbers."""
    functions = formula.atoms(CombinatorialFunction)
    return {symbol for function in functions for symbol in function.free_symbols}


def is_too_large(formula: Any, point: Point) -> bool:
    """Return whether a power or a factorial is too large to be computed, as in 9^{9^9}."""
    for node in postorder_traversal(formula):  # inner exponents first: they must be small, too
        if isinstance(node, Pow | exp | CombinatorialFunction):
            # The last argument: n of n!, and k of a binomial coefficient.
            size: Any = node.exp if isinstance(node, Pow | exp) else node.args[-1]
            size = size.evalf(5, subs=point)
            if size.is_number and bool(abs(size) > MAX_EXPONENT):
                return True
    return False
