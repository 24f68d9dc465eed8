"""Advantages of a step's completions: the paper's, and weights beyond the paper."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eepo.config import AlgorithmConfig


def rollout_advantages(
    rewards: Sequence[Sequence[float]],  # [Q][G]
    stages: Sequence[int],  # [G], from 1
    options: AlgorithmConfig,
) -> list[list[float]]:  # [Q][G]
    """Normalise the rewards of each group (or of each stage of it) and apply the weights."""
    parts = options.num_stages if options.advantage_baseline == "stage" else 1
    chunks = torch.tensor(rewards).chunk(parts, 1)
    advantages = torch.cat([group_advantages(chunk) for chunk in chunks], 1)
    weights = advantage_weights(advantages, torch.tensor(stages), options)
    return (advantages * weights).tolist()


def group_advantages(rewards: Tensor) -> Tensor:  # [Q, G] -> [Q, G]
    """Return (r − mean) / (std + 1e-6) within each group; equal rewards give exactly 0.

    The standard deviation is the sample one (division by G − 1).
    """
    centred = rewards - rewards.mean(1, keepdim=True)
    advantages = centred / (rewards.std(1, keepdim=True, correction=1) + 1e-6)
    equal = (rewards == rewards[:, :1]).all(1, keepdim=True)  # the mean may be rounded
    return torch.where(equal, 0.0, advantages)


def advantage_weights(
    advantages: Tensor,  # [..., n]
    stages: Tensor,  # broadcasts to advantages; the first stage is 1
    options: AlgorithmConfig,
) -> Tensor:  # [..., n]
    """Return the factor of each advantage: 1 everywhere with the default knobs.

    `failure_weight` multiplies negative advantages. Without `stage2_negative_advantages`, those of
    stage 2 and later are 0.
    """
    later = stages > 1
    failure = torch.where(
        later & (not options.stage2_negative_advantages), 0.0, options.failure_weight
    )
    return torch.where(advantages > 0, 1.0, failure)
