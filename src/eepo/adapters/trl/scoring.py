"""Scores completions under the weights that the trainer's model holds: θ, or θ′ in stage 2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eepo.adapters.trl.batches import (
    PaddedBatch,
    interleave_stages,
    pad_batch,
    pad_rows,
    unpad_rows,
)
from eepo.algorithm import k3
from eepo.model.batching import evenly_spaced
from eepo.model.policy import Scores

RowLogprobs = dict[int, Tensor]  # [T_k] each, by the index of the row in its stage


@dataclass
class RolloutLogprobs:
    """Log-probabilities of every row of a rollout, both stages interleaved."""

    old: list[Tensor]  # the denominators of the ratio
    sampled: list[Tensor]  # to compare with vLLM's

    @classmethod
    def of(cls, first: RowLogprobs, old: RowLogprobs, sampled: RowLogprobs) -> RolloutLogprobs:
        """Combine stage 1 with both kinds of log-probabilities of stage 2."""
        stage1, stage2_old, stage2_sampled = (
            [logprobs[row] for row in sorted(logprobs)] for logprobs in (first, old, sampled)
        )
        return cls(interleave_stages(stage1, stage2_old), interleave_stages(stage1, stage2_sampled))


class Scorer:
    """Runs forward passes of the trainer's model, in micro-batches."""

    def __init__(self, trainer: Any, trl_scores: Callable[..., tuple[Any, ...]]) -> None:
        self.trainer = trainer
        self.trl_scores = trl_scores  # TRL's `_get_per_token_logps_and_entropies`

    def micro_batches(
        self, stage: tuple[Any, ...], rows: list[int] | None = None
    ) -> list[PaddedBatch]:
        """Cut a stage, or some rows of it, into batches of the size that TRL's update uses."""
        trainer = self.trainer
        rows = list(range(len(stage[0]))) if rows is None else rows
        size, pad_id = trainer.args.per_device_train_batch_size, trainer._tokenizer.pad_token_id
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        return [pad_batch(stage, part, pad_id, trainer.accelerator.device) for part in parts]

    def probe_batches(self, batches: list[PaddedBatch]) -> list[PaddedBatch]:
        """Choose evenly spaced micro-batches with about `probe_completions` rows."""
        most = max(1, self.trainer.options.probe_completions // len(batches[0].rows))
        return [batches[index] for index in evenly_spaced(len(batches), most)]

    def forward(self, batch: PaddedBatch, with_complements: bool = False) -> Scores:
        """Score a micro-batch. `with_complements` adds log(1 − p) of every token."""
        model, width = self.trainer.model, batch.mask.shape[1]
        if not with_complements:
            logprobs, entropies, *_ = self.trl_scores(
                model, batch.input_ids, batch.attention_mask, width, compute_entropy=True
            )
            return Scores(logprobs.float(), entropies.float())
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        labels[:, :-width] = -100  # only completions are scored
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        options = {"labels": labels, "fused_lm_head": True, "with_complements": True}
        with self.trainer.accelerator.autocast():
            output = model(**inputs, **options)
        names = ("log_probs", "entropy", "complements")
        return Scores(*(output[name][:, -width:].float() for name in names))

    def logprobs_and_entropy(self, batches: list[PaddedBatch]) -> tuple[RowLogprobs, float]:
        """Score rows without a gradient. The entropy is a mean over tokens of all processes."""
        sums = self.zeros(2)
        logprobs = self.logprobs(batches, sums)
        num_tokens, entropies = self.sum_over_processes(sums)
        return logprobs, entropies / num_tokens

    @torch.no_grad()
    def logprobs(self, batches: list[PaddedBatch], sums: Tensor | None = None) -> RowLogprobs:
        """Score rows without a gradient. Add their `token_sums` to `sums`."""
        logprobs: RowLogprobs = {}
        for batch in batches:
            scores = self.forward(batch)
            logprobs |= unpad_rows(scores.logprobs, batch)
            if sums is not None:
                sums += token_sums(scores, batch.mask)
        return logprobs

    @torch.no_grad()
    def kl(self, probe: list[PaddedBatch], before: RowLogprobs) -> float:
        """Estimate KL(θ‖θ′) per token over all processes. The model holds θ′."""
        sums = self.zeros(2)  # KL, tokens
        for batch in probe:
            after = self.forward(batch).logprobs
            theta = pad_rows([before[row] for row in batch.rows], after.shape)
            gap = torch.where(batch.mask, after - theta, 0.0)
            sums += torch.stack([k3(gap).sum(), batch.mask.sum()]).to(sums)
        kl, num_tokens = self.sum_over_processes(sums)
        return kl / num_tokens

    def zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.float64, device=self.trainer.accelerator.device)

    def sum_over_processes(self, sums: Tensor) -> list[float]:
        """Add up over processes. All of them get the same numbers."""
        return self.trainer.accelerator.reduce(sums, "sum").tolist()


def token_sums(scores: Scores, mask: Tensor) -> Tensor:
    """Return the number of tokens and the sum of their entropies, in float64."""
    entropy = scores.entropies.detach()[mask].sum()
    return torch.stack([mask.sum(), entropy]).to(torch.float64)
