"""Grades by text: the final answer must be the gold answer, character for character but for case and spaces."""

from __future__ import annotations

from collections.abc import Sequence

from eepo.rewards.extraction import final_answer
from eepo.types import Prompt, Verdict


class ExactReward:
    def grade(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        return [
            _verdict(str(prompt.answer), text) for prompt, text in zip(prompts, texts, strict=True)
        ]


def _verdict(gold: str, text: str) -> Verdict:
    answer = final_answer(text)
    if answer is None:
        return Verdict(0.0, None, "no answer found")
    given = normal(answer)
    return (
        Verdict(1.0, given, "same text")
        if given == normal(gold)
        else Verdict(0.0, given, "different")
    )


def normal(text: str) -> str:
    return " ".join(text.strip(" \t\r\n.$").casefold().split())
