r"""Compares two formulas: math-verify parses them, and their values decide.

Formulas are evaluated at points that are drawn from both texts (`points.py`). They are the same if
their difference is exactly zero at all points (`zero_test.py`). Decimals are read as fractions. No
symbolic simplification is needed, which may fail or take forever.
Sets and inequalities have no value; math-verify compares those by its own rules.
"""

from __future__ import annotations

import logging
import random
import re
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify
from math_verify.grader import should_treat_as_complex
from mpmath.libmp import NoConvergence
from sympy import Eq, Expr, Float, I, Rational, Symbol
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.polys.polyerrors import BasePolynomialError

from eepo.rewards.latex import ROW_END, bracket_depth
from eepo.rewards.points import STEP_FUNCTIONS, Point, draw_points, is_too_large, seeded_by
from eepo.rewards.words import have_long_products, long_runs
from eepo.rewards.zero_test import MARGIN, MAX_DIGITS, hidden_digits, is_zero, round_steps

# math-verify warns that its time-outs are off. The grading process has its own CPU limit.
logging.getLogger("math_verify").setLevel(logging.ERROR)

MAX_CHARACTERS = 500  # of a formula: parsing time grows faster than the length
MAX_NESTING = 20  # brackets in brackets: parsing time grows with each level
MAX_ROUND_NESTING = 12  # of brackets other than braces, which take longer
MAX_BARS = 20  # of absolute values
DIGITS = 50  # of a value
TOLERANCE = 1e-6  # of formulas with decimals, relative to the value


_FUNCTIONS = (
    "arcsin|arccos|arctan|sinh|cosh|tanh|sqrt|sin|cos|tan|cot|sec|csc"
    "|log|ln|exp|gcd|lcm|min|max|mod|pi|deg|det"
)
_PYTHON_NAME = re.compile(rf"\b(?:np|math|sp|sympy)\.|(?<![\\A-Za-z])({_FUNCTIONS})(?![A-Za-z])")
_PYTHON_ROOT = re.compile(r"\\sqrt\s*\(([^()]*)\)")
_LETTERS = re.compile(r"(?<![\\A-Za-z_])(?<!_\{)[A-Za-z]{2,}")
# The parser reads `d c` as a differential.
_LETTER_D = re.compile(r"(?<![\\A-Za-z])d(?![A-Za-z_])")
# The parser ignores primes, and reads both gammas as Euler's constant.
_PRIMES = re.compile(r"(?<![\\A-Za-z])([A-Za-z])('{1,3})")
_GAMMA = re.compile(r"\\([gG])amma(?![A-Za-z]|\s*[_(])")
# Two numbers side by side: the parser would add them.
_ADJACENT_NUMBERS = re.compile(r"(?<![_^\d.])\d[\d.]*\s+\d")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|[A-Za-z]|\\[A-Za-z]+)\s*\^\\circ")
_DOUBLE_BRACES = re.compile(r"\{(\{[^{}]*\})\}")
_NEGATIVE_EXPONENT = re.compile(r"\^\s*-\s*(\w)")
# The parser's unit rules are off: they remove variables. Capital letters stay capital.
_NORMALIZATION = NormalizationConfig(
    basic_latex=True,
    units=False,
    malformed_operators=True,
    nits=True,
    boxed="none",
    equations=False,
)
_CONVERSION = ConversionConfig(lowercase_symbols=False)

# What SymPy raises on malformed input. MemoryError is not listed: it must end the grading process.
SYMPY_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, RuntimeError,
    TypeError, ValueError, BasePolynomialError, NoConvergence,
)  # fmt: skip


class Unparsable(Exception):
    """The answer cannot be parsed as mathematics."""


def same_formula(gold: str, answer: str) -> bool:
    """Return whether two formulas are the same. Raise Unparsable if only the gold can be parsed."""
    gold, answer = _without_python(gold), _without_python(answer)
    with_products = have_long_products(gold, answer)
    gold_formula = parse_formula(gold, with_products)
    if gold_formula is None:
        return False
    answer_formula = parse_formula(answer, with_products)
    if answer_formula is None:
        raise Unparsable
    if is_too_large(gold_formula, {}) or is_too_large(answer_formula, {}):
        return bool(gold_formula == answer_formula)
    same = _same_value(gold_formula, answer_formula, seeded_by(gold, answer))
    return _verify(gold_formula, answer_formula) if same is None else same


def _verify(gold: Any, answer: Any) -> bool:
    """Compare sets and inequalities with math-verify.

    It drops everything below the given precision, so the precision must cover all hidden digits.
    """
    gold, answer = _with_fractions(gold), _with_fractions(answer)
    num_hidden = hidden_digits(gold, {}) + hidden_digits(answer, {})
    if num_hidden > MAX_DIGITS:
        return False
    return verify(
        gold,
        answer,
        float_rounding=12,
        numeric_precision=MARGIN + int(num_hidden),
        timeout_seconds=None,
        allow_set_relation_comp=True,
    )


def numeric_value(text: str) -> Any:
    """Evaluate a formula without variables to many digits; return None for any other text."""
    formula = parse_formula(_without_python(text))
    if not isinstance(formula, Expr) or formula.free_symbols:
        return None
    return _value(_at(_exact(formula), {}), DIGITS)


def has_variables(text: str) -> bool:
    """Return whether the text is a formula with variables."""
    formula = parse_formula(_without_python(text)) if r"\text" not in text else None
    return isinstance(formula, Expr) and bool(formula.free_symbols)


def _without_python(text: str) -> str:
    """Rewrite Python's names of functions: `np.sqrt` becomes `\\sqrt`."""
    return _PYTHON_NAME.sub(lambda match: "\\" + match[1] + " " if match[1] else "", text)


@lru_cache(maxsize=1024)
def parse_formula(text: str, with_products: bool = False) -> Any:
    """Parse to a SymPy object; return None if that fails.

    Variables are real, and i is the imaginary unit. Python's operators, as in `x**2`, are accepted.
    Four or more letters in a row are a word, unless `with_products` says that they are variables.
    """
    if _is_too_complex(text) or _ADJACENT_NUMBERS.search(text):
        return None
    if not with_products and long_runs(text):
        return None
    text = text.replace(ROW_END.strip(), r"\\")
    text = _PYTHON_ROOT.sub(r"\\sqrt{\1}", text)
    text = _DEGREES.sub(r"\\left(\\frac{\1 \\pi}{180}\\right)", text)
    text = text.replace("∪", r"\cup ").replace("**", "^").replace("*", r" \cdot ")
    text = _NEGATIVE_EXPONENT.sub(r"^{-\1}", text)
    while _DOUBLE_BRACES.search(text):
        text = _DOUBLE_BRACES.sub(r"\1", text)
    if with_products:
        text = _LETTERS.sub(lambda letters: " ".join(letters[0]), text)
        text = _LETTER_D.sub("d_{variable}", text)
    text = _PRIMES.sub(lambda match: f"{match[1]}_{{prime{len(match[2])}}}", text)
    text = _GAMMA.sub(r"\1_{gamma}", text)
    try:
        is_real = not should_treat_as_complex(text)
        formula = latex2sympy(text, None, is_real, False, _NORMALIZATION, _CONVERSION)
    except Exception as error:
        # The parser raises a plain Exception for a syntax error.
        if type(error) is not Exception and not isinstance(error, SYMPY_ERRORS):
            raise
        return None
    return _with_real_variables(formula)


def _is_too_complex(text: str) -> bool:
    """Return whether parsing would take too long."""
    return (
        len(text) > MAX_CHARACTERS
        or bracket_depth(text) > MAX_NESTING
        or bracket_depth(text, "([", ")]") > MAX_ROUND_NESTING
        or text.count("|") > MAX_BARS
    )


def _with_real_variables(formula: Any) -> Any:
    """Make all variables real. An unknown function, such as f(x + 1), becomes a variable, too."""
    functions = formula.atoms(AppliedUndef) if isinstance(formula, Expr | Relational) else set()
    formula = formula.xreplace({f: Symbol(str(f.expand())) for f in functions})
    symbols: set[Symbol] = getattr(formula, "free_symbols", set())
    return formula.xreplace(
        {old: I if old.name == "i" else Symbol(old.name, real=True) for old in symbols}
    )


def _with_fractions(formula: Any) -> Any:
    """Replace the decimals of a formula by exact fractions."""
    return formula.xreplace({number: Rational(str(number)) for number in formula.atoms(Float)})


def _same_value(gold: Any, answer: Any, rng: random.Random) -> bool | None:
    """Compare by value; return None if values cannot decide.

    That is the case for sets, inequalities, and formulas that are undefined at every point.
    """
    if isinstance(gold, Eq) and isinstance(answer, Eq):
        return _proportional(gold.lhs - gold.rhs, answer.lhs - answer.rhs, rng)
    if isinstance(gold, Eq) or isinstance(answer, Eq):
        return False  # `equivalence.py` has handled `x = 3` against 3 before
    if isinstance(gold, Relational) or isinstance(answer, Relational):
        return None
    if not isinstance(gold, Expr) or not isinstance(answer, Expr):
        return None
    comparison = _Comparison(gold, answer)
    difference = comparison.gold - comparison.answer
    if difference == 0 or (comparison.is_exact and isinstance(difference, Rational)):
        return bool(difference == 0)
    agreed = False
    for point in draw_points(comparison.gold, comparison.answer, rng):
        agrees = comparison.agrees_at(point)
        if agrees is False:
            return False
        agreed = agreed or agrees is True
    if not agreed and comparison.hidden_digits_at({}) > MAX_DIGITS:
        return False
    return agreed or None


class _Comparison:
    """Compares two formulas, with decimals as fractions, at single points."""

    def __init__(self, gold: Expr, answer: Expr) -> None:
        self.rounded = gold.has(Float), answer.has(Float)
        self.is_exact = not any(self.rounded)
        self.gold, self.answer = (_exact(side) for side in (gold, answer))

    def agrees_at(self, point: Point) -> bool | None:
        """Return whether the values are equal at a point; None if the point does not count.

        Values must be finite. At a point with a negative coordinate they must also be real:
        √(8820x³) equals 42x√(5x), but for negative x both are imaginary and differ.
        """
        gold, answer = _at(self.gold, point), _at(self.answer, point)
        values = _value(gold, 20), _value(answer, 20)
        if gold is None or answer is None or any(value is None for value in values):
            return None
        is_real = all(value.is_real for value in values)
        if not is_real and any(bool(coordinate < 0) for coordinate in point.values()):
            return None
        size = max(abs(value) for value in values)
        error = abs(values[0] - values[1])
        if error > 1e-5 * size and size > 1e-10:
            return False
        if self._may_be_rounded(gold, answer) and error <= TOLERANCE * size:
            return True
        return is_zero(gold - answer, self.hidden_digits_at(point))

    def hidden_digits_at(self, point: Point) -> float:
        return hidden_digits(self.gold, point) + hidden_digits(self.answer, point)

    def _may_be_rounded(self, gold: Expr, answer: Expr) -> bool:
        """Return whether a value was written with decimals, and the other is no whole number."""
        values = zip((gold, answer), self.rounded, strict=True)
        return not self.is_exact and not any(
            value.is_integer and not rounded for value, rounded in values
        )


def _proportional(gold: Expr, answer: Expr, rng: random.Random) -> bool | None:
    """Return whether one equation is a multiple of the other: x - 3 = 0 and 6 = 2x."""
    if gold.free_symbols != answer.free_symbols:
        return False
    gold, answer = _exact(gold), _exact(answer)
    values: list[tuple[Any, Any, float]] = [
        (left, right, hidden_digits(gold, point) + hidden_digits(answer, point))
        for point in draw_points(gold, answer, rng)
        if _value(left := _at(gold, point), 20) and _value(right := _at(answer, point), 20)
    ]
    if len(values) < 2:
        return None
    first_gold, first_answer, first_hidden = values[0]
    results = {
        is_zero(left * first_answer - right * first_gold, num_hidden + first_hidden)
        for left, right, num_hidden in values[1:]
    }
    return True in results and False not in results


def _exact(formula: Expr) -> Expr:
    """Replace decimals by fractions, and compute sums and integrals."""
    formula = _with_fractions(formula)
    return formula if formula.has(*STEP_FUNCTIONS) else formula.doit()


def _at(formula: Expr, point: Point) -> Expr | None:
    """Insert the coordinates of a point; return None if floor or ceiling cannot be computed."""
    if not formula.has(*STEP_FUNCTIONS):
        return formula.subs(point)
    rounded = round_steps(formula, point)
    return None if rounded is None else rounded.subs(point).doit()


def _value(constant: Expr | None, digits: int) -> Any:
    """Return the value to a number of digits; None if it is not a finite number."""
    value: Any = None if constant is None else constant.evalf(digits)
    return value if value is not None and value.is_number and value.is_finite else None
