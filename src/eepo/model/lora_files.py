"""Files of a LoRA run: the adapter in `peft`'s format, and the merged model in plain folders."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eepo.model.lora import ADAPTER, adapter_weights
from eepo.model.lora_policy import LoraPolicy

ADAPTER_FOLDER = "adapter"  # in the folder of the final weights
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of names in peft's files
SHARD_BYTES = 4 * 2**30  # the merged weights are written in files of about this size


@dataclass
class LoraWeights:
    """Saves the weights of a LoRA run: an adapter in checkpoints, the merged model at the end."""

    policy: LoraPolicy

    def save(self, folder: Path) -> None:
        """Write the adapter and the config of the model, so that `model.path = folder` works."""
        save_adapter(self.policy.model, folder)
        save_config(self.policy.model, folder)

    def save_final(self, folder: Path) -> None:
        """Write the merged model in fp32, and the adapter into a folder of its own beside it.

        bf16 would round most of a small adapter away.
        """
        model = self.policy.model
        save_config(model, folder)
        model.generation_config.save_pretrained(folder)
        save_shards(folder, self.policy.merged_weights())
        save_adapter(model, folder / ADAPTER_FOLDER)


def save_config(model: Any, folder: Path) -> None:
    """Write the config of the merged model: `transformers` loads weights in the dtype it names."""
    config = copy.deepcopy(model.config)
    config.dtype, config.architectures = torch.float32, [type(model).__name__]
    config.save_pretrained(folder)


def save_adapter(model: Any, folder: Path) -> None:
    """Write the adapter in peft's format."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        _file_name(name): weight.detach().cpu().contiguous()
        for name, weight in adapter_weights(model).items()
    }
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    model.peft_config[ADAPTER].save_pretrained(folder)


@torch.no_grad()
def load_adapter(model: Any, folder: Path) -> None:
    """Replace the adapter's weights by those in a folder that `save_adapter` has written."""
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    for name, weight in adapter_weights(model).items():
        weight.copy_(tensors[_file_name(name)])


def _file_name(name: str) -> str:
    return PREFIX + name.replace(f".{ADAPTER}.", ".")


def save_shards(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write weights in fp32 as `transformers` does, with at most one file's content in memory."""
    shards: list[list[str]] = []
    total = 0
    for shard in _shards(weights):
        save_file(shard, folder / _partial_name(len(shards)), metadata={"format": "pt"})
        shards.append(list(shard))
        total += sum(tensor.numel() * tensor.element_size() for tensor in shard.values())
    files: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        file = file if len(shards) > 1 else "model.safetensors"
        (folder / _partial_name(number)).rename(folder / file)
        files |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _partial_name(number: int) -> str:
    return f"shard-{number}.safetensors"


def _shards(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    num_bytes = 0
    for name, weight in weights:
        shard[name] = weight.float().cpu().contiguous()
        num_bytes += shard[name].numel() * shard[name].element_size()
        if num_bytes >= SHARD_BYTES:
            yield shard
            shard, num_bytes = {}, 0
    if shard:
        yield shard
