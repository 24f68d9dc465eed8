"""An entropy bonus whose weight follows a target entropy (Skywork-OR1, arXiv:2505.22312).

This needs more than a line in the registry: the weight carries over from step to step, so
`eepo.py` asks for it in every step and puts it into the checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eepo.config import AlgorithmConfig
from eepo.types import Rollout, mean_entropy


class EntropyTarget:
    """Changes the weight of the entropy bonus after every step. It starts at `entropy_coef`."""

    def __init__(self, options: AlgorithmConfig) -> None:
        self._options = options
        self.coef = options.entropy_coef

    def options(self, rollout: Rollout) -> AlgorithmConfig:
        """Return the knobs for this step's update, with the weight of the entropy bonus."""
        if self._options.entropy_target == "off":
            return self._options
        stage1 = [completion for completion, _ in rollout.of_stage(1)]
        return replace(self._options, entropy_coef=self.next_coef(mean_entropy(stage1)))

    def next_coef(self, entropy: float) -> float:
        """Return the weight of this step, from the mean entropy of its stage 1.

        It is 0 while the entropy is above the target. The weight of the next steps rises below the
        target, and falls above it.
        """
        options, target = self._options, self._options.entropy_target
        if target == "off":
            return options.entropy_coef
        used = self.coef if entropy <= target else 0.0
        change = options.entropy_coef_step if entropy < target else -options.entropy_coef_step
        self.coef = min(max(self.coef + change, 0.0), options.entropy_coef_max)
        return used

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {} if self._options.entropy_target == "off" else {"entropy_coef": self.coef}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.coef = state.get("entropy_coef", self._options.entropy_coef)
