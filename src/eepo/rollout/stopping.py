"""Which tokens end a completion: every engine asks here, so that all of them end at the same ones."""

from __future__ import annotations

from typing import Any

from eepo.types import UserError


def end_tokens(model: Any, tokenizer: Any, stop: str = "") -> list[int]:
    """What the model or its tokenizer calls an end, and every token whose text holds `stop`."""
    return sorted({*eos_token_ids(model, tokenizer), *tokens_with(stop, tokenizer)})


def tokens_with(stop: str, tokenizer: Any) -> list[int]:
    """Every token whose text holds `stop`; a text that no single token holds is refused, as it would never stop."""
    if not stop:
        return []
    found = [token for token in range(len(tokenizer)) if stop in tokenizer.decode([token])]
    if not found:
        raise UserError(
            f"rollout.stop = {stop!r}: no token of the model's vocabulary holds this text"
        )
    return found


def eos_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Whatever the model or its tokenizer calls an end."""
    configured = model.generation_config.eos_token_id
    ends = [*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id]
    found = sorted({end for end in ends if end is not None})
    if not found:
        raise UserError(
            "model: neither its generation config nor its tokenizer names an end-of-sequence token"
        )
    return found
