"""EEPO and GRPO. `EEPO.step` is Algorithm 1 of the paper.

θ are the policy's weights, θ′ the engine's copy that is only sampled from. A step has Q prompts
and G completions per prompt, sampled in `num_stages` stages. One stage is GRPO, two are the
paper's EEPO. With more stages, each one unlearns all completions before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from eepo.algorithm.advantages import rollout_advantages
from eepo.algorithm.background_grader import BackgroundGrader
from eepo.algorithm.credit import old_logprobs
from eepo.algorithm.dynamic_sampling import collect_groups
from eepo.algorithm.entropy_target import EntropyTarget
from eepo.algorithm.gates import StepGate
from eepo.algorithm.lr_search import SearchResult, lr_above_floor
from eepo.algorithm.metrics import StepMetrics
from eepo.algorithm.outcome_bonus import AnswerHistory
from eepo.algorithm.probe import Effect, Probe, unlearn_gradient
from eepo.algorithm.unlearning import UnlearnBatch, changed_share, largest_entry, load_unlearned
from eepo.algorithm.updates import MiniBatch, accumulate_gradient, optimizer_step
from eepo.config import AlgorithmConfig
from eepo.model.policy import Policy
from eepo.protocols import Reward, RolloutEngine
from eepo.types import Prompt, Rollout, Sampling, mean_entropy


@dataclass
class EEPO:
    policy: Policy  # θ
    reference: Policy | None  # the KL penalty keeps θ near it; None without a penalty
    engine: RolloutEngine  # θ′
    reward: Reward
    optimizer: torch.optim.Optimizer
    options: AlgorithmConfig
    mini_batch: int  # prompts per optimizer step
    max_grad_norm: float
    lr_search: SearchResult = field(default_factory=SearchResult)  # of unlearn_lr = "auto"
    unlearn_scale: float = 1.0  # multiplies η or the KL target; an alarm may lower it
    grader: BackgroundGrader = field(default_factory=BackgroundGrader)

    def __post_init__(self) -> None:
        self.gate = StepGate(self.options)
        self.entropy_target, self.answers = EntropyTarget(self.options), AnswerHistory(self.options)

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs besides θ and the optimizer's state."""
        state = {"gate_history": self.gate.history, "lr_search": asdict(self.lr_search)}
        methods = self.entropy_target.state() | self.answers.state()
        return state | {"unlearn_scale": self.unlearn_scale} | methods

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.gate.history = list(state["gate_history"])
        self.lr_search = SearchResult(**state.get("lr_search", {}))
        self.unlearn_scale = state.get("unlearn_scale", 1.0)
        self.entropy_target.load_state(state)
        self.answers.load_state(state)

    def step(self, prompts: list[Prompt], sampling: Sampling, metrics: StepMetrics) -> Rollout:
        """Run one policy iteration."""
        num_rounds = self.options.dynamic_sampling
        rollout = collect_groups(self.collect, prompts, sampling, metrics, num_rounds)
        with metrics.phase("reward"):
            rollout.wait_for_rewards()
        options, bonus = self.entropy_target.options(rollout), self.answers.bonus(rollout)
        rollout.advantages = rollout_advantages(rollout.rewards, rollout.stages, options, bonus)
        metrics.record_rollout(rollout, options)
        mini_batches = rollout.mini_batches(self.mini_batch)
        with metrics.phase("update"):
            denominators = old_logprobs(self.policy, rollout, mini_batches, options)
        for rows, old in zip(mini_batches, denominators, strict=True):
            self.update(MiniBatch.of(rollout, rows, old, options), metrics)
        return rollout  # θ′ needs no reset: the next sync overwrites it

    def collect(self, prompts: list[Prompt], sampling: Sampling, metrics: StepMetrics) -> Rollout:
        """Sample the groups of `prompts` in all stages."""
        rollout = Rollout(prompts)
        with metrics.phase("sync"):
            self.engine.load_weights(self.policy.named_weights())  # θ′ ← θ
        self.sample(rollout, 1, sampling, metrics)
        for stage in range(2, self.options.num_stages + 1):
            with metrics.phase("unlearn"):
                self.unlearn(rollout, metrics)  # θ′ ← θ − η ∇L
            self.sample(rollout, stage, sampling, metrics)
        return rollout

    def sample(
        self, rollout: Rollout, stage: int, sampling: Sampling, metrics: StepMetrics
    ) -> None:
        """Sample G / num_stages completions per prompt from θ′. Grading runs in the background."""
        num_samples = self.options.group_size // self.options.num_stages
        sampling = replace(sampling, first_sample=(stage - 1) * num_samples)
        with metrics.phase(f"stage{stage}"):
            groups = self.engine.generate(rollout.prompts, num_samples, sampling)
            self.engine.release_memory()
        verdicts = self.grader.submit(self.reward, rollout.prompts, groups)
        rollout.add_stage(stage, groups, verdicts)

    def unlearn(self, rollout: Rollout, metrics: StepMetrics) -> None:
        """Load θ′ = θ − η ∇L into the engine. If nothing is gated, θ′ stays θ."""
        if rollout.stages[-1] == 1:
            self.gate.record(mean_entropy(rollout.completions()))
        if not self.gate.is_open():
            return
        batch = UnlearnBatch.of(rollout, self.options)
        probe = Probe(self.policy, batch)
        gradient, num_gated = unlearn_gradient(self.policy, batch, probe)  # ∇L
        metrics.unlearning.record_gate(num_gated, batch.num_tokens)
        if largest_entry(gradient) == 0:  # nothing gated, or all saturated
            return
        lr, effect = self.unlearn_lr(gradient, probe)  # η
        weights = load_unlearned(self.engine, self.policy, gradient, lr)  # θ′ ← θ − η ∇L
        effect = effect or probe.measure(weights)
        changed = changed_share(self.policy.named_weights(), weights)
        metrics.unlearning.record_step(lr, effect, changed)
        rollout.record_unlearning(effect.logprobs_after)

    def unlearn_lr(
        self, gradient: Mapping[str, Tensor], probe: Probe
    ) -> tuple[float, Effect | None]:
        """Return η, with its effect if a search has measured it."""
        if self.options.unlearn_lr != "auto":
            return self.options.unlearn_lr * self.unlearn_scale, None
        effects: dict[float, Effect] = {}

        def kl_of(lr: float) -> float:
            effects[lr] = probe.measure(load_unlearned(self.engine, self.policy, gradient, lr))
            return effects[lr].kl

        target = self.options.unlearn_kl_target * self.unlearn_scale
        rounds = {self.engine.dtype, self.policy.compute_dtype} != {torch.float32}
        found = self.lr_search = lr_above_floor(kl_of, target, self.lr_search, has_floor=rounds)
        effect = effects.get(found.lr)
        return found.lr, effect and replace(effect, kl=found.kl, kl_floor=found.floor)

    def update(self, mini_batch: MiniBatch, metrics: StepMetrics) -> None:
        """Take one optimizer step on a mini-batch."""
        accumulate_gradient(self.policy, self.reference, mini_batch, metrics)
        with metrics.phase("update"):
            norm = optimizer_step(self.policy, self.optimizer, self.max_grad_norm)
        metrics.update.record_grad_norm(norm)
