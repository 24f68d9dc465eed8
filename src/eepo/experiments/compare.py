"""Trains several recipes over several seeds with the same prompts, one folder per run.

At equal rollouts, every recipe trains its number of steps. At equal time, the first recipe does.
The other recipes then train, seed by seed, for the seconds that its steps took. Runs are trained
one after another: parallel runs would slow each other down and distort the times.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from eepo import recipe
from eepo.assemble import build_trainer, check_folder
from eepo.config import RunConfig
from eepo.runs.progress import Progress
from eepo.trainer import Interrupted, Stopped, trained_seconds
from eepo.types import UserError

FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,99}")
# At equal time, a run ends at the latest after this many times the steps of its recipe.
MAX_STEP_FACTOR = 100


def compare(
    configs: Sequence[RunConfig],
    num_seeds: int,
    out: Path,
    progress: Progress,
    equal_time: bool = False,
) -> list[Path]:
    """Train every recipe with every seed in `out/name/seed-N`; return the folders by recipe.

    Finished runs are not trained again, and stopped runs continue.
    """
    _check_names([config.name for config in configs])
    if equal_time and len(configs) < 2:
        raise UserError("--equal-time needs a baseline and at least one more recipe, got 1 recipe")
    planned = [(config, offset) for offset in range(num_seeds) for config in configs]
    baseline = configs[0]
    for config, offset in planned:  # before the first run starts
        by_time = (equal_time and config is not baseline) or config.training.max_seconds > 0
        _check_folder(with_seed(config, offset), _folder(out, config, offset), by_time)
    folders: list[Path] = []
    for config, offset in planned:
        folder = _folder(out, config, offset)
        # The starting policy is the same in all runs, so only one run evaluates it.
        seeded = with_seed(config, offset, evaluate_start=config is baseline and offset == 0)
        if equal_time and config is not baseline:
            seeded = with_seconds(seeded, trained_seconds(_folder(out, baseline, offset)))
        trainer = build_trainer(seeded, folder, resume=True, progress=progress)
        try:
            trainer.run()
        except Stopped as stop:
            raise Interrupted(
                f"stopped after step {trainer.step} of {folder}, "
                f"with {len(folders)} of {len(planned)} runs finished; the same command continues"
            ) from stop
        folders.append(folder)
    names = [config.name for config in configs]
    return sorted(folders, key=lambda folder: names.index(folder.parent.name))


def with_seed(config: RunConfig, offset: int, evaluate_start: bool = False) -> RunConfig:
    seed = config.training.seed + offset
    return dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, seed=seed),
        evaluation=dataclasses.replace(config.evaluation, start=evaluate_start),
    )


def with_seconds(config: RunConfig, seconds: float) -> RunConfig:
    """Limit the run by time instead of by its number of steps."""
    num_steps = MAX_STEP_FACTOR * config.training.num_steps if seconds else 0
    training = dataclasses.replace(config.training, max_seconds=seconds, num_steps=num_steps)
    return dataclasses.replace(config, training=training)


def _folder(out: Path, config: RunConfig, offset: int) -> Path:
    return out / config.name / f"seed-{config.training.seed + offset}"


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if not FOLDER_NAME.fullmatch(name):
            raise UserError(
                f"name = {name!r} is used as a folder name: "
                "only letters, digits, '.', '_', '+' and '-' are allowed"
            )
    if duplicates := {name for name in names if list(names).count(name) > 1}:
        raise UserError(
            f"two recipes have the name {min(duplicates)!r}; give each recipe a different name"
        )


def _check_folder(config: RunConfig, folder: Path, by_time: bool) -> None:
    """Refuse a folder whose run has other knobs or another kind of limit.

    A run that ended by its number of steps may already have trained longer than the time limit.
    """
    recipe_file = folder / "recipe.toml"
    if recipe_file.exists():
        existing_by_time = recipe.load_run(recipe_file).training.max_seconds > 0
        if existing_by_time != by_time:
            limits = {True: "time", False: "its number of steps"}
            raise UserError(
                f"{folder} contains a run limited by {limits[existing_by_time]}, but this run is "
                f"limited by {limits[by_time]}; give another --out"
            )
    advice = "give the same recipes and --set again, or another --out"
    check_folder(config, folder, resume=True, advice=advice)
