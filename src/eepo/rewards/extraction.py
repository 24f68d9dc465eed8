r"""The final answer of a completion: the last \boxed{}, else the last answer that the text states as one.

A number that merely stands last is not an answer: counting it would hide whether a model has learned to answer or
only to format, and would pay for rambling. Only linear scans: a hostile text costs no more than an honest one.
"""

from __future__ import annotations

import re

from eepo.rewards.boxed import MAX_ANSWER, last_boxed

MAX_BARE = 100  # characters of a completion that is nothing but its answer

_MARK = re.compile(
    r"####|\banswer\**(?:\s{1,5}(?:is|are)\b(?:\s{1,5}(?:therefore|thus|then|simply)\b)?\s{0,5}:?|\s{0,5}[:=])\s{0,5}\**"
    r"|\bfinal answer\**[ \t]{0,5}\n\s{0,5}",
    re.IGNORECASE,
)
_INSIDE = re.compile(
    r"(?:\\text\s*\{)?\s*(?:the\s+)?(?:final\s+)?answer\s*(?:is\b|[:=])\s*\}?", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\*\*|,?\s+(?:since|because|as|so|which|where|when)\b|\n")
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
    return (
        _INSIDE.sub("", answer.strip(), count=1).strip()
        if _INSIDE.match(answer.strip())
        else answer.strip() or None
    )


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
    rest = text[mark.end() : mark.end() + MAX_ANSWER].strip()
    return rest.split("\n")[0] if mark[0] == "####" else _without_prose(rest)


def _without_prose(rest: str) -> str:
    """The formula that it begins with, else its first sentence. A frame that holds prose is a sign of money."""
    for opened, closed in _FRAMES:
        if rest.startswith(opened) and closed in rest[len(opened) :]:
            inner = rest[len(opened) : rest.index(closed, len(opened))]
            if inner.strip() and not re.search(r"(?<![\\{A-Za-z])[A-Za-z]{3,} ", inner):
                return inner
    return _SENTENCE_END.split(rest, maxsplit=1)[0]


def _is_bare(text: str) -> bool:
    """One line without prose: `42`, `$\\frac{1}{2}$`, `x = 3`."""
    stripped = text.strip()
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", re.sub(r"\\text\s?\{[^{}]*\}", "", stripped))
    return "\n" not in stripped and r"\boxed" not in stripped and len(words) <= 1
