"""Outcome-based exploration: a bonus for rare answers (arXiv:2509.06941).

The bonus of an answer is 1 / √N, where N counts how often it was given for the same prompt in the
whole run, this step included. It is added to the advantage, as its difference to the mean of the
group. So in a group that always fails, an answer that was never given before is still reinforced.
The grader extracts the answers. A completion without an answer has the bonus 0.

This needs more than a line in the registry: the history carries over from step to step, so
`eepo.py` asks for the bonus in every step and puts the history into the checkpoints.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from eepo.config import AlgorithmConfig
from eepo.types import Prompt, Rollout, Verdict

MAX_PROMPTS = 100_000  # older ones are forgotten: tasks with new prompts in every step never end


class AnswerHistory:
    """Counts the answers to every prompt. Checkpoints contain it."""

    def __init__(self, options: AlgorithmConfig) -> None:
        self._weight = options.outcome_bonus
        # digest of a prompt -> digest of an answer -> count. Ids of prompts contain the epoch.
        self._counts: dict[str, Counter[str]] = {}

    def bonus(self, rollout: Rollout) -> list[list[float]] | None:  # [Q][G]
        """Count the answers of this step, and return the weighted bonus; None if it is off."""
        if not self._weight:
            return None
        for prompt, verdicts in zip(rollout.prompts, rollout.verdicts, strict=True):
            self._count(_digest(prompt.text), verdicts)
        pairs = zip(rollout.prompts, rollout.verdicts, strict=True)
        return [
            [self._weight * value for value in centred_bonus(self._times(prompt, verdicts))]
            for prompt, verdicts in pairs
        ]

    def _count(self, key: str, verdicts: Sequence[Verdict]) -> None:
        # A copy, because `state` shares the counters. The newest prompts are at the end.
        counts = Counter(self._counts.pop(key, ()))
        counts.update(_digest(v.answer) for v in verdicts if v.answer is not None)
        self._counts[key] = counts
        if len(self._counts) > MAX_PROMPTS:
            del self._counts[next(iter(self._counts))]

    def _times(self, prompt: Prompt, verdicts: Sequence[Verdict]) -> list[int]:
        """Return how often each answer was given; 0 for no answer."""
        counts = self._counts[_digest(prompt.text)]
        return [0 if v.answer is None else counts[_digest(v.answer)] for v in verdicts]

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs. No later step changes it."""
        return {"answers": dict(self._counts)} if self._weight else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._counts = {key: Counter(value) for key, value in state.get("answers", {}).items()}


def centred_bonus(times: Sequence[int]) -> list[float]:  # [G] -> [G]
    """Return 1 / √N minus the mean of the group; 0 times is no answer and has no bonus."""
    values = [1 / math.sqrt(count) if count else 0.0 for count in times]
    mean = sum(values) / len(values)
    return [0.0 if len(set(values)) == 1 else value - mean for value in values]


def _digest(text: str) -> str:
    """Shorten a prompt or an answer: a model may write very long ones."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
