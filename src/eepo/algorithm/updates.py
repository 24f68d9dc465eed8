"""Updates θ: sums the gradient of a mini-batch over micro-batches, and applies it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eepo.algorithm.covariance import covariances, seed_of, selected_tokens
from eepo.algorithm.credit import OldLogprobs, engine_weights
from eepo.algorithm.losses import (
    PolicyTerms,
    TokenLoss,
    grpo_token_loss,
    regularised,
    token_mean,
    token_weights,
)
from eepo.algorithm.metrics import StepMetrics
from eepo.algorithm.registry import LOSSES, SELECT_TOKENS
from eepo.config import AlgorithmConfig
from eepo.model.batching import MicroBatch
from eepo.model.optimizers import clipped_step
from eepo.model.policy import Policy, Scores
from eepo.types import Completion, Prompt, Rollout


@dataclass(frozen=True)
class MiniBatch:
    """The n completions of one optimizer step."""

    pairs: list[tuple[Prompt, Completion]]
    advantages: list[float]  # [n]
    stages: list[int]  # [n]
    from_policy: list[bool]  # [n]: sampled from θ, not from θ′
    weights: list[float]  # [n] of `token_weights`
    old: OldLogprobs
    options: AlgorithmConfig

    @classmethod
    def of(
        cls, rollout: Rollout, rows: range, old: OldLogprobs, options: AlgorithmConfig
    ) -> MiniBatch:
        """Collect what the loss of the groups in `rows` depends on."""
        pairs = rollout.pairs(rows)
        advantages = [advantage for row in rows for advantage in rollout.advantages[row]]
        weights = token_weights([len(c.token_ids) for _, c in pairs], len(rows), options)
        columns = rollout.stages * len(rows), rollout.from_policy * len(rows)
        return cls(pairs, advantages, *columns, weights, old, options)

    @property
    def num_tokens(self) -> int:
        return sum(len(completion.token_ids) for _, completion in self.pairs)

    def terms(
        self, batch: MicroBatch, scores: Scores, selected: list[list[bool]] | None
    ) -> PolicyTerms:
        """Return the terms of the policy loss of a micro-batch."""
        old, advantages = self.old.of(batch, scores), batch.pick(self.advantages)
        chosen = batch.pad(selected).bool() if selected else torch.zeros_like(batch.mask)
        return PolicyTerms(scores.logprobs, old, advantages, batch.mask, chosen)

    def token_loss(self, batch: MicroBatch, terms: PolicyTerms) -> TokenLoss:
        """Return the policy loss of every token."""
        loss, cap = LOSSES[self.options.loss](terms, self.options), self.options.engine_ratio_cap
        if cap == "off":
            return loss
        sampled = self.old.of_rollout(batch, terms.old_logprobs)
        corrected = batch.pick(self.from_policy).bool()
        weights = engine_weights(terms.old_logprobs, sampled, corrected, cap)
        return TokenLoss(loss.values * weights, loss.clipped)


def accumulate_gradient(
    policy: Policy, reference: Policy | None, mini_batch: MiniBatch, metrics: StepMetrics
) -> None:
    """Add the gradient of the loss to θ's `.grad`. Micro-batches add up to the whole mini-batch."""
    options, num_tokens = mini_batch.options, mini_batch.num_tokens
    selected = None
    if options.loss in SELECT_TOKENS:
        with metrics.phase("update"):
            selected = select_tokens(policy, mini_batch)
    for batch in policy.micro_batches(mini_batch.pairs):
        reference_logprobs = None
        if reference is not None:
            with metrics.phase("reference"), torch.no_grad():
                reference_logprobs = reference.score(batch, options.temperature).logprobs
        with metrics.phase("update"):
            scores = policy.score(batch, options.temperature)
            terms = mini_batch.terms(batch, scores, selected)
            values, clipped = mini_batch.token_loss(batch, terms)
            weights = batch.pick(mini_batch.weights)
            loss = token_mean(values, batch.mask, weights)
            loss = regularised(loss, scores, reference_logprobs, batch.mask, options, weights)
            (loss * batch.mask.sum() / num_tokens).backward()
        sampled, stages = mini_batch.old.of_rollout(batch, terms.old_logprobs), mini_batch.stages
        metrics.update.record_batch(batch, terms, clipped, scores.entropies, sampled, stages)


@torch.no_grad()
def select_tokens(policy: Policy, mini_batch: MiniBatch) -> list[list[bool]]:  # [n][length]
    """Choose tokens among all tokens of the mini-batch, for Clip-Cov and KL-Cov."""
    options = mini_batch.options
    logprobs: dict[int, Tensor] = {}  # by row
    clipped: dict[int, Tensor] = {}
    for batch in policy.micro_batches(mini_batch.pairs):
        terms = mini_batch.terms(batch, policy.score(batch, options.temperature), None)
        columns = terms.logprobs.cpu(), grpo_token_loss(terms, options).clipped.cpu()
        for index, row in enumerate(batch.rows):
            length = len(mini_batch.pairs[row][1].token_ids)
            logprobs[row], clipped[row] = (column[index, :length] for column in columns)
    rows = range(len(mini_batch.pairs))
    lengths = [len(logprobs[row]) for row in rows]
    advantages = torch.tensor(mini_batch.advantages).repeat_interleave(torch.tensor(lengths))
    parts = covariances(torch.cat([logprobs[row] for row in rows]), advantages)
    seed = seed_of([completion.token_ids for _, completion in mini_batch.pairs])
    chosen = selected_tokens(parts, torch.cat([clipped[row] for row in rows]), options, seed)
    return [part.tolist() for part in chosen.split(lengths)]


def optimizer_step(policy: Policy, optimizer: torch.optim.Optimizer, max_grad_norm: float) -> float:
    """Clip the gradient, update θ, clear the gradient, and return its norm."""
    advice = (
        "start a new run with a lower unlearn_lr or learning_rate, for example from a checkpoint "
        "of this run (model.path = its folder)"
    )
    return clipped_step(policy.model.parameters(), optimizer, max_grad_norm, advice)
