"""The unlearning step on a sharded model: its loss as verl's engines call it, and θ′ beside θ.

The mathematics is `eepo.algorithm`'s; here are only verl's shapes and FSDP2's shards. θ is not written to here.
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

Shards = dict[
    str, Tensor
]  # of θ′, by parameter name; each a DTensor with its parameter's placement


@dataclass(frozen=True)
class Errand:
    """What the trainer asks of all workers at once."""

    options: AlgorithmConfig
    num_completions: int  # that the loss is a mean over: without padding
    wanted: tuple[bool, ...]  # of the rows of all ranks, in order: those to unlearn
    first_stage: tuple[bool, ...]  # those that θ sampled, on which a KL can be measured
    start_lr: float  # where a search for η begins
    debug: bool


def micro_batch_loss(
    scores: Scores,  # [B, T] of completion tokens
    mask: Tensor,  # [B, T]; a row of padding has none set
    wanted: Tensor,  # [B]
    options: AlgorithmConfig,
    num_completions: int,  # real ones, over all micro-batches and ranks
) -> tuple[Tensor, dict[str, float]]:
    """This micro-batch's part of the mean over all completions, and what it gated. Gate and loss share one forward."""
    mask = mask.bool()
    gate = unlearn_gate(scores, mask, options) & wanted.bool().unsqueeze(1)
    loss = unlearn_loss(scores, mask, gate, options) * (len(mask) / num_completions)
    entropy = torch.where(mask, scores.entropies.detach(), 0.0).sum()
    counts = {"gated": float(gate.sum()), "tokens": float(mask.sum()), "entropy": float(entropy)}
    return loss, counts | {"loss": float(loss.detach())}


def gradient_norm(module: nn.Module) -> float:
    """Over all shards: every rank gets the same number. 0 where nothing was gated, or all of it was saturated."""
    gradients = [weight.grad for weight in module.parameters() if weight.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


@torch.no_grad()
def take_rollout_weights(module: nn.Module, lr: float) -> Shards:
    """θ − lr · gradient, in the gradient's own memory: nothing is allocated. The module has no gradients after it."""
    shards = {}
    for name, weight in module.named_parameters():
        if weight.grad is not None:
            shards[name] = weight.grad.mul_(-lr).add_(weight.detach())
            weight.grad = None
    return shards


@torch.no_grad()
def count_changes(module: nn.Module, shards: Shards, dtype: torch.dtype) -> tuple[int, int]:
    """How many of this rank's rollout weights differ after rounding to `dtype`, and of how many."""
    changed = total = 0
    for name, weight in module.named_parameters():
        total += _local(weight).numel()
        if name in shards:
            changed += int((_local(shards[name]).to(dtype) != _local(weight).to(dtype)).sum())
    return changed, total


@contextmanager
def rollout_weights(module: nn.Module, shards: Shards) -> Iterator[None]:
    """Inside, `module.state_dict()` tells θ′: what verl's weight push reads. θ itself stays where it is."""
    aliases: dict[
        int, list[str]
    ] = {}  # a tied weight has several names there, and one among the parameters
    for name, weight in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(weight), []).append(name)
    moved = {
        alias: shards[name]
        for name, weight in module.named_parameters()
        if name in shards
        for alias in aliases[id(weight)]
    }

    def tell(_: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        state.update(
            {prefix + name: shard for name, shard in moved.items() if prefix + name in state}
        )

    handle = module.register_state_dict_post_hook(tell)
    try:
        yield
    finally:
        handle.remove()


def fingerprint(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    """Changes with any bit of this rank's weights or optimizer state, but for accidents: two sums over their bits."""
    tensors = [_local(weight) for weight in module.parameters()]
    for state in optimizer.state.values():
        tensors += [_local(value) for value in state.values() if isinstance(value, Tensor)]
    return [part for tensor in tensors for part in _bit_sums(tensor)]


def _bit_sums(tensor: Tensor) -> tuple[int, int]:
    """In pieces, so that the widened copies stay small."""
    plain = mixed = 0
    for bits in tensor.contiguous().reshape(-1).view(torch.uint8).split(2**24):
        places = torch.arange(1, len(bits) + 1, device=bits.device)
        plain += int(bits.sum())
        mixed = (mixed * 31 + int((bits * places).sum())) % 2**61
    return plain, mixed


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()
