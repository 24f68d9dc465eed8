"""GSPO: the ratio and its clipping belong to a whole completion (arXiv:2507.18071).

The ratio is the geometric mean of the token ratios. Completions weigh the same
(`loss_normalisation = "completion"`). The ratio of a completion is much closer to 1 than those of
its tokens, so the clipping range is much smaller: 3e-4 below and 4e-4 above in the paper.
"""

from __future__ import annotations

from eepo.algorithm.losses import PolicyTerms, TokenLoss, clipped_surrogate
from eepo.config import AlgorithmConfig


def gspo_loss(terms: PolicyTerms, options: AlgorithmConfig) -> TokenLoss:
    """Return −min(s A, clip(s) A) at every token of a completion, with s = exp(mean log ratio)."""
    log_ratio = terms.log_ratio.sum(1, keepdim=True) / terms.mask.sum(1, keepdim=True).clamp(min=1)
    ratio = log_ratio.exp().expand_as(terms.log_ratio)
    return clipped_surrogate(ratio, terms.advantages, options)
