"""Looks up the grader that `reward.name` in a recipe selects. Each grader has its own file.

Keep the imports here light: every grading process imports this package and must start quickly.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from eepo.config import DatasetConfig, RewardConfig, TaskConfig
from eepo.rewards.countdown import CountdownReward
from eepo.rewards.exact import ExactReward
from eepo.rewards.isolation import PooledReward
from eepo.rewards.shortcut import ShortcutReward
from eepo.types import UserError

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
    name = DEFAULT_REWARDS[task.name] if config.name == "auto" else config.name
    if name in IN_PROCESS:
        return IN_PROCESS[name]()
    if name in POOLED:
        return PooledReward(POOLED[name], config)
    _check_user_function(name)
    return PooledReward(name, config)


def build_grader(config: RewardConfig) -> Reward:
    """Build a grader for gold answers that are text, as in benchmarks and files of completions."""
    if config.name not in TEXT_REWARDS and ":" not in config.name:
        allowed = ", ".join(TEXT_REWARDS)
        raise UserError(f"--reward {config.name} must be {allowed} or module:function")
    return build_reward(config, DatasetConfig())


def _check_user_function(name: str) -> None:
    """Check that `module:function` exists without running it.

    Only the grading processes import the user's module.
    """
    module, colon, function = name.partition(":")
    if not (colon and module and function.isidentifier()):
        names = ", ".join(["auto", *IN_PROCESS, *POOLED])
        raise UserError(f'reward.name = "{name}" must be one of {names}, or module:function')
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path.pop(0)
    if spec is None:
        raise UserError(
            f'reward.name = "{name}": no module {module} in the working directory or environment'
        )
    source = Path(spec.origin or "")
    text = source.read_text("utf-8", "replace") if source.suffix == ".py" else ""
    # A star import or __getattr__ may provide any name.
    if text and not re.search(rf"\b{function}\b|import \*|__getattr__", text):
        raise UserError(f'reward.name = "{name}": {source} has no function {function}')
