"""What a completion's advantage weighs beside others': beyond the paper, and nothing with the default knobs."""

from __future__ import annotations

import torch
from torch import Tensor

from eepo.config import AlgorithmConfig


def advantage_weights(
    advantages: Tensor,  # [..., n] of one prompt and stage
    logprobs: Tensor,  # [..., n] means over each completion's tokens, under the weights that sampled it
    stages: Tensor,  # broadcasts to them; the first is 1
    options: AlgorithmConfig,
) -> Tensor:  # [..., n]
    """Likelihoods under θ and under θ′ are not compared: hence stage by stage."""
    good = advantages > 0
    spared = (options.later_advantages == "positive") & (
        stages > 1
    )  # sampled to be unlike: not punished for failing
    failing = torch.where(spared, 0.0, options.failure_weight)
    return torch.where(good, rarity_weights(logprobs, good, options.rare_weight), failing)


def rarity_weights(
    logprobs: Tensor, good: Tensor, strength: float
) -> Tensor:  # [..., n], bool [..., n] -> [..., n]
    """Of what did well, the least likely weighs 1 + strength, the likeliest 1 − strength, in even steps."""
    count = good.sum(-1, keepdim=True)
    ranks = torch.where(good, logprobs, torch.inf).argsort(-1).argsort(-1)  # 0: the least likely
    return torch.where(
        good & (count > 1), 1 + strength * (1 - 2 * ranks / (count - 1).clamp(min=1)), 1.0
    )
