"""A layer's residual, added by the product that ends the layer instead of by a kernel after it.

Matrix products can add to what is there at no cost, but only in place. So the residual is computed once more, for the
product alone; torch does that in the kernel that computes it for others. (If they shared one tensor, torch would fuse
nobody's reading of it with its computation, since it is changed later.) Such a sum is rounded once, not twice.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

aten = torch.ops.aten


@torch.library.custom_op("eepo::add_product", mutates_args={"residual"})
def add_product(residual: Tensor, x: Tensor, weight: Tensor) -> None:
    """[N, O], seen in any shape, += [N, I] @ [I, O]."""
    residual.view(x.shape[0], weight.shape[1]).addmm_(x, weight)


def add_in_products(graph: Graph) -> None:
    """`(a + b) + x @ weight` as `add_product` to another `a + b`. Graphs know no mutation; torch spares the copy."""
    for total in [
        node for node in graph.nodes if node.target is aten.add.Tensor and not node.kwargs
    ]:
        for residual, product in (total.args, total.args[::-1]):
            factors = _factors_of(product)
            if factors and _is_sum(residual) and _alike(residual, product):
                _put_in(graph, total, residual, *factors)
                break
    graph.eliminate_dead_code()


def _factors_of(product: Any) -> tuple[Any, ...]:
    """Of a product that nobody else wants; nothing if it is none."""
    while isinstance(product, Node) and len(product.users) == 1:
        if product.target is aten.mm.default:
            return product.args
        if product.target not in (aten.view.default, aten.reshape.default):
            break
        product = product.args[0]
    return ()


def _is_sum(residual: Any) -> bool:
    """Cheap to compute again. An input would have to be copied."""
    return isinstance(residual, Node) and residual.target is aten.add.Tensor


def _alike(residual: Node, product: Node) -> bool:
    mine, other = residual.meta["val"], product.meta["val"]
    same = mine.dtype == other.dtype and statically_known_true(sym_eq(mine.shape, other.shape))
    return same and mine.is_contiguous()


def _put_in(graph: Graph, total: Node, residual: Node, x: Node, weight: Node) -> None:
    with graph.inserting_before(total):
        again = graph.node_copy(residual)
        given: dict[str, Any] = {"residual": again, "x": x, "weight": weight}
        called = graph.call_function(
            torch.ops.higher_order.auto_functionalized, (torch.ops.eepo.add_product.default,), given
        )
        called.meta["val"] = (None, total.meta["val"])
        after = graph.call_function(operator.getitem, (called, 1))
    after.meta = dict(total.meta)
    total.replace_all_uses_with(after)
    graph.erase_node(total)
