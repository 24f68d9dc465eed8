"""Layers compiled by torch: their norms, rotations and activations fused. Layers are alike, so one compilation serves
all of them, and all sizes of a batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from eepo import kernels
from eepo.config import compiles

log = logging.getLogger(__name__)


def wants_compiling(model: Any, choice: str) -> bool:
    """`choice` is a recipe's: auto, on or off. Who says on, and cannot have it, is to hear why."""
    size = sum(weight.numel() for weight in model.parameters())
    return compiles(choice, size) and (choice == "on" or can_compile(model))


def can_compile(model: Any) -> bool:
    return not _obstacle(model)


def _obstacle(model: Any) -> str:
    """Why layers cannot be compiled there, in a few words."""
    if torch._dynamo.config.disable:
        return "torch.compile is turned off (TORCH_COMPILE_DISABLE)"
    return kernels.lacking() or ("" if model.device.type == "cuda" else "that needs a GPU")


def compile_layers(model: Any, options: dict[str, Any] | None = None) -> bool:
    """In place; names of weights stay. False, with one line, where torch cannot compile for the device.

    `options` are for the compiler.
    """
    if not can_compile(model):
        log.warning("layers are not compiled: %s", _obstacle(model))
        return False
    # A policy, its reference and an engine share the code of a layer, and ask it in several modes each.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    compile_modules(decoder_layers(model), options)
    return True


def compile_modules(modules: Sequence[nn.Module], options: dict[str, Any] | None = None) -> None:
    """Compiled when they are first called. If torch then fails, they run as they are, and one line says so."""

    def give_up(error: Exception) -> None:
        cause = getattr(error, "inner_exception", error)
        reason = next(iter(str(cause).strip().splitlines()), "")
        log.warning(
            "%s is not compiled, and slower: %s: %s",
            type(modules[0]).__name__,
            type(cause).__name__,
            reason,
        )
        for module in modules:
            module._compiled_call_impl = None

    for module in modules:
        module.compile(dynamic=True, options=options)
        module._compiled_call_impl = _or_plain(module, give_up)


def _or_plain(module: nn.Module, give_up: Callable[[Exception], None]) -> Callable[..., Any]:
    compiled: Any = module._compiled_call_impl

    def call(*given: Any, **named: Any) -> Any:
        try:
            return compiled(*given, **named)
        except TorchDynamoException as error:
            give_up(error)
        return module._call_impl(*given, **named)

    return call


def decoder_layers(model: Any) -> list[nn.Module]:
    """The one list of modules that is as long as the model is deep."""
    depth = model.config.get_text_config().num_hidden_layers
    lists = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    return list(lists[0]) if lists else []


def beside_layers(model: Any) -> list[nn.Module]:
    """The last norm and the rotary embedding, by what they are: next to the layers, alone, and made of vectors.

    An embedding that looks at its positions, to stretch itself for long ones, is none to compile.
    """
    layers = decoder_layers(model)
    parents = [
        one
        for one in model.modules()
        if any(list(child.children()) == layers for child in one.children())
    ]
    found = []
    for module in parents[0].children() if layers and parents else []:
        tensors = [*module.parameters(), *module.buffers()]
        small = (
            bool(tensors) and all(one.dim() < 2 for one in tensors) and not list(module.children())
        )
        if small and not any(
            kind in str(getattr(module, "rope_type", "")) for kind in ("dynamic", "longrope")
        ):
            found.append(module)
    return found
