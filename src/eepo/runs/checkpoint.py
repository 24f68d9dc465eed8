"""Save and load: model, optimizer and state in one folder that appears whole or not at all.

A checkpoint is a `transformers` model folder (so `from_pretrained` reads it) with two more files. It is written
under a dotted name, flushed to disk, then renamed; a kill at any moment leaves the checkpoints before it. No pickle.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TRAINING, STATE = "training.safetensors", "state.json"
RNG = "rng"
_NAME = re.compile(r"step-(\d{6,})")


def save(
    folder: Path,
    step: int,
    model: Any,
    tokenizer: Any,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
) -> Path:
    """Write `folder/step-NNNNNN`."""
    aside = folder / f".step-{step:06d}.{os.getpid()}"
    save_model(aside, model, tokenizer)
    save_file(_moments(model, optimizer) | {RNG: torch.get_rng_state()}, aside / TRAINING)
    (aside / STATE).write_text(json.dumps(state | {"step": step}))
    return publish(aside, folder / f"step-{step:06d}")


def save_final(folder: Path, model: Any, tokenizer: Any) -> Path:
    """The weights alone, for use elsewhere."""
    for left in folder.parent.glob(f".*{folder.name}.*"):  # by a kill
        shutil.rmtree(left)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    save_model(aside, model, tokenizer)
    return publish(aside, folder)


def save_model(folder: Path, model: Any, tokenizer: Any) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def publish(aside: Path, final: Path) -> Path:
    """Make `aside` appear as `final`, durably: contents first, then the name."""
    for path in [*aside.rglob("*"), aside]:
        _flush(path)
    if (
        final.exists()
    ):  # an earlier save of the same step: step aside first, since a folder cannot be replaced
        old = final.with_name(f".old-{final.name}.{os.getpid()}")
        os.rename(final, old)
        os.rename(aside, final)
        shutil.rmtree(old)
    else:
        os.rename(aside, final)
    _flush(final.parent)
    return final


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint."""
    found = sorted(
        (path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=step_of
    )
    return found[-1] if found else None


def step_of(checkpoint: Path) -> int:
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint} is not a checkpoint's name")
    return int(match.group(1))


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep`, and what killed saves left behind."""
    found = sorted(
        (path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=step_of
    )
    for path in [*found[:-keep], *folder.glob(".*step-*")]:
        shutil.rmtree(path)


def load_training(checkpoint: Path, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put the saved moments (by parameter name) and torch's random state back; returns the rest of the state."""
    tensors = load_file(checkpoint / TRAINING)
    torch.set_rng_state(tensors.pop(RNG))
    moments: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        moment, _, name = key.partition("/")
        moments.setdefault(name, {})[moment] = tensor
    names = [name for name, _ in model.named_parameters()]
    restored = {index: moments[name] for index, name in enumerate(names) if name in moments}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": restored})
    return json.loads((checkpoint / STATE).read_text())


def _moments(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`moment/parameter name` -> tensor. The optimizer must hold the model's parameters, in its order."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, tensor in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = (
                tensor.detach().cpu().contiguous()
            )  # never a second copy on a card
    return tensors


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
