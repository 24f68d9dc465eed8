"""Dr. GRPO: advantages without division by the standard deviation (arXiv:2503.20783).

Division by the standard deviation weighs prompts that are almost always or almost never solved
more than the others. The paper also divides the loss by a constant instead of the completion
lengths: `loss_normalisation = "constant"`, which the recipe sets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eepo.algorithm.grpo import equal_rewards
from eepo.config import AlgorithmConfig


def advantages(rewards: Tensor, options: AlgorithmConfig) -> Tensor:  # [Q, G] -> [Q, G]
    """Return r − mean within each group; equal rewards give exactly 0."""
    return torch.where(equal_rewards(rewards), 0.0, rewards - rewards.mean(1, keepdim=True))
