"""The unlearning step on FSDP2 shards: its loss, and θ′ next to θ. Never changes θ.

The gate and the loss come from `eepo.algorithm`. This module adapts them to verl's tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eepo.algorithm import unlearn_gate, unlearn_loss
from eepo.config import AlgorithmConfig
from eepo.model.policy import Scores

# Shards of θ′ by parameter name: DTensors with the placement of their parameter.
Shards = dict[str, Tensor]


@dataclass(frozen=True)
class UnlearnRequest:
    """The trainer's request to all workers. The flags cover the rows of all ranks, in order."""

    options: AlgorithmConfig
    num_completions: int  # the loss is a mean over these; without padding
    selected: tuple[bool, ...]  # rows to unlearn
    in_stage1: tuple[bool, ...]  # rows that θ sampled; only these can measure KL(θ‖θ′)
    start_lr: float  # start of the search for η
    debug: bool


def micro_batch_loss(
    scores: Scores,  # [B, T] of completion tokens
    mask: Tensor,  # [B, T]; all zeros for a row of padding
    selected: Tensor,  # [B]
    options: AlgorithmConfig,
    num_completions: int,  # over all micro-batches and ranks, without padding
) -> tuple[Tensor, dict[str, float]]:
    """Return this micro-batch's part of the mean over all completions, and sums for metrics."""
    mask = mask.bool()
    gate = unlearn_gate(scores, mask, options) & selected.bool().unsqueeze(1)
    loss = unlearn_loss(scores, mask, gate, options) * (len(mask) / num_completions)
    entropy = torch.where(mask, scores.entropies.detach(), 0.0).sum()
    sums = {"gated": gate.sum(), "tokens": mask.sum(), "entropy": entropy, "loss": loss.detach()}
    return loss, {name: float(value) for name, value in sums.items()}


def gradient_norm(module: nn.Module) -> float:
    """Return the norm over all shards, the same on every rank.

    It is 0 if nothing is gated or all gated tokens are saturated.
    """
    gradients = [weight.grad for weight in module.parameters() if weight.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


@torch.no_grad()
def take_rollout_weights(module: nn.Module, lr: float) -> Shards:
    """Compute θ − lr · gradient in the gradient's memory, without allocating any.

    The gradients are then removed from the module.
    """
    shards = {}
    for name, weight in module.named_parameters():
        if weight.grad is not None:
            shards[name] = weight.grad.mul_(-lr).add_(weight.detach())
            weight.grad = None
    return shards


@torch.no_grad()
def count_changes(module: nn.Module, shards: Shards, dtype: torch.dtype) -> tuple[int, int]:
    """Count this rank's weights that differ between θ and θ′ after rounding, and all weights."""
    changed = total = 0
    for name, weight in module.named_parameters():
        total += _local(weight).numel()
        if name in shards:
            changed += int((_local(shards[name]).to(dtype) != _local(weight).to(dtype)).sum())
    return changed, total


@contextmanager
def rollout_weights(module: nn.Module, shards: Shards) -> Iterator[None]:
    """Make `module.state_dict()` return θ′ inside the block: verl's weight push reads it."""
    aliases: dict[int, list[str]] = {}  # tied weights have several names in the state dict
    for name, weight in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(weight), []).append(name)
    replaced = {
        alias: shards[name]
        for name, weight in module.named_parameters()
        if name in shards
        for alias in aliases[id(weight)]
    }

    def replace(_: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        for name, shard in replaced.items():
            if prefix + name in state:
                state[prefix + name] = shard

    handle = module.register_state_dict_post_hook(replace)
    try:
        yield
    finally:
        handle.remove()


def fingerprint(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    """Hash this rank's weights and optimizer state: two sums over the bytes of each tensor."""
    tensors = [_local(weight) for weight in module.parameters()]
    for state in optimizer.state.values():
        tensors += [_local(value) for value in state.values() if isinstance(value, Tensor)]
    return [part for tensor in tensors for part in _byte_sums(tensor)]


def _byte_sums(tensor: Tensor) -> tuple[int, int]:
    """Return a plain sum and one weighted by position. Chunks keep the int64 copies small."""
    plain = weighted = 0
    for chunk in tensor.contiguous().reshape(-1).view(torch.uint8).split(2**24):
        positions = torch.arange(1, len(chunk) + 1, device=chunk.device)
        plain += int(chunk.sum())
        weighted = (weighted * 31 + int((chunk * positions).sum())) % 2**61
    return plain, weighted


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()
