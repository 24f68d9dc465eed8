r"""Extracts \boxed{...}: models are asked to put the answer there, and data sets store it there."""

from __future__ import annotations

import re
from collections import deque

MAX_BOXES = 10  # boxes tried from the end of the text until a closed one is found
MAX_ANSWER = 2_000  # characters in a box; longer contents are not an answer

_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,5}(?=[{\w\\])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""Return the contents of the last closed \boxed{} or \fbox{}, or None.

    `\boxed 5` without braces counts, too. Runs in linear time.
    """
    for match in reversed(deque(_BOX.finditer(text), maxlen=MAX_BOXES)):
        start = match.end()
        if text[start] != "{":
            return re.split(r"[\s$,]|\.$", text[start : start + 50])[0]
        end = _closing_brace(text, start)
        if end is not None:
            return text[start + 1 : end]
    return None


def _closing_brace(text: str, start: int) -> int | None:
    r"""Return the index of the brace that closes the one at `start`, within MAX_ANSWER characters.

    The escaped braces \{ and \} are text and do not nest.
    """
    depth = 0
    for brace in _BRACE.finditer(text, start, start + MAX_ANSWER + 2):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and brace[0] == "}":
            return brace.start()
    return None
