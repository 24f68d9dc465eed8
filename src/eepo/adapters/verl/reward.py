"""Makes the graders reward functions for verl. They run in a process that can be killed.

reward.custom_reward_function.path=pkg://eepo.adapters.verl.reward
reward.custom_reward_function.name=math
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from eepo.config import DatasetConfig, RewardConfig
from eepo.protocols import Reward
from eepo.rewards import build_reward
from eepo.types import Prompt

# verl calls from several threads. Grading in parallel happens in verl's reward workers.
_LOCK = threading.Lock()


def math(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> dict[str, float]:
    """Return 1 if the final answer is mathematically equal to `ground_truth`, else 0."""
    return _score("math", solution_str, ground_truth)


def exact(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> dict[str, float]:
    """Return 1 if the answer is the same text as `ground_truth`, else 0."""
    return _score("exact", solution_str, ground_truth)


def _score(name: str, completion: str, answer: str) -> dict[str, float]:
    with _LOCK:
        verdict = _grader(name).grade([Prompt("", "", (), answer)], [completion])[0]
    return {"score": verdict.reward, "acc": float(verdict.correct)}


@functools.cache
def _grader(name: str) -> Reward:
    return build_reward(RewardConfig(name=name, num_workers=1), DatasetConfig())
