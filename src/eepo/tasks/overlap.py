"""Evaluation problems that also stand in the training set: warned about, not removed."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from eepo.tasks.problems import Problem


def overlap(train: Sequence[Problem], evaluation: Sequence[Problem]) -> list[tuple[str, str]]:
    """(evaluation id, training id) of every evaluation problem whose text is also trained on."""
    trained = {normalised(problem.text): problem.id for problem in reversed(train)}
    keys = ((problem.id, normalised(problem.text)) for problem in evaluation)
    return [(own, trained[key]) for own, key in keys if key in trained]


def normalised(text: str) -> str:
    return re.sub(r"[\W_]+", "", unicodedata.normalize("NFKC", text).casefold())
