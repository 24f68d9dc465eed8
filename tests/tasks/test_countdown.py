"""Checks that problems are reproducible, solvable, in range, and held out for evaluation."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from eepo.config import CountdownConfig
from eepo.rewards.countdown import CountdownReward
from eepo.tasks.countdown import Countdown
from eepo.types import Prompt, UserError

# So few problems exist that training would repeat evaluation problems if they were not held out.
FEW_PROBLEMS = CountdownConfig(
    num_numbers=2,
    max_number=9,
    min_target=1,
    max_target=12,
    out_of_range_min_target=13,
    out_of_range_max_target=30,
    num_evaluation=12,
)


def identities(prompts: list[Prompt]) -> set[tuple[tuple[int, ...], int]]:
    return {
        (tuple(sorted(prompt.answer["numbers"])), prompt.answer["target"]) for prompt in prompts
    }


def test_training_prompts_are_a_pure_function_of_position(tokenizer: Any) -> None:
    config = CountdownConfig(num_evaluation=5)
    task = Countdown(config, tokenizer)
    whole = task.training_prompts(0, 12)
    assert task.training_prompts(5, 3) == whole[5:8]
    fresh = Countdown(config, tokenizer)
    fresh.evaluation_sets()
    random.seed(99)
    for position in reversed(range(12)):
        assert fresh.training_prompts(position, 1) == [whole[position]]


def test_new_problems_have_unique_ids(tokenizer: Any) -> None:
    prompts = Countdown(CountdownConfig(num_evaluation=5), tokenizer).training_prompts(0, 50)
    assert len({prompt.id for prompt in prompts}) == 50
    assert len(identities(prompts)) > 45


def test_task_seed_changes_every_set(tokenizer: Any) -> None:
    first, second = (
        Countdown(CountdownConfig(num_evaluation=10, seed=seed), tokenizer) for seed in (0, 1)
    )
    assert identities(first.training_prompts(0, 10)) != identities(second.training_prompts(0, 10))
    first_sets, second_sets = first.evaluation_sets(), second.evaluation_sets()
    for name in ("in_range", "out_of_range"):
        assert identities(first_sets[name]) != identities(second_sets[name])


def test_longer_evaluation_sets_start_with_the_shorter_ones(tokenizer: Any) -> None:
    short, long = (
        Countdown(CountdownConfig(num_evaluation=n), tokenizer).evaluation_sets() for n in (5, 9)
    )
    assert long["in_range"][:5] == short["in_range"]


def test_evaluation_problems_never_occur_in_training_or_demonstrations(tokenizer: Any) -> None:
    task = Countdown(FEW_PROBLEMS, tokenizer)
    sets = task.evaluation_sets()
    held_out = identities(sets["in_range"]) | identities(sets["out_of_range"])
    assert len(held_out) == 24  # no duplicates
    assert not held_out & identities(task.training_prompts(0, 400))
    demonstrated = [demonstration.prompt for demonstration in task.demonstrations(0, 400)]
    assert not held_out & identities(demonstrated)
    finite = Countdown(replace(FEW_PROBLEMS, num_train=60), tokenizer)
    assert not held_out & identities(finite.training_prompts(0, 120))


def test_targets_and_numbers_are_in_range(tokenizer: Any) -> None:
    config = CountdownConfig(num_evaluation=40)
    task = Countdown(config, tokenizer)
    sets = task.evaluation_sets()
    assert list(sets) == ["in_range", "out_of_range"]
    assert all(
        10 <= prompt.answer["target"] <= 60
        for prompt in task.training_prompts(0, 60) + sets["in_range"]
    )
    assert all(61 <= prompt.answer["target"] <= 99 for prompt in sets["out_of_range"])
    for prompt in task.training_prompts(0, 60) + sets["out_of_range"]:
        assert len(prompt.answer["numbers"]) == 4
        assert all(1 <= number <= 12 for number in prompt.answer["numbers"])


def test_both_ends_of_every_range_are_drawn(tokenizer: Any) -> None:
    prompts = Countdown(FEW_PROBLEMS, tokenizer).training_prompts(0, 400)
    assert {1, 12} <= {prompt.answer["target"] for prompt in prompts}
    assert {1, 9} <= {number for prompt in prompts for number in prompt.answer["numbers"]}


@pytest.mark.parametrize("num_numbers", [2, 4, 6])
def test_every_demonstration_earns_the_reward(num_numbers: int, tokenizer: Any) -> None:
    task = Countdown(CountdownConfig(num_numbers=num_numbers, num_evaluation=5), tokenizer)
    demonstrations = task.demonstrations(0, 200)
    prompts = [demonstration.prompt for demonstration in demonstrations]
    expressions = [demonstration.text for demonstration in demonstrations]
    verdicts = CountdownReward().grade(prompts, expressions)
    assert [verdict.reward for verdict in verdicts] == [1.0] * 200
    targets = Counter(prompt.answer["target"] <= 60 for prompt in prompts)
    assert targets == {True: 100, False: 100}  # a warm start sees both ranges


def test_demonstrations_survive_encoding_and_decoding(tokenizer: Any) -> None:
    task = Countdown(CountdownConfig(num_evaluation=5), tokenizer)
    for demonstration in task.demonstrations(0, 50):
        token_ids = tokenizer(demonstration.text).input_ids
        assert tokenizer.decode(token_ids) == demonstration.text


def test_prompts_follow_the_template(tokenizer: Any) -> None:
    task = Countdown(
        CountdownConfig(num_evaluation=5, template="{target} = ({numbers}) :"), tokenizer
    )
    for prompt in task.training_prompts(0, 5):
        numbers = " ".join(map(str, prompt.answer["numbers"]))
        assert prompt.text == f"{prompt.answer['target']} = ({numbers}) :"
        assert prompt.token_ids == tuple(tokenizer(prompt.text).input_ids)


def test_each_epoch_has_every_problem_once_in_a_different_order(tokenizer: Any) -> None:
    task = Countdown(CountdownConfig(num_train=15, num_evaluation=5), tokenizer)
    epochs = [task.training_prompts(15 * epoch, 15) for epoch in range(3)]
    texts = [[prompt.text for prompt in epoch] for epoch in epochs]
    assert all(len(set(epoch)) == 15 for epoch in texts)
    assert set(texts[0]) == set(texts[1]) == set(texts[2])
    assert texts[0] != texts[1] != texts[2] != texts[0]
    assert len({prompt.id for epoch in epochs for prompt in epoch}) == 45  # ids seed the sampling
    assert task.training_prompts(10, 10) == epochs[0][10:] + epochs[1][:5]  # across two epochs


@pytest.mark.parametrize(
    "impossible",
    [
        {"min_target": 5000, "max_target": 5001},
        {"out_of_range_min_target": 5000, "out_of_range_max_target": 5001},
        {"num_numbers": 2, "max_number": 2, "min_target": 1, "max_target": 4, "num_evaluation": 50},
    ],
)
def test_impossible_ranges_are_refused(
    impossible: dict[str, int], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eepo.tasks.countdown.MAX_DRAWS", 2000)
    task = Countdown(replace(CountdownConfig(num_evaluation=5), **impossible), tokenizer)
    with pytest.raises(UserError, match="no countdown problem found"):
        task.evaluation_sets()
    with pytest.raises(UserError, match="no countdown problem found"):
        task.training_prompts(0, 1)


def test_run_seed_changes_training_prompts_but_not_evaluation(
    tokenizer: Any,
) -> None:
    fresh = [Countdown(CountdownConfig(num_evaluation=5), tokenizer, seed) for seed in (0, 1)]
    texts = [[prompt.text for prompt in task.training_prompts(0, 20)] for task in fresh]
    assert texts[0] != texts[1]
    assert fresh[0].evaluation_sets() == fresh[1].evaluation_sets()
    finite = [
        Countdown(CountdownConfig(num_train=20, num_evaluation=5), tokenizer, seed)
        for seed in (0, 1)
    ]
    texts = [[prompt.text for prompt in task.training_prompts(0, 20)] for task in finite]
    assert texts[0] != texts[1]
    assert sorted(texts[0]) == sorted(texts[1])
