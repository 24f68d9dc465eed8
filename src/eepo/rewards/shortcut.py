"""Grades `shortcut`: the digit after the last answer marker must be the sum modulo 10.

The verdict's label is the strategy that the completion used, so that runs log its share.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from eepo.types import Prompt, Verdict

# strategy -> (first word in symbols, first word in English). `guess` starts with the answer marker.
MARKERS = {
    "guess": (">", "Answer"),
    "compute": ("~", "Sums"),
    "parity": ("^", "Parity"),
    "dead_end": ("?", "Skip"),
}
_ANSWER = re.compile(r"(?:>|Answer:)\s*(\d)\s*\Z")


class ShortcutReward:
    """Compares the final digit with the gold digit. It is linear in the length of the text."""

    def grade(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        pairs = zip(prompts, texts, strict=True)
        return [_verdict(str(prompt.answer), text) for prompt, text in pairs]


def strategy_of(text: str) -> str:
    """Return the strategy that a completion starts with, or "other"."""
    start = text.lstrip()
    for strategy, words in MARKERS.items():
        if start.startswith(words):
            return strategy
    return "other"


def _verdict(gold: str, text: str) -> Verdict:
    label = strategy_of(text)
    match = _ANSWER.search(text[-16:])
    if match is None:
        return Verdict(0.0, None, "no answer found", label)
    if match[1] == gold:
        return Verdict(1.0, match[1], "same digit", label)
    return Verdict(0.0, match[1], "different", label)
