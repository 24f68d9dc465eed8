"""Grades by text: the final answer must equal the gold answer, except for case and whitespace."""

from __future__ import annotations

from collections.abc import Sequence

from eepo.rewards.extraction import final_answer
from eepo.types import Prompt, Verdict


class ExactReward:
    """Compares texts after `normalise_text`."""

    def grade(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        pairs = zip(prompts, texts, strict=True)
        return [_verdict(str(prompt.answer), text) for prompt, text in pairs]


def _verdict(gold: str, text: str) -> Verdict:
    answer = final_answer(text)
    if answer is None:
        return Verdict(0.0, None, "no answer found")
    answer = normalise_text(answer)
    if answer == normalise_text(gold):
        return Verdict(1.0, answer, "same text")
    return Verdict(0.0, answer, "different")


def normalise_text(text: str) -> str:
    """Drop case, extra whitespace, and the dots and dollar signs around the text."""
    return " ".join(text.strip(" \t\r\n.$").casefold().split())
