"""Products with the same input as one: queries, keys and values of a layer, and the two that an MLP begins with.

With few rows a product takes the time to read its matrix, and a small one not even that: so few and large is fast.
Weights lie in one tensor, and each module's own is a view of it, under its old name. Each module asks for the whole
product and takes its part; a compiled layer is told to compute what it was asked for three times once. Modules that do
not share their input, after all, are slow, not wrong. So is all of it in layers that are not compiled.
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
    beside_layers,
    can_compile,
    compile_layers,
    compile_modules,
    decoder_layers,
)
from eepo.rollout import residual
from eepo.rollout.residual import add_in_products

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
aten = torch.ops.aten
MERGED = {
    aten.mm.default,
    aten.addmm.default,
    aten.view.default,
    aten.reshape.default,
    aten.permute.default,
}


class Pack(NamedTuple):
    """Of siblings, below each other. Parameters of no module: neither saved nor loaded, and of fixed size."""

    weight: nn.Parameter  # [all outputs, inputs]
    bias: nn.Parameter | None  # [all outputs]


class PackedLinear(nn.Linear):
    """A linear map whose weight is some rows of a `Pack`. To write into it is fine; to move or cast it is not."""

    pack: Pack
    start: int
    end: int

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.pack.weight, self.pack.bias)[..., self.start : self.end]

    def _apply(self, *given: Any, **options: Any) -> Any:
        raise RuntimeError(
            "a packed model stays on its device and in its type: its weights are views"
        )

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError(
            "a packed model is not copied: the copy's weights would be views of nothing that it uses"
        )


def compute_once(graph: Graph) -> None:
    """Of equal products in a graph the first stays. torch itself looks for such only where there are gradients.

    Equal results are then one tensor: fine for parts of a pack, which do not overlap.
    """
    seen: dict[str, Any] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in MERGED:
            continue
        first = seen.setdefault(
            f"{node.target} {node.args} {node.kwargs}", node
        )  # a node's name is its own
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


class FewerKernels(CustomGraphPass):
    """What a compiled layer's graph goes through before torch fuses what is left."""

    def __call__(self, graph: Graph) -> None:
        compute_once(graph)
        add_in_products(graph)

    def uuid(self) -> Any:
        """Says to torch's cache of compiled code which pass it was."""
        return get_hash_for_files((__file__, residual.__file__))


OPTIONS = {  # one for all: layers compiled with another are compiled again
    "post_grad_custom_pre_pass": FewerKernels(),
    "combo_kernels": True,  # small ones that do not wait for each other are one: queries and keys are turned together
}


def compile_packed(model: Any) -> bool:
    """As `compile_layers`, for a model that nobody trains, moves or copies: with products of one input as one.

    What goes before and after the layers is compiled too: little work, but in many kernels.
    """
    if can_compile(model):
        pack(model)
    if not compile_layers(model, OPTIONS):
        return False
    for module in beside_layers(model):
        compile_modules([module], OPTIONS)
    return True


@torch.no_grad()
def pack(model: Any) -> int:
    """How many products are left out. Layer by layer: no more than one pack is held twice at a time."""
    owners = Counter(
        id(weight) for module in model.modules() for weight in module.parameters(recurse=False)
    )
    spared = 0
    for module in [module for layer in decoder_layers(model) for module in layer.modules()]:
        for names in SIBLINGS:
            parts: list[Any] = [getattr(module, name, None) for name in names]
            if _alike(parts) and all(
                owners[id(weight)] == 1 for part in parts for weight in part.parameters()
            ):
                _join(parts)
                spared += len(parts) - 1
    return spared


def _alike(parts: list[Any]) -> bool:
    """Adapters and quantized maps are classes of their own, and stay."""
    if not all(type(part) is nn.Linear for part in parts):
        return False
    biases = {one.weight.dtype if one.bias is None else one.bias.dtype for one in parts}
    kinds = {
        (one.in_features, one.bias is None, one.weight.dtype, one.weight.device) for one in parts
    }
    return len(kinds) == 1 and len(biases) == 1


def _join(parts: list[Any]) -> None:
    weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
    bias = None
    if parts[0].bias is not None:
        bias = nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False)
    start = 0
    for part in parts:
        end = start + part.out_features
        part.weight.data = weight.data[start:end]
        if bias is not None:
            part.bias.data = bias.data[start:end]
        part.__class__ = PackedLinear
        part.pack, part.start, part.end = Pack(weight, bias), start, end
        start = end
