"""Problems. One file a task; `TASKS` is where a recipe's `task.name` is looked up."""

from __future__ import annotations

from eepo.tasks.countdown import Countdown

TASKS = {"countdown": Countdown}
