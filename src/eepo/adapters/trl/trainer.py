"""TRL's trainer with two-stage rollouts.

A generation batch holds every prompt G times in a row, and G is even. Even rows are stage 1, odd
rows are stage 2. This also holds if the slice of a process cuts a group, because every slice has an
even number of rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from trl import GRPOTrainer

from eepo.adapters.trl.batches import (
    PaddedBatch,
    interleave_stages,
    pad_batch,
    pad_rows,
    unpad_rows,
)
from eepo.adapters.trl.checks import check_trainer
from eepo.adapters.trl.config import EEPOConfig
from eepo.adapters.weights import reshard, stashed_gradients, trial_steps, unlearned_in_place
from eepo.algorithm import (
    SearchResult,
    StepGate,
    advantage_weights,
    completions_to_unlearn,
    k3,
    lr_above_floor,
    unlearn_gate,
    unlearn_loss,
)
from eepo.model.batching import evenly_spaced
from eepo.model.policy import Scores
from eepo.types import UserError

# Micro-batches of stage 1. The log-probabilities under θ start with those of the batch's rows.
ScoredBatches = list[tuple[PaddedBatch, list[Tensor]]]
STATE_FILE = "eepo.json"  # in every checkpoint
COMPLETION_IDS, COMPLETIONS = 1, 3  # indices in the tuple that TRL's `_generate` returns


@dataclass
class GradedStage:
    """Rewards of stage 1, where `unlearn_on` needs them before stage 2."""

    rewards: Tensor  # [rows of all processes, reward functions]
    extra_columns: dict[str, list[Any]]  # logged by the reward functions


class EEPOTrainer(GRPOTrainer):
    """`GRPOTrainer` with two-stage rollouts.

    Evaluation is TRL's. With `gate = "never"` training is TRL's too, except for `failure_weight`.
    """

    _tag_names = ["trl", "eepo"]  # noqa: RUF012  (as TRL declares it)
    _name = "EEPO"
    _paper = {"title": "EEPO: Exploration-Enhanced Policy Optimization via Sample-Then-Forget"}  # noqa: RUF012

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: EEPOConfig | None = None, **others: Any
    ) -> None:
        args = EEPOConfig("eepo-output") if args is None else args
        if not isinstance(args, EEPOConfig):
            raise UserError(f"args must be an EEPOConfig, got {type(args).__name__}")
        self.options = args.algorithm
        self.step_gate = StepGate(self.options)
        self.auto_lr = args.unlearn_lr  # with a KL target: the last choice
        # Set only while TRL scores a two-stage rollout:
        self._rollout_logprobs: list[Tensor] | None = None  # of each row
        self._inputs: list[dict[str, Any]] = []  # rows of the data set
        self._graded_stage1: GradedStage | None = None
        # [rows of all processes] of the last rollout; NaN where no function gave a reward
        self._rewards = torch.empty(0)
        self.num_generations: int  # G; set by TRL
        super().__init__(model, reward_funcs, args, **others)
        if self.options.gate != "never":
            check_trainer(self)

    # --- the rollout

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        if not self.model.training or self.options.gate == "never":
            return super()._generate(prompts)
        if prompts[0::2] != prompts[1::2]:
            raise UserError(
                "train_dataset: the sampler must give each prompt num_generations times in a row"
            )
        first = self._sample_stage(prompts[0::2])
        batches = self._micro_batches(first)
        selected = self._rows_to_unlearn(prompts[0::2], first)
        before, gradient = self._unlearn_gradient(batches, selected)
        probe = self._probe_batches(batches, before)
        lr = self._unlearn_lr(gradient, probe)
        with self._rollout_weights(gradient, lr):
            second = self._sample_stage(prompts[1::2])
            after = self._score_stage2(self._micro_batches(second))
            if gradient is not None:
                self._record("kl", self._kl(probe))
        self._rollout_logprobs = interleave_stages(before, after)
        return tuple(interleave_stages(*parts) for parts in zip(first, second, strict=True))

    def _sample_stage(self, prompts: list[Any]) -> tuple[Any, ...]:
        """Sample the G / 2 rows of each prompt.

        TRL asks a vLLM server for `num_generations` completions of every distinct prompt.
        """
        group_size = self.num_generations
        self.num_generations = group_size // 2
        try:
            return super()._generate(prompts)
        finally:
            self.num_generations = group_size

    def _rows_to_unlearn(self, prompts: list[Any], first: tuple[Any, ...]) -> list[bool]:
        """Apply `unlearn_on` to this process's rows of stage 1.

        If that needs rewards, stage 1 is graded here and not again later.
        """
        choice = self.options.unlearn_on
        if choice == "all":
            return [True] * len(prompts)
        rewards = super()._calculate_rewards(
            self._inputs[0::2], prompts, first[COMPLETIONS], first[COMPLETION_IDS]
        )
        self._graded_stage1 = GradedStage(rewards, dict(self._pending_extra_logs))
        self._pending_extra_logs.clear()
        # Rows of all processes, in the order of the prompts.
        groups = self._total_rewards(rewards).view(-1, self.num_generations // 2).tolist()
        selected = [flag for group in groups for flag in completions_to_unlearn(group, choice)]
        start = self.accelerator.process_index * len(prompts)
        return selected[start : start + len(prompts)]

    def _unlearn_gradient(
        self, batches: list[PaddedBatch], selected: list[bool]
    ) -> tuple[list[Tensor], dict[str, Tensor] | None]:
        """Return the log-probabilities of stage 1 under θ, and ∇L over all processes.

        The gradient is None if the gate is shut. An update may have accumulated gradients already:
        they are stashed and restored.
        """
        logprobs: list[Tensor] = []
        sums = self._zeros(4)  # tokens, entropies, gated tokens, loss
        weights = self._weights()
        with stashed_gradients(weights), self._gradient_sync():
            for batch in batches:
                scores = self._forward(batch)
                flags = selected[len(logprobs) :][: len(batch.mask)]
                rows = torch.tensor(flags, device=batch.mask.device).unsqueeze(1)
                gate = unlearn_gate(scores, batch.mask, self.options) & rows
                loss = unlearn_loss(scores, batch.mask, gate, self.options)
                loss = loss * len(batch.mask) / len(selected)
                loss.backward()
                logprobs += unpad_rows(scores.logprobs.detach(), batch.mask)
                entropy = scores.entropies.detach()[batch.mask].sum()
                sums += torch.stack([batch.mask.sum(), entropy, gate.sum(), loss.detach()]).to(sums)
            gradient = {
                name: weight.grad for name, weight in weights.items() if weight.grad is not None
            }
        if not self._update_gate(self.accelerator.reduce(sums, "sum").tolist()):
            return logprobs, None
        self._average_gradient(gradient, weights)
        return logprobs, gradient

    def _update_gate(self, sums: list[float]) -> bool:
        """Record the entropy of stage 1. Return whether anything is unlearned."""
        num_tokens, entropies, gated, loss = sums
        self.step_gate.record(entropies / num_tokens)
        is_open = gated > 0 and self.step_gate.is_open()
        self._record("stage1_entropy", entropies / num_tokens)
        self._record("gated_share", gated / num_tokens if is_open else 0.0)
        self._record("unlearn_loss", loss / self.accelerator.num_processes if is_open else 0.0)
        return is_open

    def _average_gradient(self, gradient: dict[str, Tensor], weights: dict[str, Parameter]) -> None:
        """Average over processes. FSDP has already done so in the backward pass."""
        if self.accelerator.num_processes == 1 or self.accelerator.is_fsdp2:
            return
        # All processes must reduce the same weights. One at a time: each reduction makes a copy.
        for name, weight in weights.items():
            part = gradient[name] if name in gradient else torch.zeros_like(weight)
            gradient[name] = self.accelerator.reduce(part, "mean")

    def _unlearn_lr(self, gradient: dict[str, Tensor] | None, probe: ScoredBatches) -> float:
        """Return η: the knob, or with a KL target the result of a search."""
        if self.options.unlearn_lr != "auto":
            return self.options.unlearn_lr
        if gradient is not None:
            result = self._search_lr(gradient, probe)
            self.auto_lr = result.lr
            self._record("unlearn_lr", result.lr)
            self._record("kl_floor", result.floor)
        return self.auto_lr

    def _search_lr(self, gradient: dict[str, Tensor], probe: ScoredBatches) -> SearchResult:
        """Search the η that meets the KL target. All processes get the same result."""
        try:
            with trial_steps(self._weights(), gradient) as take_step:

                def kl_of(lr: float) -> float:
                    take_step(lr)
                    reshard(self.model)
                    return self._kl(probe)

                target = self.options.unlearn_kl_target
                has_floor = self.accelerator.mixed_precision != "no"
                return lr_above_floor(kl_of, target, self.auto_lr, has_floor)
        finally:
            reshard(self.model)

    @contextmanager
    def _rollout_weights(self, gradient: dict[str, Tensor] | None, lr: float) -> Iterator[None]:
        """Put θ′ into the model and vLLM inside the block, and θ afterwards.

        vLLM gets the weights with its next use. Without a gradient θ′ is θ.
        """
        if gradient is None:
            yield
            return
        try:
            with unlearned_in_place(self._weights(), gradient, lr):
                self._invalidate_copies()
                yield
        finally:
            self._invalidate_copies()

    def _invalidate_copies(self) -> None:
        """Make sure that copies of the previous weights are not used again."""
        self._last_loaded_step = -1  # TRL pushes weights to vLLM if this is not the current step
        reshard(self.model)

    def _weights(self) -> dict[str, Parameter]:
        """Return the trained weights; with FSDP their shards, not a gathered copy."""
        reshard(self.model)
        named = self.model.named_parameters()
        return {name: weight for name, weight in named if weight.requires_grad}

    @contextmanager
    def _gradient_sync(self) -> Iterator[None]:
        """Make FSDP reduce gradients in every backward pass inside the block.

        By default it does so only in the last micro-batch of an update.
        """
        if not self.accelerator.is_fsdp2:
            yield
            return
        self.model.set_requires_gradient_sync(True)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(self.accelerator.sync_gradients)

    # --- scoring

    def _micro_batches(self, stage: tuple[Any, ...]) -> list[PaddedBatch]:
        """Cut the rows of a stage into batches of the size that TRL's update uses."""
        prompts, completions = ([torch.tensor(ids) for ids in part] for part in stage[:2])
        size, pad_id = self.args.per_device_train_batch_size, self._tokenizer.pad_token_id
        slices = [slice(row, row + size) for row in range(0, len(prompts), size)]
        device = self.accelerator.device
        return [pad_batch(prompts[rows], completions[rows], pad_id, device) for rows in slices]

    def _forward(self, batch: PaddedBatch) -> Scores:
        width = batch.mask.shape[1]
        logprobs, entropies, *_ = super()._get_per_token_logps_and_entropies(
            self.model, batch.input_ids, batch.attention_mask, width, compute_entropy=True
        )
        return Scores(logprobs.float(), entropies.float())

    @torch.no_grad()
    def _score_stage2(self, batches: list[PaddedBatch]) -> list[Tensor]:
        """Return the log-probabilities of each row under θ′, and record the mean entropy."""
        logprobs: list[Tensor] = []
        sums = self._zeros(2)  # tokens, entropies
        for batch in batches:
            scores = self._forward(batch)
            logprobs += unpad_rows(scores.logprobs, batch.mask)
            sums += torch.stack([batch.mask.sum(), scores.entropies[batch.mask].sum()]).to(sums)
        num_tokens, entropies = self.accelerator.reduce(sums, "sum").tolist()
        self._record("stage2_entropy", entropies / num_tokens)
        return logprobs

    def _probe_batches(self, batches: list[PaddedBatch], before: list[Tensor]) -> ScoredBatches:
        """Choose evenly spaced micro-batches with about `probe_completions` rows."""
        size = len(batches[0].mask)
        most = max(1, self.options.probe_completions // size)
        indices = evenly_spaced(len(batches), most)
        return [(batches[index], before[index * size :]) for index in indices]

    @torch.no_grad()
    def _kl(self, probe: ScoredBatches) -> float:
        """Estimate KL(θ‖θ′) per token over all processes. The model holds θ′."""
        sums = self._zeros(2)  # KL, tokens
        for batch, before in probe:
            after = self._forward(batch).logprobs
            gap = torch.where(batch.mask, after - pad_rows(before, after.shape), 0.0)
            sums += torch.stack([k3(gap).sum(), batch.mask.sum()]).to(sums)
        kl, num_tokens = self.accelerator.reduce(sums, "sum").tolist()
        return kl / num_tokens

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the rollout logprobs where TRL asks for "old" ones of a two-stage rollout.

        TRL also compares them with vLLM's. Under θ, stage 2 would look like an error of the engine
        and its completions would be zeroed.
        """
        if self._rollout_logprobs is not None and model is self.model:
            shape = attention_mask[:, -logits_to_keep:].shape
            return pad_rows(self._rollout_logprobs, shape), None, None
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._inputs = inputs
        try:
            output = super()._generate_and_score_completions(inputs)
            if self._rollout_logprobs is not None:
                mask = output["completion_mask"]  # without the completions that TRL masks
                output["old_per_token_logps"] = pad_rows(self._rollout_logprobs, mask.shape) * mask
                self._record_stage_rewards()
            if self.model.training:
                output["advantages"] = self._weighted_advantages(output["advantages"])
        finally:
            self._rollout_logprobs = self._graded_stage1 = None
            self._inputs = []
        return output

    # --- rewards and advantages

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Tensor:
        """Grade all rows, or only stage 2 if stage 1 has been graded already."""
        rows = (inputs, prompts, completions, completion_ids_list)
        if self._graded_stage1 is None:
            rewards = super()._calculate_rewards(*rows)
        else:
            second = super()._calculate_rewards(*(part[1::2] for part in rows))
            rewards = torch.stack([self._graded_stage1.rewards, second], 1).flatten(0, 1)
            self._interleave_extra_columns(self._graded_stage1.extra_columns, len(prompts) // 2)
        self._rewards = self._total_rewards(rewards)
        return rewards

    def _interleave_extra_columns(self, first: dict[str, list[Any]], num_rows: int) -> None:
        """Merge the columns that the reward functions logged for stage 1 into stage 2's."""
        second, missing = self._pending_extra_logs, [None] * num_rows
        for name in {*first, *second}:
            stage1, stage2 = first.get(name, missing), second.get(name, missing)
            same_length = len(stage1) == len(stage2)
            second[name] = interleave_stages(stage1, stage2) if same_length else [*stage1, *stage2]

    def _total_rewards(self, rewards: Tensor) -> Tensor:  # [rows, functions] -> [rows]
        """Return weighted sums over the functions that gave a reward; NaN where none did."""
        total = (rewards.cpu() * self.reward_weights.cpu()).nansum(1)
        return torch.where(rewards.cpu().isnan().all(1), torch.nan, total)

    def _weighted_advantages(self, advantages: Tensor) -> Tensor:  # [B] -> [B]
        stages = torch.ones_like(advantages)
        if self._rollout_logprobs is not None:
            stages[1::2] = 2
        return advantages * advantage_weights(advantages, stages, self.options)

    # --- metrics and checkpoints

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.float64, device=self.accelerator.device)

    def _record(self, name: str, value: float) -> None:
        self._metrics["train"][f"eepo/{name}"].append(value)

    def _record_stage_rewards(self) -> None:
        self._record("stage1_reward", self._rewards[0::2].nanmean().item())
        self._record("stage2_reward", self._rewards[1::2].nanmean().item())

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            output_dir = Path(self._get_output_dir(trial=trial))
            path = output_dir / f"checkpoint-{self.state.global_step}" / STATE_FILE
            state = {"gate_history": self.step_gate.history, "auto_lr": self.auto_lr}
            path.write_text(json.dumps(state), encoding="utf-8")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (Path(checkpoint) / STATE_FILE).is_file():
            state = json.loads((Path(checkpoint) / STATE_FILE).read_text(encoding="utf-8"))
            self.step_gate.history = state["gate_history"]
            self.auto_lr = state.get("auto_lr", self.auto_lr)
