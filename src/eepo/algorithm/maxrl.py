"""MaxRL: advantages divided by the success rate of the group (arXiv:2602.02710).

The gradient estimates that of log p instead of p, where p is the probability of success. So rare
successes weigh more: by 1 / p, where GRPO weighs them by 1 / √(p (1 − p)).
"""

from __future__ import annotations

import torch
from torch import Tensor

from eepo.algorithm.grpo import equal_rewards
from eepo.config import AlgorithmConfig


def advantages(rewards: Tensor, options: AlgorithmConfig) -> Tensor:  # [Q, G] -> [Q, G]
    """Return (r − mean) / mean within each group; 0 for equal rewards or a mean of at most 0.

    The mean is a success rate only for rewards of at least 0.
    """
    mean = rewards.mean(1, keepdim=True)
    scale = torch.where(mean > 0, mean, 1.0)
    return torch.where(equal_rewards(rewards) | (mean <= 0), 0.0, (rewards - mean) / scale)
