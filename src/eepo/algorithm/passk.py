"""Pass@k training with analytic advantages (arXiv:2508.10751).

The reward belongs to k completions: 1 if at least one of them is correct. A completion's advantage
is the mean over all choices of k completions of the group that contain it, standardised over all
choices. With k = 1 it is GRPO's, with the standard deviation of the population.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eepo.config import AlgorithmConfig


def advantages(rewards: Tensor, options: AlgorithmConfig) -> Tensor:  # [Q, G] -> [Q, G]
    """Return the advantages for pass@k. A completion is correct if its reward is at least 1."""
    correct = rewards >= 1
    values = [
        passk_advantages(int(count), rewards.shape[1], options.pass_k)
        for count in (~correct).sum(1)
    ]
    of_correct, of_wrong = torch.tensor(values, dtype=rewards.dtype, device=rewards.device).unbind(
        1
    )
    return torch.where(correct, of_correct[:, None], of_wrong[:, None])


def passk_advantages(num_wrong: int, size: int, k: int) -> tuple[float, float]:
    """Return the advantages of a correct and of a wrong completion.

    `all_wrong` is the share of choices of k completions without a correct one, `with_this` the
    same among the choices that contain one given wrong completion.
    """
    all_wrong = math.comb(num_wrong, k) / math.comb(size, k)
    if all_wrong in (0, 1):  # every choice of k has the same reward
        return 0.0, 0.0
    with_this = math.comb(num_wrong - 1, k - 1) / math.comb(size - 1, k - 1)
    std = math.sqrt(all_wrong * (1 - all_wrong))
    return all_wrong / std, (all_wrong - with_this) / std
