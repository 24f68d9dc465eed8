r"""Decides whether an answer equals the gold answer.

Rules are tried in a fixed order, and the first rule that applies decides:

| rule | accepts, for example |
|---|---|
| same text | any answer with the same normalised LaTeX |
| choice label | `\textbf{(A)} 5` for A, or for 5 |
| domain | `x^2` for `x^2 \text{ for all } x \in \mathbb{R}` |
| numbers in a base | `52` for `52_8`, never `52_9` |
| numbers with units | `15` for `15 \text{ cm}^2`, `0.5` for `50\%` |
| assignments | `x = 3` for 3, `x \in S` for S, `2/3 \approx 0.67` for 2/3 |
| unions | intervals in any order |
| lists and sets | elements in any order, `\pm` as two elements |
| matrices | the same elements; a column for a tuple |
| tuples and intervals | the same brackets and elements, in order |
| ratios and times | `2:4` for 1:2, but never `16:60` for 8:30 |
| words | the same words, without `\text{}` and case |
| formulas | the same value at random points (`formulas.py`) |

Structure and numbers are compared here, exactly, before anything reaches math-verify. By itself
math-verify reads `52_8` and `52_9` as one number and `4.5e33` as 4.5·e·33, rounds decimals to an
absolute precision, and removes variables as units.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from eepo.rewards.domains import split_domain
from eepo.rewards.formulas import Unparsable, has_variables, numeric_value, same_formula
from eepo.rewards.inequalities import INEQUALITY, ascending
from eepo.rewards.latex import normalise_latex, outer_brackets, remove_spaces, split_top_level
from eepo.rewards.matrices import as_vector, matrix_rows
from eepo.rewards.names import is_name
from eepo.rewards.numbers import Number, read_base, read_number, value_in_base
from eepo.rewards.ratios import same_ratio
from eepo.rewards.units import split_unit, units_conflict
from eepo.rewards.words import same_words

__all__ = ["Unparsable", "canonical", "same_answer"]

MAX_ELEMENTS = 64  # of a list, a tuple or a set
MAX_BRACKETS = 20  # around one element
MAX_DEPTH = 8  # of rules that compare parts of an answer

# What a rule returns if it applies and the answers differ.
DIFFERENT = ""

_COMMA = re.compile(r"[,;]|\\text\{\s*,?\s*(?:and|or)\s*\}|,?\s+(?:and|or)\s+")
# As _COMMA, but the comma of a thousands separator does not split.
_LIST_COMMA = re.compile(rf"(?!(?<=\d),\d{{3}}(?!\d))(?:{_COMMA.pattern})")
_UNION = re.compile(r"∪")
_EQUALS = re.compile(r"(?<![<>!\\])=(?!=)")
_APPROX = re.compile(r"\\approx")
_IN = re.compile(r"\\in(?![A-Za-z])")
_LABEL = re.compile(r"\\text\{\s*\(?([A-E])\)?[.:]?\s*\}\s*(?=[^\s_^+*/=<>-]|-\d)")


def same_answer(gold: str, answer: str) -> str | None:
    """Return which rule accepts the answer, in two or three words; None if it is different."""
    return _compare(normalise_latex(gold), normalise_latex(answer), 0)


def canonical(answer: str) -> str:
    """Return a key for counting answers.

    Equal numbers have equal keys. Other answers have one key for each spelling.
    """
    text = normalise_latex(answer)
    number = read_number(split_unit(text)[0])
    return str(number.value) if number else remove_spaces(text)


def _compare(gold: str, answer: str, depth: int) -> str | None:
    """Apply the rules to normalised texts; return the reason of a match, or None.

    Each rule returns the reason of a match, DIFFERENT, or None if it does not apply.
    """
    if remove_spaces(gold) == remove_spaces(answer):
        return "same text"
    if depth > MAX_DEPTH or not answer:
        return None
    for rule in _RULES:
        result = rule(gold, answer, depth)
        if result is not None:
            return result or None
    same = same_formula(ascending(gold), ascending(answer))
    return "same expression" if same else None


def _compare_labels(gold: str, answer: str, depth: int) -> str | None:
    r"""Compare an answer with a choice label, such as \textbf{(A)} 5.

    The label counts if the gold is a single letter A to E. Otherwise the text after it counts.
    """
    label = _LABEL.match(answer)
    if label is None or _LABEL.match(gold):
        return None
    is_choice = re.fullmatch(r"(?:\\text\{)?\s*\(?([A-E])\)?\s*\}?", gold)
    part = label[1] if is_choice else answer[label.end() :]
    return _compare(gold, part, depth + 1) or DIFFERENT


def _compare_domains(gold: str, answer: str, depth: int) -> str | None:
    r"""Compare answers with a domain at their end, such as `for all x \in \mathbb{R}`."""
    (gold, gold_domain), (answer, answer_domain) = split_domain(gold), split_domain(answer)
    if gold_domain is None and answer_domain is None:
        return None
    if gold_domain and answer_domain and gold_domain != answer_domain:
        return DIFFERENT
    return _compare(gold, answer, depth + 1) or DIFFERENT


def _compare_in_base(gold: str, answer: str, depth: int) -> str | None:
    """Compare numbers if at least one side states its base.

    A base on one side only holds for both sides. Different bases are different answers, even if
    the values are equal: `42_{10}` does not answer a problem that asks for base 8.
    """
    gold, answer = remove_spaces(gold), remove_spaces(answer)
    gold_number, answer_number = read_base(gold), read_base(answer)
    stated = gold_number or answer_number
    if stated is None:
        return None
    base = stated[1]
    gold_digits, _ = gold_number or (gold, base)
    answer_digits, answer_base = answer_number or (answer, base)
    value = value_in_base(gold_digits, base)
    if base != answer_base or value is None or value != value_in_base(answer_digits, base):
        return DIFFERENT
    return "same number in its base"


def _compare_quantities(gold: str, answer: str, depth: int) -> str | None:
    """Compare numbers with or without units, by the rules of `numbers.py` and `units.py`."""
    if any(sign.search(text) for sign in (_EQUALS, _APPROX) for text in (gold, answer)):
        return None
    (gold, gold_unit), (answer, answer_unit) = split_unit(gold), split_unit(answer)
    if units_conflict(gold_unit, answer_unit):
        return DIFFERENT
    gold_number, answer_number = read_number(gold), read_number(answer)
    if gold_number is None or answer_number is None:
        if gold_unit is None and answer_unit is None:
            return None
        return _compare(gold, answer, depth + 1) or DIFFERENT
    same = gold_number.equals(answer_number)
    if not same and (gold_unit == "%") != (answer_unit == "%"):
        same = _share(gold_number, gold_unit).equals(_share(answer_number, answer_unit))
    return "same number" if same else DIFFERENT


def _share(number: Number, unit: str | None) -> Number:
    """Return the number, as a share of 1 if it is a percentage."""
    return Number(number.value / 100) if unit == "%" else number


def _compare_assignments(gold: str, answer: str, depth: int) -> str | None:
    r"""Compare the values of chains such as `x = 3`, `x \in S` and `2/3 \approx 0.67`.

    If both sides have a chain of the same length, they must agree on everything but the value.
    Otherwise a chain stands for its value: see `_chain_values`.
    """
    is_list = any(len(split_top_level(text, _COMMA)) > 1 for text in (gold, answer))
    for sign in (_APPROX, _IN, _EQUALS):
        if is_list and sign is not _IN:
            continue
        gold_parts, answer_parts = (
            [part for part in split_top_level(text, sign) if part] for text in (gold, answer)
        )
        has_chain = [gold_parts, answer_parts] != [[gold], [answer]]
        if not has_chain or not gold_parts or not answer_parts:
            continue
        if len(gold_parts) == len(answer_parts) > 1:
            pairs = zip(gold_parts[:-1], answer_parts[:-1], strict=True)
            if any(remove_spaces(left) != remove_spaces(right) for left, right in pairs):
                return None
            return _compare(gold_parts[-1], answer_parts[-1], depth + 1) or DIFFERENT
        gold_values = _chain_values(gold_parts, sign, depth, is_gold=True)
        answer_values = _chain_values(answer_parts, sign, depth, is_gold=False)
        matches = [_compare(g, a, depth + 1) for g in gold_values for a in answer_values]
        return next((match for match in matches if match), DIFFERENT)
    return None


def _chain_values(parts: list[str], sign: re.Pattern[str], depth: int, is_gold: bool) -> list[str]:
    """Return the values that a chain stands for; none if the chain contradicts itself.

    `x = 2 + 3 = 5` stands for 5. `2 + 2 = 5` and `5 ≈ 6` are contradictions.
    An answer `x + y = 5` stands for 5, because it repeats what the problem asks for. A gold
    `x + y = 5` is an equation, which 5 does not answer.
    """
    *left_parts, last = parts
    formulas = [part for part in left_parts if not is_name(part)]
    if sign is _IN:
        return [] if formulas else [last]
    if sign is _APPROX:
        return [*formulas, last] if all(_rounds_to(part, last) for part in formulas) else []
    is_true = all(
        (not is_gold and has_variables(part)) or _compare(part, last, depth + 1)
        for part in formulas
    )
    return [last] if is_true else []


def _rounds_to(exact: str, rounded: str) -> bool:
    """Return whether `rounded` is `exact` to the written digits: 2/3 rounds to 0.67."""
    number, value = read_number(split_unit(rounded)[0]), _real_value(exact)
    if number is None or value is None:
        return False
    half_unit = Fraction(1, 2) / Fraction(10) ** (number.decimals or 0)
    return abs(value - number.value) <= half_unit * (1 + Fraction(1, 10**9))


def _real_value(text: str) -> Fraction | None:
    number = read_number(split_unit(text)[0])
    if number is not None:
        return number.value
    value: Any = numeric_value(text)
    return Fraction(str(value)) if value is not None and value.is_real else None


def _compare_unions(gold: str, answer: str, depth: int) -> str | None:
    """Compare unions of intervals in any order.

    An interval may also be written as an inequality: x < -1 or x > 2.
    """
    gold_parts, answer_parts = split_top_level(gold, _UNION), split_top_level(answer, _UNION)
    if len(gold_parts) == 1 and len(answer_parts) == 1:
        return None
    gold_parts, answer_parts = (
        split_top_level(text, _COMMA) if len(parts) == 1 and INEQUALITY.search(text) else parts
        for text, parts in ((gold, gold_parts), (answer, answer_parts))
    )
    return "same union" if _equal_in_any_order(gold_parts, answer_parts, depth) else DIFFERENT


def _compare_lists(gold: str, answer: str, depth: int) -> str | None:
    """Compare lists and sets in any order.

    `100,200` may be one number or two. It matches if either reading does.
    """
    gold_readings, answer_readings = list(_list_readings(gold)), list(_list_readings(answer))
    if max(map(len, gold_readings)) == max(map(len, answer_readings)) == 1:
        return None
    for gold_parts in gold_readings:
        for answer_parts in answer_readings:
            is_list = len(gold_parts) > 1 or len(answer_parts) > 1
            if is_list and _equal_in_any_order(gold_parts, answer_parts, depth):
                return "same elements"
            is_new_number = not is_list and [*gold_parts, *answer_parts] != [gold, answer]
            if is_new_number and _compare(gold_parts[0], answer_parts[0], depth + 1):
                return "same number"
    return _compare_tuple_with_list(gold, answer, depth)


def _list_readings(text: str) -> Iterator[list[str]]:
    r"""Yield the elements twice: with commas as thousands separators, and as separators only.

    The braces of a set are removed, and ± becomes two elements.
    """
    inner = outer_brackets(text)
    if inner and inner[0] == r"\{\}":
        text = inner[1]
    if text.startswith(r"\text{") and text.endswith("}") and "{" not in text[6:-1]:
        text = text[6:-1]
    for comma in (_LIST_COMMA, _COMMA):
        parts = [part for part in split_top_level(text, comma) if part]
        yield [signed for part in parts for signed in _both_signs(part)] or [text]


def _both_signs(part: str) -> list[str]:
    if part.count(r"\pm") != 1:
        return [part]
    return [part.replace(r"\pm", "+").lstrip("+ "), part.replace(r"\pm", "-")]


def _compare_tuple_with_list(gold: str, answer: str, depth: int) -> str:
    """Compare a tuple with the same elements without brackets: `(1, 2)` and `1, 2`, in order."""
    texts = []
    for text in (gold, answer):
        inner = outer_brackets(text)
        texts.append(inner[1] if inner and inner[0] == "()" else text)
    if texts == [gold, answer]:
        return DIFFERENT
    gold_parts, answer_parts = (split_top_level(text, _COMMA) for text in texts)
    return "same elements" if _equal_in_order(gold_parts, answer_parts, depth) else DIFFERENT


def _equal_in_order(gold_parts: list[str], answer_parts: list[str], depth: int) -> bool:
    if len(gold_parts) != len(answer_parts) or len(gold_parts) > MAX_ELEMENTS:
        return False
    pairs = zip(gold_parts, answer_parts, strict=True)
    return all(_same_element(gold, answer, depth) for gold, answer in pairs)


def _equal_in_any_order(gold_parts: list[str], answer_parts: list[str], depth: int) -> bool:
    """Return whether the elements can be paired one to one."""
    if len(gold_parts) != len(answer_parts) or len(gold_parts) > MAX_ELEMENTS:
        return False
    unmatched = list(answer_parts)
    for gold in gold_parts:
        matches = (i for i, part in enumerate(unmatched) if _same_element(gold, part, depth))
        index = next(matches, None)
        if index is None:
            return False
        del unmatched[index]
    return True


def _same_element(gold: str, answer: str, depth: int) -> bool:
    r"""Compare elements of lists and tuples. Unlike for whole answers, `\{1\}` is not 1 here."""
    pairs = outer_brackets(gold), outer_brackets(answer)
    gold_is_set, answer_is_set = (pair is not None and pair[0] == r"\{\}" for pair in pairs)
    return gold_is_set == answer_is_set and bool(_compare(gold, answer, depth + 1))


def _compare_matrices(gold: str, answer: str, depth: int) -> str | None:
    """Compare matrices element by element. A single column or row may be written as a tuple."""
    gold_rows, answer_rows = matrix_rows(gold), matrix_rows(answer)
    if gold_rows is None or answer_rows is None:
        matrix = gold_rows or answer_rows
        inner = outer_brackets(answer if gold_rows else gold) if matrix else None
        vector = as_vector(matrix or [])
        if vector is None or inner is None or inner[0] not in ("()", r"\langle\rangle"):
            return None
        same = _equal_in_order(vector, split_top_level(inner[1], _COMMA), depth)
        return "same vector" if same else DIFFERENT
    if len(gold_rows) != len(answer_rows):
        return DIFFERENT
    row_pairs = zip(gold_rows, answer_rows, strict=True)
    same = all(_equal_in_order(gold_row, answer_row, depth) for gold_row, answer_row in row_pairs)
    return "same matrix" if same else DIFFERENT


def _compare_bracketed(gold: str, answer: str, depth: int) -> str | None:
    """Compare tuples and intervals: the same brackets and the same elements, in order. `(5)` is 5.

    An interval may match an inequality, which math-verify decides.
    """
    gold_pair, answer_pair = outer_brackets(gold), outer_brackets(answer)
    if gold_pair is None and answer_pair is None:
        return None
    gold_inner, answer_inner = _without_brackets(gold), _without_brackets(answer)
    if [gold_inner, answer_inner] != [gold, answer]:
        return _compare(gold_inner, answer_inner, depth + 1) or DIFFERENT
    gold_parts, answer_parts = (
        split_top_level(pair[1], _COMMA) if pair else [] for pair in (gold_pair, answer_pair)
    )
    if gold_pair and answer_pair:
        same_brackets = gold_pair[0] == answer_pair[0]
        same = same_brackets and _equal_in_order(gold_parts, answer_parts, depth)
        return "same elements" if same else DIFFERENT
    return None if INEQUALITY.search(gold) or INEQUALITY.search(answer) else DIFFERENT


def _without_brackets(text: str) -> str:
    """Remove the brackets around a single element."""
    for _ in range(MAX_BRACKETS):
        pair = outer_brackets(text)
        if pair is None or len(split_top_level(pair[1], _COMMA)) > 1:
            break
        text = pair[1]
    return text


def _compare_ratios(gold: str, answer: str, depth: int) -> str | None:
    same = same_ratio(gold, answer, same_formula)
    return None if same is None else "same ratio" if same else DIFFERENT


def _compare_words(gold: str, answer: str, depth: int) -> str | None:
    same = same_words(gold, answer)
    return None if same is None else "same words" if same else DIFFERENT


_RULES = (
    _compare_labels,
    _compare_domains,
    _compare_in_base,
    _compare_quantities,
    _compare_assignments,
    _compare_unions,
    _compare_lists,
    _compare_matrices,
    _compare_bracketed,
    _compare_ratios,
    _compare_words,
)
