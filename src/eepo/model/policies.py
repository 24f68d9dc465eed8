"""Builds the trained policy and its reference, with all weights or an adapter, from a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eepo.config import ModelConfig, RunConfig
from eepo.model import loading, lora
from eepo.model.compilation import compile_layers, should_compile_layers
from eepo.model.lora_files import LoraWeights, load_adapter
from eepo.model.lora_policy import LoraPolicy
from eepo.model.policy import Policy


def base_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """Return fp32, or for the frozen base of an adapter the dtype of matrix products."""
    return loading.pick_dtype(config.compute_dtype, device) if config.lora_rank else torch.float32


def add_adapter(model: Any, config: RunConfig, saved: Path | None) -> None:
    if config.model.lora_rank:
        lora.add_adapter(model, config.model, config.training.seed)
        if saved is not None:
            load_adapter(model, saved)


def weights_writer(policy: Policy) -> LoraWeights | None:
    return LoraWeights(policy) if isinstance(policy, LoraPolicy) else None


def build_policy(
    model: Any, config: ModelConfig, dtype: torch.dtype | None = None, merges: bool = True
) -> Policy:
    compute = loading.pick_dtype(config.compute_dtype, model.device)
    sizes = config.micro_batch_tokens, config.head_tokens
    if config.lora_rank:
        policy: Policy = LoraPolicy(model, *sizes, compute, merges=merges)
    else:
        policy = Policy(model, *sizes, compute, dtype)
    if should_compile_layers(model, config.compile):
        compile_layers(model)
    return policy


def build_reference(policy: Policy, base: Any, config: ModelConfig) -> Policy:
    """Build the reference. It is never trained, so with bf16 products it is kept in bf16."""
    if isinstance(policy, LoraPolicy):
        return policy.reference()
    dtype = policy.compute_dtype if policy.compute_dtype == torch.bfloat16 else None
    return build_policy(base.requires_grad_(False), config, dtype)
