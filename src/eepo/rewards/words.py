r"""Compares words, and tells them from products of variables: `east` from `mghR`.

Three letters in a row, and fewer, are always a product in a formula. Four or more are a product
only if they do not look like a word.
"""

from __future__ import annotations

import re
from itertools import pairwise

from eepo.rewards.latex import remove_spaces

_TEXT_COMMAND = re.compile(r"\\(?:text|begin|end|mathbb|operatorname)\s*\{[^{}]*\}")
_LONG_RUN = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
_COMMAND = re.compile(r"\\[A-Za-z]+")


def same_words(gold: str, answer: str) -> bool | None:
    r"""Compare answers in words and letters of a choice, without `\text{}`, brackets and case.

    Return None if one of them is not in words. Words that could be a formula, such as `xyz`, are
    decided here only if they are the same.
    """
    if not _is_words(gold) or not _is_words(answer):
        return None
    if _letters(gold) == _letters(answer):
        has_other_case = remove_spaces(gold) != remove_spaces(answer)
        return None if is_product(gold) and has_other_case else True
    gold_is_no_formula = (
        r"\text" in gold
        or re.fullmatch(r"[A-Z]{2,}", gold)
        or (re.search(r"[A-Za-z]{5}", gold) and not have_long_products(gold, answer))
    )
    return False if gold_is_no_formula else None


def long_runs(text: str) -> list[re.Match[str]]:
    r"""Find four or more letters in a row, outside of commands and `\text{}`."""
    return list(_LONG_RUN.finditer(_TEXT_COMMAND.sub("", text)))


def have_long_products(gold: str, answer: str) -> bool:
    """Return whether two formulas have four or more letters in a row, all of them variables.

    Both sides must have the same letters. A run of letters that could be a word must touch a digit,
    a sign or a bracket, as in 2abxy.
    """
    runs = long_runs(gold) + long_runs(answer)
    if not runs or _variables(gold) != _variables(answer):
        return False
    products = {"".join(sorted(run[0])) for run in runs if is_product(run[0])}
    others = [run for run in runs if "".join(sorted(run[0])) not in products]
    if not all(_may_be_product(run[0]) for run in others):
        return False
    return bool(products) or all(_touches_math(run) for run in others)


def _variables(text: str) -> set[str]:
    return set(re.findall("[A-Za-z]", _COMMAND.sub("", _TEXT_COMMAND.sub("", text))))


def is_product(text: str) -> bool:
    """Return whether letters are variables and not a word, as in `mghR`, `nRT`, `abcd` and `xyz`.

    They have no vowel, are neighbours in the alphabet, or have a capital after the first letter.
    """
    if not re.fullmatch("[A-Za-z]{3,}", text) or text.isupper():
        return False
    steps = {ord(after) - ord(before) for before, after in pairwise(text)}
    has_no_vowel = not re.search("[aeiouy]", text, re.IGNORECASE) or re.fullmatch("[w-z]+", text)
    has_inner_capital = re.search("(?!^)[A-Z]", text) and _may_be_product(text)
    return bool(has_no_vowel or has_inner_capital or steps in ({1}, {-1}))


def _may_be_product(letters: str) -> bool:
    """Return whether letters may be variables: e, i and o are hardly ever used as such."""
    return not re.search("[eio]", letters, re.IGNORECASE)


def _touches_math(run: re.Match[str]) -> bool:
    """Return whether a digit, a sign or a bracket touches the run of letters."""
    before, after = run.string[: run.start()][-1:], run.string[run.end() :][:1]
    return any(character and character not in " .,;:'" for character in (before, after))


def _is_words(text: str) -> bool:
    r"""Return whether the text is words: in `\text{}`, or without digits and math signs.

    The letter of a choice counts as a word.
    """
    bare = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    if r"\text" in text:
        return bool(re.fullmatch(r"[\s().,:;'A-Za-z0-9-]*[A-Za-z][\s().,:;'A-Za-z0-9-]*", bare))
    return bool(re.fullmatch(r"[A-Za-z'., ]*[A-Za-z]{3}[A-Za-z'., ]*|[Nn]o|\(?[A-Z]\)?", bare))


def _letters(text: str) -> str:
    """Return the letters and digits of a text, with the sign and the point of numbers.

    Case is dropped, except for a single letter.
    """
    filler = r"\b(?:option|choice|answer)\b"
    bare = re.sub(filler, "", text.replace(r"\text", ""), flags=re.IGNORECASE)
    kept = re.sub(r"(?![-.]\d)[^A-Za-z0-9:]", "", bare)
    return kept if len(kept) == 1 else kept.lower()
