"""Rewrites inequalities so that the smaller side comes first."""

from __future__ import annotations

import re

INEQUALITY = re.compile(r"[<>]|\\(?:le|ge|lt|gt)(?![A-Za-z])")
_REVERSED_SIGN = {">": "<", r"\ge": r"\le", r"\gt": r"\lt"}


def ascending(text: str) -> str:
    r"""Rewrite a descending inequality: 5 > x \ge -2 becomes -2 \le x < 5."""
    signs = INEQUALITY.findall(text)
    if not signs or any(sign not in _REVERSED_SIGN for sign in signs) or "," in text:
        return text
    parts = INEQUALITY.split(text)
    reversed_text = parts[-1]
    for sign, part in zip(reversed(signs), reversed(parts[:-1]), strict=True):
        reversed_text += f" {_REVERSED_SIGN[sign]} {part}"
    return reversed_text
