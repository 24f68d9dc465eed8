"""Graders. One file a reward; a recipe's `reward.name` is looked up here."""

from __future__ import annotations

from eepo.config import RewardConfig, TaskConfig
from eepo.protocols import Reward
from eepo.rewards.countdown import CountdownReward
from eepo.types import UserError

OF_TASK = {"countdown": "countdown"}


def build_reward(config: RewardConfig, task: TaskConfig) -> Reward:
    """The grader that `config` names; "auto" is the task's own."""
    name = OF_TASK[task.name] if config.name == "auto" else config.name
    if name == "countdown":
        return CountdownReward()
    raise UserError(f'reward.name = "{name}" must be one of auto, countdown')
