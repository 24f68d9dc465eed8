"""Adds log(1 − p) to what TRL's fused head returns, for `saturation = "exact"`.

TRL's head returns log-probabilities and entropies, and never has all logits in memory. This module
keeps that property: it computes log(1 − p) from the same hidden states, chunk by chunk.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from eepo.model.lm_head import LMHead
from eepo.model.policy import product_dtype
from eepo.types import UserError

CHUNK = 4096  # positions whose logits are in memory at once
MAX_DIFFERENCE = 0.05  # between the mean log-probabilities of both heads; bf16 differs by less


def add_complements(model: Any, temperature: float, in_fp32: bool) -> None:
    """Make `model(..., with_complements=True)` also return log(1 − p) of every label.

    The model must have TRL's fused head. The result is a dictionary with `log_probs`, `entropy` and
    `complements`. As with TRL's head, the work happens inside the model's forward pass, because
    FSDP gathers the head's weights only there.
    """
    fused_forward = model.forward

    # `generate` checks its arguments against the signature.
    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, with_complements: bool = False, **options: Any) -> Any:
        if not with_complements:
            return fused_forward(*args, **options)
        with _last_hidden_states(self.base_model) as recorded:
            fused = fused_forward(*args, **options)
        targets = options["labels"][:, 1:]  # [B, T - 1]; -100 where nothing is scored
        mask = targets != -100
        head, states = LMHead.from_model(self), recorded[0][:, :-1][mask]
        _check_gathered(head.weight)
        dtype = torch.float32 if in_fp32 else product_dtype(head.weight)
        with torch.autocast(mask.device.type, enabled=False) if in_fp32 else nullcontext():
            scores = head.scores(states, targets[mask], temperature, CHUNK, dtype)
        logprobs, _, complements = scores
        _check_same(logprobs.detach(), fused.log_probs.detach()[mask], type(self).__name__)
        padded = complements.new_zeros(mask.shape).masked_scatter(mask, complements)
        return {"log_probs": fused.log_probs, "entropy": fused.entropy, "complements": padded}

    model.forward = types.MethodType(forward, model)


@contextmanager
def _last_hidden_states(backbone: Any) -> Iterator[list[Tensor]]:
    """Record the last hidden states of every forward pass inside the block."""
    recorded: list[Tensor] = []

    def record(_module: Any, _inputs: Any, output: Any) -> None:
        recorded.append(output.last_hidden_state)

    handle = backbone.register_forward_hook(record)
    try:
        yield recorded
    finally:
        handle.remove()


def _check_gathered(weight: Tensor) -> None:
    if isinstance(weight, DTensor):
        raise UserError(
            'saturation = "exact" needs an output layer that FSDP does not wrap on its own: '
            "wrap only the transformer layers"
        )


def _check_same(logprobs: Tensor, fused_logprobs: Tensor, family: str) -> None:
    """Reject families whose logits TRL transforms in a way that `LMHead` does not know."""
    if (logprobs - fused_logprobs.float()).abs().mean() > MAX_DIFFERENCE:
        raise UserError(
            f'saturation = "exact" does not support {family}: '
            "it transforms its logits in an unknown way"
        )
