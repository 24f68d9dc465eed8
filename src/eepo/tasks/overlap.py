"""Evaluation problems that also stand in the training set: warned about, not removed.

Two problems are the same when their normalised texts are equal, or when they have the same answer, the same digits and
nearly the same text: that finds rewordings ("How many are there" for "How many are"), and keeps apart the exercises
that differ in a number or a sign only, of which maths data sets are full.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence

from eepo.tasks.problems import Problem

PIECE = 4  # letters
ALIKE = 0.7  # shared pieces over all pieces of two texts
MAX_KIN = 200  # problems with the same answer and digits; of yes-or-no riddles there may be many more, left uncompared

# How it is set, not what it says. Signs that bear meaning (+ - = < ^ / ...) stay.
_LAYOUT = re.compile(
    r"\\(?:left|right|quad|qquad|text|textbf|mathrm|mbox|displaystyle|[lcd]?dots)(?![a-z])"
    r"|\\[,;:!\[\]()\\ ]|[\s$.,;:!?'\"`{}~&…‘’“”]"
)


def overlap(train: Sequence[Problem], evaluation: Sequence[Problem]) -> list[tuple[str, str]]:
    """(evaluation id, training id) of every evaluation problem that is also trained on."""
    trained: dict[str, str] = {}  # normalised text → id
    near: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(
        list
    )  # answer and digits → ids and texts
    for problem in train:
        text = normalised(problem.text)
        trained.setdefault(text, problem.id)
        near[_kin(problem, text)].append((problem.id, text))
    pairs = []
    for problem in evaluation:
        text = normalised(problem.text)
        kin = near.get(_kin(problem, text), [])[:MAX_KIN]
        found = trained.get(text) or next(
            (own for own, other in kin if similarity(text, other) >= ALIKE), None
        )
        if found is not None:
            pairs.append((problem.id, found))
    return pairs


def normalised(text: str) -> str:
    """Without case, spacing, punctuation and LaTeX's layout."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return _LAYOUT.sub("", re.sub(r"\\[dt]frac(?![a-z])", r"\\frac", folded))


def similarity(one: str, other: str) -> float:
    """Of normalised texts: the share of their pieces that both hold, from 0 to 1."""
    first, second = _pieces(one), _pieces(other)
    return len(first & second) / len(first | second)


def _pieces(text: str) -> set[str]:
    return {text[start : start + PIECE] for start in range(max(1, len(text) - PIECE + 1))}


def _kin(problem: Problem, text: str) -> tuple[str, str]:
    """Only problems with the same answer and digits are compared: in maths data sets a handful."""
    return normalised(problem.answer), "".join(sorted(filter(str.isdigit, text)))
