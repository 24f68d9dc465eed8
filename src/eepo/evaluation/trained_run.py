"""Finds the run that a model belongs to, so that it is evaluated as it was trained."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eepo import recipe
from eepo.runs.jsonl import read_records
from eepo.runs.runlog import METRICS

SEED_FOLDER, CHECKPOINT = re.compile(r"seed-\d+"), re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class TrainedRun:
    """Describes the run whose weights are evaluated."""

    folder: Path  # absolute
    tables: dict[str, Any]  # its recipe
    checkpoint_step: int | None = None  # None: the run as a whole, that is, its newest weights

    def knob(self, section: str, name: str, default: Any) -> Any:
        return self.tables.get(section, {}).get(name, default)

    def recipe_text(self) -> str:
        return (self.folder / "recipe.toml").read_text(encoding="utf-8")

    @property
    def method(self) -> str:
        return str(self.tables.get("name", self.folder.name))

    @property
    def seed(self) -> int | None:
        """Return the seed of the run; None for a warm start, which has no [training]."""
        return self.knob("training", "seed", None)

    @property
    def step(self) -> int | None:
        """Return the step of the weights; None if the run has no records."""
        if self.checkpoint_step is not None:
            return self.checkpoint_step
        records = self.folder / METRICS
        rows = read_records(records) if records.is_file() else ()
        return max((row["step"] for row in rows), default=None)

    @property
    def name(self) -> str:
        """Return the folder's name and the seed. In a comparison, the folder is that of the method.

        Several methods and seeds can then be evaluated side by side.
        """
        is_seed = SEED_FOLDER.fullmatch(self.folder.name)
        parts = [self.folder.parent.name if is_seed else self.folder.name]
        if self.seed is not None:
            parts.append(f"seed-{self.seed}")
        if self.checkpoint_step is not None:
            parts.append(f"step-{self.checkpoint_step}")
        return "-".join(parts)


def find_run(model: str) -> TrainedRun | None:
    """Return the run if `model` is a run folder, its final weights or one of its checkpoints."""
    folder = Path(os.path.expanduser(model)).resolve()
    if not folder.is_dir():
        return None
    step, run_folder = None, folder
    if folder.name == "final":
        run_folder = folder.parent
    elif folder.parent.name == "checkpoints" and (match := CHECKPOINT.fullmatch(folder.name)):
        step, run_folder = int(match[1]), folder.parent.parent
    path = run_folder / "recipe.toml"
    return TrainedRun(run_folder, recipe.read_toml(path), step) if path.is_file() else None


def model_label(model: str) -> str:
    """Return the last informative part of a hub name or folder."""
    uninformative = ("", ".", "..", "~", "final", "checkpoints")
    parts = [part for part in re.split(r"[/\\:]", model) if part not in uninformative]
    return parts[-1] if parts else Path(os.path.expanduser(model)).resolve().name


def evaluation_name(model: str) -> str:
    """Return the name of the folder for the evaluation of a model."""
    run = find_run(model)
    return run.name if run else model_label(model)
