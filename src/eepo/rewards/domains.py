r"""Splits off the domain at the end of an answer: `x^2 \text{ for all } x \in \mathbb{R}`.

A domain on one side only is ignored, because the problem states it. Domains on both sides must be
the same.
"""

from __future__ import annotations

import re

_REALS = r"\(-\\infty, ?\\infty\)"  # what `normalise_latex` makes of \mathbb{R}
_SIGN = r"\^ ?\{?[-+*\d]\}?|_ ?\{?[-+>\\ge 0]+\}?"  # of the numbers, as in \mathbb{Z}^+
_SET = rf"(?:{_REALS}|\\mathbb ?(?:\{{[A-Z]\}}|[A-Z]))(?:{_SIGN})?"
_VARIABLE = r"\b[A-Za-z](?:_\w)?\b"
_VARIABLES = rf"{_VARIABLE}(?: ?, ?{_VARIABLE})*"
_MEMBERSHIP = rf"{_VARIABLES} ?\\in ?{_SET}"
_KINDS = (
    "real|positive|negative|nonnegative|non-negative|nonzero|integers?|natural|rational|complex"
    "|numbers?|values?|of|in|the"
)
_BOUND = r"[<>]|\\(?:le|ge|neq?)\b|-?\d+"
# What may follow "for all": words for a set of numbers, variables, bounds.
_CONDITION = rf"(?:\s|\b(?:{_KINDS})\b|\\text ?\{{|[{{}}()]|{_MEMBERSHIP}|{_VARIABLES}|{_BOUND})*+"
_QUANTIFIER = r"(?:for (?:all|any|every|each)\b|\\forall(?![A-Za-z]))"
_DOMAIN = re.compile(
    rf"[\s,;]*(?:\\text ?\{{)?[\s,(]*{_QUANTIFIER}(?P<condition>{_CONDITION})"
    rf"|(?:[\s,;]*\\text ?\{{[\s,(]*(?:for|where|with)\s*\}}|\s*[,(]|\s+(?:for|where|with)\b)\s*"
    rf"(?P<membership>{_MEMBERSHIP})\s*\)?",
)


def split_domain(text: str) -> tuple[str, str | None]:
    """Return (answer, domain); (text, None) if there is no domain at the end."""
    if not ("for " in text or r"\in" in text or r"\forall" in text):
        return text, None
    for match in _DOMAIN.finditer(text):
        answer = text[: match.start()].strip()
        if answer and match.end() == len(text) and _belongs(match["membership"], answer):
            return answer, _canonical(match["condition"] or match["membership"] or "")
    return text, None


def _belongs(membership: str | None, answer: str) -> bool:
    """Return whether the variables occur in the answer. In `x = 1, y \\in R` y is a solution."""
    if membership is None:
        return True
    variables = re.findall(r"[A-Za-z](?:_\w)?", membership.split(r"\in")[0])
    return all(re.search(rf"(?<![\\A-Za-z]){variable}", answer) for variable in variables)


def _canonical(domain: str) -> str:
    r"""Give `x \in (-\infty,\infty)` and `\text{real numbers } x` one spelling."""
    domain = re.sub(rf"\\in ?{_REALS}", " real ", domain)
    domain = re.sub(r"\\in ?\\mathbb ?\{?Z\}?", " integer ", domain)
    words = re.findall(r"[A-Za-z]+|[^\sA-Za-z]", re.sub(r"\\text|[{}(),]", " ", domain))
    dropped = {"numbers", "number", "values", "value", "of", "in", "the"}
    return " ".join(sorted(word.removesuffix("s") for word in words if word not in dropped))
