"""Looks up the grader that `reward.name` in a recipe selects. Each grader has its own file.

Keep the imports here light: every grading process imports this package and must start quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eepo.config import DatasetConfig, RewardConfig, TaskConfig
from eepo.rewards.countdown import CountdownReward
from eepo.rewards.exact import ExactReward
from eepo.rewards.isolation import PooledReward
from eepo.rewards.shortcut import ShortcutReward
from eepo.rewards.user_code import FORMS, check_user_function, columns_for, is_user_function
from eepo.types import RowColumns, UserError

if TYPE_CHECKING:
    from eepo.protocols import Reward

# task name → the reward that "auto" selects
DEFAULT_REWARDS = {
    "countdown": "countdown",
    "sums": "exact",
    "shortcut": "shortcut",
    "dataset": "math",
    "reasoning_gym": "reasoning_gym",
}
# Cheap on any input, so they run in the trainer's process.
IN_PROCESS: dict[str, type[Reward]] = {
    "countdown": CountdownReward,
    "exact": ExactReward,
    "shortcut": ShortcutReward,
}
# reward name → the function that the grading processes call
POOLED = {
    "math": "eepo.rewards.math:grade",
    "guess_or_reason": "eepo.rewards.guess_or_reason:grade",
    "reasoning_gym": "eepo.rewards.reasoning_gym:grade",
}
# Rewards whose gold answer is plain text.
TEXT_REWARDS = ("math", "guess_or_reason", "exact")


def build_reward(config: RewardConfig, task: TaskConfig) -> Reward:
    """Build the grader that `config` names: a built-in one, or a user's `module:function`.

    "auto" selects the default grader of the task.
    """
    name = DEFAULT_REWARDS.get(task.name, "math") if config.name == "auto" else config.name
    if name in IN_PROCESS:
        return IN_PROCESS[name]()
    if name in POOLED:
        return PooledReward(POOLED[name], config)
    if not is_user_function(name):
        names = ", ".join(["auto", *IN_PROCESS, *POOLED])
        raise UserError(f'reward.name = "{name}" must be one of {names}, or {FORMS}')
    check_user_function(name)
    return PooledReward(name, config, sends_row=True)


def reward_columns(name: str) -> RowColumns:
    """Return the columns of a data set that the reward `name` receives: none if it is built in."""
    return columns_for(name) if is_user_function(name) else RowColumns()


def build_grader(config: RewardConfig) -> Reward:
    """Build a grader for gold answers that are text, as in benchmarks and files of completions."""
    if config.name not in TEXT_REWARDS and ":" not in config.name:
        allowed = ", ".join(TEXT_REWARDS)
        raise UserError(f"--reward {config.name} must be {allowed} or {FORMS}")
    return build_reward(config, DatasetConfig())
