"""The denominator of the importance ratio: how much a completion of stage 2 counts in the update.

`credit = "importance"` divides by the probability under the weights that sampled, as in the paper.
A completion that θ′ finds because θ almost never samples it then has a ratio close to 0.
`credit = "full"` divides what θ′ sampled by θ's probability before the update, so that its ratio
starts at 1. docs/credit.md explains the difference. A step without unlearning is GRPO under both.
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

    def of(self, batch: MicroBatch, scores: Scores) -> Tensor:  # [B, T]
        """Return the log-probabilities in the denominator for the rows of a micro-batch."""
        logprobs = batch.pad(self.logprobs)
        if not any(self.is_current):
            return logprobs
        current = batch.pick(self.is_current).bool()[:, None]
        return torch.where(current, scores.logprobs.detach(), logprobs)


def old_logprobs(
    policy: Policy, rollout: Rollout, mini_batches: Sequence[range], options: AlgorithmConfig
) -> list[OldLogprobs]:
    """Return the denominators of every mini-batch. Call this before the first update.

    Full credit needs θ's log-probabilities of stage 2. For the first mini-batch they are those of
    the update's own pass. For later ones θ has changed by then, so they are scored here, in one
    pass without gradient. Completions without advantage are skipped: they do not enter the loss.
    """
    return [
        _old_logprobs(policy, rollout, rows, options, is_first=number == 0)
        for number, rows in enumerate(mini_batches)
    ]


def _old_logprobs(
    policy: Policy, rollout: Rollout, rows: range, options: AlgorithmConfig, is_first: bool
) -> OldLogprobs:
    pairs = rollout.pairs(rows)
    logprobs: list[Sequence[float]] = [completion.logprobs for _, completion in pairs]
    if options.credit == "importance":
        return OldLogprobs(logprobs, [False] * len(pairs))
    unlearned = [not from_policy for from_policy in rollout.from_policy] * len(rows)
    if is_first:
        return OldLogprobs(logprobs, unlearned)
    advantages = [advantage for row in rows for advantage in rollout.advantages[row]]
    needed = [i for i, replaced in enumerate(unlearned) if replaced and advantages[i]]
    with torch.no_grad():  # queue all passes before the first result is read from the GPU
        scored = [
            (batch.rows, policy.score(batch, options.temperature).logprobs)
            for batch in policy.micro_batches(pairs, needed)
        ]
    for scored_rows, values in scored:
        for row, row_values in zip(scored_rows, values.tolist(), strict=True):
            logprobs[row] = row_values[: len(logprobs[row])]
    skipped = [replaced and not advantages[i] for i, replaced in enumerate(unlearned)]
    return OldLogprobs(logprobs, skipped)
