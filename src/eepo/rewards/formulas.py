r"""Compares two formulas: math-verify parses them, and their values decide.

Formulas are evaluated at random rational points. Two formulas that agree at all of them to 40
digits are the same. No symbolic simplification is needed, which may fail or take forever.
Sets and inequalities have no value; math-verify compares those by its own rules.
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

from eepo.rewards.latex import ROW_END, bracket_depth

# math-verify warns that its time-outs are off. The grading process has its own CPU limit.
logging.getLogger("math_verify").setLevel(logging.ERROR)

MAX_CHARACTERS = 500  # of a formula: parsing time grows faster than the length
MAX_NESTING = 20  # brackets in brackets: parsing time doubles with each level
NUM_POINTS = 10  # at which two formulas are compared
DIGITS = 50  # of each value
STEP_FUNCTIONS = (floor, ceiling, Mod)

_FUNCTIONS = (
    "arcsin|arccos|arctan|sinh|cosh|tanh|sqrt|sin|cos|tan|cot|sec|csc"
    "|log|ln|exp|gcd|lcm|min|max|mod|pi|deg|det"
)
_PYTHON_NAME = re.compile(rf"\b(?:np|math|sp|sympy)\.|(?<![\\A-Za-z])({_FUNCTIONS})(?![A-Za-z])")
_PYTHON_ROOT = re.compile(r"\\sqrt\s*\(([^()]*)\)")
# Four letters in a row are a word, not a product of variables.
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
_TEXT_COMMAND = re.compile(r"\\(?:text|begin|end|mathbb|operatorname)\s*\{[^{}]*\}")
# Two numbers side by side: the parser would add them.
_ADJACENT_NUMBERS = re.compile(r"(?<![_^\d.])\d[\d.]*\s+\d")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|[A-Za-z]|\\[A-Za-z]+)\s*\^\\circ")
_NEGATIVE_EXPONENT = re.compile(r"\^\s*-\s*(\w)")
# math-verify's own unit rules are off: they remove variables.
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
    """The answer cannot be parsed as mathematics."""


def same_formula(gold: str, answer: str) -> bool:
    """Return whether two formulas are the same. Raise Unparsable if only the gold can be parsed."""
    gold_formula = parse_formula(gold)
    if gold_formula is None:
        return False
    answer_formula = parse_formula(answer)
    if answer_formula is None:
        raise Unparsable
    same = _same_value(gold_formula, answer_formula)
    if same is not None:
        return same
    return verify(
        gold_formula,
        answer_formula,
        float_rounding=12,
        timeout_seconds=None,
        allow_set_relation_comp=True,
    )


def numeric_value(text: str) -> Any:
    """Evaluate a formula without variables to many digits; return None for any other text."""
    formula = parse_formula(text)
    if not isinstance(formula, Expr) or formula.free_symbols:
        return None
    return _evaluate(formula)


def has_variables(text: str) -> bool:
    """Return whether the text is a formula with variables."""
    formula = parse_formula(text) if r"\text" not in text else None
    return isinstance(formula, Expr) and bool(formula.free_symbols)


@lru_cache(maxsize=1024)
def parse_formula(text: str) -> Any:
    """Parse to a SymPy object; return None if that fails.

    Variables are real, and i is the imaginary unit. Python notation such as `np.sqrt(x)**2` is
    accepted, too.
    """
    too_complex = len(text) > MAX_CHARACTERS or bracket_depth(text) > MAX_NESTING
    if too_complex or _ADJACENT_NUMBERS.search(text):
        return None
    text = text.replace(ROW_END.strip(), r"\\")
    text = _PYTHON_NAME.sub(lambda match: "\\" + match[1] + " " if match[1] else "", text)
    if _PROSE.search(_TEXT_COMMAND.sub("", text)):
        return None
    text = _PYTHON_ROOT.sub(r"\\sqrt{\1}", text)
    text = _DEGREES.sub(r"\\left(\\frac{\1 \\pi}{180}\\right)", text)
    text = text.replace("∪", r"\cup ").replace("**", "^").replace("*", r" \cdot ")
    text = _NEGATIVE_EXPONENT.sub(r"^{-\1}", text)
    formulas = parse(f"${text}$", _PARSING, fallback_mode="no_fallback", parsing_timeout=None)
    return _with_real_variables(formulas[0]) if formulas else None


def _with_real_variables(formula: Any) -> Any:
    symbols: set[Symbol] = getattr(formula, "free_symbols", set())
    return formula.xreplace(
        {old: I if old.name == "i" else Symbol(old.name, real=True) for old in symbols}
    )


def _same_value(gold: Any, answer: Any) -> bool | None:
    """Compare by value; return None if values cannot decide.

    That is the case for sets, inequalities, and formulas that are undefined at every point.
    """
    if isinstance(gold, Eq) and isinstance(answer, Eq):
        return _proportional(gold.lhs - gold.rhs, answer.lhs - answer.rhs)
    if isinstance(gold, Eq) or isinstance(answer, Eq):
        return False  # `equivalence.py` has handled `x = 3` against 3 before
    if isinstance(gold, Relational) or isinstance(answer, Relational):
        return None
    if not isinstance(gold, Expr) or not isinstance(answer, Expr):
        return None
    exact = not (gold.has(Float) or answer.has(Float))
    if exact and isinstance(difference := (gold - answer).doit(), Rational):
        return bool(difference == 0)
    num_points = 0
    for gold_value, answer_value, difference in _values_at_points(gold, answer):
        if not _close(gold_value, answer_value, difference, exact):
            return False
        num_points += 1
    return True if num_points else None


def _close(gold: Any, answer: Any, difference: Any, exact: bool) -> bool:
    """Return whether two values are equal up to rounding.

    Formulas with decimals (not `exact`) may differ by a relative 1e-6, or by 1e-12 if one of the
    values is a whole number. `difference` was taken before rounding, so that 10^{25} + π differs
    from 10^{25} + e.
    """
    size = max(abs(gold), abs(answer))
    if exact:
        return bool(abs(difference) <= 1e-40 * max(size, 1e-20))
    has_whole_value = any(
        value.is_real and abs(value - round(value)) < 1e-30
        for value in (gold, answer)
        if abs(value) > 1
    )
    return bool(abs(difference) <= (1e-12 if has_whole_value else 1e-6) * size)


def _proportional(gold: Expr, answer: Expr) -> bool | None:
    """Return whether one equation is a multiple of the other: x - 3 = 0 and 6 = 2x."""
    if gold.free_symbols != answer.free_symbols:
        return False
    ratios = [left / right for left, right, _ in _values_at_points(gold, answer) if right != 0]
    if len(ratios) < 2:
        return None
    return ratios[0] != 0 and all(
        abs(ratio - ratios[0]) <= 1e-15 * abs(ratios[0]) for ratio in ratios
    )


def _values_at_points(gold: Expr, answer: Expr) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the values of both formulas and of their difference at random points.

    Points where a value is not finite are skipped. Without variables there is a single point.
    Points with a negative coordinate count only if all values are real: √(8820x³) equals 42x√(5x),
    but for negative x both are imaginary and differ.
    Step functions, such as ⌊n/5⌋, are compared at whole numbers and at more points.
    """
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=default_sort_key)
    has_steps = gold.has(*STEP_FUNCTIONS) or answer.has(*STEP_FUNCTIONS)
    num_points = (3 if has_steps else 1) * NUM_POINTS if symbols else 1
    rng = random.Random(0)
    for index in range(num_points):
        point = {symbol: _coordinate(rng, index, has_steps) for symbol in symbols}
        values = [_evaluate(formula.subs(point)) for formula in (gold, answer, gold - answer)]
        if any(value is None for value in values):
            continue
        if all(value.is_real for value in values) or all(number > 0 for number in point.values()):
            yield values[0], values[1], values[2]


def _coordinate(rng: random.Random, index: int, whole: bool) -> Rational:
    """Draw a coordinate, mostly between 0 and 3, where powers stay small; some are negative."""
    if whole:
        return Rational(rng.randrange(2, 40) if index % 2 else rng.randrange(300, 2700))
    drawn = Rational(rng.randrange(300, 2700), 997)
    return (drawn, -drawn, drawn, rng.choice((1, -1)) * drawn, 7 * drawn)[index % 5]


def _evaluate(formula: Any) -> Any:
    """Return the value to `DIGITS` digits; None if it is not a finite number."""
    value: Any = formula.doit().evalf(DIGITS)
    return value if value.is_number and value.is_finite else None
