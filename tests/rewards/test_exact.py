"""Checks the reward that compares texts."""

from __future__ import annotations

import pytest

from eepo.rewards.exact import ExactReward
from eepo.types import Prompt, Verdict

NO_ANSWER = Verdict(0.0, None, "no answer found")


@pytest.mark.parametrize(
    ("gold", "text", "verdict"),
    [
        ("12", "12", Verdict(1.0, "12", "same text")),
        ("12", " 12\n", Verdict(1.0, "12", "same text")),
        ("Blue  Whale", r"so \boxed{blue whale}", Verdict(1.0, "blue whale", "same text")),
        ("0.5", "1/2", Verdict(0.0, "1/2", "different")),
        ("12", "", NO_ANSWER),
        ("12", "well, I would say that 12 comes out of this", NO_ANSWER),
    ],
)
def test_final_answer_must_equal_the_gold_answer(gold: str, text: str, verdict: Verdict) -> None:
    assert ExactReward().grade([Prompt("", "", (), gold)], [text]) == [verdict]


def test_prompts_and_texts_must_have_equal_length() -> None:
    with pytest.raises(ValueError):
        ExactReward().grade([Prompt("", "", (), "1")], ["1", "2"])
