"""Loads a causal model and its tokenizer.

They come from a folder, a GGUF file, the hub, this package or another one.
"""

from __future__ import annotations

import dataclasses
import importlib.util
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
from eepo.model import gguf_convert, smollm2
from eepo.runs import checkpoint
from eepo.runs.checksums import CHECKSUMS, find_damage
from eepo.runs.jsonl import parse_json
from eepo.types import UserError, first_line, printable

ADAPTER_CONFIG = "adapter_config.json"  # of an adapter in peft's format
BUILTIN = Path(__file__).parents[1] / "assets"


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"unsupported device type {device.type}")
        torch.empty(0, device=device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # Triton kernels and CUDA graphs use the current GPU
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f'model.device = "{name}" is not available; allowed: auto, cpu, cuda, cuda:N'
        ) from error
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def dtype_mismatch(config: RunConfig, device: torch.device) -> str:
    """Return a warning if rollouts and training compute in different dtypes, else ""."""
    rollout = pick_dtype(config.rollout.dtype, device)
    training = pick_dtype(config.model.compute_dtype, device)
    if rollout == training:
        return ""
    names = [str(dtype).removeprefix("torch.") for dtype in (rollout, training)]
    return (
        f"rollouts are sampled in {names[0]} but training computes in {names[1]}: "
        "the sampling policy differs slightly from the trained one"
    )


def resolve(path: str) -> str:
    """Return the folder or hub name behind a recipe's `model.path`.

    A run folder stands for its final weights or, while it is unfinished, its newest checkpoint.
    """
    if path.startswith("builtin:"):
        return str(_builtin_folder(path))
    if path.startswith("package:"):
        if path != "package:smollm2":
            raise UserError(
                f'model.path = "{path}": no such packaged model; allowed: package:smollm2'
            )
        return str(smollm2.converted_folder())
    folder = Path(os.path.expanduser(path))  # Path.expanduser raises an error for ~nobody
    if path.lower().endswith(".gguf") and not folder.is_dir():
        return str(_gguf_folder(path, folder))
    for candidate in (folder, folder / "final", checkpoint.latest(folder / "checkpoints")):
        if candidate is not None and any(
            (candidate / name).is_file() for name in ("config.json", ADAPTER_CONFIG, CHECKSUMS)
        ):
            return str(candidate)
    if folder.is_dir() or path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise UserError(
            f'model.path = "{path}": no config.json found there; allowed: a model folder, '
            "a run folder of eepo train or eepo warmup, a hub name (owner/name)"
        )
    if folder.parent.is_dir():
        _announce_hub_lookup(path)
    return path


def _builtin_folder(path: str) -> Path:
    folder = BUILTIN / path.removeprefix("builtin:")
    if not folder.is_dir():
        folders = [entry for entry in sorted(BUILTIN.iterdir()) if entry.is_dir()]
        names = ", ".join(f"builtin:{entry.name}" for entry in folders)
        raise UserError(f'model.path = "{path}": no such built-in model; allowed: {names}')
    return folder


def _gguf_folder(path: str, file: Path) -> Path:
    if not file.is_file():
        raise UserError(f'model.path = "{path}": no such GGUF file')
    try:
        return gguf_convert.converted_folder(file)
    except UserError as error:
        raise UserError(f'model.path = "{path}": {error}') from error


@cache
def _announce_hub_lookup(path: str) -> None:
    """Print, once per path, that the hub is asked: that can take minutes for a misspelt folder."""
    line = f'model.path = "{path}" is not a local folder: looking it up on the hub'
    print(printable(line), file=sys.stderr, flush=True)


def absolute(path: str) -> str:
    """Return the folder behind a recipe's `model.path` as an absolute path, or the hub name."""
    resolved = resolve(path)
    return os.path.abspath(resolved) if os.path.isdir(resolved) else resolved


def load_tokenizer(config: ModelConfig) -> Any:
    if (Path(resolve(config.path)) / "tokenizer_config.json").is_file():
        return _load(AutoTokenizer, config)
    return _load(AutoTokenizer, _base_model(config))


def load_shape(config: ModelConfig) -> tuple[Any, int]:
    """Return the model's `transformers` config and number of parameters without its weights."""
    model = meta_model(config)
    return model.config, sum(weight.numel() for weight in model.parameters())


def meta_model(config: ModelConfig) -> Any:
    """Return the model without its weights. Its config is as it was read."""
    shape = _load(AutoConfig, _base_model(config))
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                shape, trust_remote_code=config.trust_remote_code
            )
    except ValueError as error:
        raise UserError(
            f'model.path = "{config.path}" is a {shape.model_type}, not a causal language model'
        ) from error
    model.config = shape
    return model


def _base_model(config: ModelConfig) -> ModelConfig:
    """Return the model below all adapters: itself, if `path` is no adapter folder."""
    base = _base_of_adapter(config)
    return config if base is None else _base_model(base)


def _base_of_adapter(config: ModelConfig) -> ModelConfig | None:
    """Return where the base model of a `peft` adapter is; None if `path` is no adapter folder."""
    file = Path(resolve(config.path)) / ADAPTER_CONFIG
    if not file.is_file():
        return None
    settings = parse_json(file.read_bytes(), str(file))
    base = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
    if not isinstance(base, str) or not base or absolute(base) == absolute(config.path):
        raise UserError(
            f'model.path = "{config.path}": {ADAPTER_CONFIG} has base_model_name_or_path = '
            f"{base!r}; allowed: the folder or the hub name of a model"
        )
    return dataclasses.replace(config, path=base, revision=settings.get("revision") or "main")


def _load_weights(config: ModelConfig, dtype: torch.dtype) -> Any:
    """Load a model. An adapter is merged into its base model in fp32 and rounded to `dtype`."""
    base = _base_of_adapter(config)
    if base is None:
        return _load(AutoModelForCausalLM, config, dtype=dtype)
    if importlib.util.find_spec("peft") is None:
        raise UserError(
            f'model.path = "{config.path}" is an adapter, and peft is not installed; '
            "pip install 'eepo[lora]'"
        )
    from peft import PeftModel

    model = _load_weights(base, dtype)
    try:
        return PeftModel.from_pretrained(model, resolve(config.path)).merge_and_unload()
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
        line = first_line(error)
        raise UserError(f'model.path = "{config.path}" could not be loaded: {line}') from error


def load_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype = torch.float32
) -> Any:
    """Load a model with dropout turned off, so that training and sampling are the same function."""
    _check_intact(config.path)
    model = _load_weights(config, dtype).to(device)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, rate in vars(module).items():
            if "dropout" in name and isinstance(rate, float):
                setattr(module, name, 0.0)
    try:
        model.generation_config.validate(strict=True)
    except ValueError:
        # Sampling options without do_sample: `save_pretrained` would refuse such a model.
        model.generation_config.do_sample = True
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    else:
        model.eval()
    return model


def _check_intact(path: str) -> None:
    """Raise an error if weights that eepo saved have changed since."""
    folder = Path(resolve(path))
    if damage := find_damage(folder, ignore=(checkpoint.TRAINING, checkpoint.STATE)):
        raise UserError(
            f'model.path = "{path}": {folder} is damaged: {damage}; if you changed it yourself, '
            f"delete {CHECKSUMS} there"
        )


def _load(loader: Any, config: ModelConfig, **options: Any) -> Any:
    path = resolve(config.path)
    local = os.path.isdir(path)
    if local:
        # A progress bar per small file would hide ours; downloads keep theirs.
        logging.disable_progress_bar()
    try:
        return loader.from_pretrained(
            path,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            local_files_only=local,
            **options,
        )
    except (OSError, ValueError, SafetensorError) as error:
        line = first_line(error)
        where = "" if local else "no such local folder, and from the hub: "
        raise UserError(
            f'model.path = "{config.path}" could not be loaded: {where}{line}'
        ) from error
