"""TRL's trainer with two-stage rollouts.

A generation batch holds every prompt G times in a row, and G is even. Even rows are stage 1, odd
rows are stage 2. This also holds if the slice of a process cuts a group, because every slice has an
even number of rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from trl import GRPOTrainer

from eepo.adapters.trl.batches import interleave_stages, pad_rows
from eepo.adapters.trl.checks import check_trainer
from eepo.adapters.trl.complements import add_complements
from eepo.adapters.trl.config import EEPOConfig
from eepo.adapters.trl.grading import (
    GradedStage,
    interleave_columns,
    interleave_rewards,
    rows_to_unlearn,
    stage_rewards,
    total_rewards,
)
from eepo.adapters.trl.reference_pass import is_reference_pass
from eepo.adapters.trl.scoring import RolloutLogprobs, RowLogprobs, Scorer
from eepo.adapters.trl.unlearning import Unlearner, UnlearningStep, needs_complements
from eepo.algorithm import advantage_weights
from eepo.types import UserError

STATE_FILE = "eepo.json"  # in every checkpoint
COMPLETION_IDS, COMPLETIONS = 1, 3  # indices in the tuple that TRL's `_generate` returns


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
        # Set only while TRL scores a two-stage rollout:
        self._inputs: list[dict[str, Any]] = []  # rows of the data set
        self._graded_stage1: GradedStage | None = None
        self._rollout: RolloutLogprobs | None = None
        # [rows of all processes] of the last rollout; NaN where no function gave a reward
        self._rewards = torch.empty(0)
        self.num_generations: int  # G; set by TRL
        super().__init__(model, reward_funcs, args, **others)
        self.scorer = Scorer(self, super()._get_per_token_logps_and_entropies)
        self.unlearner = Unlearner(self, self.scorer)
        if self.options.gate != "never":
            check_trainer(self)
            if needs_complements(self.options):
                base = self.model.get_base_model() if is_peft_model(self.model) else self.model
                add_complements(base, self.temperature, args.cast_lm_head_to_fp32)

    # --- the rollout

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """Sample half of every group from θ, unlearn it, and sample the other half from θ′."""
        if not self.model.training or self.options.gate == "never":
            return super()._generate(prompts)
        if prompts[0::2] != prompts[1::2]:
            raise UserError(
                "train_dataset: the sampler must give each prompt num_generations times in a row"
            )
        first = self._sample_stage(prompts[0::2])
        selected = self._select_rows(prompts[0::2], first)
        step = self.unlearner.step(first, selected)  # η and ∇L
        self._record_step(step)
        with self.unlearner.rollout_weights(step):  # θ′ ← θ − η ∇L
            second = self._sample_stage(prompts[1::2])
            sampled = self._score_stage2(second, step)
        self._record_stage_lengths(first, second)
        self._rollout = self._rollout_logprobs(second, step, sampled)  # under θ again
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

    def _select_rows(self, prompts: list[Any], first: tuple[Any, ...]) -> list[bool]:
        """Apply `unlearn_on` to this process's rows of stage 1.

        If that needs rewards, stage 1 is graded here and not again later.
        """
        num_rows = len(prompts)
        if self.options.unlearn_on == "all":
            return [True] * num_rows
        rewards = super()._calculate_rewards(
            self._inputs[0::2], prompts, first[COMPLETIONS], first[COMPLETION_IDS]
        )
        self._graded_stage1 = GradedStage(rewards, dict(self._pending_extra_logs))
        self._pending_extra_logs.clear()
        start = self.accelerator.process_index * num_rows
        totals, rows = total_rewards(rewards, self.reward_weights), range(start, start + num_rows)
        return rows_to_unlearn(totals, self.num_generations // 2, self.options.unlearn_on, rows)

    def _score_stage2(self, second: tuple[Any, ...], step: UnlearningStep) -> RowLogprobs:
        """Score stage 2 under the weights that sampled it. Record its mean entropy, and the KL.

        Full credit does not need these log-probabilities if TRL does not compare them with vLLM's.
        Then some rows are enough, for the entropy.
        """
        batches = self.scorer.micro_batches(second)
        if self._is_credited_in_full(step) and not self._compares_with_vllm:
            batches = self.scorer.probe_batches(batches)
        logprobs, entropy = self.scorer.logprobs_and_entropy(batches)
        self._record("stage2_entropy", entropy)
        if step.gradient is not None:
            self._record("kl", self.unlearner.kl(step))
            self._record("kl_floor", 0.0 if step.search is None else step.search.floor)
        return logprobs

    def _rollout_logprobs(
        self, second: tuple[Any, ...], step: UnlearningStep, sampled: RowLogprobs
    ) -> RolloutLogprobs:
        """Combine the log-probabilities of both stages. With full credit, score stage 2 under θ."""
        old = sampled
        if self._is_credited_in_full(step):
            old = self.scorer.logprobs(self.scorer.micro_batches(second))
        compared = sampled if self._compares_with_vllm else old
        return RolloutLogprobs.of(step.logprobs, old, compared)

    def _is_credited_in_full(self, step: UnlearningStep) -> bool:
        """Return whether the denominators of stage 2 are not under the weights that sampled it."""
        return self.options.credit == "full" and step.gradient is not None

    @property
    def _compares_with_vllm(self) -> bool:
        """Return whether TRL compares old log-probabilities with those of vLLM."""
        return bool(self.use_vllm and self.vllm_importance_sampling_correction)

    # --- scoring and grading

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Set the denominators of a two-stage rollout, and weight the advantages."""
        self._inputs = inputs
        try:
            output = super()._generate_and_score_completions(inputs)
            if self._rollout is not None:
                mask = output["completion_mask"]  # without the completions that TRL masks
                output["old_per_token_logps"] = pad_rows(self._rollout.old, mask.shape) * mask
                self._record_stage_rewards()
            if self.model.training:
                output["advantages"] = self._weighted_advantages(output["advantages"])
        finally:
            self._inputs, self._graded_stage1, self._rollout = [], None, None
        return output

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
        if self._rollout is not None and model is self.model and not is_reference_pass(model):
            shape = attention_mask[:, -logits_to_keep:].shape
            return pad_rows(self._rollout.sampled, shape), None, None
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Tensor:
        """Grade all rows, or only stage 2 if stage 1 has been graded already."""
        rows, first = (inputs, prompts, completions, completion_ids_list), self._graded_stage1
        if first is None:
            rewards = super()._calculate_rewards(*rows)
        else:
            second = super()._calculate_rewards(*(part[1::2] for part in rows))
            rewards = interleave_rewards(first.rewards, second)
            interleave_columns(first.extra_columns, self._pending_extra_logs, len(prompts) // 2)
        self._rewards = total_rewards(rewards, self.reward_weights)
        return rewards

    def _weighted_advantages(self, advantages: Tensor) -> Tensor:  # [B] -> [B]
        stages = torch.ones_like(advantages)
        if self._rollout is not None:
            stages[1::2] = 2
        return advantages * advantage_weights(advantages, stages, self.options)

    # --- metrics

    def _record(self, name: str, value: float) -> None:
        self._metrics["train"][f"eepo/{name}"].append(value)

    def _record_step(self, step: UnlearningStep) -> None:
        self._record("stage1_entropy", step.entropy)
        self._record("gated_share", step.gated_share)
        self._record("unlearn_loss", step.loss)
        if step.search is not None:
            self._record("unlearn_lr", step.lr)

    def _record_stage_lengths(self, *stages: tuple[Any, ...]) -> None:
        """Record the mean number of tokens. Every process has the same number of rows."""
        lengths = self.scorer.zeros(len(stages))
        for index, stage in enumerate(stages):
            lengths[index] = sum(map(len, stage[COMPLETION_IDS])) / len(stage[COMPLETION_IDS])
        for number, length in enumerate(self.accelerator.reduce(lengths, "mean").tolist(), 1):
            self._record(f"stage{number}_length", length)

    def _record_stage_rewards(self) -> None:
        first, second, shares = stage_rewards(self._rewards, self.num_generations // 2)
        self._record("stage1_reward", first)
        self._record("stage2_reward", second)
        for name, share in shares.items():
            self._record(name, share)

    # --- checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            output_dir = Path(self._get_output_dir(trial=trial))
            path = output_dir / f"checkpoint-{self.state.global_step}" / STATE_FILE
            path.write_text(json.dumps(self.unlearner.state()), encoding="utf-8")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (Path(checkpoint) / STATE_FILE).is_file():
            state = json.loads((Path(checkpoint) / STATE_FILE).read_text(encoding="utf-8"))
            self.unlearner.load_state(state)
