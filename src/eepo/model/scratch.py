"""Builds a randomly initialised model."""

from __future__ import annotations

from typing import Any

import torch

from eepo.config import ScratchConfig
from eepo.types import UserError


def new_model(scratch: ScratchConfig, tokenizer: Any, seed: int) -> Any:
    """Return a randomly initialised decoder with the tokenizer's vocabulary."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if scratch.hidden_size % scratch.num_heads:
        raise UserError(
            f"scratch.hidden_size = {scratch.hidden_size} must be a multiple of num_heads = "
            f"{scratch.num_heads}"
        )
    shape = AutoConfig.for_model(
        scratch.family,
        vocab_size=len(tokenizer),
        hidden_size=scratch.hidden_size,
        intermediate_size=scratch.intermediate_size,
        num_hidden_layers=scratch.num_layers,
        num_attention_heads=scratch.num_heads,
        num_key_value_heads=scratch.num_heads,
        head_dim=scratch.hidden_size // scratch.num_heads,
        max_position_embeddings=scratch.max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(shape)
