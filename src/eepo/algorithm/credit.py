"""The denominator of the importance ratio: how much a completion of stage 2 counts in the update.

`credit = "importance"` divides by the probability under the weights that sampled, as in the paper.
A completion that θ′ finds because θ almost never samples it then has a ratio close to 0.
`credit = "full"` divides what θ′ sampled by θ's probability before the update, so that its ratio
starts at 1. docs/credit.md explains the difference. A step without unlearning is GRPO under both.

`engine_ratio_cap` is truncated importance sampling: what θ sampled is divided by θ's probability
as the policy computes it, not as the engine reports it. The tokens are weighted by the quotient of
the two, at most the cap. Both use θ's log-probabilities before the update, so both are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eepo.config import AlgorithmConfig
from eepo.model.batching import MicroBatch
from eepo.model.policy import Policy, Scores
from eepo.types import Rollout


@dataclass(frozen=True)
class OldLogprobs:
    """The denominators of one mini-batch, per completion."""

    logprobs: list[Sequence[float]]
    is_current: list[bool]  # use θ's present value instead: θ has not been updated yet
    # under the weights that sampled, as the engine reports them; None: `logprobs` are these
    rollout_logprobs: list[Sequence[float]] | None = None

    def of(self, batch: MicroBatch, scores: Scores) -> Tensor:  # [B, T]
        """Return the log-probabilities in the denominator for the rows of a micro-batch."""
        logprobs = batch.pad(self.logprobs)
        if not any(self.is_current):
            return logprobs
        current = batch.pick(self.is_current).bool()[:, None]
        return torch.where(current, scores.logprobs.detach(), logprobs)

    def of_rollout(self, batch: MicroBatch, old_logprobs: Tensor) -> Tensor:  # [B, T]
        """Return the log-probabilities that the engine reported; `old_logprobs` are those of `of`.

        They are the same unless `rollout_logprobs` says otherwise.
        """
        return old_logprobs if self.rollout_logprobs is None else batch.pad(self.rollout_logprobs)


def engine_weights(
    old_logprobs: Tensor,  # [B, T] before the update, as the policy computes them
    rollout_logprobs: Tensor,  # [B, T] as the engine reports them
    corrected: Tensor,  # bool [B]: θ sampled the completion
    cap: float,
) -> Tensor:  # [B, T]
    """Return min(policy / engine, cap) for every token, and 1 where θ′ sampled."""
    ratio = (old_logprobs - rollout_logprobs).exp().clamp(max=cap)
    return torch.where(corrected[:, None], ratio, 1.0)


def old_logprobs(
    policy: Policy, rollout: Rollout, mini_batches: Sequence[range], options: AlgorithmConfig
) -> list[OldLogprobs]:
    """Return the denominators of every mini-batch. Call this before the first update.

    Full credit needs θ's log-probabilities of stage 2, `engine_ratio_cap` and KL-Cov those of
    stage 1. For the first mini-batch they are those of the update's own pass. For later ones θ has
    changed by then, so they are scored here, in one pass without gradient. Completions without
    advantage are skipped: they do not enter the loss, except the penalty of KL-Cov.
    """
    return [
        _old_logprobs(policy, rollout, rows, options, is_first=number == 0)
        for number, rows in enumerate(mini_batches)
    ]


def _old_logprobs(
    policy: Policy, rollout: Rollout, rows: range, options: AlgorithmConfig, is_first: bool
) -> OldLogprobs:
    pairs = rollout.pairs(rows)
    sampled: list[Sequence[float]] = [completion.logprobs for _, completion in pairs]
    # The penalty of KL-Cov would follow the sign of rounding differences between engine and policy.
    rescores = options.engine_ratio_cap != "off" or options.loss == "kl_cov"
    gives_full = options.credit == "full"
    if not rescores and not gives_full:
        return OldLogprobs(sampled, [False] * len(pairs))
    by_column = [rescores if from_policy else gives_full for from_policy in rollout.from_policy]
    is_replaced = by_column * len(rows)
    if is_first:
        return OldLogprobs(sampled, is_replaced, sampled)
    advantages = [advantage for row in rows for advantage in rollout.advantages[row]]
    in_loss = [options.loss == "kl_cov" or advantage != 0 for advantage in advantages]
    needed = [i for i, replaced in enumerate(is_replaced) if replaced and in_loss[i]]
    logprobs = list(sampled)
    with torch.no_grad():  # queue all passes before the first result is read from the GPU
        scored = [
            (batch.rows, policy.score(batch, options.temperature).logprobs)
            for batch in policy.micro_batches(pairs, needed)
        ]
    for scored_rows, values in scored:
        for row, row_values in zip(scored_rows, values.tolist(), strict=True):
            logprobs[row] = row_values[: len(logprobs[row])]
    skipped = [replaced and not in_loss[i] for i, replaced in enumerate(is_replaced)]
    return OldLogprobs(logprobs, skipped, sampled)
