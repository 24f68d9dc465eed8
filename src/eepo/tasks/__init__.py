"""Problems. One file a task; a recipe's `task.name` is looked up here."""

from __future__ import annotations

from typing import Any

from eepo.config import CountdownConfig, DatasetConfig, TaskConfig
from eepo.protocols import Task
from eepo.tasks.countdown import Countdown
from eepo.tasks.dataset import Dataset
from eepo.types import UserError


def build_task(config: TaskConfig, tokenizer: Any, order_seed: int = 0) -> Task:
    """`order_seed` is the run's: which problems come when."""
    if isinstance(config, CountdownConfig):
        return Countdown(config, tokenizer, order_seed)
    if isinstance(config, DatasetConfig):
        return Dataset(config, tokenizer, order_seed)
    raise UserError(f'task.name = "{config.name}" is not there yet')
