r"""Recognises the name on the left of `=`, such as f(x) in `f(x) = 2x`."""

from __future__ import annotations

import re

# For example x_1, f(x), \angle ABC, AB, f^{-1}(x), (x, y), P(X = 2), n(\text{red}), \text{Area}.
_NAME = re.compile(
    r"[A-Za-z](?:_\w|_\{[^{}]{1,15}\})?(?:\([A-Za-z, ]{1,10}\))?"
    r"|\\[A-Za-z]+(?:_\w)?(?: ?[A-Z]){0,3}"
    r"|[A-Z]{2,4}"
    r"|[a-z]\^\{-1\}\([a-z]\)"
    r"|\([A-Za-z](?:_\w)?(?:, ?[A-Za-z](?:_\w)?){1,4}\)"
    r"|(?:P|Pr|\\Pr|\\text\{Pr?\}) ?\([^()=]{1,60}(?:=[^()=]{1,20})?\)"
    r"|(?:[A-Za-z]|\\text\{[A-Za-z ]{1,30}\}) ?\([^()=]{0,20}\\text\{[^{}]{1,60}\}[^()=]{0,20}\)"
    r"|\\text\{(?! *not\b)[A-Za-z ]{1,60}\}(?: ?\([A-Za-z, ]{1,10}\))?"
)


def is_name(text: str) -> bool:
    """Return whether the text names a quantity or a function, instead of computing a value."""
    return bool(_NAME.fullmatch(text))
