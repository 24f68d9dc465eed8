"""The unlearning step of a rollout: ∇L of stage 1, the rate η, and θ′ = θ − η ∇L in the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from eepo.adapters.trl.batches import PaddedBatch, unpad_rows
from eepo.adapters.trl.scoring import RowLogprobs, Scorer, token_sums
from eepo.adapters.weights import reshard, stashed_gradients, trial_steps, unlearned_in_place
from eepo.algorithm import SearchResult, StepGate, lr_above_floor, unlearn_gate, unlearn_loss
from eepo.config import AlgorithmConfig
from eepo.model.batching import evenly_spaced
from eepo.types import UserError


@dataclass
class UnlearningStep:
    """Stage 1 as scored under θ, and the step that forgets it."""

    logprobs: RowLogprobs  # of all rows of stage 1
    probe: list[PaddedBatch]  # the rows that measure KL(θ‖θ′)
    entropy: float  # mean over the tokens of stage 1
    gradient: dict[str, Tensor] | None = None  # ∇L; None if the gate is shut: θ′ is θ
    lr: float = 0.0  # η
    search: SearchResult | None = None  # of η, with a KL target
    gated_share: float = 0.0
    loss: float = 0.0


class Unlearner:
    """Computes unlearning steps and applies them to the trainer's model.

    All processes get the same gate and the same η.
    """

    def __init__(self, trainer: Any, scorer: Scorer) -> None:
        self.trainer, self.scorer, self.options = trainer, scorer, trainer.options
        self.gate = StepGate(self.options)
        self.lr_search = SearchResult(trainer.args.unlearn_lr)  # with a KL target: the last search

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"gate_history": self.gate.history, "lr_search": asdict(self.lr_search)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.gate.history = state["gate_history"]
        lr_only = {"lr": state.get("auto_lr", self.lr_search.lr)}  # in old checkpoints
        self.lr_search = SearchResult(**state.get("lr_search", lr_only))

    def step(self, first: tuple[Any, ...], selected: list[bool]) -> UnlearningStep:
        """Score stage 1 under θ, and find the step that unlearns its selected rows.

        An update may have accumulated gradients already: they are stashed and restored.
        """
        rows = self._covered_rows(len(selected))
        batches = self.scorer.micro_batches(first, rows)
        others = self.scorer.micro_batches(first, sorted({*range(len(selected))} - {*rows}))
        sums = self.scorer.zeros(5)  # tokens, entropies, candidate tokens, gated tokens, loss
        weights = self.weights()
        with stashed_gradients(weights), self._gradient_sync():
            logprobs = self._backward(batches, selected, sums)
            gradient = {
                name: weight.grad for name, weight in weights.items() if weight.grad is not None
            }
        logprobs |= self.scorer.logprobs(others, sums[:2])
        num_tokens, entropies, candidates, gated, loss = self.scorer.sum_over_processes(sums)
        step = UnlearningStep(logprobs, self.scorer.probe_batches(batches), entropies / num_tokens)
        self.gate.record(step.entropy)
        if gated > 0 and self.gate.is_open():
            self._average(gradient, weights)
            self._check_finite(gradient)
            step.gradient, step.gated_share = gradient, gated / candidates
            step.loss = loss / self.trainer.accelerator.num_processes
            self._choose_lr(step, gradient)
        return step

    @contextmanager
    def rollout_weights(self, step: UnlearningStep) -> Iterator[None]:
        """Put θ′ into the model and vLLM inside the block, and θ afterwards.

        vLLM gets the weights with its next use. The gradient is lost.
        """
        if step.gradient is None:
            yield
            return
        try:
            with unlearned_in_place(self.weights(), step.gradient, step.lr):
                self.invalidate_copies()
                yield
        finally:
            self.invalidate_copies()

    def kl(self, step: UnlearningStep) -> float:
        """Return KL(θ‖θ′) per token above the floor. The model holds θ′."""
        if step.search is not None:
            return step.search.kl
        return self.scorer.kl(step.probe, step.logprobs)

    def invalidate_copies(self) -> None:
        """Make sure that copies of the previous weights are not used again."""
        # TRL pushes weights to vLLM if this is not the current step.
        self.trainer._last_loaded_step = -1
        reshard(self.trainer.model)

    def weights(self) -> dict[str, Parameter]:
        """Return the trained weights; with FSDP their shards, not a gathered copy."""
        reshard(self.trainer.model)
        named = self.trainer.model.named_parameters()
        return {name: weight for name, weight in named if weight.requires_grad}

    # --- gradient

    def _covered_rows(self, num_rows: int) -> list[int]:
        """Apply `unlearn_max_completions`. The other rows are only scored.

        Every process covers the same number: FSDP needs as many backward passes on each.
        """
        most = self.options.unlearn_max_completions
        if most:
            most = max(1, most // self.trainer.accelerator.num_processes)
        return evenly_spaced(num_rows, most)

    def _backward(
        self, batches: list[PaddedBatch], selected: list[bool], sums: Tensor
    ) -> RowLogprobs:
        """Add ∇L to `.grad`, and the micro-batches' numbers to `sums`."""
        logprobs: RowLogprobs = {}
        options, num_rows = self.options, sum(len(batch.rows) for batch in batches)
        for batch in batches:
            scores = self.scorer.forward(batch, with_complements=needs_complements(options))
            flags = torch.tensor([selected[row] for row in batch.rows]).unsqueeze(1)
            gate = unlearn_gate(scores, batch.mask, options) & flags.to(batch.mask.device)
            loss = unlearn_loss(scores, batch.mask, gate, options) * len(batch.rows) / num_rows
            loss.backward()
            logprobs |= unpad_rows(scores.logprobs.detach(), batch)
            parts = [batch.mask.sum(), gate.sum(), loss.detach()]
            sums += torch.cat([token_sums(scores, batch.mask), torch.stack(parts).to(sums)])
        return logprobs

    def _average(self, gradient: dict[str, Tensor], weights: dict[str, Parameter]) -> None:
        """Average over processes. FSDP has already done so in the backward pass."""
        accelerator = self.trainer.accelerator
        if accelerator.num_processes == 1 or accelerator.is_fsdp2:
            return
        # All processes must reduce the same weights. One at a time: each reduction makes a copy.
        for name, weight in weights.items():
            part = gradient[name] if name in gradient else torch.zeros_like(weight)
            gradient[name] = accelerator.reduce(part, "mean")

    def _check_finite(self, gradient: dict[str, Tensor]) -> None:
        """Raise an error on all processes if one of them has a value that is not finite."""
        num_broken = self.scorer.zeros(1)
        for part in gradient.values():
            local = part.to_local() if isinstance(part, DTensor) else part
            num_broken += (~local.isfinite()).any().to(num_broken)
        if sum(self.scorer.sum_over_processes(num_broken)) > 0:
            raise UserError(
                "the unlearning gradient is not finite; start a new run with a lower learning_rate "
                "or unlearn_lr, for example from a checkpoint of this run (model = its folder)"
            )

    @contextmanager
    def _gradient_sync(self) -> Iterator[None]:
        """Make FSDP reduce gradients in every backward pass inside the block.

        By default it does so only in the last micro-batch of an update.
        """
        accelerator = self.trainer.accelerator
        if not accelerator.is_fsdp2:
            yield
            return
        self.trainer.model.set_requires_gradient_sync(True)
        try:
            yield
        finally:
            self.trainer.model.set_requires_gradient_sync(accelerator.sync_gradients)

    # --- rate

    def _choose_lr(self, step: UnlearningStep, gradient: dict[str, Tensor]) -> None:
        """Set η: the knob, or with a KL target the result of a search."""
        if self.options.unlearn_lr != "auto":
            step.lr = self.options.unlearn_lr
            return
        step.search = self.lr_search = self._search(step, gradient)
        step.lr = step.search.lr

    def _search(self, step: UnlearningStep, gradient: dict[str, Tensor]) -> SearchResult:
        """Search the η that meets the KL target, from where the last search ended."""
        model = self.trainer.model
        try:
            with trial_steps(self.weights(), gradient) as take_step:

                def kl_of(lr: float) -> float:
                    take_step(lr)
                    reshard(model)
                    return self.scorer.kl(step.probe, step.logprobs)

                target = self.options.unlearn_kl_target
                has_floor = self.trainer.accelerator.mixed_precision != "no"
                return lr_above_floor(kl_of, target, self.lr_search, has_floor)
        finally:
            reshard(model)


def needs_complements(options: AlgorithmConfig) -> bool:
    """Return whether the unlearning loss needs log(1 − p) of every token."""
    return options.saturation == "exact" and options.unlearn_loss == "comp"
