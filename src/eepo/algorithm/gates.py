"""What is unlearned: the step gate, the token gate, and the choice of completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eepo.config import AlgorithmConfig
from eepo.model.policy import Scores


@dataclass
class StepGate:
    """Opens or shuts unlearning for a whole step, from the stage-1 entropy of the last steps.

    Only `gate = "step"` compares the entropy with the threshold. `"never"` is always shut;
    `"token"` and `"always"` are always open.
    """

    options: AlgorithmConfig
    history: list[float] = field(default_factory=list)  # stage-1 entropies, at most gate_window

    def record(self, entropy: float) -> None:
        """Add the mean token entropy of this step's stage 1."""
        self.history = [*self.history, entropy][-self.options.gate_window :]

    @property
    def mean_entropy(self) -> float:
        return sum(self.history) / len(self.history)

    def is_open(self) -> bool:
        if self.options.gate == "step":
            return self.mean_entropy < self.options.gate_threshold
        return self.options.gate != "never"


def token_gate(
    entropies: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    threshold: float,
    window: int,
) -> Tensor:  # bool [B, T]
    """Return True where the mean entropy of the last `window` tokens is below `threshold`.

    The first tokens of a completion have shorter windows. Prompt tokens are not counted.
    """
    mask = mask.bool()
    kept = torch.where(mask, entropies, 0.0).double()
    sums = _trailing_windows(kept, window).sum(-1)
    counts = _trailing_windows(mask.double(), window).sum(-1)
    return (sums / counts.clamp(min=1) < threshold) & mask


def _trailing_windows(values: Tensor, window: int) -> Tensor:  # [B, T] -> [B, T, window]
    return torch.nn.functional.pad(values, (window, 0)).unfold(1, window + 1, 1)[..., 1:]


def unlearn_gate(scores: Scores, mask: Tensor, options: AlgorithmConfig) -> Tensor:  # bool [B, T]
    """Return the tokens to unlearn in a step whose step gate is open."""
    if options.gate == "token":
        entropies = scores.entropies.detach()
        return token_gate(entropies, mask, options.gate_threshold, options.gate_window)
    return mask


def completions_to_unlearn(rewards: Sequence[float], choice: str) -> list[bool]:
    """Apply `unlearn_on` to the completions of one prompt.

    `"zero_variance"` selects all completions of a group whose rewards are equal: such a group has
    no advantage to learn from. A completion without a reward (NaN) is selected only by `"all"`.
    """
    if choice == "all":
        return [True] * len(rewards)
    graded = {reward for reward in rewards if not math.isnan(reward)}
    selected = {
        "rewarded": lambda reward: reward > 0,
        "unrewarded": lambda reward: reward <= 0,
        "zero_variance": lambda reward: len(graded) == 1,
    }[choice]
    return [not math.isnan(reward) and selected(reward) for reward in rewards]
