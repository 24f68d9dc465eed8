r"""Decides whether a constant is exactly zero: \sin^2 1 + \cos^2 1 - 1 is, and e^{-1000} is not.

A value that rounds to zero proves nothing by itself. So the number of digits depends on the
formula: a formula with few symbols and moderate values cannot come close to zero without being
zero. `hidden_digits` estimates how close it can come, from the digits that it is written with and
from the orders of magnitude of its powers and functions. For example, tanh 100 hides 87 digits: its
difference to 1 is 2.8e-87. Formulas that can hide more than `MAX_DIGITS` are not decided.
"""

from __future__ import annotations

from typing import Any

import mpmath
from sympy import (
    Abs,
    Expr,
    Float,
    I,
    Integer,
    Pow,
    Rational,
    ceiling,
    cosh,
    coth,
    exp,
    floor,
    im,
    log,
    sinh,
    tanh,
)
from sympy.core.function import Function
from sympy.functions.combinatorial.factorials import CombinatorialFunction
from sympy.functions.elementary.integers import RoundFunction
from sympy.functions.elementary.trigonometric import (
    InverseTrigonometricFunction,
    TrigonometricFunction,
)

from eepo.rewards.points import Point

MARGIN = 40  # digits in addition to those that a formula can hide
MAX_DIGITS = 2000

_LOG10_2 = 0.30103
# The size of the value says how many digits these hide.
_GROWING = (Pow, exp, sinh, cosh, CombinatorialFunction)
# These hide no more digits than their arguments.
_SIMPLE = (Abs, log, RoundFunction, InverseTrigonometricFunction)


def is_zero(constant: Expr, num_hidden: float) -> bool | None:
    """Return whether a constant is exactly zero; None if that cannot be decided.

    `num_hidden` is the number of digits that it can hide.
    """
    if isinstance(constant, Rational):
        return bool(constant == 0)
    value = _significant_value(constant, num_hidden)
    return None if value is None else bool(value == 0)


def round_steps(formula: Any, point: Point) -> Any:
    """Replace floor and ceiling by their values at a point; return None if one is undecided.

    SymPy's floor of tanh 1000 is 1.
    """
    steps = formula.atoms(floor, ceiling)
    while steps:
        step = min(steps, key=lambda node: len(node.atoms(floor, ceiling)))  # the innermost one
        value = _round(step, point)
        if value is None:
            return None
        formula = formula.xreplace({step: value})
        steps = formula.atoms(floor, ceiling)
    return formula


def _round(step: Any, point: Point) -> Integer | None:
    (argument,) = step.args
    constant = argument.subs(point).doit()
    if not isinstance(constant, Expr) or not constant.is_extended_real:
        return None
    num_digits = 20 + int(max(0.0, _magnitude_at(constant, {})))
    nearest = Integer(round(constant.evalf(num_digits)))
    error = _significant_value(constant - nearest, hidden_digits(argument, point) + num_digits)
    if error is None:
        return None
    if isinstance(step, floor):
        return nearest - 1 if error < 0 else nearest
    return nearest + 1 if error > 0 else nearest


def _significant_value(constant: Expr, num_hidden: float) -> Any:
    """Return the value, or 0 if it is smaller than the constant can be without being zero.

    Return None if the constant can hide too many digits, and if it is not a finite number.
    """
    if num_hidden > MAX_DIGITS:
        return None
    # SymPy caches what it needs for a precision, so there should be few different precisions.
    digits = MARGIN * (2 + int(num_hidden) // MARGIN)
    value: Any = constant.evalf(2 * digits, maxn=2 * digits)
    if not value.is_number or not value.is_finite:
        return None
    return 0 if value == 0 or magnitude(value) < -digits else value


def hidden_digits(formula: Any, point: Point) -> float:
    """Return how many digits a formula can hide at a point. The coordinates hide none."""
    if isinstance(formula, Rational):
        return _LOG10_2 * (formula.p.bit_length() + formula.q.bit_length())
    inner = sum(hidden_digits(part, point) for part in formula.args)
    if isinstance(formula, _GROWING):
        return inner + abs(_magnitude_at(formula, point))
    if not isinstance(formula, Function) or isinstance(formula, _SIMPLE):
        return inner
    # Near a maximum a function has twice the correct digits of its argument: cos(1e-300).
    return 3 * inner + sum(_digits_of_function(formula, part, point) for part in formula.args)


def _digits_of_function(function: Any, argument: Any, point: Point) -> float:
    if isinstance(function, TrigonometricFunction):  # tan(100i) is i tanh(100)
        return 10.0 ** min(_magnitude_at(im(argument), point), 9.0) if argument.has(I) else 0.0
    size = 10.0 ** min(_magnitude_at(argument, point), 9.0)
    if isinstance(function, tanh | coth):  # differs from 1 by 2e^{-2x}
        return size
    return size + size**2  # the error function differs from 1 by about e^{-x²}


def _magnitude_at(formula: Any, point: Point) -> float:
    """Return the order of magnitude at a point; 0 if the value is zero or not a number."""
    value = formula.evalf(5, subs=point)
    return magnitude(value) if value.is_number and value.is_finite and value != 0 else 0.0


def magnitude(value: Any) -> float:
    """Return about log10 |value| of a finite number."""
    size: Any = abs(value).evalf(5)
    return _LOG10_2 * float(mpmath.mag(Float(size).num))
