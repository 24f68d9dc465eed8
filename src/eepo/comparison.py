"""Several recipes over several seeds, at equal rollouts: the same prompts, the same seeds, one folder a run."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from eepo.assemble import build_trainer
from eepo.config import RunConfig
from eepo.progress import Progress
from eepo.types import UserError

FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,99}")


def compare(configs: Sequence[RunConfig], num_seeds: int, out: Path, progress: Progress) -> list[Path]:
    """Train every recipe with every seed under `out/name/seed-N`; what is there already is taken up, not done again."""
    names = [config.name for config in configs]
    for name in names:
        if not FOLDER_NAME.fullmatch(name):
            raise UserError(
                f"name = {name!r} becomes a folder here: letters, digits, '.', '_', '+' and '-' are allowed"
            )
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"two recipes are named {min(twice)!r}; names tell methods apart, so give each its own")
    folders = []
    for index in range(num_seeds):
        for place, config in enumerate(configs):
            seeded = with_seed(config, config.training.seed + index, evaluate_start=place == 0 and index == 0)
            folder = out / config.name / f"seed-{seeded.training.seed}"
            build_trainer(seeded, folder, resume=True, progress=progress).run()
            folders.append(folder)
    return sorted(folders, key=lambda folder: names.index(folder.parent.name))


def with_seed(config: RunConfig, seed: int, evaluate_start: bool) -> RunConfig:
    """The starting policy is the same for all, so one run judges it for all."""
    return dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, seed=seed),
        evaluation=dataclasses.replace(config.evaluation, start=evaluate_start),
    )
