"""Trains the policies that a plan starts from, before its runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import torch

from eepo import assemble, recipe
from eepo.experiments.experiment import Experiment
from eepo.experiments.plan import Selection, Start
from eepo.experiments.schedule import Schedule
from eepo.runs.checkpoint import weights_damage
from eepo.runs.progress import Progress
from eepo.runs.resume import FINAL

MODEL_PATH = "model.path="


def train_starts(experiment: Experiment, selection: Selection, progress: Progress) -> None:
    """Train the warm starts that unfinished runs need and that are not finished."""
    for start in _needed(experiment, selection):
        folder = Path(start.folder)
        config = recipe.load_warmup(start.recipe, start.knobs)
        if (folder / "recipe.toml").exists():  # it may be of a start with other knobs
            assemble.check_folder(config, folder, resume=True)
        if not weights_damage(folder / FINAL):
            continue
        progress.print(f"warm start: {start.recipe} in {folder}")
        assemble.build_warmup(config, folder, resume=True, progress=progress).run()
        gc.collect()
        if torch.cuda.is_available():  # the runs need this memory
            torch.cuda.empty_cache()


def _needed(experiment: Experiment, selection: Selection) -> Iterator[Start]:
    """Yield the warm starts of regimes that have unfinished runs."""
    plan = experiment.plan
    chosen = Schedule(experiment, selection).unfinished_regimes()
    knobs = [knob for name in chosen for knob in (*plan.knobs, *plan.regimes[name].knobs)]
    paths = [Path(knob.removeprefix(MODEL_PATH)) for knob in knobs if knob.startswith(MODEL_PATH)]
    for start in plan.starts:
        if any(path.is_relative_to(start.folder) for path in paths):
            yield start
