"""Builds the engine of a recipe."""

from __future__ import annotations

import copy
from typing import Any

from eepo.config import ModelConfig, RolloutConfig
from eepo.model import loading, lora
from eepo.protocols import RolloutEngine
from eepo.rollout.builtin import builtin_engine
from eepo.rollout.vllm import VLLMEngine


def build_engine(
    model: Any,
    tokenizer: Any,
    config: RolloutConfig,
    model_config: ModelConfig,
    keep_bytes: int | None = None,
) -> RolloutEngine:
    """Build the engine on its own copy of the weights that change, in its own dtype."""
    dtype = loading.pick_dtype(config.dtype, model.device)
    if config.engine == "vllm":
        return VLLMEngine(
            model, tokenizer, dtype, config.max_rows, config.stop, config.gpu_memory_share
        )
    shared = lora.shared_weights(model, model_config, config, dtype)
    model = copy.deepcopy(model, {id(weight): weight for weight in shared})
    # Buffers keep their dtype: rotary frequencies in bf16 are wrong by radians after 1,000 tokens.
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    return builtin_engine(
        model, tokenizer, config.max_rows, config.stop, model_config.compile, keep_bytes
    )
