"""MaxRL: advantages divided by the mean reward."""

from __future__ import annotations

import math

import pytest
import torch

from eepo.algorithm.maxrl import advantages
from eepo.config import AlgorithmConfig

OPTIONS = AlgorithmConfig(advantage="maxrl")


def test_advantages_are_relative_to_the_mean_reward() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.5, 1.0, 0.0, 0.0]])
    expected = [[3.0, -1, -1, -1], [1 / 3, 1 / 3, 1 / 3, -1.0], [1 / 3, 5 / 3, -1, -1]]
    for actual, values in zip(advantages(rewards, OPTIONS).tolist(), expected, strict=True):
        assert actual == pytest.approx(values)


def test_groups_without_success_and_equal_rewards_give_zeros() -> None:
    rewards = torch.tensor([[0.0, 0.0, 0.0], [0.1, 0.1, 0.1], [-1.0, 0.0, 0.0], [-1.0, 1.0, 0.0]])
    assert advantages(rewards, OPTIONS).tolist() == [[0.0] * 3] * 4


def test_the_expected_gradient_is_that_of_the_truncated_log_likelihood() -> None:
    """For a success probability p and groups of n, it is that of −Σ_{k < n} (1 − p)^k / k.

    This is log p for n → ∞, and p for n = 2. Sum over the number of successes, by hand: for a logit
    θ, d log π / dθ is 1 − p for a success and −p for a failure.
    """
    p, size = 0.3, 4
    gradient = 0.0
    for num in range(1, size):
        probability = math.comb(size, num) * p**num * (1 - p) ** (size - num)
        rewards = torch.tensor([[1.0] * num + [0.0] * (size - num)], dtype=torch.float64)
        values = advantages(rewards, OPTIONS)[0].tolist()
        scores = [1 - p] * num + [-p] * (size - num)
        gradient += probability * sum(a * s for a, s in zip(values, scores, strict=True)) / size
    expected = sum((1 - p) ** (k - 1) for k in range(1, size)) * p * (1 - p)
    assert gradient == pytest.approx(expected)
