"""Adds log(1 − p) to the outputs of verl's FSDP engine, for `saturation = "exact"`.

The engine has the logits of a micro-batch in memory and returns log-probabilities and entropies.
This module reads the same logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

COMPLEMENTS = "complements"  # key in the engine's model output
CHUNK = 512  # tokens whose logits exist in float32 at once


@contextmanager
def complements_in_output(engine: Any) -> Iterator[None]:
    """Make the engine's model outputs contain log(1 − p) of every token inside the block."""
    prepare_model_outputs = engine.prepare_model_outputs

    def prepare(output: Any, output_args: Any, micro_batch: Any, **others: Any) -> dict[str, Any]:
        input_ids = micro_batch["input_ids"]  # jagged
        complements = packed_complements(engine, output.logits, output_args, input_ids)
        model_output: dict[str, Any] = prepare_model_outputs(
            output=output, output_args=output_args, micro_batch=micro_batch, **others
        )
        nested = torch.nested.nested_tensor_from_jagged(complements, input_ids.offsets())
        return model_output | {COMPLEMENTS: nested}

    engine.prepare_model_outputs = prepare
    try:
        yield
    finally:
        del engine.prepare_model_outputs  # the class's method is visible again


def packed_complements(
    engine: Any,
    logits: Tensor,
    output_args: dict[str, Any],
    input_ids: Any,  # jagged
) -> Tensor:
    """Return log(1 − p) of all tokens of a micro-batch, [tokens], in the order of `input_ids`.

    With `use_remove_padding` the logits are [1, tokens, V], else [B, S, V].
    """
    if hasattr(logits, "full_tensor"):  # sharded over the vocabulary
        logits = logits.full_tensor()
    targets = output_args["input_ids_rmpad_rolled"]  # [tokens]; with sequence parallelism a slice
    if "temperature_rmpad" in output_args:
        temperatures = output_args["temperature_rmpad"]
        complements = log_complements(logits.squeeze(0), targets, temperatures)
        gathered: Tensor = engine._gather_and_unpad_packed(complements, output_args["pad_size"])
        return gathered
    shape, offsets = logits.shape[:2], input_ids.offsets()
    mask = torch.arange(shape[1], device=logits.device) < offsets.diff().unsqueeze(1)  # [B, S]
    padded = targets.new_zeros(shape).masked_scatter(mask, targets)
    temperatures = output_args["temperature"].unsqueeze(1).expand(shape).flatten()
    return log_complements(logits.flatten(0, 1), padded.flatten(), temperatures)[mask.flatten()]


def log_complements(logits: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
    """Return log(1 − p) of `targets`, [N], from logits [N, V] and one temperature per token.

    The backward pass computes each chunk again, so only one chunk exists in float32 at a time.
    """
    chunks = zip(*(column.split(CHUNK) for column in (logits, targets, temperatures)), strict=True)
    score = partial(checkpoint, _log_complements, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([score(*chunk) for chunk in chunks])


def _log_complements(logits: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
    logits = logits.float() / temperatures.clamp(min=1e-8).unsqueeze(1)  # clamped as in verl
    others = logits.scatter(1, targets.unsqueeze(1), -torch.inf)
    return others.logsumexp(1) - logits.logsumexp(1)
