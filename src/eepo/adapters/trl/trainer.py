"""TRL's trainer with two-stage rollouts.

A generation batch holds every prompt G times in a row, G even: even rows are stage 1, odd rows stage 2. That stays true
where a process's slice cuts a group, as long as every slice is even.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from trl import GRPOTrainer

from eepo.adapters.trl.batches import MicroBatch, interleaved, micro_batch, padded, rows_of
from eepo.adapters.trl.config import EEPOConfig
from eepo.adapters.weights import moved, own_gradients, reshard, tried
from eepo.algorithm import kl_penalty, to_unlearn, unlearn_gate, unlearn_loss
from eepo.algorithm.advantages import advantage_weights
from eepo.algorithm.probe import lr_above_floor
from eepo.model.batching import evenly
from eepo.model.policy import Scores
from eepo.types import UserError

Probe = list[
    tuple[MicroBatch, list[Tensor]]
]  # rows of stage 1, and their log-probabilities under θ
STATE_FILE = "eepo.json"  # in every checkpoint
COMPLETION_IDS, COMPLETIONS = 1, 3  # places in what TRL returns of a rollout


@dataclass
class Graded:
    """Rows of stage 1."""

    rewards: Tensor  # [rows of all processes, functions]
    extra: dict[str, list[Any]]  # what reward functions wrote beside completions


class EEPOTrainer(GRPOTrainer):
    """`GRPOTrainer` with two-stage rollouts. Evaluation, and gate = "never" but for `failure_weight`, are TRL's own."""

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
        self.gate_history: list[float] = []  # stage-1 entropies of the last steps
        self.auto_lr = args.unlearn_lr  # with a KL target: what was chosen last
        self._rollout_logprobs: list[Tensor] | None = (
            None  # of each row, while TRL scores a two-stage rollout
        )
        self._inputs: list[dict[str, Any]] = []  # rows of the data set, in that time
        self._graded: Graded | None = None  # stage 1, if its rewards were wanted before stage 2
        self._rewards = torch.empty(
            0
        )  # [rows of all processes] of the last rollout; NaN where no function had one
        self.num_generations: int  # G, TRL's
        super().__init__(model, reward_funcs, args, **others)
        if self.options.gate != "never":
            self._check_host()

    def _check_host(self) -> None:
        """What only the built trainer knows."""
        if self.tools or self.rollout_func is not None or self.environment_factories is not None:
            raise UserError(
                "tools, rollout_func and environment_factory must be left out: stages split plain rollouts"
            )
        if self._is_vlm:
            raise UserError(
                f"processing_class must be a tokenizer: text only, got {type(self.processing_class).__name__}"
            )
        if hasattr(self.model, "peft_config") and self.beta != 0.0:
            raise UserError(f"beta must be 0 with a PEFT model, got {self.beta}")
        for name, weight in self.model.named_parameters():
            if weight.requires_grad and weight.dtype != torch.float32:
                raise UserError(
                    f'model: {name} is {weight.dtype}, must be float32 (dtype="float32"): other types round the '
                    "unlearning step away; bf16 = True computes in bfloat16 all the same"
                )
        if self.options.unlearn_lr == "auto" and (dropout := dropped(self.model)):
            raise UserError(
                f"model: {dropout} must be 0 with unlearn_kl_target: the KL would be that of its noise"
            )
        kind = str(self.accelerator.distributed_type).rpartition(".")[2]
        if kind in ("DEEPSPEED", "MEGATRON_LM") or (
            kind == "FSDP" and not self.accelerator.is_fsdp2
        ):
            raise UserError(
                f"accelerate: distributed_type = {kind} must be none, DDP or FSDP with fsdp_version 2"
            )
        window, every = (
            self.args.gradient_accumulation_steps,
            self.args.steps_per_generation * self.num_iterations,
        )
        if kind == "FSDP" and every % window:
            raise UserError(
                f"with FSDP steps_per_generation * num_iterations must be a multiple of "
                f"gradient_accumulation_steps = {window}, got {every}"
            )

    # --- the rollout

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        if not self.model.training or self.options.gate == "never":
            return super()._generate(prompts)
        if prompts[0::2] != prompts[1::2]:
            raise UserError(
                "train_dataset: the sampler must give each prompt num_generations times in a row"
            )
        first = self._sample(prompts[0::2])
        batches = self._micro_batches(first)
        before, gradient = self._forget(batches, self._to_unlearn(prompts[0::2], first))
        probe = self._probe(batches, before)
        lr = self._rate(gradient, probe)
        with self._unlearned(gradient, lr):
            second = self._sample(prompts[1::2])
            after = self._score(self._micro_batches(second), "stage2")
            if gradient is not None:
                self._record("kl", self._kl(probe))
        self._rollout_logprobs = interleaved(before, after)
        return tuple(interleaved(*parts) for parts in zip(first, second, strict=True))

    def _sample(self, prompts: list[Any]) -> tuple[Any, ...]:
        """One stage: G / 2 rows of each prompt. A vLLM server is asked for `num_generations` of every distinct one."""
        whole = self.num_generations
        self.num_generations = whole // 2
        try:
            return super()._generate(prompts)
        finally:
            self.num_generations = whole

    def _to_unlearn(self, prompts: list[Any], first: tuple[Any, ...]) -> list[bool]:
        """Which rows of stage 1. Where that depends on rewards they are graded here, and not again."""
        choice = self.options.unlearn_on
        if choice == "all":
            return [True] * len(prompts)
        rewards = super()._calculate_rewards(
            self._inputs[0::2], prompts, first[COMPLETIONS], first[COMPLETION_IDS]
        )
        self._graded = Graded(rewards, dict(self._pending_extra_logs))
        self._pending_extra_logs.clear()
        groups = self._totals(rewards).view(
            -1, self.num_generations // 2
        )  # of all processes, in order
        wanted = [one for group in groups for one in chosen(group.tolist(), choice)]
        start = self.accelerator.process_index * len(prompts)
        return wanted[start : start + len(prompts)]

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Tensor:
        """Of the rows of both stages, in turn: stage 1 may have been graded."""
        rows = (inputs, prompts, completions, completion_ids_list)
        if self._graded is None:
            rewards = super()._calculate_rewards(*rows)
        else:
            second = super()._calculate_rewards(*(part[1::2] for part in rows))
            rewards = torch.stack([self._graded.rewards, second], 1).flatten(0, 1)
            self._interleave_extra(self._graded.extra, len(prompts) // 2)
        self._rewards = self._totals(rewards)
        return rewards

    def _interleave_extra(self, first: dict[str, list[Any]], num_rows: int) -> None:
        """Columns that reward functions wrote beside completions: stage 1's, and now those of stage 2."""
        for column in {*first, *self._pending_extra_logs}:
            ours, theirs = (
                extra.get(column, [None] * num_rows) for extra in (first, self._pending_extra_logs)
            )
            even = len(ours) == len(theirs)
            self._pending_extra_logs[column] = (
                interleaved(ours, theirs) if even else [*ours, *theirs]
            )

    def _totals(self, rewards: Tensor) -> Tensor:  # [rows, functions] -> [rows]
        """Weighted sums over the functions that had something to say; NaN where none had."""
        total = (rewards.cpu() * self.reward_weights.cpu()).nansum(1)
        return torch.where(rewards.cpu().isnan().all(1), torch.nan, total)

    def _forget(
        self, batches: list[MicroBatch], wanted: list[bool]
    ) -> tuple[list[Tensor], dict[str, Tensor] | None]:
        """Log-probabilities of stage 1 under θ, and ∇L over all processes; None where the gate lets nothing through.

        An update may be half accumulated: its gradients are set aside.
        """
        num_rows = len(wanted)
        logprobs: list[Tensor] = []
        sums = torch.zeros(
            4, dtype=torch.float64, device=self.accelerator.device
        )  # tokens, entropies, gated, loss
        weights = self._weights()
        with own_gradients(weights), self._gradients_reduced():
            for batch in batches:
                scores = self._forward(batch)
                own = torch.tensor(
                    wanted[len(logprobs) :][: len(batch.mask)], device=batch.mask.device
                )
                gate = unlearn_gate(scores, batch.mask, self.options) & own.unsqueeze(1)
                loss = (
                    unlearn_loss(scores, batch.mask, gate, self.options)
                    * len(batch.mask)
                    / num_rows
                )
                loss.backward()
                logprobs += rows_of(scores.logprobs.detach(), batch.mask)
                entropy = scores.entropies.detach()[batch.mask].sum()
                sums += torch.stack([batch.mask.sum(), entropy, gate.sum(), loss.detach()]).to(sums)
            gradient = {
                name: weight.grad for name, weight in weights.items() if weight.grad is not None
            }
        opened = self._record_stage_1(self.accelerator.reduce(sums, "sum").tolist())
        if not opened:
            return logprobs, None
        if (
            self.accelerator.num_processes > 1 and not self.accelerator.is_fsdp2
        ):  # FSDP took the mean itself
            for (
                name,
                weight,
            ) in weights.items():  # one by one, since this copies; all processes the same ones
                part = gradient[name] if name in gradient else torch.zeros_like(weight)
                gradient[name] = self.accelerator.reduce(part, "mean")
        return logprobs, gradient

    def _record_stage_1(self, sums: list[float]) -> bool:
        """Remember the step's entropy; True where something is to be unlearned."""
        num_tokens, entropies, gated, loss = sums
        self.gate_history = [*self.gate_history, entropies / num_tokens][
            -self.options.gate_window :
        ]
        low_entropy = sum(self.gate_history) / len(self.gate_history) < self.options.gate_threshold
        opened = gated > 0 and (low_entropy or self.options.gate != "step")
        self._record("stage1_entropy", entropies / num_tokens)
        self._record("gated_share", gated / num_tokens if opened else 0.0)
        self._record("unlearn_loss", loss / self.accelerator.num_processes if opened else 0.0)
        return opened

    def _rate(self, gradient: dict[str, Tensor] | None, probe: Probe) -> float:
        """η: as it was given, or one that moves θ by the KL that was. Every process finds the same."""
        if self.options.unlearn_lr != "auto":
            return self.options.unlearn_lr
        if gradient is not None:
            with tried(self._weights(), gradient) as put:

                def kl_of(lr: float) -> float:
                    put(lr)
                    reshard(self.model)
                    return self._kl(probe)

                try:
                    rounds = self.accelerator.mixed_precision != "no"
                    found = lr_above_floor(
                        kl_of, self.options.unlearn_kl_target, self.auto_lr, rounds
                    )
                finally:
                    reshard(self.model)
            self.auto_lr = found.lr
            self._record("unlearn_lr", found.lr)
            self._record("kl_floor", found.floor)
        return self.auto_lr

    @contextmanager
    def _unlearned(self, gradient: dict[str, Tensor] | None, lr: float) -> Iterator[None]:
        """θ′ in the model, and in vLLM from its next use; θ in both afterwards. Without a gradient θ′ is θ."""
        if gradient is None:
            yield
            return
        try:
            with moved(self._weights(), gradient, lr):
                self._forget_copies()
                yield
        finally:
            self._forget_copies()

    def _forget_copies(self) -> None:
        """The weights have changed: whatever was made of them before must not be sampled from."""
        self._last_loaded_step = -1  # TRL pushes weights to vLLM where this is not the current step
        reshard(self.model)

    def _weights(self) -> dict[str, Parameter]:
        """What is trained: under FSDP the shards, not a gathered copy."""
        reshard(self.model)
        return {
            name: weight for name, weight in self.model.named_parameters() if weight.requires_grad
        }

    @contextmanager
    def _gradients_reduced(self) -> Iterator[None]:
        """FSDP leaves gradients unreduced in all but the last micro-batch of an update; ours are always whole."""
        if not self.accelerator.is_fsdp2:
            yield
            return
        self.model.set_requires_gradient_sync(True)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(self.accelerator.sync_gradients)

    # --- scoring

    def _micro_batches(self, stage: tuple[Any, ...]) -> list[MicroBatch]:
        """As many rows at a time as TRL's own update takes."""
        prompts, completions = ([torch.tensor(ids) for ids in part] for part in stage[:2])
        size, device = self.args.per_device_train_batch_size, self.accelerator.device
        return [
            micro_batch(
                prompts[row : row + size],
                completions[row : row + size],
                self._tokenizer.pad_token_id,
                device,
            )
            for row in range(0, len(prompts), size)
        ]

    def _forward(self, batch: MicroBatch) -> Scores:
        width = batch.mask.shape[1]
        logprobs, entropies, *_ = super()._get_per_token_logps_and_entropies(
            self.model, batch.input_ids, batch.attention_mask, width, compute_entropy=True
        )
        return Scores(logprobs.float(), entropies.float())

    @torch.no_grad()
    def _score(self, batches: list[MicroBatch], name: str) -> list[Tensor]:
        """Log-probabilities of each row under the model as it stands."""
        logprobs: list[Tensor] = []
        sums = torch.zeros(2, dtype=torch.float64, device=self.accelerator.device)
        for batch in batches:
            scores = self._forward(batch)
            logprobs += rows_of(scores.logprobs, batch.mask)
            sums += torch.stack([batch.mask.sum(), scores.entropies[batch.mask].sum()]).to(sums)
        num_tokens, entropies = self.accelerator.reduce(sums, "sum").tolist()
        self._record(f"{name}_entropy", entropies / num_tokens)
        return logprobs

    def _probe(self, batches: list[MicroBatch], before: list[Tensor]) -> Probe:
        """Some of stage 1, evenly spread, with its log-probabilities under θ."""
        size = len(batches[0].mask)
        chosen = evenly(len(batches), max(1, self.options.probe_completions // size))
        return [(batches[place], before[place * size :]) for place in chosen]

    @torch.no_grad()
    def _kl(self, probe: Probe) -> float:
        """KL(θ‖θ′) a token, over all processes."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.accelerator.device)
        for batch, before in probe:
            after, num_tokens = self._forward(batch).logprobs, batch.mask.sum()
            kl = kl_penalty(padded(before, after.shape), after, batch.mask)
            sums += torch.stack([kl * num_tokens, num_tokens]).to(sums)
        total, tokens = self.accelerator.reduce(sums, "sum").tolist()
        return total / tokens

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Where TRL asks for "old" log-probabilities of a two-stage rollout, those of the weights that sampled.

        It also holds what vLLM reports against these: under θ, stage 2 would look like a broken engine and be zeroed.
        """
        if self._rollout_logprobs is not None and model is self.model:
            return (
                padded(self._rollout_logprobs, attention_mask[:, -logits_to_keep:].shape),
                None,
                None,
            )
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._inputs = inputs
        try:
            output = super()._generate_and_score_completions(inputs)
            if self._rollout_logprobs is not None:
                mask = output[
                    "completion_mask"
                ]  # without what TRL masks, as its own log-probabilities are
                output["old_per_token_logps"] = padded(self._rollout_logprobs, mask.shape) * mask
                self._record_rewards()
            if self.model.training:
                output["advantages"] = self._weighed(output["advantages"])
        finally:
            self._rollout_logprobs = self._graded = None
            self._inputs = []
        return output

    def _weighed(self, advantages: Tensor) -> Tensor:  # [B] -> [B]
        stages = torch.ones_like(advantages)
        if self._rollout_logprobs is not None:
            stages[1::2] = 2
        return advantages * advantage_weights(
            advantages, advantages, stages, self.options
        )  # nobody asks who is rare

    # --- records

    def _record(self, name: str, value: float) -> None:
        self._metrics["train"][f"eepo/{name}"].append(value)

    def _record_rewards(self) -> None:
        """Means over the rows of all processes, which stand in the order of the prompts."""
        self._record("stage1_reward", self._rewards[0::2].nanmean().item())
        self._record("stage2_reward", self._rewards[1::2].nanmean().item())

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = (
                Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            )
            state = {"gate_history": self.gate_history, "auto_lr": self.auto_lr}
            (folder / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (Path(checkpoint) / STATE_FILE).is_file():
            state = json.loads((Path(checkpoint) / STATE_FILE).read_text(encoding="utf-8"))
            self.gate_history, self.auto_lr = (
                state["gate_history"],
                state.get("auto_lr", self.auto_lr),
            )


def chosen(rewards: list[float], choice: str) -> list[bool]:
    """Of one prompt's completions, those to unlearn; what nobody could grade is left alone."""
    graded = [one for one in rewards if not math.isnan(one)]
    wanted = iter(to_unlearn(graded, choice))
    return [not math.isnan(one) and next(wanted) for one in rewards]


def dropped(model: Any) -> str:
    """A dropout that is on, by its name and its share; nothing if none is."""
    modules = (
        (name, module.p)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Dropout)
    )
    settings = (
        (name, value)
        for name, value in model.config.to_dict().items()
        if name == "attention_dropout"
    )
    return next((f"{name} = {share}" for name, share in (*settings, *modules) if share), "")
