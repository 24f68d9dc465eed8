r"""The final answer of a completion: the last \boxed{}, else the last answer that the text states as one.

A number that merely stands last is not an answer: counting it would hide whether a model has learned to answer or
only to format, and would pay for rambling. Only linear scans: a hostile text costs no more than an honest one.
"""

from __future__ import annotations

import re

MAX_ANSWER = 2_000  # characters; nothing longer is an answer
MAX_BARE = 100  # characters of a completion that is nothing but its answer

MAX_BOXES = 10  # boxes tried from the end, until one is closed

_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,5}(?=[{\w\\])")
_MARK = re.compile(
    r"####|\banswer(?:\s{1,5}(?:is|are)\b(?:\s{1,5}(?:therefore|thus|then|simply)\b)?\s{0,5}:?|\s{0,5}[:=])\s{0,5}\**",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\*\*")
_FRAMES = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


def final_answer(text: str) -> str | None:
    """The answer as written, without the frame around it; None where no answer is given."""
    answer = last_boxed(text)
    if answer is None:
        answer = _last_stated(text)
    if answer is None and len(text) <= MAX_BARE and _is_bare(text):
        answer = text
    if answer is None or len(answer) > MAX_ANSWER:
        return None
    return answer.strip() or None


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{} or \fbox{} that is closed; `\boxed 5` is a box, too."""
    for match in list(_BOX.finditer(text))[: -MAX_BOXES - 1 : -1]:
        start = match.end()
        if text[start] != "{":
            return text[start : start + 50].split("$")[0].split()[0]
        end = _closing_brace(text, start)
        if end is not None:
            return text[start + 1 : end]
    return None


def _closing_brace(text: str, start: int) -> int | None:
    """Where the brace at `start` is closed, if it is within the longest answer we read."""
    depth, place = 0, start
    while place < min(len(text), start + MAX_ANSWER + 2):
        if text[place] == "\\":
            place += 1  # \{ and \} are text
        elif text[place] == "{":
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if depth == 0:
                return place
        place += 1
    return None


def _last_stated(text: str) -> str | None:
    """After "answer is", "answer:" or "####", or in <answer> tags, whichever comes last."""
    mark = None
    for mark in _MARK.finditer(text):  # noqa: B007 (only the last one counts)
        pass
    close = text.rfind("</answer>")
    opened = text.rfind("<answer>", 0, close) if close >= 0 else -1
    if opened >= 0 and (mark is None or mark.start() < close):
        return text[opened + len("<answer>") : close]
    if mark is None:
        return None
    line = text[mark.end() : mark.end() + MAX_ANSWER].strip().split("\n")[0]
    return line if mark[0] == "####" else _without_prose(line)


def _without_prose(line: str) -> str:
    """The formula that the line begins with, else its first sentence."""
    for opened, closed in _FRAMES:
        if line.startswith(opened) and closed in line[len(opened) :]:
            return line[len(opened) : line.index(closed, len(opened))]
    return _SENTENCE_END.split(line, maxsplit=1)[0]


def _is_bare(text: str) -> bool:
    """One line without prose: `42`, `$\\frac{1}{2}$`, `x = 3`."""
    stripped = text.strip()
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", re.sub(r"\\text\s?\{[^{}]*\}", "", stripped))
    return "\n" not in stripped and r"\boxed" not in stripped and len(words) <= 1
