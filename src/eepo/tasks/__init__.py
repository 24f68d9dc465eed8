"""Builds the task that `task.name` in a recipe selects. Each task has its own file."""

from __future__ import annotations

from typing import Any

from eepo.config import (
    CountdownConfig,
    CustomTaskConfig,
    DatasetConfig,
    ShortcutConfig,
    SumsConfig,
    TaskConfig,
)
from eepo.protocols import Task
from eepo.tasks import countdown, shortcut
from eepo.tasks.countdown import Countdown
from eepo.tasks.custom import CustomTask
from eepo.tasks.dataset import Dataset
from eepo.tasks.reasoning_gym import ReasoningGym
from eepo.tasks.shortcut import Shortcut
from eepo.tasks.sums import Sums
from eepo.types import NO_COLUMNS, RowColumns


def build_task(
    config: TaskConfig,
    tokenizer: Any,
    order_seed: int = 0,
    reward_columns: RowColumns = NO_COLUMNS,
) -> Task:
    """Build a task. `order_seed` is the seed of the run: it selects the training problems.

    `reward_columns` are the columns of a data set that the reward function receives.
    """
    if isinstance(config, CountdownConfig):
        return Countdown(config, tokenizer, order_seed)
    if isinstance(config, DatasetConfig):
        return Dataset(config, tokenizer, order_seed, reward_columns)
    if isinstance(config, ShortcutConfig):
        return Shortcut(config, tokenizer, order_seed)
    if isinstance(config, SumsConfig):
        return Sums(config, tokenizer, order_seed)
    if isinstance(config, CustomTaskConfig):
        return CustomTask(config, tokenizer, order_seed)
    return ReasoningGym(config, tokenizer, order_seed)


def build_tokenizer(config: TaskConfig) -> Any:
    """Build the small tokenizer of a policy that is trained from scratch on this task."""
    if isinstance(config, ShortcutConfig):
        return shortcut.build_tokenizer()
    return countdown.build_tokenizer()
