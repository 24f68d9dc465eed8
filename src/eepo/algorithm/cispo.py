"""CISPO: the ratio is a capped weight without gradient (MiniMax-M1, arXiv:2506.13585).

GRPO's clipping removes the gradient of tokens whose ratio leaves the range. Here every token keeps
its gradient, and the range only bounds the weight. The paper uses no lower bound: `clip_low = 1`.
"""

from __future__ import annotations

from eepo.algorithm.losses import PolicyTerms, TokenLoss
from eepo.config import AlgorithmConfig


def cispo_loss(terms: PolicyTerms, options: AlgorithmConfig) -> TokenLoss:
    """Return −stop_gradient(clip(ratio)) · A · log p. `clipped` marks capped weights."""
    ratio = terms.log_ratio.detach().exp()
    weight = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    return TokenLoss(-weight * terms.advantages[:, None] * terms.logprobs, ratio != weight)
