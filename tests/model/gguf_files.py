"""Writes small GGUF files of `transformers` models, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

NAMES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}
TEXT = [
    "the answer is 42, so 17 + 25 = 42",
    "Zürich ist schön, 日本語 and ½",
    "don't  stop\n\n now 1234",
]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen2's pattern; Llama 3's takes up to three digits together.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,DIGITS}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tiny_model(architecture: str, **settings: Any) -> Any:
    """Return a random model with 2 layers, whose heads share keys and values."""
    shape = {
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
    } | settings
    torch.manual_seed(0)
    if architecture == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**shape))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**shape))
    for name, weight in model.named_parameters():
        if weight.dim() == 1:  # norms are 1 and biases are 0 otherwise
            weight.data = torch.rand_like(weight) + ("norm" in name)
    return model.float().eval()


def byte_level_tokenizer(digits: int, normalize: bool) -> Tokenizer:
    """Train a byte-level BPE with the pattern of Qwen2 (`digits` = 1) or Llama 3 (3)."""
    tokenizer = Tokenizer(models.BPE())
    if normalize:
        tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PATTERN.replace("DIGITS", str(digits))), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=370,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    return tokenizer


def tokenizer_fields(tokenizer: Tokenizer, size: int, **changes: Any) -> dict[str, Any]:
    """Return the metadata of a byte-level tokenizer, padded to the model's vocabulary size."""
    data = json.loads(tokenizer.to_str())
    vocabulary = sorted(data["model"]["vocab"], key=data["model"]["vocab"].__getitem__)
    padding = [f"[PAD{index}]" for index in range(len(vocabulary), size)]
    types = [3 if token in SPECIAL else 1 for token in vocabulary] + [5] * len(padding)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": vocabulary + padding,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in data["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    } | changes


def model_fields(model: Any) -> dict[str, Any]:
    config = model.config
    rope, prefix = config.rope_parameters, config.model_type
    fields = {
        f"{prefix}.block_count": config.num_hidden_layers,
        f"{prefix}.context_length": config.max_position_embeddings,
        f"{prefix}.embedding_length": config.hidden_size,
        f"{prefix}.feed_forward_length": config.intermediate_size,
        f"{prefix}.attention.head_count": config.num_attention_heads,
        f"{prefix}.attention.head_count_kv": config.num_key_value_heads,
        f"{prefix}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{prefix}.rope.freq_base": float(rope["rope_theta"]),
    }
    if rope["rope_type"] in ("linear", "yarn"):
        fields[f"{prefix}.rope.scaling.type"] = rope["rope_type"]
        fields[f"{prefix}.rope.scaling.factor"] = float(rope["factor"])
    if rope["rope_type"] == "yarn":
        original = rope["original_max_position_embeddings"]
        fields[f"{prefix}.rope.scaling.original_context_length"] = original
    return fields


def model_tensors(model: Any) -> dict[str, np.ndarray]:
    """Return all tensors by their names in a GGUF file, with Llama's order of rows."""
    config = model.config
    names = gguf.get_tensor_name_map(NAMES[config.model_type], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = {}
    for name, weight in model.named_parameters():
        values = weight.detach().numpy()
        num_heads = next((number for part, number in heads.items() if part in name), 0)
        if num_heads and config.model_type == "llama":
            values = permute(values, num_heads)
        tensors[str(names.get_name(name, try_suffixes=(".weight", ".bias")))] = values
    return tensors


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder rows as `permute` in llama.cpp's convert_hf_to_gguf.py does."""
    shape = (num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape)


def write_gguf(
    path: Path,
    architecture: str,
    fields: dict[str, Any],
    tensors: dict[str, np.ndarray],
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> None:
    """Write a file. `types` quantizes tensors by name; the rest stays in fp32."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, values in tensors.items():
        kind = (types or {}).get(name, gguf.GGMLQuantizationType.F32)
        stored = gguf.quantize(values, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
