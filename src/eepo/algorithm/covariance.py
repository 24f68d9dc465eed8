"""Clip-Cov and KL-Cov: hold back the few tokens that lower entropy most (arXiv:2505.22617).

Entropy falls with the covariance of log-probability and advantage: likely tokens with a positive
advantage become more likely still. A token's part of it is (log p − mean) · (A − mean), with means
over all tokens of the mini-batch. Clip-Cov removes the gradient of a random choice of tokens whose
part is between `cov_low` and `cov_high`. KL-Cov has no clipping, and adds a penalty |log ratio| to
the tokens with the largest parts.

This needs more than a line in the registry: a choice among all tokens of a mini-batch cannot be
made in one micro-batch. So `updates.select_tokens` scores the mini-batch once more, without
gradient.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from eepo.algorithm.losses import PolicyTerms, TokenLoss, grpo_token_loss
from eepo.config import AlgorithmConfig


def clip_cov_loss(terms: PolicyTerms, options: AlgorithmConfig) -> TokenLoss:
    """Return GRPO's loss, without the selected tokens."""
    loss, clipped = grpo_token_loss(terms, options)
    return TokenLoss(torch.where(terms.selected, 0.0, loss), clipped | terms.selected)


def kl_cov_loss(terms: PolicyTerms, options: AlgorithmConfig) -> TokenLoss:
    """Return −ratio · A, plus `cov_kl_coef` · |log ratio| on the selected tokens."""
    loss = -terms.log_ratio.exp() * terms.advantages[:, None]
    penalty = options.cov_kl_coef * terms.log_ratio.abs()
    loss = loss + torch.where(terms.selected, penalty, 0.0)
    return TokenLoss(loss, torch.zeros_like(terms.selected))


def covariances(logprobs: Tensor, advantages: Tensor) -> Tensor:  # [N], [N] -> [N]
    """Return each token's part of the covariance, over all N tokens of a mini-batch."""
    logprobs, advantages = logprobs.double(), advantages.double()
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def selected_tokens(
    parts: Tensor,  # [N] of `covariances`
    clipped: Tensor,  # bool [N]
    options: AlgorithmConfig,
    seed: int,
) -> Tensor:  # bool [N]
    """Choose `cov_share` of the tokens, at least one if any is allowed."""
    count = max(int(options.cov_share * len(parts)), 1)
    if options.loss == "kl_cov":
        indices = parts.topk(count).indices
    else:
        allowed = (parts > options.cov_low) & (parts < options.cov_high) & ~clipped
        candidates = allowed.nonzero().flatten()
        order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
        indices = candidates[order.to(candidates.device)][:count]
    return torch.zeros_like(clipped).index_fill(0, indices, True)


def seed_of(completions: Sequence[Sequence[int]]) -> int:
    """Derive a seed from the tokens, so that a resumed run makes the same random choice."""
    seed = 0
    for token_ids in completions:
        seed = zlib.crc32(repr(tuple(token_ids)).encode(), seed)
    return seed
