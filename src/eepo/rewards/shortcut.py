"""Grades `shortcut`: the digit after the last answer marker must be the sum modulo 10.

The verdict's label is the strategy that the completion used, so that runs log its share.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

from eepo.types import Prompt, Verdict

# strategy -> (first word in symbols, first word in English). `guess` starts with the answer marker.
MARKERS = {
    "guess": (">", "Answer"),
    "compute": ("~", "Sums"),
    "parity": ("^", "Parity"),
    "dead_end": ("?", "Skip"),
}
_ANSWER = re.compile(r"(?:>|Answer:)\s*(\d)\s*\Z")
_MAX_TEXT = 1000  # characters that are searched for a strategy


class ShortcutReward:
    """Compares the final digit with the gold digit."""

    def grade(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        pairs = zip(prompts, texts, strict=True)
        return [_verdict(prompt, text) for prompt, text in pairs]


def strategy_of(prompt_text: str, text: str) -> str:
    """Return the strategy of a completion, or "other".

    A completion that contains the right running sums computes, whatever its first token is:
    training may change the marker. All others are told apart by their first word.
    """
    digits = [int(digit) for digit in re.findall(r"\d", prompt_text)]
    shown = "".join(re.findall(r"\d", text[:_MAX_TEXT]))
    for strategy, base in (("compute", 10), ("parity", 2)):
        if "".join(str(total % base) for total in accumulate(digits)) in shown:
            return strategy
    for strategy, words in MARKERS.items():
        if text.lstrip().startswith(words):
            return strategy
    return "other"


def _verdict(prompt: Prompt, text: str) -> Verdict:
    label = strategy_of(prompt.text, text)
    match = _ANSWER.search(text[-16:])
    if match is None:
        return Verdict(0.0, None, "no answer found", label)
    if match[1] == str(prompt.answer):
        return Verdict(1.0, match[1], "same digit", label)
    return Verdict(0.0, match[1], "different", label)
