"""Adds stages to verl's synchronous trainer: it samples and unlearns before the last stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.debug import marked_timer

from eepo.adapters.verl.options import DEBUG, has_advantage_weights, read_options
from eepo.adapters.verl.stages import (
    StagedBuffer,
    concatenate,
    entropy_sum,
    is_padding,
    rows_to_unlearn,
    stage_metrics,
    stage_of,
    staged_prompts,
    weight_advantages,
)
from eepo.adapters.verl.unlearning import UnlearnRequest
from eepo.adapters.verl.worker import REQUEST, UnlearningWorker
from eepo.algorithm import StepGate

STATE_FILE = "eepo.json"  # next to verl's files in a checkpoint


class EEPOTrainer(PPOTrainerSync):
    """Samples and unlearns all stages but the last in `prepare_step`. verl does everything else."""

    def __init__(self, config: DictConfig) -> None:
        plain: Any = OmegaConf.to_container(config, resolve=True)
        self.options = read_options(plain)
        self.debug = bool((plain.get("eepo") or {}).get(DEBUG, False))
        self.staged = self.options.num_stages > 1 and self.options.gate != "never"
        self.step_gate = StepGate(self.options)
        self.auto_lr = 1e-3  # last choice of eepo.unlearn_lr = auto; the next search starts there
        self.balancing_unlearn_batch = False  # read by _get_required_batch_multiple
        super().__init__(config)

    def prepare_step(self) -> dict[str, float]:
        """Run all stages but the last, and request the last one. Without stages this is GRPO."""
        if not self.staged:
            return super().prepare_step()
        prompts = self._next_train_batch()
        metrics: dict[str, float] = {}  # of the last unlearning step: each one starts from θ again
        for stage in range(1, self.options.num_stages):
            self._request_stage(prompts, stage)
            with marked_timer(f"eepo_stage{stage}", self.timing_raw):
                self.replay_buffer.add_stage(
                    global_steps=self.global_steps, batch_size=len(prompts)
                )
            metrics = self._unlearn(concatenate(self.replay_buffer.finished_stages), stage)
        self._request_stage(prompts, self.options.num_stages)
        return metrics

    def _request_stage(self, prompts: Any, stage: int) -> None:
        num_samples = self.options.group_size // self.options.num_stages
        self._submit_batch_to_rollout(staged_prompts(prompts, stage, num_samples))

    def _unlearn(self, rows: KVBatchMeta, stage: int) -> dict[str, float]:
        """Load θ′ = θ − η ∇L of all rows so far into the rollout servers.

        If the step gate is shut or no row is selected, there is no pass and no push.
        """
        if stage == 1:
            entropy, num_tokens = entropy_sum(rows)
            self.step_gate.record(entropy / max(num_tokens, 1))
        metrics = {"eepo/gate_entropy": self.step_gate.mean_entropy, "eepo/gate_share": 0.0}
        if not self.step_gate.is_open():
            return metrics
        rows, selected = rows_to_unlearn(rows, self.options)
        if not any(selected.values()):
            return metrics
        with marked_timer("eepo_unlearn", self.timing_raw):
            self.checkpoint_manager.sleep_replicas()  # frees the KV caches for the unlearning pass
            metrics |= self._compute_rollout_weights(rows, selected)
        with marked_timer("eepo_push", self.timing_raw):
            # The same version number as in stage 1.
            self.checkpoint_manager.update_weights(self.global_steps - 1)
        return metrics

    def _compute_rollout_weights(
        self, rows: KVBatchMeta, selected: dict[str, bool]
    ) -> dict[str, float]:
        """Let the workers compute θ′, and return metrics.

        verl distributes the rows evenly over ranks and adds padding rows.
        """
        num_rows = len(rows)
        self.balancing_unlearn_batch = True
        batch = self._balance_batch(rows, metrics={})
        self.balancing_unlearn_batch = False
        request = UnlearnRequest(
            self.options,
            num_rows,
            selected=tuple(selected.get(key, False) for key in batch.keys),
            in_stage1=tuple(stage_of(key) == 1 for key in batch.keys),
            start_lr=self.auto_lr,
            debug=self.debug,
        )
        temperature = self.config.actor_rollout_ref.rollout.temperature
        batch.extra_info |= {"temperature": temperature, REQUEST: request}
        result = self.actor_rollout_wg.unlearn(batch)["metrics"]
        padding = [key for key in batch.keys if is_padding(key)]
        if padding:
            tq.kv_clear(keys=padding, partition_id=batch.partition_id)
        if "kl" in result:
            self.auto_lr = result["lr"]
        num_tokens = max(result["tokens"], 1)
        names = ("loss", "grad_norm", "lr", "kl", "kl_floor", "weights_changed_share")
        return {
            "eepo/gate_share": result["gated"] / num_tokens,
            "eepo/unlearn/entropy": result["entropy"] / num_tokens,
            "eepo/unlearn/completions": float(num_rows),
            **{f"eepo/unlearn/{name}": float(result[name]) for name in names if name in result},
        }

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Return the divisor of a batch's size.

        Unlearning is one pass without mini-batches. It only needs whole micro-batches per rank.
        """
        if not self.balancing_unlearn_batch:
            return super()._get_required_batch_multiple(dp_size)
        actor = self.config.actor_rollout_ref.actor
        return dp_size * (1 if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu)

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()
        return StagedBuffer(buffer) if self.staged else buffer

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in (Role.ActorRollout, Role.ActorRolloutRef):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(UnlearningWorker)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = super()._compute_advantage(batch, metrics)
        if has_advantage_weights(self.options):
            weight_advantages(batch, self.options, self.staged)
        return batch

    def _compute_metrics(
        self,
        batch: KVBatchMeta,
        metrics: dict[str, Any],
        timing_raw: dict[str, float],
        **others: Any,
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, **others)
        rollout = self.config.actor_rollout_ref.rollout
        if rollout.calculate_log_probs:  # always with stages
            metrics.update(stage_metrics(batch, rollout.response_length, self.staged))

    def _save_checkpoint(self) -> None:
        """Write EEPO's state first: at the end, verl marks the checkpoint as complete."""
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        folder.mkdir(parents=True, exist_ok=True)
        state = {"gate_history": self.step_gate.history, "auto_lr": self.auto_lr}
        (folder / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        """Restore EEPO's state. A checkpoint of plain verl has none: the history starts empty."""
        super()._load_checkpoint()
        trainer = self.config.trainer
        folder = Path(trainer.default_local_dir) / f"global_step_{self.global_steps}"
        if trainer.resume_mode == "resume_path":
            folder = Path(trainer.resume_from_path)
        if self.global_steps > 0 and (folder / STATE_FILE).is_file():
            state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
            self.step_gate.history = state["gate_history"]
            self.auto_lr = state.get("auto_lr", self.auto_lr)
