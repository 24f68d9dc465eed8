"""verl's synchronous trainer with EEPO between its two calls "ask for completions" and "train on them"."""

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

from eepo.adapters.verl.options import DEBUG, read_options, weighs
from eepo.adapters.verl.stages import (
    StagedBuffer,
    joined,
    row_entropies,
    rows_to_unlearn,
    stage_metrics,
    stage_of,
    staged_prompts,
    weigh_advantages,
)
from eepo.adapters.verl.unlearning import Errand
from eepo.adapters.verl.worker import UnlearningWorker

STATE = "eepo.json"  # beside verl's own files in a checkpoint


class EEPOTrainer(PPOTrainerSync):
    """All stages but the last are sampled and forgotten in `prepare_step`; the rest of a step is verl's own."""

    def __init__(self, config: DictConfig) -> None:
        plain: Any = OmegaConf.to_container(config, resolve=True)
        self.options = read_options(plain)
        self.debug = bool((plain.get("eepo") or {}).get(DEBUG, False))
        self.staged = self.options.num_stages > 1 and self.options.gate != "never"
        self.gate_history: list[float] = []  # stage-1 entropies of the last steps
        self.auto_lr = (
            1e-3  # with eepo.unlearn_lr = auto: what was chosen last, where the next search begins
        )
        self.forgetting = False  # while rows are laid out for `unlearn`
        super().__init__(config)

    def prepare_step(self) -> dict[str, float]:
        """Sample, forget, ..., and ask for the last stage. Without stages: stock GRPO."""
        if not self.staged:
            return super().prepare_step()
        prompts = self._next_train_batch()
        metrics: dict[str, float] = {}  # of the last unlearning: each starts from θ again
        for stage in range(1, self.options.num_stages):
            self._ask(prompts, stage)
            with marked_timer(f"eepo_stage{stage}", self.timing_raw):
                self.replay_buffer.add_stage(
                    global_steps=self.global_steps, batch_size=len(prompts)
                )
            metrics = self._forget(joined(self.replay_buffer.earlier), stage)
        self._ask(prompts, self.options.num_stages)
        return metrics

    def _ask(self, prompts: Any, stage: int) -> None:
        num_samples = self.options.group_size // self.options.num_stages
        self._submit_batch_to_rollout(staged_prompts(prompts, stage, num_samples))

    def _forget(self, rows: KVBatchMeta, stage: int) -> dict[str, float]:
        """Put θ′ = θ − η ∇L of all rows so far under the rollout servers. A shut step gate costs nothing."""
        if stage == 1:
            entropy, num_tokens = row_entropies(rows)
            self.gate_history = [*self.gate_history, entropy / max(num_tokens, 1)][
                -self.options.gate_window :
            ]
        mean_entropy = sum(self.gate_history) / len(self.gate_history)
        metrics = {"eepo/gate_entropy": mean_entropy, "eepo/gate_share": 0.0}
        if self.options.gate == "step" and mean_entropy >= self.options.gate_threshold:
            return metrics
        rows, wanted = rows_to_unlearn(rows, self.options)
        if not any(wanted.values()):
            return metrics
        with marked_timer("eepo_unlearn", self.timing_raw):
            self.checkpoint_manager.sleep_replicas()  # the pass needs the memory of their caches
            metrics |= self._unlearn(rows, wanted)
        with marked_timer("eepo_push", self.timing_raw):
            self.checkpoint_manager.update_weights(
                self.global_steps - 1
            )  # the version that stage 1 had
        return metrics

    def _unlearn(self, rows: KVBatchMeta, wanted: dict[str, bool]) -> dict[str, float]:
        """Have the workers compute θ′. verl lays rows out evenly over ranks and fills up with empty ones."""
        num_rows = len(rows)
        self.forgetting = True
        batch = self._balance_batch(rows, metrics={})
        self.forgetting = False
        errand = Errand(
            self.options,
            num_rows,
            wanted=tuple(wanted.get(key, False) for key in batch.keys),
            first_stage=tuple(stage_of(key) == 1 for key in batch.keys),
            start_lr=self.auto_lr,
            debug=self.debug,
        )
        temperature = self.config.actor_rollout_ref.rollout.temperature
        batch.extra_info |= {"temperature": temperature, "eepo_errand": errand}
        found = self.actor_rollout_wg.unlearn(batch)["metrics"]
        padding = [key for key in batch.keys if key.startswith("pad")]
        if padding:
            tq.kv_clear(keys=padding, partition_id=batch.partition_id)
        metrics = {
            "eepo/gate_share": found["gated"] / max(found["tokens"], 1),
            "eepo/unlearn/entropy": found["entropy"] / max(found["tokens"], 1),
            "eepo/unlearn/loss": found["loss"],
            "eepo/unlearn/grad_norm": found["grad_norm"],
            "eepo/unlearn/completions": float(num_rows),
        }
        moved = {
            name: found[name]
            for name in ("lr", "kl", "kl_floor", "weights_changed_share")
            if name in found
        }
        if "kl" in moved:
            self.auto_lr = moved["lr"]
        return metrics | {f"eepo/unlearn/{name}": float(value) for name, value in moved.items()}

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Unlearning is one pass without mini-batches: only whole micro-batches on every rank."""
        if not self.forgetting:
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
        if weighs(self.options):
            weigh_advantages(batch, self.options, self.staged)
        return batch

    def _compute_metrics(
        self,
        batch: KVBatchMeta,
        metrics: dict[str, Any],
        timing_raw: dict[str, float],
        **where: Any,
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, **where)
        if self.staged:
            metrics.update(
                stage_metrics(batch, self.config.actor_rollout_ref.rollout.response_length)
            )

    def _save_checkpoint(self) -> None:
        """Ours first: verl's last act is to name the checkpoint the newest one."""
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        folder.mkdir(parents=True, exist_ok=True)
        state = {"gate_history": self.gate_history, "auto_lr": self.auto_lr}
        (folder / STATE).write_text(json.dumps(state), encoding="utf-8")
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        """A checkpoint of plain verl has no history: the gate then starts with this run's first step."""
        super()._load_checkpoint()
        trainer = self.config.trainer
        folder = Path(trainer.default_local_dir) / f"global_step_{self.global_steps}"
        if trainer.resume_mode == "resume_path":
            folder = Path(trainer.resume_from_path)
        if self.global_steps > 0 and (folder / STATE).is_file():
            state = json.loads((folder / STATE).read_text(encoding="utf-8"))
            self.gate_history, self.auto_lr = (
                state["gate_history"],
                state.get("auto_lr", self.auto_lr),
            )
