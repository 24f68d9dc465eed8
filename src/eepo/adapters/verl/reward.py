"""Our graders as verl's reward function: in a process that a hostile completion can only kill, never hold up.

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

_LOCK = (
    threading.Lock()
)  # verl calls from several threads; its reward workers are what runs side by side


def math(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> dict[str, float]:
    """1 for a completion whose final answer equals `ground_truth` as mathematics, else 0; no reward for its form."""
    return _score("math", solution_str, ground_truth)


def exact(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> dict[str, float]:
    return _score("exact", solution_str, ground_truth)


def _score(name: str, completion: str, answer: str) -> dict[str, float]:
    with _LOCK:
        verdict = _grader(name).grade([Prompt("", "", (), answer)], [completion])[0]
    return {"score": verdict.reward, "acc": float(verdict.correct)}


@functools.cache
def _grader(name: str) -> Reward:
    return build_reward(RewardConfig(name=name, num_workers=1), DatasetConfig())
