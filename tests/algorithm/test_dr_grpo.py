"""Dr. GRPO: advantages without the standard deviation, and a constant in the loss."""

from __future__ import annotations

import pytest
import torch

from eepo.algorithm import rollout_advantages, token_mean, token_weights
from eepo.algorithm.dr_grpo import advantages
from eepo.config import AlgorithmConfig

OPTIONS = AlgorithmConfig(advantage="dr_grpo", group_size=4)


def test_advantages_are_rewards_minus_the_mean_of_the_group() -> None:
    rewards = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.5, 0.0]]
    expected = [[0.75, -0.25, -0.25, -0.25], [0.375, 0.375, -0.125, -0.625]]
    assert advantages(torch.tensor(rewards), OPTIONS).tolist() == expected
    assert rollout_advantages(rewards, [1, 1, 2, 2], OPTIONS) == expected


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3])
def test_equal_rewards_give_exact_zeros(reward: float) -> None:
    assert advantages(torch.full((1, 7), reward), OPTIONS).tolist() == [[0.0] * 7]


def test_the_stage_baseline_subtracts_the_mean_of_each_stage() -> None:
    options = AlgorithmConfig(advantage="dr_grpo", group_size=4, advantage_baseline="stage")
    result = rollout_advantages([[1.0, 0.0, 1.0, 1.0]], [1, 1, 2, 2], options)
    assert result == [[0.5, -0.5, 0.0, 0.0]]


def test_constant_normalisation_divides_the_sum_over_tokens_by_a_constant() -> None:
    """Σ over all tokens / (completions · max_new_tokens), however long the completions are."""
    options = AlgorithmConfig(loss_normalisation="constant", max_new_tokens=10)
    values = torch.tensor([[1.0, 2.0, 3.0], [5.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    weights = torch.tensor(token_weights([3, 1], 1, options))
    assert token_mean(values, mask, weights).item() == pytest.approx((1 + 2 + 3 + 5) / (2 * 10))
