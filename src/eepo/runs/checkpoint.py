"""Saves and loads checkpoints: model, optimizer and state in one folder.

A checkpoint is a `transformers` model folder, so `from_pretrained` can read it, with three more
files: optimizer, state and checksums. It is written under a hidden name, flushed to disk, then
renamed. A kill at any moment leaves the earlier checkpoints intact. No pickle is used.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging

from eepo.runs.checksums import CHECKSUMS, find_damage, write_checksums
from eepo.runs.jsonl import parse_json
from eepo.runs.writing import flush_to_disk, writing
from eepo.types import UserError

TRAINING, STATE = "training.safetensors", "state.json"
RNG = "rng"
_NAME = re.compile(r"step-(\d{6,})")
_OLD_NAME = re.compile(r"\.old-step-(\d{6,})\.\d+")  # while it is replaced or removed


class Weights(Protocol):
    """Writes the weights of a run."""

    def save(self, folder: Path) -> None:
        """Write what a resumed run needs."""
        ...

    def save_final(self, folder: Path) -> None:
        """Write a model that `from_pretrained` reads."""
        ...


@dataclass
class ModelWeights:
    """Writes all weights of a model, for both purposes."""

    model: Any

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)

    save_final = save


@dataclass
class Checkpointer:
    """Saves the checkpoints of one run in `folder`, and keeps the newest `keep` of them.

    `weights` writes the model; None: all its weights.
    """

    folder: Path
    model: Any
    tokenizer: Any
    optimizer: torch.optim.Optimizer
    keep: int
    weights: Weights | None = None

    def __post_init__(self) -> None:
        self._weights = self.weights or ModelWeights(self.model)

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write `folder/step-NNNNNN`, then remove old checkpoints."""
        temporary = self.folder / f".step-{step:06d}.{os.getpid()}"
        save_model(temporary, self._weights.save, self.tokenizer)
        tensors = optimizer_tensors(self.model, self.optimizer) | {RNG: torch.get_rng_state()}
        with writing(temporary):
            save_file(tensors, temporary / TRAINING)
            (temporary / STATE).write_text(json.dumps(state | {"step": step}))
            write_checksums(temporary)
        saved = publish(temporary, self.folder / f"step-{step:06d}")
        prune(self.folder, self.keep)
        return saved

    def load(self, checkpoint: Path) -> dict[str, Any]:
        """Restore the optimizer and torch's random state; return the saved state.

        `checkpoint_damage` must have found none: this does not verify the checksums again.
        """
        state = read_state(checkpoint)
        tensors = load_file(checkpoint / TRAINING)
        torch.set_rng_state(tensors.pop(RNG))
        by_parameter: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            moment, _, name = key.partition("/")
            by_parameter.setdefault(name, {})[moment] = tensor
        names = [name for name, w in self.model.named_parameters() if w.requires_grad]
        restored = {i: by_parameter[name] for i, name in enumerate(names) if name in by_parameter}
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": restored})
        return state

    def save_final(self, folder: Path) -> Path:
        """Write the weights alone, for use elsewhere."""
        remove_leftovers(folder.parent, folder.name)
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
        save_model(temporary, self._weights.save_final, self.tokenizer)
        with writing(temporary):
            write_checksums(temporary)
        return publish(temporary, folder)


def save_model(folder: Path, save: Callable[[Path], None], tokenizer: Any) -> None:
    logging.disable_progress_bar()  # a bar per checkpoint would hide ours
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    with writing(folder):
        save(folder)
        tokenizer.save_pretrained(folder)


def publish(temporary: Path, final: Path) -> Path:
    """Rename `temporary` to `final` after its contents are safely on disk."""
    for path in [*temporary.rglob("*"), temporary]:
        flush_to_disk(path)
    if final.exists():  # an earlier save of the same step; a folder cannot be replaced in one call
        old = final.with_name(f".old-{final.name}.{os.getpid()}")
        os.rename(final, old)
        os.rename(temporary, final)
        shutil.rmtree(old)
    else:
        os.rename(temporary, final)
    flush_to_disk(final.parent)
    return final


def recover(folder: Path) -> None:
    """Give a checkpoint its name back if a process was killed while it replaced it (`publish`).

    If a newer checkpoint is intact, the old one was being removed (`prune`) and is not needed.
    """
    old = [path for path in folder.glob(".old-*") if _OLD_NAME.fullmatch(path.name)]
    for path in sorted(old, key=step_of):
        final = folder / f"step-{step_of(path):06d}"
        newer = (each for each in list_checkpoints(folder) if step_of(each) >= step_of(path))
        if (
            not final.exists()
            and all(map(checkpoint_damage, newer))
            and not checkpoint_damage(path)
        ):
            os.rename(path, final)


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint. It may be damaged: see `checkpoint_damage`."""
    checkpoints = list_checkpoints(folder)
    return checkpoints[-1] if checkpoints else None


def step_of(checkpoint: Path) -> int:
    match = _NAME.fullmatch(checkpoint.name) or _OLD_NAME.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint} is not the name of a checkpoint")
    return int(match.group(1))


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and the leftovers of killed saves.

    Hide them before they are removed: a kill must not leave half a checkpoint with a valid name.
    """
    for path in list_checkpoints(folder)[:-keep]:
        os.rename(path, path.with_name(f".old-{path.name}.{os.getpid()}"))
    remove_leftovers(folder, "step-")


def remove_leftovers(folder: Path, name: str) -> None:
    """Remove what a killed process left in `folder` while it wrote or removed `name`."""
    for leftover in leftovers(folder, name):
        shutil.rmtree(leftover)


def leftovers(folder: Path, name: str) -> list[Path]:
    return list(folder.glob(f".*{name}*.*"))


def weights_damage(folder: Path) -> str:
    """Return what is damaged in a folder of final weights, or ""."""
    if not (folder / "config.json").is_file():
        return "config.json is missing"
    return find_damage(folder)


def checkpoint_damage(checkpoint: Path) -> str:
    """Return what is damaged in a checkpoint, or ""."""
    try:
        read_state(checkpoint)
    except UserError as error:
        return str(error)
    if (checkpoint / CHECKSUMS).exists():
        return find_damage(checkpoint)
    return _damage_without_checksums(checkpoint)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the state of a checkpoint. Raise an error if its values are impossible."""
    try:
        state = parse_json((checkpoint / STATE).read_bytes(), STATE)
    except OSError as error:
        raise UserError(f"{STATE}: {error.strerror}") from error
    if not isinstance(state, dict):
        raise UserError(f"{STATE} is not a JSON object")
    step, folder_step = state.get("step"), step_of(checkpoint)
    if type(step) is not int or step != folder_step:
        raise UserError(f"{STATE} has step = {step!r} instead of {folder_step}")
    num_prompts = state.get("num_prompts_seen", 0)
    if type(num_prompts) is not int or num_prompts < 0:
        raise UserError(f"{STATE} has num_prompts_seen = {num_prompts!r}")
    if not _all_finite(state):
        raise UserError(f"{STATE} has a number that is not finite")
    return state


def _all_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_all_finite, value.values()))
    if isinstance(value, list):
        return all(map(_all_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _damage_without_checksums(checkpoint: Path) -> str:
    """Check the structure of a checkpoint from a version that wrote no checksums."""
    tensors = sorted(checkpoint.glob("*.safetensors"))
    names = {path.name for path in checkpoint.iterdir()}
    for name in {"config.json", TRAINING} - names:
        return f"{name} is missing"
    if len(tensors) < 2:
        return "the weights are missing"
    try:
        for path in checkpoint.glob("*.json"):
            parse_json(path.read_bytes(), path.name)
        for path in tensors:
            with safe_open(path, framework="pt"):
                pass
    except (UserError, OSError, SafetensorError) as error:
        return f"{path.name} cannot be read ({_first_line(error)})"
    return ""


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def optimizer_tensors(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as `moment/parameter name` -> tensor, on the CPU."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, tensor in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = tensor.detach().cpu().contiguous()
    return tensors


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    paths = (path for path in folder.glob("step-*") if _NAME.fullmatch(path.name))
    return sorted(paths, key=step_of)
