"""Compile decoder layers with torch, which fuses norms, rotary embeddings and activations.

All layers have the same code, so one compilation serves all of them and every batch size.
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
from eepo.config import should_compile

log = logging.getLogger(__name__)


def should_compile_layers(model: Any, choice: str) -> bool:
    """Tell whether a recipe's `choice` (auto, on or off) asks to compile this model's layers.

    With `on` the answer is True even if compilation is impossible: `compile_layers` then warns.
    """
    num_parameters = sum(weight.numel() for weight in model.parameters())
    return should_compile(choice, num_parameters) and (choice == "on" or can_compile(model))


def can_compile(model: Any) -> bool:
    return not _obstacle(model)


def _obstacle(model: Any) -> str:
    """Return why layers cannot be compiled on the model's device, or ""."""
    if torch._dynamo.config.disable:
        return "torch.compile is turned off (TORCH_COMPILE_DISABLE)"
    if reason := kernels.triton_unavailable_reason():
        return reason
    return "" if model.device.type == "cuda" else "compilation needs a GPU"


def compile_layers(model: Any, options: dict[str, Any] | None = None) -> bool:
    """Compile the decoder layers in place; names of weights stay. `options` go to the compiler.

    If that is impossible on the model's device, log a warning and return False.
    """
    if not can_compile(model):
        log.warning("layers are not compiled: %s", _obstacle(model))
        return False
    # A policy, its reference and an engine run the same layer code, in several modes each.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    compile_modules(decoder_layers(model), options)
    return True


def compile_modules(modules: Sequence[nn.Module], options: dict[str, Any] | None = None) -> None:
    """Compile modules at their first call. If torch fails, warn and run them uncompiled."""

    def give_up(error: Exception) -> None:
        cause = getattr(error, "inner_exception", error)
        reason = next(iter(str(cause).strip().splitlines()), "")
        name = type(modules[0]).__name__
        log.warning("%s runs uncompiled, slower: %s: %s", name, type(cause).__name__, reason)
        for module in modules:
            module._compiled_call_impl = None

    for module in modules:
        module.compile(dynamic=True, options=options)
        module._compiled_call_impl = _with_fallback(module, give_up)


def _with_fallback(module: nn.Module, give_up: Callable[[Exception], None]) -> Callable[..., Any]:
    compiled: Any = module._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            give_up(error)
        return module._call_impl(*args, **kwargs)

    return call


def decoder_layers(model: Any) -> list[nn.Module]:
    """Return the decoder layers: the first module list with `num_hidden_layers` entries."""
    depth = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return list(module)
    return []


def norm_and_rotary_modules(model: Any) -> list[nn.Module]:
    """Return the final norm and the rotary embedding, to be compiled beside the layers.

    Family names differ, so they are recognized by structure: siblings of the layer list, without
    children, whose tensors are all vectors. A rotary embedding that depends on the largest position
    (dynamic, longrope) cannot be compiled and is left out.
    """
    layers = decoder_layers(model)
    if not layers:
        return []
    for parent in model.modules():
        if any(list(child.children()) == layers for child in parent.children()):
            return [module for module in parent.children() if _is_norm_or_rotary(module)]
    return []


def _is_norm_or_rotary(module: nn.Module) -> bool:
    tensors = [*module.parameters(), *module.buffers()]
    only_vectors = bool(tensors) and all(tensor.dim() < 2 for tensor in tensors)
    rope_type = str(getattr(module, "rope_type", ""))
    depends_on_positions = any(kind in rope_type for kind in ("dynamic", "longrope"))
    return only_vectors and not list(module.children()) and not depends_on_positions
