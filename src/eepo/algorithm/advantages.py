"""Advantages of a step's completions. Each formula has a module of its own (`registry.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eepo.algorithm.registry import ADVANTAGES
from eepo.config import AlgorithmConfig


def rollout_advantages(
    rewards: Sequence[Sequence[float]],  # [Q][G]
    stages: Sequence[int],  # [G], from 1
    options: AlgorithmConfig,
    bonus: Sequence[Sequence[float]] | None = None,  # [Q][G]
) -> list[list[float]]:  # [Q][G]
    """Compute the advantages of each group (or of each stage of it), and apply the weights.

    `bonus` is added before the weights are applied.
    """
    formula = ADVANTAGES[options.advantage]
    parts = options.num_stages if options.advantage_baseline == "stage" else 1
    chunks = torch.tensor(rewards).chunk(parts, 1)
    advantages = torch.cat([formula(chunk, options) for chunk in chunks], 1)
    if bonus is not None:
        advantages = advantages + torch.tensor(bonus)
    weights = advantage_weights(advantages, torch.tensor(stages), options)
    return (advantages * weights).tolist()


def advantage_weights(
    advantages: Tensor,  # [..., n]
    stages: Tensor,  # broadcasts to advantages; the first stage is 1
    options: AlgorithmConfig,
) -> Tensor:  # [..., n]
    """Return the factor of each advantage: 1 everywhere with the default knobs.

    `success_weight` multiplies positive advantages and `failure_weight` negative ones. Without
    `stage2_negative_advantages`, those of stage 2 and later are 0. Negative-sample reinforcement
    (arXiv:2506.01347) is `success_weight = 0.1`.
    """
    later = stages > 1
    failure = torch.where(
        later & (not options.stage2_negative_advantages), 0.0, options.failure_weight
    )
    return torch.where(advantages > 0, options.success_weight, failure)
