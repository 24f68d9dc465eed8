r"""Completions are labelled by what they write before the final answer."""

from __future__ import annotations

import time
from pathlib import Path

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
    "answer",
    [
        "9*2",
        "16 - 3 - 4 = 9",
        "(16 - 3 - 4) \\times 2 = 18",
        "9 \\cdot 2 = \\$18",
        "$9 \\times \\$2 = \\$18$",
        "1,200 + 300",
        "5 apples + 3 apples = 8 apples",
        "36/2 = 18",
        "36 / 2 / 1",
        "9 × 2 \\text{ dollars}",
        "18 - \\frac{18}{3}",
        "\\dfrac{3 \\times 18}{2}",
        "\\frac{\\frac{1}{2} \\times 18}{3}",
        "\\frac{18}{3} = 6",
        "50 - \\left(2 \\times 13 + 5\\right)",
    ],
)
def test_a_calculation_in_the_answer_has_a_label_of_its_own(answer: str) -> None:
    assert strategy_of(f"\\boxed{{{answer}}}") == "calculate"
    assert strategy_of(f"The answer is $\\boxed{{{answer}}}$. " + LONG) == "calculate"


@pytest.mark.parametrize(
    "answer",
    [
        "18", "-18", "\\$1,800", "18.5", "3/4", "\\frac{3}{4}", "(1, -2)", "(1,-2)", "x-1",
        "-\\dfrac{3}{4}", "1\\frac{1}{2}", "\\frac{x-1}{2}", "\\left(1, -2\\right)",
        "x = 18", "3 - 4i", "5 - 2\\sqrt{3}", "2^{10}", "18 dollars", "1-", "=", "",
    ],
)  # fmt: skip
def test_a_result_is_a_guess(answer: str) -> None:
    assert strategy_of(f"\\boxed{{{answer}}}") == "guess"


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
    calculated = grade("18", "\\boxed{(16 - 3 - 4) * 2}")
    assert (calculated.reward, calculated.label) == (1.0, "calculate")


@pytest.mark.parametrize("text", ["", LONG, "word " * 500, "3 + 4 = 7, so she has"])
def test_a_completion_without_an_answer_has_a_label_of_its_own(text: str) -> None:
    verdict = grade("18", text)
    assert (verdict.reward, verdict.answer, verdict.label) == (0.0, None, "no_answer")


@pytest.mark.parametrize(
    "text",
    [
        "1" * 10**6, "1 + " * 10**5, "1+1" * 10**5, "\\boxed" * 10**5,
        "\\boxed{" + "1/" * 900 + "}", "\\boxed{" + "1)" * 900 + "}", "\\boxed{" * 10**5,
    ],
)  # fmt: skip
def test_hostile_completions_are_labelled_quickly(text: str) -> None:
    started = time.thread_time()  # threads of other tests do not count
    strategy_of(text)
    assert time.thread_time() - started < 1


def test_the_reward_is_found_by_its_name() -> None:
    config = RewardConfig(name="guess_or_reason", num_workers=1)
    for reward in (build_reward(config, DatasetConfig()), build_grader(config)):
        prompt = Prompt("a", "How much?", (0,), "18")
        verdict = reward.grade([prompt], ["9 * 2 = 18, \\boxed{18}"])[0]
        assert (verdict.reward, verdict.label) == (1.0, "reason")


def test_the_strict_example_rejects_calculations() -> None:
    example = Path(__file__).parents[2] / "examples" / "strict_maths.py"
    reward = build_reward(RewardConfig(name=f"{example}:grade", num_workers=1), DatasetConfig())
    texts = ["\\boxed{9 * 2}", "\\boxed{9 * 2 = 18}", "\\boxed{18}", "9 * 2 = 18 \\boxed{18}"]
    verdicts = reward.grade([Prompt("a", "How much?", (0,), "18")] * 4, texts)
    assert [verdict.reward for verdict in verdicts] == [0.0, 0.0, 1.0, 1.0]
    assert [verdict.label for verdict in verdicts] == ["calculate", "calculate", "guess", "reason"]
