r"""Whether two answers are the same. Structure and numbers are settled here, exactly; formulas go to math-verify.

Why not math-verify alone: it reads `52_8` and `52_9` as one number, `4.5e33` as 4.5·e·33, rounds decimals at an
absolute place, and eats variables as units. So numbers never reach it, and it parses without its unit rules.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Eq, Expr, Float, Mod, Rational, ceiling, default_sort_key, floor
from sympy.core.relational import Relational

from eepo.rewards.latex import ROW, brackets, nesting, plain, split, squeeze
from eepo.rewards.numbers import Number, in_base, read_base, read_number
from eepo.rewards.units import conflict, split_unit

logging.getLogger("math_verify").setLevel(logging.ERROR)  # its time-outs are off: the worker's kernel timer is ours

MAX_PARTS = 64  # elements of a list, a tuple or a set
MAX_DEPTH = 8  # lists in lists
MAX_NESTING = 20  # brackets in brackets, of a formula
NUM_POINTS = 6  # at which two formulas are compared
DIGITS = 30  # of those values
STEPS = (floor, ceiling, Mod)

_COMMA = re.compile(r"[,;]|\\text\{\s*,?\s*(?:and|or)\s*\}|,?\s+(?:and|or)\s+")
_LIST_COMMA = re.compile(r"(?!(?<=\d),\d{3}(?!\d))(?:[,;]|\\text\{\s*,?\s*(?:and|or)\s*\}|,?\s+(?:and|or)\s+)")
_UNION = re.compile(r"∪")
_EQUALS = re.compile(r"(?<![<>!\\])=(?!=)")
_ABOUT = re.compile(r"\\approx")
_MEMBER = re.compile(r"\\in(?![A-Za-z])")
_RELATION = re.compile(r"[<>=]|\\(?:le|ge|lt|gt|ne)(?![A-Za-z])")
_NAME = re.compile(r"[A-Za-z](?:\([A-Za-z, ]{1,10}\))?(?:_\{?\w{1,8}\}?)?|\\[A-Za-z]+(?: ?[A-Z]){0,3}|[A-Z]{2,4}")
_MATRIX = re.compile(r"\\begin\{(p|b|B|v|small)?matrix\}(.*)\\end\{\1?matrix\}", re.DOTALL)
_PYTHON = re.compile(r"\b(?:np|math|sp|sympy)\.|\\?\b(arcsin|arccos|arctan|sqrt|sin|cos|tan|log|ln|exp|pi)\b")
_PARSING = [
    LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
        )
    )
]


class Unparsable(Exception):
    """The answer is no mathematics that we can read."""


def same_answer(gold: str, answer: str) -> str | None:
    """How they match, in two or three words; None if they differ."""
    return _same(plain(gold), plain(answer), 0)


def canonical(answer: str) -> str:
    """A key for counting answers: equal numbers get equal keys, other answers one per spelling."""
    text, _ = split_unit(plain(answer))
    number = read_number(text)
    return str(number.value) if number else squeeze(plain(answer))


def _same(gold: str, answer: str, depth: int) -> str | None:
    """The first rule that decides. Each gives a reason, "" (decided: different) or None (not mine)."""
    if squeeze(gold) == squeeze(answer):
        return "same text"
    if depth > MAX_DEPTH or not answer:
        return None
    for rule in (_bases, _quantities, _assignments, _lists, _unions, _matrices, _bracketed, _words):
        decided = rule(gold, answer, depth)
        if decided is not None:
            return decided or None
    return _formulas(gold, answer)


def _bases(gold: str, answer: str, depth: int) -> str | None:
    """A base on one side only is the base of both. Two bases must be one: asked for base 8, 42_{10} is no answer."""
    one, other = read_base(squeeze(gold)), read_base(squeeze(answer))
    if one is None and other is None:
        return None
    digits, base = one or (squeeze(gold), other[1] if other else 10)
    other_digits, other_base = other or (squeeze(answer), base)
    value = in_base(digits, base)
    same = base == other_base and value is not None and value == in_base(other_digits, base)
    return "same number in its base" if same else ""


def _quantities(gold: str, answer: str, depth: int) -> str | None:
    """Numbers, with or without units."""
    (one, unit), (other, other_unit) = split_unit(gold), split_unit(answer)
    if unit is None and other_unit is None:
        left, right = read_number(one), read_number(other)
        return None if left is None or right is None else _numbers(left, right)
    if conflict(unit, other_unit) and "%" not in (unit, other_unit):
        return ""
    left, right = read_number(one), read_number(other)
    if left is None or right is None:
        return _same(one, other, depth + 1) or ""
    if (unit == "%") != (other_unit == "%"):
        share = Number(left.value / 100) if unit == "%" else left
        other_share = Number(right.value / 100) if other_unit == "%" else right
        return _numbers(left, right) or _numbers(share, other_share)
    return _numbers(left, right)


def _numbers(left: Number, right: Number) -> str:
    return "same number" if left.same(right) else ""


def _assignments(gold: str, answer: str, depth: int) -> str | None:
    """`x = 3` is 3, `x \\in S` is S, `2/3 \\approx 0.67` is 2/3, where the other side does not say otherwise."""
    for sign in (_ABOUT, _MEMBER, _EQUALS):
        one, other = ([part for part in split(text, sign) if part] for text in (gold, answer))
        lists = len(split(gold, _COMMA)) > 1 or len(split(answer, _COMMA)) > 1
        if [one, other] == [[gold], [answer]] or not one or not other or lists:
            continue
        if len(one) == len(other) > 1:
            same_left = all(squeeze(left) == squeeze(right) for left, right in zip(one[:-1], other[:-1], strict=True))
            return _same(one[-1], other[-1], depth + 1) or "" if same_left else None
        if sign is _EQUALS and not all(_NAME.fullmatch(name) or _is_number(name) for name in (one[:-1] + other[:-1])):
            return None
        return _same(_value(one, sign), _value(other, sign), depth + 1) or ""
    return None


def _value(parts: list[str], sign: re.Pattern[str]) -> str:
    """What is meant by a chain: of ≈ the exact first part, unless that is a name; else the last."""
    exact = sign is _ABOUT and not _NAME.fullmatch(parts[0])
    return parts[0] if exact else parts[-1]


def _is_number(text: str) -> bool:
    return read_number(split_unit(text)[0]) is not None


def _lists(gold: str, answer: str, depth: int) -> str | None:
    """Several answers, in any order. `100,200` may be one number or two: either reading may match."""
    left, right = list(_readings(gold)), list(_readings(answer))
    if max(map(len, left)) == max(map(len, right)) == 1:
        return None
    for one in left:
        for other in right:
            if (len(one) > 1 or len(other) > 1) and _match_any_order(one, other, depth):
                return "same elements"
            if len(one) == len(other) == 1 and [*one, *other] != [gold, answer] and _same(one[0], other[0], depth + 1):
                return "same number"
    return _tuple_without_brackets(gold, answer, depth)


def _tuple_without_brackets(gold: str, answer: str, depth: int) -> str:
    """`1, 2` for (1, 2), and the other way round: then order counts."""
    texts = []
    for text in (gold, answer):
        inner = brackets(text)
        texts.append(inner[1] if inner and inner[0] == "()" else text)
    if texts == [gold, answer]:
        return ""
    return "same elements" if _match_in_order(split(texts[0], _COMMA), split(texts[1], _COMMA), depth) else ""


def _readings(text: str) -> Iterator[list[str]]:
    r"""Its elements: without the braces of a set, with ± spelled out, with and without thousands separators."""
    inner = brackets(text)
    if inner and inner[0] == r"\{\}":
        text = inner[1]
    if text.startswith(r"\text{") and text.endswith("}") and "{" not in text[6:-1]:
        text = text[6:-1]
    for comma in (_LIST_COMMA, _COMMA):
        parts = [part for part in split(text, comma) if part]
        yield [signed for part in parts for signed in _both_signs(part)] or [text]


def _both_signs(part: str) -> list[str]:
    if part.count(r"\pm") != 1:
        return [part]
    return [part.replace(r"\pm", "+").lstrip("+ "), part.replace(r"\pm", "-")]


def _match_in_order(one: list[str], other: list[str], depth: int) -> bool:
    if len(one) != len(other) or len(one) > MAX_PARTS:
        return False
    return all(_same(left, right, depth + 1) for left, right in zip(one, other, strict=True))


def _match_any_order(one: list[str], other: list[str], depth: int) -> bool:
    """Every element has a partner of its own."""
    if len(one) != len(other) or len(one) > MAX_PARTS:
        return False
    left = list(other)
    for element in one:
        partner = next((place for place, rival in enumerate(left) if _same(element, rival, depth + 1)), None)
        if partner is None:
            return False
        del left[partner]
    return True


def _unions(gold: str, answer: str, depth: int) -> str | None:
    one, other = split(gold, _UNION), split(answer, _UNION)
    if len(one) == 1 and len(other) == 1:
        return None
    if len(one) > 1 and len(other) > 1:
        return "same union" if _match_any_order(one, other, depth) else ""
    return None


def _matrices(gold: str, answer: str, depth: int) -> str | None:
    """Element by element. A column may be written as a tuple."""
    one, other = _rows(gold), _rows(answer)
    if one is None or other is None:
        inner = brackets(answer if one else gold) if one or other else None
        column = one or other
        if column is None or inner is None or inner[0] not in ("()", r"\langle\rangle"):
            return None
        return "same vector" if _match_in_order([row[0] for row in column], split(inner[1], _COMMA), depth) else ""
    if len(one) != len(other):
        return ""
    return "same matrix" if all(_match_in_order(*rows, depth) for rows in zip(one, other, strict=True)) else ""


def _rows(text: str) -> list[list[str]] | None:
    match = _MATRIX.fullmatch(text.strip())
    if match is None or match[1] == "v":
        return None
    return [[cell.strip() for cell in row.split("&")] for row in match[2].strip(" ⏎").split(ROW.strip())]


def _bracketed(gold: str, answer: str, depth: int) -> str | None:
    """Tuples and intervals: the same brackets, the same elements, in order. `(5)` is 5."""
    one, other = brackets(gold), brackets(answer)
    if one is None and other is None:
        return None
    many = [inner is not None and len(split(inner[1], _COMMA)) > 1 for inner in (one, other)]
    if one and other and any(many):
        fits = one[0] == other[0] and _match_in_order(split(one[1], _COMMA), split(other[1], _COMMA), depth)
        return "same elements" if fits else ""
    if any(many):
        return None if _RELATION.search(gold) or _RELATION.search(answer) else ""
    return _same(one[1] if one else gold, other[1] if other else answer, depth + 1)


def _words(gold: str, answer: str, depth: int) -> str | None:
    r"""Answers in words, and letters of a choice: case, \text{} and brackets do not count."""
    if not all(_is_words(text) for text in (gold, answer)):
        return "" if _is_words(gold) and not _is_choice(gold) and _is_number(answer) else None
    return "same words" if _letters(gold) == _letters(answer) else ""


def _is_words(text: str) -> bool:
    bare = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    return bool(re.fullmatch(r"[\s().,:;'A-Za-z0-9-]*[A-Za-z][\s().,:;'A-Za-z0-9-]*", bare)) and (
        r"\text" in text or len(re.findall(r"[A-Za-z]", bare)) == 1 or bool(re.search(r"[A-Za-z]{3}", bare))
    )


def _is_choice(text: str) -> bool:
    return len(_letters(text)) == 1


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9:]", "", text.replace(r"\text", "").lower())


def _formulas(gold: str, answer: str) -> str | None:
    """Parsed by math-verify; compared by value where that is possible, else by its own rules."""
    expected = _parsed(gold)
    if expected is None:
        return None
    given = _parsed(answer)
    if given is None:
        raise Unparsable
    decided = _same_value(expected, given)
    if decided is None:
        decided = verify(expected, given, float_rounding=12, timeout_seconds=None, allow_set_relation_comp=True)
    return "same expression" if decided else None


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Any:
    """A SymPy object, or None. The parser's time doubles with every bracket in a bracket: no answer needs many."""
    if nesting(text) > MAX_NESTING:
        return None
    text = _PYTHON.sub(lambda match: "\\" + match[1] + " " if match[1] else "", text.replace(ROW.strip(), r"\\"))
    text = text.replace("∪", r"\cup ").replace("**", "^").replace("*", r" \cdot ")
    found = parse(f"${text}$", _PARSING, fallback_mode="no_fallback", parsing_timeout=None)
    return found[0] if found else None


def _same_value(gold: Any, answer: Any) -> bool | None:
    """Formulas at the same random points; None where values do not decide (sets, relations, undefined points)."""
    if isinstance(gold, Eq) and isinstance(answer, Eq):
        return _proportional(gold.lhs - gold.rhs, answer.lhs - answer.rhs)
    if isinstance(gold, Relational) or isinstance(answer, Relational):
        return None
    if not isinstance(gold, Expr) or not isinstance(answer, Expr):
        return None
    if gold.free_symbols != answer.free_symbols:
        return None
    exact = not (gold.has(Float) or answer.has(Float))
    if exact and isinstance(difference := (gold - answer).doit(), Rational):
        return bool(difference == 0)  # 2^{2008} - 2 and 2^{2008} - 3 are close in no other sense
    close = _close_to(1e-20 if exact else 1e-6)
    seen = 0
    for left, right in _values(gold, answer):
        if not close(left, right):
            return False
        seen += 1
    return True if seen else None


def _proportional(gold: Expr, answer: Expr) -> bool | None:
    """One equation is a multiple of the other: x - 3 = 0 and 6 = 2x."""
    if gold.free_symbols != answer.free_symbols:
        return False
    ratios = [left / right for left, right in _values(gold, answer) if right != 0]
    if len(ratios) < 2:
        return None
    close = _close_to(1e-15)
    return ratios[0] != 0 and all(close(ratio, ratios[0]) for ratio in ratios)


def _values(gold: Expr, answer: Expr) -> Iterator[tuple[complex, complex]]:
    """Both at random points (a single one if there is no variable), where they are finite.

    Between 0 and 3, where powers stay small; but steps, such as those of ⌊n/5⌋, only show at whole numbers.
    """
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=default_sort_key)
    rng, steps = random.Random(0), gold.has(*STEPS) or answer.has(*STEPS)
    for place in range((4 if steps else 1) * NUM_POINTS if symbols else 1):
        drawn = [rng.randrange(2, 40) if steps and place % 2 else rng.randrange(300, 2700) for _ in symbols]
        point = {symbol: Rational(number, 1 if steps else 997) for symbol, number in zip(symbols, drawn, strict=True)}
        left, right = (_number(formula.subs(point)) for formula in (gold, answer))
        if left is not None and right is not None:
            yield left, right


def _number(formula: Any) -> Any:
    value: Any = formula.doit().evalf(DIGITS)
    return value if value.is_number and value.is_finite else None


def _close_to(tolerance: float) -> Callable[[Any, Any], bool]:
    return lambda left, right: bool(abs(left - right) <= tolerance * max(abs(left), abs(right)))


__all__ = ["Unparsable", "canonical", "same_answer"]
