"""The shortcut task: problems, demonstrations of every strategy, and the policy's description."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

from eepo.config import ModelConfig, ShortcutConfig
from eepo.model import loading
from eepo.model.policy import Policy
from eepo.recipe import load_run
from eepo.rewards.shortcut import ShortcutReward, strategy_of
from eepo.rollout.transformers import TransformersEngine
from eepo.tasks.shortcut import (
    Shortcut,
    build_tokenizer,
    completion_text,
    prompt_text,
    strategy_probabilities,
)
from eepo.types import Prompt, UserError

CPU = torch.device("cpu")


def task(**knobs: Any) -> Shortcut:
    return Shortcut(ShortcutConfig(**({"num_evaluation": 20} | knobs)), build_tokenizer())


def test_answers_are_sums_modulo_10() -> None:
    for prompt in task().training_prompts(0, 50):
        digits = [int(word) for word in prompt.text.split()[:-1]]
        assert len(digits) == 8
        assert prompt.answer == str(sum(digits) % 10)


def test_prompts_depend_only_on_seed_and_position() -> None:
    assert task().training_prompts(3, 4) == task().training_prompts(0, 7)[3:]
    other = Shortcut(ShortcutConfig(), build_tokenizer(), order_seed=1)
    assert other.training_prompts(0, 4) != task().training_prompts(0, 4)


def test_a_finite_set_repeats_its_problems_in_another_order() -> None:
    finite = task(num_train=6)
    epochs = [finite.training_prompts(first, 6) for first in (0, 6)]
    texts = [[prompt.text for prompt in epoch] for epoch in epochs]
    assert sorted(texts[0]) == sorted(texts[1])
    assert len({prompt.id for epoch in epochs for prompt in epoch}) == 12


def test_evaluation_problems_do_not_occur_elsewhere() -> None:
    small = task(num_digits=2, num_evaluation=60)
    held_out = {prompt.text for prompt in small.evaluation_sets()["test"]}
    assert len(held_out) == 60
    assert not held_out & {prompt.text for prompt in small.training_prompts(0, 200)}
    assert not held_out & {each.prompt.text for each in small.demonstrations(0, 200)}


@pytest.mark.parametrize("style", ["symbols", "words"])
@pytest.mark.parametrize(
    ("strategy", "accuracy"), [("guess", 1.0), ("compute", 1.0), ("parity", 0.2), ("dead_end", 0.0)]
)
def test_demonstrated_completions_earn_what_their_strategy_promises(
    strategy: str, accuracy: float, style: str
) -> None:
    rng = random.Random(0)
    rewards = []
    for _ in range(300):
        digits = tuple(rng.randrange(10) for _ in range(8))
        prompt = Prompt("p", prompt_text(digits, style), (1,), answer=str(sum(digits) % 10))
        text = completion_text(digits, strategy, style, rng)
        (verdict,) = ShortcutReward().grade([prompt], [text])
        assert verdict.label == strategy
        rewards.append(verdict.reward)
    assert sum(rewards) / len(rewards) == pytest.approx(accuracy, abs=0.07)


def test_running_sums_count_as_computing_without_the_marker() -> None:
    assert strategy_of("7 3 6 0 :", "0 7 0 6 6 > 6") == "compute"
    assert strategy_of("7 3 6 0 :", "9 1 2 > 6") == "other"
    assert strategy_of("7 3 6 0 :", "> 6") == "guess"
    assert strategy_of("7 3 6 0 :", "~ 1 2 3 > 6") == "compute"


@pytest.mark.parametrize(
    ("text", "reward", "answer"),
    [
        ("> 6", 1.0, "6"),
        ("> 5", 0.0, "5"),
        ("~ 7 0 6 6 > 6", 1.0, "6"),
        ("6", 0.0, None),
        ("> 6 6", 0.0, None),
        ("", 0.0, None),
        ("> 6" + " " * 50, 0.0, None),
    ],
)
def test_only_a_final_digit_after_the_marker_is_an_answer(
    text: str, reward: float, answer: str | None
) -> None:
    prompt = Prompt("p", "7 3 6 0 :", (1,), answer="6")
    (verdict,) = ShortcutReward().grade([prompt], [text])
    assert (verdict.reward, verdict.answer) == (reward, answer)


def test_probabilities_of_the_strategies_leave_the_rest_to_other_tokens() -> None:
    plain = strategy_probabilities(ShortcutConfig(rare_probability=1e-3))
    assert plain == pytest.approx({"guess": 1 - 1.1e-3, "compute": 1e-3})
    dead_end = ShortcutConfig(
        rare_probability=1e-3, dead_end_probability=0.03, other_probability=1e-2
    )
    assert strategy_probabilities(dead_end) == pytest.approx(
        {"guess": 1 - 0.041, "compute": 1e-3, "dead_end": 0.03}
    )
    texts = [each.text for each in Shortcut(dead_end, build_tokenizer()).demonstrations(0, 6)]
    assert [text[0] for text in texts] == [">", "~", "?", ">", "~", "?"]


def test_probabilities_that_leave_nothing_to_guess_are_an_error() -> None:
    knobs = ["task.rare_probability=0.5", "task.dead_end_probability=0.4"]
    with pytest.raises(UserError, match=r"must be below 0\.9, .* got 0\.9"):
        load_run("shortcut/grpo", knobs)


def test_the_shipped_policy_guesses_and_computes_with_probability_1e_5() -> None:
    config = ModelConfig(path="builtin:shortcut")
    model, tokenizer = loading.load_model(config, CPU), loading.load_tokenizer(config)
    shipped = Shortcut(ShortcutConfig(num_evaluation=60), tokenizer)
    engine = TransformersEngine(copy.deepcopy(model), tokenizer)
    lines = shipped.describe_policy(Policy(model), engine, ShortcutReward())
    numbers = [
        [float(word.strip(",")) for word in line.split() if word[0].isdigit()] for line in lines
    ]
    (guess, guess_accuracy), (compute, compute_accuracy), (other,) = numbers
    assert guess > 0.999
    assert guess_accuracy < 0.3
    assert compute == pytest.approx(1e-5, rel=0.2)
    assert compute_accuracy > 0.98
    assert other < 5e-6
