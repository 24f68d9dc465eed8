"""Compares the knobs of a run with those that it is resumed with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eepo.config import AlarmConfig, LoggingConfig
from eepo.types import UserError

# Knobs that may change when a run is resumed. Those of [model] and [rollout] concern memory and
# speed: they may change the last bits of a number, not what is computed.
FREE_TO_CHANGE = {
    "model.device",
    "model.gradient_checkpointing",
    "model.compile",
    "model.micro_batch_tokens",
    "model.head_tokens",
    "rollout.max_rows",
    "rollout.gpu_memory_share",
    "rollout.merge_lora",
    "reward.num_workers",
    "reward.wall_seconds",
    "training.num_steps",
    "training.max_seconds",
    "training.checkpoint_every",
    "training.keep_checkpoints",
    "training.log_completions",
    "evaluation.start",
    *(f"alarm.{field.name}" for field in dataclasses.fields(AlarmConfig)),
    *(f"logging.{field.name}" for field in dataclasses.fields(LoggingConfig)),
}


def check_same(config: Any, before: Any, recipe_file: Path, advice: str) -> None:
    """Raise an error for the first knob that differs from `before`, the run's recipe."""
    old_knobs = dict(_flat(before))
    for key, new in _flat(config):
        old = old_knobs.get(key)
        if old != new and key not in FREE_TO_CHANGE:
            raise UserError(f"{key} = {new!r}, but {recipe_file} has {old!r}; {advice}")


def _flat(config: Any) -> Iterator[tuple[str, Any]]:
    for key, value in dataclasses.asdict(config).items():
        if isinstance(value, dict):
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        else:
            yield key, value
