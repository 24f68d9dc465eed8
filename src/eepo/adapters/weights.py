"""θ′ in the place of θ, and θ back, in a model that a host trains, sharded or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import Parameter

from eepo.algorithm import unlearned_weights


def reshard(model: nn.Module) -> None:
    """FSDP leaves the last layers gathered after a forward pass: not what their shards hold if these change."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def own_gradients(weights: dict[str, Parameter]) -> Iterator[None]:
    """Inside, every `.grad` starts empty; what was there is back afterwards."""
    kept = {name: weight.grad for name, weight in weights.items()}
    for weight in weights.values():
        weight.grad = None
    try:
        yield
    finally:
        for name, weight in weights.items():
            weight.grad = kept[name]


@contextmanager
@torch.no_grad()
def moved(weights: dict[str, Parameter], gradient: dict[str, Tensor], lr: float) -> Iterator[None]:
    """θ − lr · gradient in place of θ. The gradient's memory holds θ meanwhile: exact, and no third copy."""
    named = [(name, weights[name]) for name in gradient]
    kept: list[str] = []  # an embedding's step may find no memory when others are made
    try:
        for name, stepped in unlearned_weights(named, gradient, lr, torch.float32):
            gradient[name].copy_(weights[name])
            kept.append(name)
            weights[name].copy_(stepped)
        yield
    finally:
        for name in kept:
            weights[name].copy_(gradient[name])


@contextmanager
@torch.no_grad()
def tried(
    weights: dict[str, Parameter], gradient: dict[str, Tensor]
) -> Iterator[Callable[[float], None]]:
    """A way to put θ − lr · gradient in place of θ again and again. The gradient stays: for that, a third copy."""
    kept = {name: weights[name].detach().clone() for name in gradient}

    @torch.no_grad()
    def put(lr: float) -> None:
        for name, stepped in unlearned_weights(kept.items(), gradient, lr, torch.float32):
            weights[name].copy_(stepped)

    try:
        yield put
    finally:
        for name, theta in kept.items():
            weights[name].copy_(theta)
