"""GRPO: rewards standardised within the group (arXiv:2402.03300)."""

from __future__ import annotations

import torch
from torch import Tensor

from eepo.config import AlgorithmConfig


def advantages(rewards: Tensor, options: AlgorithmConfig) -> Tensor:  # [Q, G] -> [Q, G]
    """Return GRPO's advantages. No knob changes them."""
    return group_advantages(rewards)


def group_advantages(rewards: Tensor) -> Tensor:  # [Q, G] -> [Q, G]
    """Return (r − mean) / (std + 1e-6) within each group; equal rewards give exactly 0.

    The standard deviation is the sample one (division by G − 1).
    """
    centred = rewards - rewards.mean(1, keepdim=True)
    advantages = centred / (rewards.std(1, keepdim=True, correction=1) + 1e-6)
    return torch.where(equal_rewards(rewards), 0.0, advantages)


def equal_rewards(rewards: Tensor) -> Tensor:  # [Q, G] -> bool [Q, 1]
    """Return which groups have equal rewards. Their mean may be rounded, so it cannot tell."""
    return (rewards == rewards[:, :1]).all(1, keepdim=True)
