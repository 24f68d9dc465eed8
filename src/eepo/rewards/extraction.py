r"""Extracts the final answer of a completion: the last \boxed{}, else the last stated answer.

The last number in a text is not an answer by itself. Counting it would reward rambling, and would
hide whether a model has learned to solve problems or only to format answers.
All scans take linear time, so a hostile text costs no more than a normal one.
"""

from __future__ import annotations

import re

from eepo.rewards.boxed import MAX_ANSWER, last_boxed

MAX_BARE = 100  # characters of a completion that consists of the answer alone

# "The answer is", "Answer:", "Final answer" on its own line, GSM8K's "####".
_ANSWER_MARK = re.compile(
    r"####"
    r"|\banswer\**"
    r"(?:\s{1,5}(?:is|are)\b(?:\s{1,5}(?:therefore|thus|then|simply)\b)?\s{0,5}:?|\s{0,5}[:=])"
    r"\s{0,5}\**"
    r"|\bfinal answer\**[ \t]{0,5}\n\s{0,5}",
    re.IGNORECASE,
)
# The same words inside of the answer, as in \boxed{\text{The answer is } 5}.
_ANSWER_PREFIX = re.compile(
    r"(?:\\text\s*\{)?\s*(?:the\s+)?(?:final\s+)?answer\s*(?:is\b|[:=])\s*\}?", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\*\*|,?\s+(?:since|because|as|so|which|where|when)\b|\n")
_MATH_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


def final_answer(text: str) -> str | None:
    """Return the answer as written, without delimiters around it; None if there is no answer."""
    answer = last_boxed(text)
    if answer is None:
        answer = _last_stated(text)
    if answer is None and len(text) <= MAX_BARE and _is_bare(text):
        answer = text
    if answer is None or len(answer) > MAX_ANSWER:
        return None
    answer = answer.strip()
    prefix = _ANSWER_PREFIX.match(answer)
    return answer[prefix.end() :].strip() if prefix else answer or None


def _last_stated(text: str) -> str | None:
    """Return the answer after the last answer mark or in the last <answer> tag.

    If the text has both, the later one counts.
    """
    mark = None
    for mark in _ANSWER_MARK.finditer(text):  # noqa: B007 (only the last match is used)
        pass
    tag_end = text.rfind("</answer>")
    tag_start = text.rfind("<answer>", 0, tag_end) if tag_end >= 0 else -1
    if tag_start >= 0 and (mark is None or mark.start() < tag_end):
        return text[tag_start + len("<answer>") : tag_end]
    if mark is None:
        return None
    stated = text[mark.end() : mark.end() + MAX_ANSWER].strip()
    return stated.split("\n")[0] if mark[0] == "####" else _without_prose(stated)


def _without_prose(stated: str) -> str:
    """Return the formula at the start of the text, else the first sentence.

    If prose follows a dollar sign, the sign is a currency, not a math delimiter.
    """
    for opening, closing in _MATH_DELIMITERS:
        if stated.startswith(opening) and closing in stated[len(opening) :]:
            inner = stated[len(opening) : stated.index(closing, len(opening))]
            if inner.strip() and not re.search(r"(?<![\\{A-Za-z])[A-Za-z]{3,} ", inner):
                return inner
    return _SENTENCE_END.split(stated, maxsplit=1)[0]


def _is_bare(text: str) -> bool:
    """Return whether the text is one line without prose: `42`, `$\\frac{1}{2}$`, `x = 3`."""
    stripped = text.strip()
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", re.sub(r"\\text\s?\{[^{}]*\}", "", stripped))
    return "\n" not in stripped and r"\boxed" not in stripped and len(words) <= 1
