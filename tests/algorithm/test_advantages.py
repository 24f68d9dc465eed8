"""Advantages against plain loops in float64, and the weights that knobs give them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eepo.algorithm import advantage_weights, group_advantages, rollout_advantages
from eepo.config import AlgorithmConfig

REWARDS = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0], [0.0, 0.5, 1.0, 0.0]]
STAGES = [1, 1, 2, 2]


def normalised(rewards: list[float]) -> list[float]:
    """Standardise the rewards of one group with a plain loop."""
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / (std + 1e-6) for reward in rewards]


@given(
    st.integers(2, 9).flatmap(
        lambda size: st.lists(st.lists(st.floats(-5, 5), min_size=size, max_size=size), min_size=1)
    )
)
def test_advantages_are_rewards_standardised_within_a_group(rewards: list[list[float]]) -> None:
    advantages = group_advantages(torch.tensor(rewards, dtype=torch.float64)).tolist()
    for group, actual in zip(rewards, advantages, strict=True):
        assert actual == pytest.approx(normalised(group), abs=1e-6)


def test_advantages_of_one_correct_completion_in_four() -> None:
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64))
    expected = [0.75 / 0.500001, *[-0.25 / 0.500001] * 3]
    assert advantages.tolist()[0] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 0.7, 1 / 3, 1e-8, -0.3])
@pytest.mark.parametrize("size", [2, 3, 6, 7, 16])
def test_equal_rewards_give_exact_zeros_even_if_their_mean_is_rounded(
    reward: float, size: int
) -> None:
    rewards = torch.stack([torch.full((size,), reward), torch.arange(size).float()])
    advantages = group_advantages(rewards)
    assert advantages[0].tolist() == [0.0] * size
    assert advantages[1].max() > 0.5


def test_group_baseline_normalises_over_both_stages() -> None:
    advantages = rollout_advantages(REWARDS, STAGES, AlgorithmConfig(group_size=4))
    for rewards, actual in zip(REWARDS, advantages, strict=True):
        assert actual == pytest.approx(normalised(rewards), abs=1e-5)


def test_stage_baseline_normalises_within_each_stage() -> None:
    options = AlgorithmConfig(group_size=4, advantage_baseline="stage")
    advantages = rollout_advantages(REWARDS, STAGES, options)
    for rewards, actual in zip(REWARDS, advantages, strict=True):
        expected = [*normalised(rewards[:2]), *normalised(rewards[2:])]
        assert actual == pytest.approx(expected, abs=1e-5)


def test_default_weights_are_1() -> None:
    advantages = torch.tensor([[1.0, -1.0, 0.5, -2.0]])
    weights = advantage_weights(advantages, torch.tensor(STAGES), AlgorithmConfig())
    assert weights.tolist() == [[1.0, 1.0, 1.0, 1.0]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"failure_weight": 0.25}, [1.0, 0.25, 1.0, 0.25]),
        ({"failure_weight": 0.0}, [1.0, 0.0, 1.0, 0.0]),
        ({"stage2_negative_advantages": False}, [1.0, 1.0, 1.0, 0.0]),
        ({"stage2_negative_advantages": False, "failure_weight": 0.25}, [1.0, 0.25, 1.0, 0.0]),
    ],
)
def test_knobs_lower_the_weight_of_negative_advantages(
    options: dict[str, float], expected: list[float]
) -> None:
    advantages = torch.tensor([1.5, -1.0, 0.5, -2.0])
    weights = advantage_weights(advantages, torch.tensor(STAGES), AlgorithmConfig(**options))
    assert weights.tolist() == expected
