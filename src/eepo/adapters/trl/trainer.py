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
from accelerate.utils import is_peft_model
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
from eepo.adapters.trl.complements import add_complements
from eepo.adapters.trl.config import EEPOConfig
from eepo.adapters.trl.reference_pass import is_reference_pass
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
from eepo.algorithm.metrics import second_half_metrics
from eepo.model.batching import evenly_spaced
from eepo.model.policy import Scores
from eepo.types import UserError

RowLogprobs = dict[int, Tensor]  # [T_k] each, by the index of the row in its stage
STATE_FILE = "eepo.json"  # in every checkpoint
COMPLETION_IDS, COMPLETIONS = 1, 3  # indices in the tuple that TRL's `_generate` returns


@dataclass
class GradedStage:
    """Rewards of stage 1, where `unlearn_on` needs them before stage 2."""

    rewards: Tensor  # [rows of all processes, reward functions]
    extra_columns: dict[str, list[Any]]  # logged by the reward functions


@dataclass
class UnlearningPass:
    """The result of scoring stage 1 under θ."""

    batches: list[PaddedBatch]  # the rows that the loss is a mean over
    logprobs: RowLogprobs  # of all rows
    gradient: dict[str, Tensor] | None  # ∇L; None if the gate is shut


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
        self._rollout_logprobs: list[Tensor] | None = None  # of each row, to compare with vLLM's
        self._old_logprobs: list[Tensor] = []  # of each row: the denominators of the ratio
        self._inputs: list[dict[str, Any]] = []  # rows of the data set
        self._graded_stage1: GradedStage | None = None
        # [rows of all processes] of the last rollout; NaN where no function gave a reward
        self._rewards = torch.empty(0)
        self.num_generations: int  # G; set by TRL
        super().__init__(model, reward_funcs, args, **others)
        if self.options.gate != "never":
            check_trainer(self)
            if self._is_exact:
                base = self.model.get_base_model() if is_peft_model(self.model) else self.model
                add_complements(base, self.temperature, args.cast_lm_head_to_fp32)

    # --- the rollout

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        if not self.model.training or self.options.gate == "never":
            return super()._generate(prompts)
        if prompts[0::2] != prompts[1::2]:
            raise UserError(
                "train_dataset: the sampler must give each prompt num_generations times in a row"
            )
        first = self._sample_stage(prompts[0::2])
        selected = self._rows_to_unlearn(prompts[0::2], first)
        stage1 = self._score_stage1(first, selected)
        probe = self._probe_batches(stage1.batches)
        search = self._search_lr(stage1, probe)
        with self._rollout_weights(stage1.gradient, self._unlearn_lr(search)):
            second = self._sample_stage(prompts[1::2])
            batches = self._micro_batches(second)
            sampled = self._score_stage2(batches, is_unlearned=stage1.gradient is not None)
            if stage1.gradient is not None:
                kl = self._kl(probe, stage1.logprobs) if search is None else search.kl
                self._record("kl", kl)
                self._record("kl_floor", 0.0 if search is None else search.floor)
        # The model holds θ again.
        self._record_stage_lengths(first, second)
        is_full = self.options.credit == "full" and stage1.gradient is not None
        old = self._logprobs(batches) if is_full else sampled
        self._keep_logprobs(stage1.logprobs, old, sampled if self._compares_with_vllm else old)
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

    def _score_stage1(self, first: tuple[Any, ...], selected: list[bool]) -> UnlearningPass:
        """Score stage 1 under θ, and compute ∇L over all processes.

        With `unlearn_max_completions`, every process unlearns the same number of rows: FSDP needs
        as many backward passes on each. The other rows are only scored. An update may have
        accumulated gradients already: they are stashed and restored.
        """
        most = self.options.unlearn_max_completions
        if most:
            most = max(1, most // self.accelerator.num_processes)
        rows = evenly_spaced(len(selected), most)
        batches = self._micro_batches(first, rows)
        others = self._micro_batches(first, sorted({*range(len(selected))} - {*rows}))
        logprobs: RowLogprobs = {}
        sums = self._zeros(5)  # tokens, entropies, candidate tokens, gated tokens, loss
        weights = self._weights()
        with stashed_gradients(weights), self._gradient_sync():
            for batch in batches:
                scores = self._forward(batch, with_complements=self._is_exact)
                flags = torch.tensor([selected[row] for row in batch.rows]).unsqueeze(1)
                gate = unlearn_gate(scores, batch.mask, self.options) & flags.to(batch.mask.device)
                loss = unlearn_loss(scores, batch.mask, gate, self.options)
                loss = loss * len(batch.rows) / len(rows)
                loss.backward()
                logprobs |= unpad_rows(scores.logprobs.detach(), batch)
                parts = [batch.mask.sum(), gate.sum(), loss.detach()]
                sums += torch.cat([_token_sums(scores, batch.mask), torch.stack(parts).to(sums)])
            gradient = {
                name: weight.grad for name, weight in weights.items() if weight.grad is not None
            }
        logprobs |= self._logprobs(others, sums[:2])
        is_open = self._update_gate(self.accelerator.reduce(sums, "sum").tolist())
        if is_open:
            self._average_gradient(gradient, weights)
        return UnlearningPass(batches, logprobs, gradient if is_open else None)

    def _update_gate(self, sums: list[float]) -> bool:
        """Record the entropy of stage 1. Return whether anything is unlearned."""
        num_tokens, entropies, candidates, gated, loss = sums
        self.step_gate.record(entropies / num_tokens)
        is_open = gated > 0 and self.step_gate.is_open()
        self._record("stage1_entropy", entropies / num_tokens)
        self._record("gated_share", gated / candidates if is_open else 0.0)
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

    def _unlearn_lr(self, search: SearchResult | None) -> float:
        """Return η: the knob, or with a KL target the result of a search."""
        if search is not None:
            self.auto_lr = search.lr
            self._record("unlearn_lr", search.lr)
        return self.auto_lr if self.options.unlearn_lr == "auto" else self.options.unlearn_lr

    def _search_lr(self, stage1: UnlearningPass, probe: list[PaddedBatch]) -> SearchResult | None:
        """Search the η that meets the KL target. All processes get the same result.

        Return None without a target, or if nothing is unlearned.
        """
        gradient = stage1.gradient
        if self.options.unlearn_lr != "auto" or gradient is None:
            return None
        try:
            with trial_steps(self._weights(), gradient) as take_step:

                def kl_of(lr: float) -> float:
                    take_step(lr)
                    reshard(self.model)
                    return self._kl(probe, stage1.logprobs)

                target = self.options.unlearn_kl_target
                has_floor = self.accelerator.mixed_precision != "no"
                return lr_above_floor(kl_of, target, SearchResult(self.auto_lr), has_floor)
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

    @property
    def _is_exact(self) -> bool:
        """Return whether the unlearning loss needs log(1 − p) of every token."""
        return self.options.saturation == "exact" and self.options.unlearn_loss == "comp"

    @property
    def _compares_with_vllm(self) -> bool:
        """Return whether TRL compares old log-probabilities with those of vLLM."""
        return bool(self.use_vllm and self.vllm_importance_sampling_correction)

    def _micro_batches(
        self, stage: tuple[Any, ...], rows: list[int] | None = None
    ) -> list[PaddedBatch]:
        """Cut a stage, or some rows of it, into batches of the size that TRL's update uses."""
        rows = list(range(len(stage[0]))) if rows is None else rows
        size, pad_id = self.args.per_device_train_batch_size, self._tokenizer.pad_token_id
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        return [pad_batch(stage, part, pad_id, self.accelerator.device) for part in parts]

    def _forward(self, batch: PaddedBatch, with_complements: bool = False) -> Scores:
        width = batch.mask.shape[1]
        if not with_complements:
            logprobs, entropies, *_ = super()._get_per_token_logps_and_entropies(
                self.model, batch.input_ids, batch.attention_mask, width, compute_entropy=True
            )
            return Scores(logprobs.float(), entropies.float())
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        labels[:, :-width] = -100  # only completions are scored
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        options = {"labels": labels, "fused_lm_head": True, "with_complements": True}
        with self.accelerator.autocast():
            output = self.model(**inputs, **options)
        names = ("log_probs", "entropy", "complements")
        return Scores(*(output[name][:, -width:].float() for name in names))

    def _score_stage2(self, batches: list[PaddedBatch], is_unlearned: bool) -> RowLogprobs:
        """Score stage 2 under the weights that sampled it, and record its mean entropy.

        Full credit does not need these log-probabilities if TRL does not compare them with vLLM's.
        Then some rows are enough, for the entropy.
        """
        if self.options.credit == "full" and is_unlearned and not self._compares_with_vllm:
            batches = self._probe_batches(batches)
        sums = self._zeros(2)  # tokens, entropies
        logprobs = self._logprobs(batches, sums)
        num_tokens, entropies = self.accelerator.reduce(sums, "sum").tolist()
        self._record("stage2_entropy", entropies / num_tokens)
        return logprobs

    @torch.no_grad()
    def _logprobs(self, batches: list[PaddedBatch], sums: Tensor | None = None) -> RowLogprobs:
        """Score rows under the model's weights. Add their tokens and entropies to `sums`."""
        logprobs: RowLogprobs = {}
        for batch in batches:
            scores = self._forward(batch)
            logprobs |= unpad_rows(scores.logprobs, batch)
            if sums is not None:
                sums += _token_sums(scores, batch.mask)
        return logprobs

    def _keep_logprobs(self, first: RowLogprobs, old: RowLogprobs, sampled: RowLogprobs) -> None:
        """Keep the log-probabilities of both stages for TRL's scoring."""
        stage1, stage2, stage2_sampled = (
            [logprobs[row] for row in sorted(logprobs)] for logprobs in (first, old, sampled)
        )
        self._old_logprobs = interleave_stages(stage1, stage2)
        self._rollout_logprobs = interleave_stages(stage1, stage2_sampled)

    def _probe_batches(self, batches: list[PaddedBatch]) -> list[PaddedBatch]:
        """Choose evenly spaced micro-batches with about `probe_completions` rows."""
        most = max(1, self.options.probe_completions // len(batches[0].rows))
        return [batches[index] for index in evenly_spaced(len(batches), most)]

    @torch.no_grad()
    def _kl(self, probe: list[PaddedBatch], before: RowLogprobs) -> float:
        """Estimate KL(θ‖θ′) per token over all processes. The model holds θ′."""
        sums = self._zeros(2)  # KL, tokens
        for batch in probe:
            after = self._forward(batch).logprobs
            theta = pad_rows([before[row] for row in batch.rows], after.shape)
            gap = torch.where(batch.mask, after - theta, 0.0)
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

        TRL compares them with vLLM's. Under θ, stage 2 would look like an error of the engine and
        its completions would be zeroed. So this is also done for full credit, whose denominators
        are set after the comparison.
        """
        rollout = self._rollout_logprobs
        if rollout is not None and model is self.model and not is_reference_pass(model):
            shape = attention_mask[:, -logits_to_keep:].shape
            return pad_rows(rollout, shape), None, None
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._inputs = inputs
        try:
            output = super()._generate_and_score_completions(inputs)
            if self._rollout_logprobs is not None:
                mask = output["completion_mask"]  # without the completions that TRL masks
                output["old_per_token_logps"] = pad_rows(self._old_logprobs, mask.shape) * mask
                self._record_stage_rewards()
            if self.model.training:
                output["advantages"] = self._weighted_advantages(output["advantages"])
        finally:
            self._rollout_logprobs = self._graded_stage1 = None
            self._inputs, self._old_logprobs = [], []
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
        first, second = self._rewards[0::2], self._rewards[1::2]
        self._record("stage1_reward", first.nanmean().item())
        self._record("stage2_reward", second.nanmean().item())
        halves = [half.view(-1, self.num_generations // 2) for half in (first, second)]
        groups = torch.cat(halves, 1).nan_to_num().tolist()
        for name, share in second_half_metrics(groups).items():
            self._record(name, share)

    def _record_stage_lengths(self, *stages: tuple[Any, ...]) -> None:
        """Record the mean number of tokens. Every process has the same number of rows."""
        lengths = self._zeros(len(stages))
        for index, stage in enumerate(stages):
            lengths[index] = sum(map(len, stage[COMPLETION_IDS])) / len(stage[COMPLETION_IDS])
        for number, length in enumerate(self.accelerator.reduce(lengths, "mean").tolist(), 1):
            self._record(f"stage{number}_length", length)

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


def _token_sums(scores: Scores, mask: Tensor) -> Tensor:
    """Return the number of tokens and the sum of their entropies, in float64."""
    entropy = scores.entropies.detach()[mask].sum()
    return torch.stack([mask.sum(), entropy]).to(torch.float64)
