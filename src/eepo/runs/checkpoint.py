"""Saves and loads checkpoints: model, optimizer and state in one folder.

A checkpoint is a `transformers` model folder, so `from_pretrained` can read it, with two more
files. It is written under a hidden name, flushed to disk, then renamed. A kill at any moment
leaves the earlier checkpoints intact. No pickle is used.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TRAINING, STATE = "training.safetensors", "state.json"
RNG = "rng"
_NAME = re.compile(r"step-(\d{6,})")


@dataclass
class Checkpointer:
    """Saves the checkpoints of one run in `folder`, and keeps the newest `keep` of them."""

    folder: Path
    model: Any
    tokenizer: Any
    optimizer: torch.optim.Optimizer
    keep: int

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write `folder/step-NNNNNN`, then remove old checkpoints."""
        temporary = self.folder / f".step-{step:06d}.{os.getpid()}"
        save_model(temporary, self.model, self.tokenizer)
        tensors = optimizer_tensors(self.model, self.optimizer) | {RNG: torch.get_rng_state()}
        save_file(tensors, temporary / TRAINING)
        (temporary / STATE).write_text(json.dumps(state | {"step": step}))
        saved = publish(temporary, self.folder / f"step-{step:06d}")
        prune(self.folder, self.keep)
        return saved

    def load(self, checkpoint: Path) -> dict[str, Any]:
        """Restore the optimizer and torch's random state; return the saved state."""
        tensors = load_file(checkpoint / TRAINING)
        torch.set_rng_state(tensors.pop(RNG))
        by_parameter: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            moment, _, name = key.partition("/")
            by_parameter.setdefault(name, {})[moment] = tensor
        names = [name for name, _ in self.model.named_parameters()]
        restored = {i: by_parameter[name] for i, name in enumerate(names) if name in by_parameter}
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": restored})
        return json.loads((checkpoint / STATE).read_text())

    def save_final(self, folder: Path) -> Path:
        """Write the weights alone, for use elsewhere."""
        for leftover in folder.parent.glob(f".*{folder.name}.*"):  # of a killed save
            shutil.rmtree(leftover)
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
        save_model(temporary, self.model, self.tokenizer)
        return publish(temporary, folder)


def save_model(folder: Path, model: Any, tokenizer: Any) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def publish(temporary: Path, final: Path) -> Path:
    """Rename `temporary` to `final` after its contents are safely on disk."""
    for path in [*temporary.rglob("*"), temporary]:
        _fsync(path)
    if final.exists():  # an earlier save of the same step; a folder cannot be replaced in one call
        old = final.with_name(f".old-{final.name}.{os.getpid()}")
        os.rename(final, old)
        os.rename(temporary, final)
        shutil.rmtree(old)
    else:
        os.rename(temporary, final)
    _fsync(final.parent)
    return final


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint."""
    checkpoints = _checkpoints(folder)
    return checkpoints[-1] if checkpoints else None


def step_of(checkpoint: Path) -> int:
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint} is not the name of a checkpoint")
    return int(match.group(1))


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and the leftovers of killed saves."""
    for path in [*_checkpoints(folder)[:-keep], *folder.glob(".*step-*")]:
        shutil.rmtree(path)


def optimizer_tensors(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as `moment/parameter name` -> tensor, on the CPU."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, tensor in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = tensor.detach().cpu().contiguous()
    return tensors


def _checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    paths = (path for path in folder.glob("step-*") if _NAME.fullmatch(path.name))
    return sorted(paths, key=step_of)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
