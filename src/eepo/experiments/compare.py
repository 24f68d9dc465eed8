"""Several recipes over several seeds: the same prompts, the same seeds, one folder a run.

At equal rollouts every recipe trains its own number of steps. At equal time the first one does, and every other one
then has, seed by seed, the seconds that the first one's steps took. One run after another: side by side they would slow
each other down, and their seconds would say nothing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from eepo import recipe
from eepo.assemble import build_trainer, find_start
from eepo.config import RunConfig
from eepo.runs.progress import Progress
from eepo.trainer import Interrupted, Stopped, trained_seconds
from eepo.types import UserError

FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,99}")
LIFTED = 100  # times a recipe's own number of steps: where a faster method stops although it has time left


def compare(
    configs: Sequence[RunConfig],
    num_seeds: int,
    out: Path,
    progress: Progress,
    equal_time: bool = False,
) -> list[Path]:
    """Train every recipe with every seed under `out/name/seed-N`; what is there already is taken up, not done again."""
    names = [config.name for config in configs]
    _check_names(names)
    if equal_time and len(configs) < 2:
        raise UserError("--equal-time needs a baseline and at least one more recipe, got 1 recipe")
    planned = [
        (place, config, index) for index in range(num_seeds) for place, config in enumerate(configs)
    ]
    for place, config, index in planned:
        folder = _folder(out, config, index)
        _check_limit(folder, (equal_time and place > 0) or config.training.max_seconds > 0)
        _check_knobs(with_seed(config, config.training.seed + index, evaluate_start=False), folder)
    folders = []
    for place, config, index in planned:
        seeded = with_seed(
            config, config.training.seed + index, evaluate_start=place == 0 and index == 0
        )
        if equal_time and place > 0:
            seeded = with_seconds(seeded, trained_seconds(_folder(out, configs[0], index)))
        folders.append(_folder(out, config, index))
        trainer = build_trainer(seeded, folders[-1], resume=True, progress=progress)
        try:
            trainer.run()
        except Stopped as stop:
            done = f"with {len(folders) - 1} of {len(planned)} runs finished"
            where = f"stopped after step {trainer.step} of {folders[-1]}"
            raise Interrupted(f"{where}, {done}; the same command goes on") from stop
    return sorted(folders, key=lambda folder: names.index(folder.parent.name))


def with_seed(config: RunConfig, seed: int, evaluate_start: bool) -> RunConfig:
    """The starting policy is the same for all, so one run judges it for all."""
    return dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, seed=seed),
        evaluation=dataclasses.replace(config.evaluation, start=evaluate_start),
    )


def with_seconds(config: RunConfig, seconds: float) -> RunConfig:
    """Ended by time, not by its number of steps."""
    training = dataclasses.replace(
        config.training,
        max_seconds=seconds,
        num_steps=LIFTED * config.training.num_steps if seconds else 0,
    )
    return dataclasses.replace(config, training=training)


def _folder(out: Path, config: RunConfig, index: int) -> Path:
    return out / config.name / f"seed-{config.training.seed + index}"


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if not FOLDER_NAME.fullmatch(name):
            raise UserError(
                f"name = {name!r} becomes a folder here: letters, digits, '.', '_', '+' and '-' are allowed"
            )
    if twice := {name for name in names if list(names).count(name) > 1}:
        raise UserError(
            f"two recipes are named {min(twice)!r}; names tell methods apart, so give each its own"
        )


def _check_limit(folder: Path, by_time: bool) -> None:
    """A run that was ended by its steps cannot become one that is ended by time: it may have gone too far already."""
    if (folder / "recipe.toml").exists():
        held = recipe.load_run(folder / "recipe.toml").training.max_seconds > 0
        if held != by_time:
            words = {True: "by time", False: "by its number of steps"}
            raise UserError(
                f"{folder} holds a run ended {words[held]}, this one is ended {words[by_time]}; give another --out"
            )


def _check_knobs(config: RunConfig, folder: Path) -> None:
    """Before the first run is trained, not after it."""
    find_start(
        config,
        folder,
        resume=True,
        advice="give the same recipes and --set again, or another --out",
    )
