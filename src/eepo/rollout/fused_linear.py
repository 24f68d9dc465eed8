"""Fuses linear layers that share an input: q, k and v of an attention block, gate and up of an MLP.

With few rows a matrix product takes the time to read its weights, and small products do not
reach full memory bandwidth. One large product is faster than several small ones.

The weights of such layers move into one tensor. Each layer's weight becomes a view of it and keeps
its name, so `load_weights` still works. Each layer computes the whole fused product and returns its
own slice; in compiled layers, a graph pass removes the duplicate products. Without compilation, or
if the layers do not share their input, the result is correct but slower.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph
from torch.nn.functional import linear

from eepo.model.compilation import (
    can_compile,
    compile_layers,
    compile_modules,
    decoder_layers,
    norm_and_rotary_modules,
)

# Names of linear layers that share their input, within one module of a decoder layer.
FUSABLE_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
aten = torch.ops.aten
DEDUPLICATED_OPS = {
    aten.mm.default,
    aten.addmm.default,
    aten.view.default,
    aten.reshape.default,
    aten.permute.default,
}


class FusedWeights(NamedTuple):
    """Holds the weights of several linear layers, concatenated along the output dimension.

    No module registers these parameters, so they are neither saved nor loaded by themselves.
    """

    weight: nn.Parameter  # [sum of outputs, inputs]
    bias: nn.Parameter | None  # [sum of outputs]


class FusedLinear(nn.Linear):
    """Computes one slice of a fused product. Its weight is a view of some rows of `FusedWeights`.

    Writing into the weight is allowed. Moving, casting or copying the module is not.
    """

    fused: FusedWeights
    start: int
    end: int

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.fused.weight, self.fused.bias)[..., self.start : self.end]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "a model with fused linear layers cannot be moved or cast: its weights are views"
        )

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError(
            "a model with fused linear layers cannot be copied: its weights are views"
        )


class DeduplicateProducts(CustomGraphPass):
    """Runs `deduplicate_products` on a layer's graph before inductor fuses kernels."""

    def __call__(self, graph: Graph) -> None:
        deduplicate_products(graph)

    def uuid(self) -> Any:
        """Identifies this pass in torch's cache of compiled code."""
        return get_hash_for_files((__file__,))


def deduplicate_products(graph: Graph) -> None:
    """Keep the first of several equal matrix products. torch does this only with gradients.

    Equal results then share one tensor, which is safe: slices of a fused product do not overlap.
    """
    first_nodes: dict[str, Any] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in DEDUPLICATED_OPS:
            continue
        # Node names are unique, so equal texts mean equal inputs.
        expression = f"{node.target} {node.args} {node.kwargs}"
        first = first_nodes.setdefault(expression, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


# One object for all layers: layers with another options object would be compiled again.
COMPILE_OPTIONS = {
    "post_grad_custom_pre_pass": DeduplicateProducts(),
    # Merges small independent kernels: rotary embedding of queries and keys in one kernel.
    "combo_kernels": True,
}


def compile_fused(model: Any) -> bool:
    """Fuse linear layers, then compile the decoder layers, the last norm and the rotary embedding.

    Returns False if compilation is impossible. The model must not be trained, moved or copied
    afterwards. The last norm and the rotary embedding are little work but many kernels.
    """
    if can_compile(model):
        fuse_linears(model)
    if not compile_layers(model, COMPILE_OPTIONS):
        return False
    for module in norm_and_rotary_modules(model):
        compile_modules([module], COMPILE_OPTIONS)
    return True


@torch.no_grad()
def fuse_linears(model: Any) -> int:
    """Fuse linear layers in place and return how many matrix products this saves.

    Weights are concatenated group by group, so only one group exists twice at a time.
    """
    num_owners = Counter(
        id(weight) for module in model.modules() for weight in module.parameters(recurse=False)
    )

    def is_shared(linear_layer: nn.Module) -> bool:
        return any(num_owners[id(weight)] > 1 for weight in linear_layer.parameters())

    num_saved = 0
    for module in [module for layer in decoder_layers(model) for module in layer.modules()]:
        for names in FUSABLE_NAMES:
            linears: list[Any] = [getattr(module, name, None) for name in names]
            if _can_fuse(linears) and not any(map(is_shared, linears)):
                _fuse(linears)
                num_saved += len(linears) - 1
    return num_saved


def _can_fuse(linears: list[Any]) -> bool:
    """Check that all are plain `nn.Linear` of one input size, dtype and device.

    Adapters and quantized layers are subclasses or other classes; they are left alone.
    """
    if not all(type(layer) is nn.Linear for layer in linears):
        return False
    first, *others = map(_signature, linears)
    return all(other == first for other in others)


def _signature(layer: nn.Linear) -> tuple[Any, ...]:
    bias_dtype = None if layer.bias is None else layer.bias.dtype
    return layer.in_features, layer.weight.dtype, layer.weight.device, bias_dtype


def _fuse(linears: list[Any]) -> None:
    weight = nn.Parameter(torch.cat([layer.weight for layer in linears]), requires_grad=False)
    bias = None
    if linears[0].bias is not None:
        bias = nn.Parameter(torch.cat([layer.bias for layer in linears]), requires_grad=False)
    start = 0
    for layer in linears:
        end = start + layer.out_features
        layer.weight.data = weight.data[start:end]
        if bias is not None:
            layer.bias.data = bias.data[start:end]
        layer.__class__ = FusedLinear
        layer.fused, layer.start, layer.end = FusedWeights(weight, bias), start, end
        start = end
