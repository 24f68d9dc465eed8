"""Converts the config and weights of a Llama- or Qwen2-type GGUF model for `transformers`.

Weights are written to disk in shards, so memory holds one shard at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, Qwen2Config

from eepo.model.gguf_file import GgufFile, StoredTensor

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config}
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
SHARD_BYTES = 2**31
# Two embeddings that are the same apart from their quantization have a cosine above .95, even in
# two bits. Those of an untied model are nearly orthogonal.
SAME_EMBEDDINGS = 0.9
ROPE_FACTORS = "rope_freqs.weight"

# Name in the file → name in `transformers`, in one layer and outside of the layers.
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True)
class Weight:
    """One weight in `transformers`, and the tensor that holds it in the file."""

    name: str
    stored: StoredTensor
    num_rotary_heads: int = 0  # rows are reordered if this is not 0

    def load(self) -> Tensor:
        values = self.stored.load()
        if self.num_rotary_heads:
            values = _rotary_halves(values, self.num_rotary_heads)
        return values.contiguous()


def read_config(file: GgufFile) -> Any:
    """Return the `transformers` config of the model. Unsupported models raise an error."""
    architecture = file.text("general.architecture")
    if architecture not in CONFIGS:
        raise file.error(
            f"general.architecture = {architecture[:80]!r} is not supported; "
            f"supported: {', '.join(CONFIGS)}"
        )
    if file.fields.get(f"{architecture}.expert_count"):
        raise file.error("mixture-of-experts models are not supported")
    hidden_size = file.size(f"{architecture}.embedding_length")
    num_heads = file.size(f"{architecture}.attention.head_count")
    head_dim = _head_dim(file, architecture, hidden_size, num_heads)
    num_kv_heads = file.size(f"{architecture}.attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise file.error(f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads")
    config = CONFIGS[architecture](
        vocab_size=_tensor(file, "token_embd.weight").shape[0],
        hidden_size=hidden_size,
        intermediate_size=file.size(f"{architecture}.feed_forward_length"),
        num_hidden_layers=_num_layers(file, architecture),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=file.size(f"{architecture}.context_length"),
        rms_norm_eps=file.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        rope_parameters=_rope_parameters(file, architecture, head_dim),
        tie_word_embeddings=_is_tied(file),
        head_dim=head_dim,
        dtype="float32",
    )
    if architecture == "llama":
        config.attention_bias = "blk.0.attn_q.bias" in file.tensors
        config.mlp_bias = "blk.0.ffn_gate.bias" in file.tensors
    config.architectures = [CLASSES[architecture]]
    return config


def write_weights(file: GgufFile, config: Any, folder: Path) -> None:
    """Write all weights in fp32 as safetensors, and the configs."""
    shards = _shards(weights(file, config))
    names: dict[str, str] = {}
    for index, shard in enumerate(shards):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {weight.name: weight.load() for weight in shard}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        names |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        index_file = {"metadata": {}, "weight_map": names}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index_file, indent=2))
    config.save_pretrained(folder)


def write_generation_config(config: Any, end_tokens: list[int], folder: Path) -> None:
    """Write the tokens that end a completion, which may be more than one."""
    GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=end_tokens if len(end_tokens) != 1 else end_tokens[0],
        pad_token_id=config.pad_token_id,
    ).save_pretrained(folder)


def weights(file: GgufFile, config: Any) -> list[Weight]:
    """List all weights. A tensor that is missing, left over or misshapen is an error."""
    found = list(_all_weights(file, config))
    known = {weight.stored.name for weight in found} | {ROPE_FACTORS, "token_embd.weight"}
    left_over = sorted(file.tensors.keys() - known)
    if left_over:
        raise file.error(f"tensor {left_over[0][:80]!r} is not supported in this kind of model")
    return found


def _all_weights(file: GgufFile, config: Any) -> Iterator[Weight]:
    hidden, vocabulary = config.hidden_size, config.vocab_size
    embedding, head = file.tensors["token_embd.weight"], file.tensors.get("output.weight")
    _check_shape(file, embedding, (vocabulary, hidden))
    if head is not None:
        _check_shape(file, head, (vocabulary, hidden))
    if config.tie_word_embeddings:
        yield Weight(_EMBEDDING, _more_precise(embedding, head))
    else:
        yield Weight(_EMBEDDING, embedding)
        yield Weight(_HEAD, _tensor(file, "output.weight"))
    norm = _tensor(file, "output_norm.weight")
    _check_shape(file, norm, (hidden,))
    yield Weight(_NORM, norm)
    shapes = _layer_shapes(config)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for name, shape in shapes.items():
            part, _, kind = name.partition(".")
            stored = _tensor(file, f"blk.{layer}.{name}")
            _check_shape(file, stored, shape)
            # llama.cpp rotates neighbouring rows for Llama, but rows half a head apart for Qwen2.
            rotary_heads = heads.get(part, 0) if config.model_type == "llama" else 0
            yield Weight(f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}", stored, rotary_heads)


def _layer_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    hidden, wide = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    matrices = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (wide, hidden),
        "ffn_up": (wide, hidden),
        "ffn_down": (hidden, wide),
    }
    biased = ["attn_q", "attn_k", "attn_v"] if config.model_type == "qwen2" else []
    if config.model_type == "llama":
        biased += [name for name in matrices if name.startswith("attn") and config.attention_bias]
        biased += [name for name in matrices if name.startswith("ffn") and config.mlp_bias]
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": matrices[name] for name in matrices}
    shapes |= {f"{name}.bias": matrices[name][:1] for name in biased}
    return shapes | {"attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,)}


def _tensor(file: GgufFile, name: str) -> StoredTensor:
    if name not in file.tensors:
        raise file.error(f"the GGUF file has no tensor {name}")
    return file.tensors[name]


def _check_shape(file: GgufFile, stored: StoredTensor, shape: tuple[int, ...]) -> None:
    if stored.shape != shape:
        raise file.error(
            f"tensor {stored.name} has the shape {list(stored.shape)}; the metadata of the file "
            f"needs {list(shape)}"
        )


def _num_layers(file: GgufFile, architecture: str) -> int:
    """Return the number of layers. One that the file has no tensors for would not fit in memory."""
    key = f"{architecture}.block_count"
    number = file.size(key)
    if number > len(file.tensors):
        raise file.error(f"{key} = {number}, but the file has {len(file.tensors)} tensors")
    return number


def _head_dim(file: GgufFile, architecture: str, hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise file.error(f"{num_heads} attention heads do not divide {hidden_size} dimensions")
    head_dim = file.size(f"{architecture}.attention.key_length", hidden_size // num_heads)
    if head_dim % 2:
        raise file.error(f"the head size must be even, got {head_dim}")
    if file.size(f"{architecture}.rope.dimension_count", head_dim) != head_dim:
        raise file.error(f"partial rotary embeddings are not supported (head size {head_dim})")
    return head_dim


def _is_tied(file: GgufFile) -> bool:
    """Return whether input and output embeddings are one matrix.

    The file does not say so. Without `output.weight` they are. Some files of tied models store the
    matrix twice, in two quantizations.
    """
    head, embedding = file.tensors.get("output.weight"), _tensor(file, "token_embd.weight")
    if head is None:
        return True
    if head.shape != embedding.shape:
        return False
    first, second = embedding.load().flatten(), head.load().flatten()
    return float(torch.cosine_similarity(first, second, dim=0)) > SAME_EMBEDDINGS


def _more_precise(first: StoredTensor, second: StoredTensor | None) -> StoredTensor:
    if second is None or second.bits_per_weight <= first.bits_per_weight:
        return first
    return second


def _rope_parameters(file: GgufFile, architecture: str, head_dim: int) -> dict[str, Any]:
    prefix = f"{architecture}.rope"
    theta = file.number(f"{prefix}.freq_base", 10_000.0)
    kind = file.text(f"{prefix}.scaling.type", "none")
    parameters: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    if ROPE_FACTORS in file.tensors:
        return parameters | _llama3_scaling(file, theta, head_dim)
    if kind == "none":
        return parameters
    if kind not in ("linear", "yarn"):
        raise file.error(f"{prefix}.scaling.type = {kind[:80]!r}; supported: none, linear, yarn")
    parameters |= {"rope_type": kind, "factor": file.number(f"{prefix}.scaling.factor")}
    if kind == "yarn":
        original = file.size(f"{prefix}.scaling.original_context_length")
        parameters["original_max_position_embeddings"] = original
    return parameters


def _llama3_scaling(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the rope settings of Llama 3.1 to 3.3. The file has only the factors they lead to."""
    stored = _tensor(file, ROPE_FACTORS).load().flatten()
    factor = float(stored.max())
    low, high, original = 1.0, 4.0, 8192
    wavelengths = 2 * math.pi * theta ** (torch.arange(len(stored)) / len(stored))
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if len(stored) != head_dim // 2 or not torch.allclose(stored, expected, rtol=1e-3):
        raise file.error(f"{ROPE_FACTORS} are not the factors of Llama 3; they are not supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _rotary_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder rows for the rotary embedding of `transformers`.

    The file stores the two rows of a rotated pair next to each other; `transformers` stores them
    half a head apart.
    """
    pairs = weight.reshape(num_heads, len(weight) // num_heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(weight.shape)


def _shards(all_weights: list[Weight]) -> list[list[Weight]]:
    """Group weights into shards of at most SHARD_BYTES, or of one weight that is larger."""
    shards: list[list[Weight]] = [[]]
    size = 0
    for weight in all_weights:
        num_bytes = 4 * math.prod(weight.stored.shape)
        if shards[-1] and size + num_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(weight)
        size += num_bytes
    return shards
