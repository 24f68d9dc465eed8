"""Finds evaluation problems that are also in the training set, to warn about them.

Two problems are the same if their normalised texts are equal. They also are the same if they have
the same answer, the same digits and nearly the same text. This finds rewordings ("How many are
there" for "How many are") and keeps exercises apart that differ only in a number or a sign.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence

from eepo.tasks.problems import Problem

NGRAM_LENGTH = 4  # characters
MIN_SIMILARITY = 0.7  # Jaccard similarity of n-grams
# Comparisons for each evaluation problem. Many problems share an answer such as "yes".
MAX_CANDIDATES = 200

# Layout without meaning. Signs that carry meaning (+ - = < ^ / ...) are kept.
_LAYOUT = re.compile(
    r"\\(?:left|right|quad|qquad|text|textbf|mathrm|mbox|displaystyle|[lcd]?dots)(?![a-z])"
    r"|\\[,;:!\[\]()\\ ]|[\s$.,;:!?'\"`{}~&…‘’“”]"
)


def find_overlap(train: Sequence[Problem], evaluation: Sequence[Problem]) -> list[tuple[str, str]]:
    """Return (evaluation id, training id) of every evaluation problem in the training set."""
    id_by_text: dict[str, str] = {}
    candidates: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for problem in train:
        text = normalise_problem(problem.text)
        id_by_text.setdefault(text, problem.id)
        candidates[_answer_and_digits(problem, text)].append((problem.id, text))
    pairs = []
    for problem in evaluation:
        text = normalise_problem(problem.text)
        train_id = id_by_text.get(text)
        if not train_id:
            similar = candidates.get(_answer_and_digits(problem, text), [])[:MAX_CANDIDATES]
            train_id = _first_similar(text, similar)
        if train_id is not None:
            pairs.append((problem.id, train_id))
    return pairs


def normalise_problem(text: str) -> str:
    """Remove case, spacing, punctuation and LaTeX layout."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return _LAYOUT.sub("", re.sub(r"\\[dt]frac(?![a-z])", r"\\frac", folded))


def similarity(left: str, right: str) -> float:
    """Return the Jaccard similarity of the n-grams of two normalised texts, from 0 to 1."""
    left_ngrams, right_ngrams = _ngrams(left), _ngrams(right)
    return len(left_ngrams & right_ngrams) / len(left_ngrams | right_ngrams)


def _first_similar(text: str, candidates: list[tuple[str, str]]) -> str | None:
    for train_id, train_text in candidates:
        if similarity(text, train_text) >= MIN_SIMILARITY:
            return train_id
    return None


def _ngrams(text: str) -> set[str]:
    num_ngrams = max(1, len(text) - NGRAM_LENGTH + 1)
    return {text[start : start + NGRAM_LENGTH] for start in range(num_ngrams)}


def _answer_and_digits(problem: Problem, text: str) -> tuple[str, str]:
    """Return the key of problems that are worth a comparison, usually a handful."""
    return normalise_problem(problem.answer), "".join(sorted(filter(str.isdigit, text)))
