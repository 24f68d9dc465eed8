"""Writes θ′ into a model that a host framework trains, and restores θ. Works with FSDP2 shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import Parameter

from eepo.algorithm import unlearned_weights


def reshard(model: nn.Module) -> None:
    """Free the weights that FSDP keeps gathered after a forward pass.

    They would be stale after a change of the shards.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def stashed_gradients(weights: dict[str, Parameter]) -> Iterator[None]:
    """Set every `.grad` to None inside the block and restore it afterwards."""
    stash = {name: weight.grad for name, weight in weights.items()}
    for weight in weights.values():
        weight.grad = None
    try:
        yield
    finally:
        for name, weight in weights.items():
            weight.grad = stash[name]


@contextmanager
@torch.no_grad()
def unlearned_in_place(
    weights: dict[str, Parameter], gradient: dict[str, Tensor], lr: float
) -> Iterator[None]:
    """Replace θ by θ − lr · gradient inside the block, then restore θ bit for bit.

    The gradient's memory holds θ meanwhile, so no third copy is needed. The gradient is lost.
    """
    theta = [(name, weights[name]) for name in gradient]
    saved: list[str] = []  # a step that runs out of memory restores only these
    try:
        for name, stepped in unlearned_weights(theta, gradient, lr, torch.float32):
            gradient[name].copy_(weights[name])
            saved.append(name)
            weights[name].copy_(stepped)
        yield
    finally:
        for name in saved:
            weights[name].copy_(gradient[name])


@contextmanager
@torch.no_grad()
def trial_steps(
    weights: dict[str, Parameter], gradient: dict[str, Tensor]
) -> Iterator[Callable[[float], None]]:
    """Yield a function that replaces θ by θ − lr · gradient. θ is restored after the block.

    The function may be called repeatedly: the gradient is kept, and a third copy holds θ.
    """
    theta = {name: weights[name].detach().clone() for name in gradient}

    @torch.no_grad()
    def take_step(lr: float) -> None:
        for name, stepped in unlearned_weights(theta.items(), gradient, lr, torch.float32):
            weights[name].copy_(stepped)

    try:
        yield take_step
    finally:
        for name, weight in theta.items():
            weights[name].copy_(weight)
