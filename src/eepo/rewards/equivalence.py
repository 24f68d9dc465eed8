r"""Whether two answers are the same. Structure and numbers are settled here, exactly; formulas in `formulas.py`.

Why not math-verify alone: it reads `52_8` and `52_9` as one number, `4.5e33` as 4.5·e·33, rounds decimals at an
absolute place, and eats variables as units. So numbers never reach it, and it parses without its unit rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from eepo.rewards.formulas import Unparsable, has_variables, same_formula, value_of
from eepo.rewards.latex import ROW, brackets, plain, split, squeeze
from eepo.rewards.numbers import Number, in_base, read_base, read_number
from eepo.rewards.units import conflict, split_unit

__all__ = ["Unparsable", "canonical", "same_answer"]

MAX_PARTS = 64  # elements of a list, a tuple or a set
MAX_DEPTH = 8  # lists in lists

_COMMA = re.compile(r"[,;]|\\text\{\s*,?\s*(?:and|or)\s*\}|,?\s+(?:and|or)\s+")
_LIST_COMMA = re.compile(rf"(?!(?<=\d),\d{{3}}(?!\d))(?:{_COMMA.pattern})")
_UNION = re.compile(r"∪")
_EQUALS = re.compile(r"(?<![<>!\\])=(?!=)")
_ABOUT = re.compile(r"\\approx")
_MEMBER = re.compile(r"\\in(?![A-Za-z])")
_RELATION = re.compile(r"[<>]|\\(?:le|ge|lt|gt)(?![A-Za-z])")
_DOWNWARD = {">": "<", r"\ge": r"\le", r"\gt": r"\lt"}
_NAME = re.compile(
    r"[A-Za-z](?:_\w|_\{[^{}]{1,15}\})?(?:\([A-Za-z, ]{1,10}\))?|\\[A-Za-z]+(?:_\w)?(?: ?[A-Z]){0,3}|[A-Z]{2,4}"
    r"|[a-z]\^\{-1\}\([a-z]\)|\([A-Za-z](?:_\w)?(?:, ?[A-Za-z](?:_\w)?){1,4}\)"
)
_MATRIX = re.compile(
    r"\\begin\{(?:[pbB]|small)?(?:matrix|array)\}(?:\{[lcr|]+\})?(.*)\\end\{\w+\}", re.DOTALL
)
_LABEL = re.compile(r"\\text\{\s*\(?([A-E])\)?[.:]?\s*\}\s*(?=[^\s_^+*/=<>-]|-\d)")


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
    for rule in (
        _labels,
        _bases,
        _quantities,
        _assignments,
        _unions,
        _lists,
        _matrices,
        _bracketed,
        _words,
    ):
        decided = rule(gold, answer, depth)
        if decided is not None:
            return decided or None
    return "same expression" if same_formula(_upward(gold), _upward(answer)) else None


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
    if any(sign.search(text) for sign in (_EQUALS, _ABOUT) for text in (gold, answer)):
        return None
    (one, unit), (other, other_unit) = split_unit(gold), split_unit(answer)
    if unit is None and other_unit is None:
        left, right = read_number(one), read_number(other)
        return None if left is None or right is None else _numbers(left, right)
    if conflict(unit, other_unit):
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
        lists = sign is not _MEMBER and (
            len(split(gold, _COMMA)) > 1 or len(split(answer, _COMMA)) > 1
        )
        if [one, other] == [[gold], [answer]] or not one or not other or lists:
            continue
        if len(one) == len(other) > 1:
            same_left = all(
                squeeze(left) == squeeze(right)
                for left, right in zip(one[:-1], other[:-1], strict=True)
            )
            return _same(one[-1], other[-1], depth + 1) or "" if same_left else None
        golds, answers = _meant(one, sign, depth, named=True), _meant(other, sign, depth)
        matches = [_same(left, right, depth + 1) for left in golds for right in answers]
        return next((match for match in matches if match), "")
    return None


def _meant(parts: list[str], sign: re.Pattern[str], depth: int, named: bool = False) -> list[str]:
    """What a chain stands for; nothing, if it contradicts itself: 2+2=5 is no way to say 5, nor is 5≈6.

    Of an answer `x+y=5` we take 5, as it repeats what was asked for; a gold like that (`named`) is an equation.
    """
    *before, last = parts
    others = [part for part in before if not _NAME.fullmatch(part)]
    if sign is _MEMBER:
        return [] if others else [last]
    if sign is _ABOUT:
        return [*others, last] if all(_rounds_to(part, last) for part in others) else []
    true = all(
        (not named and has_variables(part)) or _same(part, last, depth + 1) for part in others
    )
    return [last] if true else []


def _rounds_to(exact: str, rounded: str) -> bool:
    """0.67 is 2/3 to the places that are written."""
    number, value = read_number(split_unit(rounded)[0]), _value(exact)
    if number is None or value is None:
        return False
    half = Fraction(1, 2) / Fraction(10) ** (number.places or 0)
    return abs(value - number.value) <= half * (1 + Fraction(1, 10**9))


def _value(text: str) -> Fraction | None:
    number = read_number(split_unit(text)[0])
    if number is not None:
        return number.value
    value: Any = value_of(text)
    return Fraction(str(value)) if value is not None and value.is_real else None


def _lists(gold: str, answer: str, depth: int) -> str | None:
    """Several answers, in any order. `100,200` may be one number or two: either reading may match."""
    left, right = list(_readings(gold)), list(_readings(answer))
    if max(map(len, left)) == max(map(len, right)) == 1:
        return None
    for one in left:
        for other in right:
            if (len(one) > 1 or len(other) > 1) and _match_any_order(one, other, depth):
                return "same elements"
            if (
                len(one) == len(other) == 1
                and [*one, *other] != [gold, answer]
                and _same(one[0], other[0], depth + 1)
            ):
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
    return (
        "same elements"
        if _match_in_order(split(texts[0], _COMMA), split(texts[1], _COMMA), depth)
        else ""
    )


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
    return all(_same_element(left, right, depth) for left, right in zip(one, other, strict=True))


def _same_element(one: str, other: str, depth: int) -> bool:
    r"""Braces around a whole answer do not count, but a set is another element than what it holds."""
    sets = [inner is not None and inner[0] == r"\{\}" for inner in (brackets(one), brackets(other))]
    return sets[0] == sets[1] and bool(_same(one, other, depth + 1))


def _match_any_order(one: list[str], other: list[str], depth: int) -> bool:
    """Every element has a partner of its own."""
    if len(one) != len(other) or len(one) > MAX_PARTS:
        return False
    left = list(other)
    for element in one:
        partner = next(
            (place for place, rival in enumerate(left) if _same_element(element, rival, depth)),
            None,
        )
        if partner is None:
            return False
        del left[partner]
    return True


def _unions(gold: str, answer: str, depth: int) -> str | None:
    """Intervals in any order; an interval may be written as an inequality: x < -1 or x > 2."""
    one, other = split(gold, _UNION), split(answer, _UNION)
    if len(one) == 1 and len(other) == 1:
        return None
    one, other = (
        split(text, _COMMA) if len(parts) == 1 and _RELATION.search(text) else parts
        for text, parts in ((gold, one), (answer, other))
    )
    return "same union" if _match_any_order(one, other, depth) else ""


def _matrices(gold: str, answer: str, depth: int) -> str | None:
    """Element by element. A single column or row may be written as a tuple."""
    one, other = _rows(gold), _rows(answer)
    if one is None or other is None:
        inner = brackets(answer if one else gold) if one or other else None
        vector = _as_vector(one or other or [])
        if vector is None or inner is None or inner[0] not in ("()", r"\langle\rangle"):
            return None
        return "same vector" if _match_in_order(vector, split(inner[1], _COMMA), depth) else ""
    if len(one) != len(other):
        return ""
    return (
        "same matrix"
        if all(_match_in_order(*rows, depth) for rows in zip(one, other, strict=True))
        else ""
    )


def _as_vector(rows: list[list[str]]) -> list[str] | None:
    """The cells of a single column or a single row."""
    if len(rows) == 1:
        return rows[0]
    return [row[0] for row in rows] if rows and all(len(row) == 1 for row in rows) else None


def _rows(text: str) -> list[list[str]] | None:
    match = _MATRIX.fullmatch(text.strip())
    if match is None:
        return None
    return [
        [cell.strip() for cell in row.split("&")] for row in match[1].strip(" ⏎").split(ROW.strip())
    ]


def _bracketed(gold: str, answer: str, depth: int) -> str | None:
    """Tuples and intervals: the same brackets, the same elements, in order. `(5)` is 5."""
    one, other = brackets(gold), brackets(answer)
    if one is None and other is None:
        return None
    many = [inner is not None and len(split(inner[1], _COMMA)) > 1 for inner in (one, other)]
    if one and other and any(many):
        fits = one[0] == other[0] and _match_in_order(
            split(one[1], _COMMA), split(other[1], _COMMA), depth
        )
        return "same elements" if fits else ""
    if any(many):
        return None if _RELATION.search(gold) or _RELATION.search(answer) else ""
    return _same(one[1] if one else gold, other[1] if other else answer, depth + 1)


def _words(gold: str, answer: str, depth: int) -> str | None:
    r"""Answers in words, and letters of a choice: \text{} and brackets do not count, nor does the case of words.

    What could as well be a formula (`xyz`) is only settled here if it is the same.
    """
    if not _is_words(gold) or not _is_words(answer):
        return None
    if _letters(gold) == _letters(answer):
        return "same words"
    return "" if r"\text" in gold or re.fullmatch(r"[A-Z]{2,}|.*[A-Za-z]{5}.*", gold) else None


def _is_words(text: str) -> bool:
    r"""In \text{}, or without a digit and any sign of a formula; or the letter of a choice."""
    bare = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    if r"\text" in text:
        return bool(re.fullmatch(r"[\s().,:;'A-Za-z0-9-]*[A-Za-z][\s().,:;'A-Za-z0-9-]*", bare))
    return bool(re.fullmatch(r"[A-Za-z'., ]*[A-Za-z]{3}[A-Za-z'., ]*|[Nn]o|\(?[A-Z]\)?", bare))


def _letters(text: str) -> str:
    """What is said, with the sign and the point of a number."""
    bare = re.sub(
        r"\b(?:option|choice|answer)\b", "", text.replace(r"\text", ""), flags=re.IGNORECASE
    )
    kept = re.sub(r"(?![-.]\d)[^A-Za-z0-9:]", "", bare)
    return kept if len(kept) == 1 else kept.lower()


def _labels(gold: str, answer: str, depth: int) -> str | None:
    r"""\textbf{(A)} 5: the letter answers a gold that is a letter, the rest any other gold."""
    label = _LABEL.match(answer)
    if label is None or _LABEL.match(gold):
        return None
    choice = re.fullmatch(r"(?:\\text\{)?\s*\(?([A-E])\)?\s*\}?", gold)
    return _same(gold, label[1] if choice else answer[label.end() :], depth + 1) or ""


def _upward(text: str) -> str:
    """An inequality with its signs turned: 5 > x \\ge -2 is -2 \\le x < 5."""
    signs = _RELATION.findall(text)
    if not signs or any(sign not in _DOWNWARD for sign in signs) or "," in text:
        return text
    parts = _RELATION.split(text)
    turned = parts[-1]
    for sign, part in zip(reversed(signs), reversed(parts[:-1]), strict=True):
        turned += f" {_DOWNWARD[sign]} {part}"
    return turned
