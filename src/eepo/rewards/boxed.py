r"""\boxed{...}: where models are asked to put their answer, and where data sets keep theirs."""

from __future__ import annotations

import re

MAX_BOXES = 10  # tried from the end, until one is closed
MAX_ANSWER = 2_000  # characters in a box; nothing longer is an answer

_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,5}(?=[{\w\\])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{} or \fbox{} that is closed; `\boxed 5` is a box, too. Takes linear time."""
    for match in list(_BOX.finditer(text))[: -MAX_BOXES - 1 : -1]:
        start = match.end()
        if text[start] != "{":
            return re.split(r"[\s$,]|\.$", text[start : start + 50])[0]
        end = _closing_brace(text, start)
        if end is not None:
            return text[start + 1 : end]
    return None


def _closing_brace(text: str, start: int) -> int | None:
    r"""Where the brace at `start` is closed, if it is within the longest answer we read. \{ and \} are only signs."""
    depth = 0
    for brace in _BRACE.finditer(text, start, start + MAX_ANSWER + 2):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and brace[0] == "}":
            return brace.start()
    return None
