"""TRL's configuration with EEPO's knobs, and checks of TRL settings that EEPO does not support."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trl import GRPOConfig

from eepo import recipe
from eepo.config import AlgorithmConfig, RunConfig
from eepo.types import UserError

KNOBS = (
    "gate",
    "gate_threshold",
    "gate_window",
    "unlearn_lr",
    "unlearn_loss",
    "unlearn_eps",
    "saturation",
    "unlearn_on",
    "unlearn_max_completions",
    "credit",
    "stage2_negative_advantages",
    "failure_weight",
)


def knob(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class EEPOConfig(GRPOConfig):
    """Adds EEPO's knobs to `GRPOConfig`, with the names and defaults of a recipe's [algorithm].

    One default differs: `unlearn_kl_target` is None. A number means `unlearn_lr = "auto"`.
    """

    gate: Literal["token", "step", "always", "never"] = knob(
        "token", "What opens unlearning: low entropy per token or per step, always or never."
    )
    gate_threshold: float = knob(0.3, "Entropy below which the gate opens, in nats.")
    gate_window: int = knob(3, "Tokens or rollouts that the entropy is averaged over.")
    unlearn_lr: float = knob(3e-3, "Learning rate of the unlearning step.")
    unlearn_kl_target: float | None = knob(
        None, "If set, each rollout chooses unlearn_lr to meet this KL per token."
    )
    unlearn_on: Literal["all", "rewarded", "unrewarded", "zero_variance"] = knob(
        "all", "Completions to unlearn. zero_variance: groups whose rewards are all equal."
    )
    unlearn_max_completions: int = knob(
        0, "Unlearn at most this many completions of stage 1, evenly spaced. 0: all."
    )
    unlearn_loss: Literal["comp", "nll"] = knob(
        "comp", "comp: complementary loss. nll: gradient ascent on the NLL (ablation)."
    )
    unlearn_eps: float = knob(1e-4, "With saturation = stop: p is clamped to 1 - unlearn_eps.")
    saturation: Literal["stop", "exact"] = knob(
        "stop", "stop: no gradient above 1 - unlearn_eps. exact: log(1 - p) of the other tokens."
    )
    credit: Literal["importance", "full"] = knob(
        "importance",
        "Denominator of stage 2. importance: the weights that sampled. full: the policy.",
    )
    stage2_negative_advantages: bool = knob(
        True, "Use negative advantages of stage 2. false: set them to 0."
    )
    failure_weight: float = knob(
        1.0, "Factor of negative advantages, from 0 to 1. 1: GRPO. 0: only positive ones."
    )

    def __post_init__(self) -> None:
        self._check_knobs()
        super().__post_init__()
        if self.gate != "never":
            self._check_trl_settings()

    @property
    def algorithm(self) -> AlgorithmConfig:
        """Convert the knobs for `eepo.algorithm`, with the checks of a recipe."""
        knobs = {name: getattr(self, name) for name in KNOBS}
        if self.unlearn_kl_target is not None:
            knobs |= {"unlearn_lr": "auto", "unlearn_kl_target": self.unlearn_kl_target}
        return recipe.parse(RunConfig, {"algorithm": knobs}, "EEPOConfig").algorithm

    def _check_knobs(self) -> None:
        if isinstance(self.unlearn_lr, str):
            raise UserError(
                f"unlearn_lr = {self.unlearn_lr!r} must be a number; "
                "set unlearn_kl_target to choose it automatically"
            )
        if self.unlearn_kl_target is not None and not self.unlearn_lr > 0:
            raise UserError(
                f"unlearn_lr = {self.unlearn_lr} must be > 0: "
                "the search for unlearn_kl_target starts there"
            )
        if self.unlearn_on == "zero_variance" and self.num_generations == 2:
            raise UserError(
                'unlearn_on = "zero_variance" needs num_generations >= 4: '
                "a single completion per stage always has zero variance"
            )
        if self.algorithm.gate != "never" and (self.num_generations or 0) % 2:
            raise UserError(
                f"num_generations must be even, half for each stage, got {self.num_generations}"
            )

    def _check_trl_settings(self) -> None:
        """Reject TRL settings that would make stages, gradients or restored weights wrong."""
        rows = self.per_device_train_batch_size * self.steps_per_generation
        if rows % 2:
            raise UserError(
                f"per_device_train_batch_size * steps_per_generation must be even, got {rows}"
            )
        # `mixed_precision` comes from accelerate's launcher.
        if self.fp16 or getattr(self, "mixed_precision", "") == "fp16":
            raise UserError(
                "fp16 must be off: the unlearning gradient underflows without loss scaling; "
                "use bf16"
            )
        if self.use_transformers_continuous_batching:
            raise UserError(
                "use_transformers_continuous_batching = True must be False: "
                "it rounds the trained weights"
            )
        if self.credit == "full" and self.use_vllm and self.off_policy_mask_threshold is not None:
            raise UserError(
                f"off_policy_mask_threshold = {self.off_policy_mask_threshold} must be None with "
                'credit = "full" and use_vllm: it drops completions that are unlikely under the '
                "policy"
            )
        optim = str(getattr(self.optim, "value", self.optim))
        if any(word in optim for word in ("layerwise", "lomo")):
            raise UserError(
                f"optim = {optim} must not update weights during the backward pass; "
                "use adamw_torch, for example"
            )
