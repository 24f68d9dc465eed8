"""The interfaces that a user can implement: an engine, a reward, a task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from eepo.types import Completion, Demonstration, Prompt, Sampling, Verdict

if TYPE_CHECKING:  # graders import this module and must start without torch
    import torch
    from torch import Tensor


class RolloutEngine(Protocol):
    """Samples from its own copy of the weights.

    Sync is `load_weights(θ)`. Unlearning is `load_weights(θ − η·grad)`.
    """

    dtype: torch.dtype

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load all weights by the policy's names, and drop every cache of the old weights."""
        ...

    def weights(self) -> Mapping[str, Tensor] | None:
        """Return the engine's copy for reading, or None if the engine cannot give access."""
        ...

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[list[Completion]]:
        """Sample `num_samples` completions per prompt, in the order of `prompts`."""
        ...

    def release_memory(self) -> None:
        """Free GPU memory for training. The next `generate` allocates it again."""
        ...


class Reward(Protocol):
    """Grades completions.

    Model output is hostile input: never execute it, and bound the time and memory of grading.
    """

    def grade(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        """Return one verdict per (prompt, completion text) pair, in order."""
        ...


class Task(Protocol):
    """Provides problems. Training prompts depend only on their position, so a run can resume."""

    def training_prompts(self, first: int, count: int) -> list[Prompt]: ...

    def evaluation_sets(self) -> dict[str, list[Prompt]]:
        """Return named sets that are disjoint from the training prompts."""
        ...

    def demonstrations(self, first: int, count: int) -> list[Demonstration]:
        """Return prompts with completions to imitate, for a supervised warm start."""
        ...
