"""Graders. One file a reward; a recipe's `reward.name` is looked up here.

Nothing heavy is imported here: a grading process imports this package, and must start quickly.
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
from eepo.types import UserError

if TYPE_CHECKING:
    from eepo.protocols import Reward

OF_TASK = {
    "countdown": "countdown",
    "sums": "exact",
    "dataset": "math",
    "reasoning_gym": "reasoning_gym",
}
OWN: dict[str, type[Reward]] = {
    "countdown": CountdownReward,
    "exact": ExactReward,
}  # cheap and bounded by themselves
OF_TEXTS = ("math", "exact")
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


def build_grader(config: RewardConfig) -> Reward:
    """Of texts against gold texts, which is what files of completions and benchmarks hold."""
    if config.name not in OF_TEXTS and ":" not in config.name:
        raise UserError(f"--reward {config.name} must be {', '.join(OF_TEXTS)} or module:function")
    return build_reward(config, DatasetConfig())


def _check_function(name: str) -> None:
    """Found without being run: the user's module is imported in the grading processes only."""
    module, colon, function = name.partition(":")
    if not (colon and module and function.isidentifier()):
        names = ", ".join(["auto", *OWN, *POOLED])
        raise UserError(f'reward.name = "{name}" must be one of {names}, or module:function')
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    finally:
        sys.path.pop(0)
    if found is None:
        raise UserError(
            f'reward.name = "{name}": there is no module {module} here or in the environment'
        )
    source = Path(found.origin or "")
    text = source.read_text("utf-8", "replace") if source.suffix == ".py" else ""
    if text and not re.search(
        rf"\b{function}\b|import \*|__getattr__", text
    ):  # the last two may bring any name
        raise UserError(f'reward.name = "{name}": {source} has no function {function}')
