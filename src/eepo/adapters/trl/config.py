"""TRL's configuration with EEPO's knobs, and what of the former cannot go with the latter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trl import GRPOConfig

from eepo import recipe
from eepo.config import AlgorithmConfig, RunConfig
from eepo.types import UserError

KNOBS = (
    "gate", "gate_threshold", "gate_window", "unlearn_lr", "unlearn_loss", "unlearn_eps", "unlearn_on",
    "later_advantages", "failure_weight",
)  # fmt: skip


@dataclass
class EEPOConfig(GRPOConfig):
    """`GRPOConfig`, and EEPO's knobs with the names, meanings and defaults they have in a recipe's [algorithm]."""

    gate: Literal["token", "step", "always", "never"] = field(
        default="token",
        metadata={
            "help": "What is unlearned: tokens of low entropy, whole steps of low entropy, all, or nothing."
        },
    )
    gate_threshold: float = field(
        default=0.3, metadata={"help": "Entropy (nats) under which the gate opens."}
    )
    gate_window: int = field(
        default=3, metadata={"help": "Tokens, or steps, whose mean entropy the gate looks at."}
    )
    unlearn_lr: float = field(default=3e-3, metadata={"help": "Step size of the unlearning step."})
    unlearn_kl_target: float | None = field(
        default=None,
        metadata={"help": "If given, η is chosen in each rollout to move θ by this KL a token."},
    )
    unlearn_on: Literal["all", "rewarded", "unrewarded", "zero_variance"] = field(
        default="all",
        metadata={
            "help": "Completions to unlearn: all, or by their rewards; 'zero_variance': of groups of equal rewards."
        },
    )
    unlearn_loss: Literal["comp", "nll"] = field(
        default="comp", metadata={"help": "-log(1 - p) of what was sampled, or ascent on its NLL."}
    )
    unlearn_eps: float = field(
        default=1e-4, metadata={"help": "p counts as at most 1 - unlearn_eps."}
    )
    later_advantages: Literal["all", "positive"] = field(
        default="all", metadata={"help": "'positive': stage 2 is not punished for failing."}
    )
    failure_weight: float = field(
        default=1.0,
        metadata={"help": "How much what does worse than its group counts, from 0 to 1."},
    )

    def __post_init__(self) -> None:
        self._check_knobs()
        super().__post_init__()
        if self.gate != "never":
            self._check_neighbours()

    @property
    def algorithm(self) -> AlgorithmConfig:
        """The same knobs as `algorithm.py` reads them, each checked as in a recipe."""
        knobs = {name: getattr(self, name) for name in KNOBS}
        if (
            self.unlearn_kl_target is not None
        ):  # unlearn_lr, where the search begins, is checked below
            knobs |= {"unlearn_lr": "auto", "unlearn_kl_target": self.unlearn_kl_target}
        return recipe.parse(RunConfig, {"algorithm": knobs}, "EEPOConfig").algorithm

    def _check_knobs(self) -> None:
        if isinstance(self.unlearn_lr, str):
            raise UserError(
                f"unlearn_lr = {self.unlearn_lr!r} must be a number here; unlearn_kl_target chooses it"
            )
        if self.unlearn_kl_target is not None and not self.unlearn_lr > 0:
            raise UserError(
                f"unlearn_lr = {self.unlearn_lr} must be > 0: the search for unlearn_kl_target begins there"
            )
        if self.unlearn_on == "zero_variance" and self.num_generations == 2:
            raise UserError(
                'unlearn_on = "zero_variance" needs num_generations >= 4: one completion a stage is always zero_variance'
            )
        if self.algorithm.gate != "never" and (self.num_generations or 0) % 2:
            raise UserError(
                f"num_generations must be even, one half for each stage, got {self.num_generations}"
            )

    def _check_neighbours(self) -> None:
        """TRL's settings under which stages, gradient or restored weights would be silently wrong."""
        rows = self.per_device_train_batch_size * self.steps_per_generation
        if rows % 2:
            raise UserError(
                f"per_device_train_batch_size * steps_per_generation must be even, got {rows}"
            )
        if (
            self.fp16 or getattr(self, "mixed_precision", "") == "fp16"
        ):  # the latter from accelerate's launcher
            raise UserError(
                "fp16 must be off: without loss scaling the unlearning gradient underflows; bf16 is fine"
            )
        if self.use_transformers_continuous_batching:
            raise UserError(
                "use_transformers_continuous_batching = True must be False: it rounds the trained weights"
            )
        optim = str(getattr(self.optim, "value", self.optim))
        if any(word in optim for word in ("layerwise", "lomo")):
            raise UserError(
                f"optim = {optim} must not update weights during a backward pass; try adamw_torch"
            )
