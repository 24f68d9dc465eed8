r"""Whether two formulas are the same: parsed by math-verify, compared by value where they have one.

Values are exact at rational points, so two formulas that agree at several of them to 40 digits are one: no
simplification that may or may not succeed. Sets and inequalities, which have no value, go to math-verify's own rules.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Eq, Expr, Float, I, Mod, Rational, Symbol, ceiling, default_sort_key, floor
from sympy.core.relational import Relational

from eepo.rewards.latex import ROW, nesting

logging.getLogger("math_verify").setLevel(
    logging.ERROR
)  # its time-outs are off: the worker's kernel timer is ours

MAX_CHARACTERS = 500  # of a formula: the parser's time grows faster than its length
MAX_NESTING = 20  # and doubles with every bracket in a bracket
NUM_POINTS = 10  # at which two formulas are compared
DIGITS = 50
STEPS = (floor, ceiling, Mod)

_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|gcd|lcm|min|max|mod|pi|deg|det"
_PYTHON = re.compile(rf"\b(?:np|math|sp|sympy)\.|(?<![\\A-Za-z])({_FUNCTIONS})(?![A-Za-z])")
_PYTHON_ROOT = re.compile(r"\\sqrt\s*\(([^()]*)\)")
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")  # no product of variables is written like this
_APART = re.compile(r"(?<![_^\d.])\d[\d.]*\s+\d")  # the parser would add them up
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|[A-Za-z]|\\[A-Za-z]+)\s*\^\\circ")
_PARSING = [
    LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            basic_latex=True,
            units=False,
            malformed_operators=True,
            nits=True,
            boxed="none",
            equations=False,
        )
    )
]


class Unparsable(Exception):
    """The answer is no mathematics that we can read."""


def same_formula(gold: str, answer: str) -> bool:
    expected = parsed(gold)
    if expected is None:
        return False
    given = parsed(answer)
    if given is None:
        raise Unparsable
    decided = _same_value(expected, given)
    if decided is None:
        decided = verify(
            expected, given, float_rounding=12, timeout_seconds=None, allow_set_relation_comp=True
        )
    return decided


def value_of(text: str) -> Any:
    """Of a formula without variables, to many digits; None if it is something else."""
    formula = parsed(text)
    if not isinstance(formula, Expr) or formula.free_symbols:
        return None
    return _number(formula)


def has_variables(text: str) -> bool:
    formula = parsed(text) if r"\text" not in text else None
    return isinstance(formula, Expr) and bool(formula.free_symbols)


@lru_cache(maxsize=1024)
def parsed(text: str) -> Any:
    """A SymPy object, or None. Real variables, and i is the imaginary unit."""
    if len(text) > MAX_CHARACTERS or nesting(text) > MAX_NESTING or _APART.search(text):
        return None
    text = _PYTHON.sub(
        lambda match: "\\" + match[1] + " " if match[1] else "", text.replace(ROW.strip(), r"\\")
    )
    if _PROSE.search(re.sub(r"\\(?:text|begin|end|mathbb|operatorname)\s*\{[^{}]*\}", "", text)):
        return None
    text = _PYTHON_ROOT.sub(r"\\sqrt{\1}", text)
    text = _DEGREES.sub(r"\\left(\\frac{\1 \\pi}{180}\\right)", text)
    text = re.sub(
        r"\^\s*-\s*(\w)",
        r"^{-\1}",
        text.replace("∪", r"\cup ").replace("**", "^").replace("*", r" \cdot "),
    )
    found = parse(f"${text}$", _PARSING, fallback_mode="no_fallback", parsing_timeout=None)
    return _with_real_variables(found[0]) if found else None


def _with_real_variables(formula: Any) -> Any:
    symbols: set[Symbol] = getattr(formula, "free_symbols", set())
    return formula.xreplace(
        {old: I if old.name == "i" else Symbol(old.name, real=True) for old in symbols}
    )


def _same_value(gold: Any, answer: Any) -> bool | None:
    """None where values do not decide: sets, relations, formulas that are undefined at every point."""
    if isinstance(gold, Eq) and isinstance(answer, Eq):
        return _proportional(gold.lhs - gold.rhs, answer.lhs - answer.rhs)
    if isinstance(gold, Eq) or isinstance(answer, Eq):
        return False  # what may stand for an equation is settled before
    if isinstance(gold, Relational) or isinstance(answer, Relational):
        return None
    if not isinstance(gold, Expr) or not isinstance(answer, Expr):
        return None
    exact = not (gold.has(Float) or answer.has(Float))
    if exact and isinstance(difference := (gold - answer).doit(), Rational):
        return bool(difference == 0)
    seen = 0
    for left, right, gap in _values(gold, answer):
        if not _close(left, right, gap, exact):
            return False
        seen += 1
    return True if seen else None


def _close(left: Any, right: Any, gap: Any, exact: bool) -> bool:
    """`gap` is their difference, taken before rounding: 10^{25} + π is not 10^{25} + e."""
    size = max(abs(left), abs(right))
    if exact:
        return bool(abs(gap) <= 1e-40 * max(size, 1e-20))
    whole = any(
        value.is_real and abs(value - round(value)) < 1e-30
        for value in (left, right)
        if abs(value) > 1
    )
    return bool(abs(gap) <= (1e-12 if whole else 1e-6) * size)


def _proportional(gold: Expr, answer: Expr) -> bool | None:
    """One equation is a multiple of the other: x - 3 = 0 and 6 = 2x."""
    if gold.free_symbols != answer.free_symbols:
        return False
    ratios = [left / right for left, right, _ in _values(gold, answer) if right != 0]
    if len(ratios) < 2:
        return None
    return ratios[0] != 0 and all(
        abs(ratio - ratios[0]) <= 1e-15 * abs(ratios[0]) for ratio in ratios
    )


def _values(gold: Expr, answer: Expr) -> Iterator[tuple[Any, Any, Any]]:
    """Both and their difference at random points (one if there is no variable), where they are finite.

    Where a variable is negative only real values count: √(8820x³) is 42x√(5x), but there both are imaginary.
    Steps, such as those of ⌊n/5⌋, only show at whole numbers.
    """
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=default_sort_key)
    rng, steps = random.Random(0), gold.has(*STEPS) or answer.has(*STEPS)
    for place in range((3 if steps else 1) * NUM_POINTS if symbols else 1):
        point = {symbol: _coordinate(rng, place, steps) for symbol in symbols}
        found = [_number(formula.subs(point)) for formula in (gold, answer, gold - answer)]
        real = all(value is not None and value.is_real for value in found)
        if real or (
            all(value is not None for value in found) and all(value > 0 for value in point.values())
        ):
            yield found[0], found[1], found[2]


def _coordinate(rng: random.Random, place: int, steps: bool) -> Rational:
    """Mostly between 0 and 3, where powers stay small; some negative, some larger."""
    if steps:
        return Rational(rng.randrange(2, 40) if place % 2 else rng.randrange(300, 2700))
    drawn = Rational(rng.randrange(300, 2700), 997)
    return (drawn, -drawn, drawn, rng.choice((1, -1)) * drawn, 7 * drawn)[place % 5]


def _number(formula: Any) -> Any:
    value: Any = formula.doit().evalf(DIGITS)
    return value if value.is_number and value.is_finite else None
