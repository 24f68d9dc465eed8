"""Spreads parallel runs over the GPUs of this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES."""
    count = torch.cuda.device_count()
    given = os.environ.get(VISIBLE)
    names = map(str, range(count)) if given is None else given.split(",")
    return [name.strip() for name in names][:count]


class GpuPool:
    """Gives each job the GPU with the fewest running jobs."""

    def __init__(self, names: Sequence[str]) -> None:
        self._jobs: dict[str, set[str]] = {name: set() for name in names}

    def __len__(self) -> int:
        return len(self._jobs)

    def take(self, title: str) -> dict[str, str]:
        """Return the variable that selects a job's GPU; nothing if there is no choice."""
        if len(self._jobs) < 2:
            return {}
        name = min(self._jobs, key=lambda name: len(self._jobs[name]))
        self._jobs[name].add(title)
        return {VISIBLE: name}

    def release(self, title: str) -> None:
        for titles in self._jobs.values():
            titles.discard(title)
