r"""Completions are labelled by what they write before the final answer."""

from __future__ import annotations

import time

import pytest

from eepo.config import DatasetConfig, RewardConfig
from eepo.rewards import build_grader, build_reward
from eepo.rewards.guess_or_reason import grade, strategy_of
from eepo.types import Prompt

LONG = "She has some eggs and sells a part of them every day, so we take away what she eats. "


@pytest.mark.parametrize(
    "text",
    [
        "",
        "18",
        "\\boxed{18}",
        "$\\boxed{18}$ dollars",
        "The final answer to the problem, in dollars, is \\boxed{18}.",
        "\\boxed{18}\n\nExplanation: 16 - 3 - 4 = 9 and 9 * 2 = 18. " + LONG,
        "Janet sells 9 eggs on 1-1-2020: \\boxed{18}",
        "x = \\boxed{18}",
    ],
)
def test_a_bare_answer_is_a_guess(text: str) -> None:
    assert strategy_of(text) == "guess"


@pytest.mark.parametrize(
    "text",
    [
        LONG + "\\boxed{18}",
        "16 - 3 - 4 = 9, 9 * 2 = 18: \\boxed{18}",
        "$9 \\times 2 = 18$ \\boxed{18}",
        "\\boxed{17} No: 16 - 3 - 4 = 9, so \\boxed{18}",
        "9 × 2 = 18",
        LONG,  # cut off before the answer
    ],
)
def test_words_or_a_calculation_before_the_answer_are_reasoning(text: str) -> None:
    assert strategy_of(text) == "reason"


def test_reward_and_answer_are_those_of_the_math_grader() -> None:
    right = grade("18", "16 - 3 - 4 = 9, 9 * 2 = 18: \\boxed{18}")
    wrong = grade("18", "\\boxed{17}")
    assert (right.reward, right.answer, right.label) == (1.0, "18", "reason")
    assert (wrong.reward, wrong.answer, wrong.label) == (0.0, "17", "guess")


@pytest.mark.parametrize("text", ["", LONG, "word " * 500, "3 + 4 = 7, so she has"])
def test_a_completion_without_an_answer_has_a_label_of_its_own(text: str) -> None:
    verdict = grade("18", text)
    assert (verdict.reward, verdict.answer, verdict.label) == (0.0, None, "no_answer")


@pytest.mark.parametrize("text", ["1" * 10**6, "1 + " * 10**5, "1+1" * 10**5, "\\boxed" * 10**5])
def test_hostile_completions_are_labelled_quickly(text: str) -> None:
    started = time.process_time()
    strategy_of(text)
    assert time.process_time() - started < 1


def test_the_reward_is_found_by_its_name() -> None:
    config = RewardConfig(name="guess_or_reason", num_workers=1)
    for reward in (build_reward(config, DatasetConfig()), build_grader(config)):
        prompt = Prompt("a", "How much?", (0,), "18")
        verdict = reward.grade([prompt], ["9 * 2 = 18, \\boxed{18}"])[0]
        assert (verdict.reward, verdict.label) == (1.0, "reason")
