"""Finds where a run continues, and keeps its records safe if checkpoints are lost.

An ordinary kill loses the steps after the newest checkpoint. They are trained again, so their
records are dropped. More than that is lost if a checkpoint is damaged or missing. Then copies of
the records are kept. If no checkpoint is left, the run does not start without `--force`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eepo.runs.checkpoint import (
    Checkpointer,
    checkpoint_damage,
    leftovers,
    list_checkpoints,
    read_state,
    recover,
    remove_leftovers,
    step_of,
)
from eepo.runs.jsonl import parse_json, read_records
from eepo.runs.runlog import FINISHED, LAST_CHECKPOINT, METRICS, RECORDS, RunLog
from eepo.runs.writing import free_name
from eepo.types import UserError

CHECKPOINTS, FINAL = "checkpoints", "final"
OLD_FINAL = "old-final"  # final weights of a run that trains more steps, until it is complete again
NUM_ROWS = "num_rows"  # key of the state: rows of each file of records


@dataclass(frozen=True)
class Start:
    """Describes where a run continues."""

    checkpoint: Path | None = None  # None: at step 1
    step: int = 0  # finished steps
    num_rows: Mapping[str, int] = field(default_factory=dict)  # of records up to the checkpoint
    renames: Mapping[Path, Path] = field(default_factory=dict)  # of damaged checkpoints
    is_fallback: bool = False  # a newer checkpoint is damaged or missing
    notes: tuple[str, ...] = ()  # lines for the user


def save_checkpoint(
    checkpointer: Checkpointer, log: RunLog, step: int, state: Mapping[str, Any]
) -> None:
    """Save a checkpoint after the records that belong to it are on the disk."""
    log.flush_to_disk()
    checkpointer.save(step, {**state, NUM_ROWS: log.num_rows})
    log.write_last_checkpoint(step)


def find_start(out: Path, checkpoint_every: int, force: bool, command: str) -> Start:
    """Return the newest intact checkpoint of a run, or step 1.

    This changes nothing, except that it recovers a checkpoint whose replacement was interrupted.
    `command` resumes the run; error messages suggest it with `--force`.
    """
    folder = out / CHECKPOINTS
    _check_readable(folder)
    recover(folder)
    checkpoint, damages = _newest_intact(folder)
    step = step_of(checkpoint) if checkpoint else 0
    expected = _newest_expected(out, step, checkpoint_every)
    is_fallback = bool(damages) or expected > step
    renames = {path: free_name(path.with_name(f"damaged-{path.name}")) for path in damages}
    lines = [f"{path} is damaged: {damage}" for path, damage in damages.items()]
    if expected > max([step, *map(step_of, damages)]):
        lines.append(f"the checkpoints up to step {expected} are missing in {folder}")
    if is_fallback and checkpoint is None and not force:
        raise UserError(
            f"{'; '.join(lines)}; no intact checkpoint is left; to train again from step 1, "
            f"with copies of the records, use: {command} --force"
        )
    if is_fallback:
        lines.append(f"continues after step {step}")
    num_rows = _num_rows(checkpoint) if checkpoint else {}
    return Start(checkpoint, step, num_rows, renames, is_fallback, tuple(lines))


def open_records(log: RunLog, start: Start) -> list[str]:
    """Cut the records back to `start` and remove leftovers. Return lines for the user."""
    notes = log.rewind(start.step, start.num_rows, keep_copies=start.is_fallback)
    folder = log.folder / CHECKPOINTS
    for path, new in start.renames.items():  # else they would count as the newest checkpoints
        os.rename(path, new)
        notes.append(f"{path.name} is renamed to {new.name}")
    remove_leftovers(folder, "step-")
    remove_leftovers(log.folder, FINAL)
    if (last_saved_step(log.folder) or 0) != start.step:
        log.write_last_checkpoint(start.step)
    return notes


def leftover_bytes(out: Path) -> int:
    """Return the disk space that `open_records` frees: what a killed or failed save has left."""
    folders = [*leftovers(out / CHECKPOINTS, "step-"), *leftovers(out, FINAL)]
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return sum(path.stat().st_size for path in files)


def set_final_aside(out: Path) -> None:
    """Rename the final weights of a run that trains more steps: they are not its newest any more.

    They are not removed yet. Without their checkpoint, no other copy of them may exist.
    """
    (out / FINISHED).unlink(missing_ok=True)
    if (out / FINAL).exists():
        remove_old_final(out)
        os.rename(out / FINAL, out / OLD_FINAL)


def remove_old_final(out: Path) -> None:
    if (out / OLD_FINAL).exists():
        shutil.rmtree(out / OLD_FINAL)


def run_files(out: Path) -> list[str]:
    """Return the names of files in `out` that only a run writes."""
    names = [name for name in RECORDS if (out / name).exists() and (out / name).stat().st_size]
    others = (LAST_CHECKPOINT, FINISHED, CHECKPOINTS, FINAL, OLD_FINAL)
    return names + [name for name in others if (out / name).exists()]


def last_saved_step(out: Path) -> int | None:
    """Return the step of the last checkpoint that the run saved, or None if it is not known."""
    try:
        step = parse_json((out / LAST_CHECKPOINT).read_bytes(), LAST_CHECKPOINT)["step"]
    except (FileNotFoundError, UserError, KeyError, TypeError):
        return None
    return step if type(step) is int else None


def _newest_intact(folder: Path) -> tuple[Path | None, dict[Path, str]]:
    """Return the newest intact checkpoint, and the damage of each newer one."""
    damages: dict[Path, str] = {}
    for path in reversed(list_checkpoints(folder)):
        if not (damage := checkpoint_damage(path)):
            return path, damages
        damages[path] = damage
    return None, damages


def _newest_expected(out: Path, step: int, checkpoint_every: int) -> int:
    """Return the step of the newest checkpoint that must exist, or `step` if nothing is missing.

    Runs of older versions have no `last_checkpoint.json`. There, the records must not go further
    than one interval between checkpoints.
    """
    saved = last_saved_step(out)
    if saved is not None:
        return max(saved, step)
    if not checkpoint_every or not (out / METRICS).is_file():
        return step
    rows = read_records(out / METRICS, on_damage=lambda error: None)
    recorded = max((row["step"] for row in rows), default=0)
    return recorded if recorded > step + checkpoint_every else step


def _num_rows(checkpoint: Path) -> Mapping[str, int]:
    """Return how many rows the records must have. Older versions did not save this."""
    state = read_state(checkpoint)
    return state.get(NUM_ROWS, {METRICS: state["step"]})


def _check_readable(folder: Path) -> None:
    """Raise an error if the folder exists and cannot be listed, e.g. on a disk that is gone."""
    if not folder.is_symlink() and not folder.exists():
        return
    try:
        os.listdir(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from error
