"""Graders. One file a reward; a recipe's `reward.name` is looked up here.

Nothing heavy is imported here: a grading process imports this package, and must start quickly.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING

from eepo.config import RewardConfig, TaskConfig
from eepo.rewards.countdown import CountdownReward
from eepo.rewards.exact import ExactReward
from eepo.rewards.isolation import PooledReward
from eepo.types import UserError

if TYPE_CHECKING:
    from eepo.protocols import Reward

OF_TASK = {"countdown": "countdown", "sums": "exact", "dataset": "math", "reasoning_gym": "reasoning_gym"}
OWN: dict[str, type[Reward]] = {"countdown": CountdownReward, "exact": ExactReward}  # cheap and bounded by themselves
POOLED = {"math": "eepo.rewards.math:judge", "reasoning_gym": "eepo.rewards.reasoning_gym:judge"}


def build_reward(config: RewardConfig, task: TaskConfig) -> Reward:
    """The grader that `config` names; "auto" is the task's own, `module:function` the user's."""
    name = OF_TASK[task.name] if config.name == "auto" else config.name
    if name in OWN:
        return OWN[name]()
    judge = POOLED.get(name, name)
    if judge == name:
        _check_function(name)
    return PooledReward(judge, config)


def _check_function(name: str) -> None:
    """Found without being run: the user's module is imported in the grading processes only."""
    module, colon, function = name.partition(":")
    if not (colon and module and function.isidentifier()):
        names = ", ".join(["auto", *OWN, *POOLED])
        raise UserError(f'reward.name = "{name}" must be one of {names}, or module:function')
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        found = False
    finally:
        sys.path.pop(0)
    if not found:
        raise UserError(f'reward.name = "{name}": there is no module {module} here or in the environment')
