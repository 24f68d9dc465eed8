"""The losses of EEPO and GRPO as pure functions. B completions, T tokens each after padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from eepo.config import AlgorithmConfig
from eepo.model.policy import Scores


@dataclass(frozen=True)
class PolicyTerms:
    """What the policy loss of one micro-batch is computed from."""

    logprobs: Tensor  # [B, T] under θ, with gradient
    old_logprobs: Tensor  # [B, T] the denominator of the ratio
    advantages: Tensor  # [B]
    mask: Tensor  # bool [B, T]
    selected: Tensor  # bool [B, T]: tokens that a method has selected in the mini-batch

    @cached_property
    def log_ratio(self) -> Tensor:  # [B, T], 0 on padding
        return torch.where(self.mask, self.logprobs - self.old_logprobs, 0.0)


class TokenLoss(NamedTuple):
    """The policy loss of every token."""

    values: Tensor  # [B, T], any value on padding
    clipped: Tensor  # bool [B, T]: clipping or selection changed the gradient of the token


def grpo_token_loss(terms: PolicyTerms, options: AlgorithmConfig) -> TokenLoss:
    """Return GRPO's clipped surrogate, negated."""
    return clipped_surrogate(terms.log_ratio.exp(), terms.advantages, options)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, options: AlgorithmConfig) -> TokenLoss:
    """Return −min(ratio · A, clip(ratio) · A) for ratios [B, T] and advantages [B]."""
    column = advantages[:, None]
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    surrogate = torch.minimum(ratio * column, clipped * column)
    above = (ratio > 1 + options.clip_high) & (column > 0)
    below = (ratio < 1 - options.clip_low) & (column < 0)
    return TokenLoss(-surrogate, above | below)


def regularised(
    loss: Tensor,  # of the policy
    scores: Scores,  # of θ
    reference_logprobs: Tensor | None,  # [B, T]
    mask: Tensor,  # [B, T]
    options: AlgorithmConfig,
    weights: Tensor | None = None,  # [B] of `token_weights`
) -> Tensor:
    """Add the entropy bonus and the KL penalty to a policy loss."""
    loss = loss - options.entropy_coef * token_mean(scores.entropies, mask, weights)
    if reference_logprobs is not None:
        penalty = kl_penalty(scores.logprobs, reference_logprobs, mask, weights)
        loss = loss + options.kl_coef * penalty
    return loss


def token_weights(
    lengths: Sequence[int],  # [n] tokens of each completion of a mini-batch, group by group
    num_groups: int,
    options: AlgorithmConfig,
) -> list[float]:  # [n]
    """Return the weight of each completion's tokens in a mean over the tokens of the mini-batch.

    `loss_normalisation = "mini_batch"` weighs all tokens the same. With `"group"`, the weighted
    mean is the mean over groups of the mean over the tokens of a group, as in the paper's equation.
    With `"completion"` it is the mean over completions of the mean over their tokens. With
    `"constant"` it is the sum over tokens, divided by the longest length and the completions.
    """
    if options.loss_normalisation == "mini_batch":
        return [1.0] * len(lengths)
    mean_length = sum(lengths) / len(lengths)
    if options.loss_normalisation == "completion":
        return [mean_length / length for length in lengths]
    if options.loss_normalisation == "constant":
        return [mean_length / options.max_new_tokens] * len(lengths)
    size = len(lengths) // num_groups
    totals = [sum(lengths[start : start + size]) for start in range(0, len(lengths), size)]
    mean_total = sum(totals) / num_groups
    return [mean_total / total for total in totals for _ in range(size)]


def kl_penalty(
    policy_logprobs: Tensor,  # [B, T]
    reference_logprobs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    weights: Tensor | None = None,  # [B]
) -> Tensor:
    """Estimate KL(θ ‖ reference) with k3, as a mean over tokens."""
    gap = torch.where(mask.bool(), reference_logprobs - policy_logprobs, 0.0)
    return token_mean(k3(gap), mask, weights)


def k3(gap: Tensor) -> Tensor:
    """Estimate KL(p ‖ q) per token from `gap` = log q − log p on samples from p.

    The estimate is unbiased, never negative, and has low variance. It is 0 where `gap` is 0.
    """
    return gap.exp() - 1 - gap


def complementary_loss(
    logprobs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    gate: Tensor,  # [B, T]
    eps: float,
    saturation: str = "stop",
    complements: Tensor | None = None,  # [B, T] log(1 − p), computed from the other tokens
) -> Tensor:
    """Return the mean over completions of (1 / T_k) Σ gate · −log(1 − p).

    Descending this loss makes the sampled tokens less likely. `saturation = "stop"` is the paper's
    p ← min(p, 1 − ε): finite, but without gradient above 1 − ε. `"exact"` uses `complements`; its
    gradient on the sampled logit is p.
    """
    if saturation == "exact":
        if complements is None:
            raise ValueError('saturation = "exact" needs complements, log(1 − p) of every token')
        penalty = -complements
    else:
        ceiling = torch.log1p(torch.tensor(-eps, dtype=torch.float64)).item()
        penalty = -_log1mexp(logprobs.clamp(max=ceiling))
    return completion_mean(penalty, mask, gate)


def unlearn_loss(scores: Scores, mask: Tensor, gate: Tensor, options: AlgorithmConfig) -> Tensor:
    """Return the complementary loss, or for the ablation the log-likelihood (`"nll"`)."""
    if options.unlearn_loss == "nll":
        return completion_mean(scores.logprobs, mask, gate)
    return complementary_loss(
        scores.logprobs, mask, gate, options.unlearn_eps, options.saturation, scores.complements
    )


def token_mean(
    values: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    weights: Tensor | None = None,  # [B]; their mean over tokens is 1
) -> Tensor:
    """Average over all completion tokens; without `weights`, every token weighs the same."""
    values = values if weights is None else values * weights[:, None]
    return torch.where(mask.bool(), values, 0.0).sum() / mask.sum().clamp(min=1)


def completion_mean(values: Tensor, mask: Tensor, gate: Tensor) -> Tensor:  # [B, T] -> scalar
    """Average (1 / T_k) Σ gated values over completions. T_k counts all tokens, gated or not."""
    gated = torch.where(gate.bool() & mask.bool(), values, 0.0).sum(1)
    return (gated / mask.sum(1).clamp(min=1)).mean()


def _log1mexp(x: Tensor) -> Tensor:
    """Compute log(1 − exp(x)) for x < 0 without cancellation.

    `torch.where` differentiates both branches, so the unused one gets a harmless input.
    """
    near_zero = x > -0.6931
    small = torch.log(-torch.expm1(torch.where(near_zero, x, -0.5)))
    return torch.where(near_zero, small, torch.log1p(-torch.where(near_zero, -1.0, x).exp()))
