"""Finds the tokens that end a completion. All engines share them, so they stop alike."""

from __future__ import annotations

from typing import Any

from eepo.types import UserError


def end_tokens(model: Any, tokenizer: Any, stop: str = "") -> list[int]:
    """Return the end-of-sequence tokens and every token whose text contains `stop`."""
    return sorted({*eos_token_ids(model, tokenizer), *tokens_containing(stop, tokenizer)})


def tokens_containing(stop: str, tokenizer: Any) -> list[int]:
    """Return every token whose text contains `stop`.

    A text that no single token contains is an error, since it would never stop a completion.
    """
    if not stop:
        return []
    tokens = [token for token in range(len(tokenizer)) if stop in tokenizer.decode([token])]
    if not tokens:
        raise UserError(
            f"rollout.stop = {stop!r}: no token of the model's vocabulary contains this text"
        )
    return tokens


def eos_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Return the end-of-sequence tokens of the generation config and of the tokenizer."""
    configured = model.generation_config.eos_token_id
    ids = [*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id]
    unique = sorted({token for token in ids if token is not None})
    if not unique:
        raise UserError(
            "model: neither its generation config nor its tokenizer has an end-of-sequence token"
        )
    return unique
