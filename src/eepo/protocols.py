"""The three things a user may bring: an engine that samples, a reward that grades, a task that asks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from eepo.types import Completion, Prompt, Sampling, Verdict

if TYPE_CHECKING:  # graders need none of it, and must start quickly
    import torch
    from torch import Tensor


class RolloutEngine(Protocol):
    """Samples from its own copy of the weights. Sync is `load_weights(θ)`, unlearning is `load_weights(θ − η·grad)`."""

    dtype: torch.dtype

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take every weight, by the policy's names. What was sampled before must not leak into what comes after."""
        ...

    def weights(self) -> Mapping[str, Tensor] | None:
        """Its copy, by the policy's names, to read; None where it cannot be read."""
        ...

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[list[Completion]]:
        """`num_samples` completions for each prompt, in the order of `prompts`."""
        ...

    def release_memory(self) -> None:
        """Sampling is over for now: give back what training wants of the card. The next `generate` takes it again."""
        ...


class Reward(Protocol):
    """Grades completions. What a model wrote is hostile input: never evaluate it, bound time and memory."""

    def grade(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        """One verdict per (prompt, completion text) pair, in order."""
        ...


class Task(Protocol):
    """Problems. Training prompts are a pure function of their position, so a run resumes from one number."""

    def training_prompts(self, first: int, count: int) -> list[Prompt]: ...

    def evaluation_sets(self) -> dict[str, list[Prompt]]:
        """Named sets, disjoint from training."""
        ...

    def demonstrations(self, first: int, count: int) -> list[tuple[Prompt, str]]:
        """Prompts with a completion that earns the reward, for a supervised warm start."""
        ...
