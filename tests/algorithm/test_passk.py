"""Pass@k advantages against all choices of k completions."""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch

from eepo.algorithm import group_advantages
from eepo.algorithm.passk import advantages
from eepo.config import AlgorithmConfig


def by_enumeration(rewards: list[float], k: int) -> list[float]:
    """Average the standardised reward of all choices of k completions that contain each one."""
    choices = list(itertools.combinations(range(len(rewards)), k))
    values = [float(any(rewards[i] >= 1 for i in choice)) for choice in choices]
    mean, std = statistics.fmean(values), statistics.pstdev(values)
    if std == 0:
        return [0.0] * len(rewards)
    return [
        statistics.fmean(
            (value - mean) / std
            for choice, value in zip(choices, values, strict=True)
            if index in choice
        )
        for index in range(len(rewards))
    ]


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_correct", range(9))
def test_advantages_equal_the_mean_over_all_choices_of_k(k: int, num_correct: int) -> None:
    rewards = [1.0] * num_correct + [0.0] * (8 - num_correct)
    options = AlgorithmConfig(advantage="passk", pass_k=k)
    actual = advantages(torch.tensor([rewards], dtype=torch.float64), options)[0].tolist()
    assert actual == pytest.approx(by_enumeration(rewards, k), abs=1e-12)


def test_k_of_1_is_grpo_with_the_standard_deviation_of_the_population() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    actual = advantages(rewards, AlgorithmConfig(advantage="passk", pass_k=1, group_size=6))
    expected = (6 / 5) ** 0.5 * group_advantages(rewards)
    assert actual[0].tolist() == pytest.approx(expected[0].tolist(), rel=1e-4)


def test_a_prompt_that_is_solved_often_enough_has_no_advantage() -> None:
    """With fewer than k wrong completions, every choice of k contains a correct one."""
    options = AlgorithmConfig(advantage="passk", pass_k=4)
    rewards = torch.tensor([[1.0] * 5 + [0.0] * 3, [1.0] * 4 + [0.0] * 4])
    first, second = advantages(rewards, options).tolist()
    assert first == [0.0] * 8
    assert second[0] > 0


def test_partial_rewards_are_not_correct() -> None:
    options = AlgorithmConfig(advantage="passk", pass_k=2, group_size=4)
    partial = advantages(torch.tensor([[1.0, 0.5, 0.9, 0.0]]), options)
    assert partial.tolist() == advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), options).tolist()
