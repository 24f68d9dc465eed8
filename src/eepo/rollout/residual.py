"""A layer's residual, added by the product that ends the layer instead of by a kernel after it.

Matrix products can add to what is there at no cost, but only in place: a sum in a tensor of its own would first be
copied there. So it is done where nobody reads the residual again. Such a sum is rounded once, not twice.
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
    """`residual + x @ weight` as `add_product` to a copy: graphs know no mutation. torch then spares the copy."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for total in [node for node in graph.nodes if node.target is aten.add.Tensor and not node.kwargs]:
        for residual, product in (total.args, total.args[::-1]):
            factors = _factors_of(product)
            own = factors and residual not in factors  # a product cannot be added to what it is still read from
            if own and _alike(residual, product) and _last_read(residual, total, order):
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


def _alike(residual: Any, product: Any) -> bool:
    if not isinstance(residual, Node):
        return False
    mine, other = residual.meta["val"], product.meta["val"]
    same = mine.dtype == other.dtype and statically_known_true(sym_eq(mine.shape, other.shape))
    return same and mine.is_contiguous()


def _last_read(residual: Node, total: Node, order: dict[Node, int]) -> bool:
    """Whether `total` is the last to read a tensor that is made here, and that no view leads to."""
    others = [user for user in residual.users if user is not total]
    return residual.target is aten.add.Tensor and not any(
        getattr(user.target, "is_view", True) or order[user] > order[total] for user in others
    )


def _put_in(graph: Graph, total: Node, residual: Node, x: Node, weight: Node) -> None:
    with graph.inserting_before(total):
        again = graph.node_copy(residual)  # with what is changed later torch fuses no reader; so they have their own
        given: dict[str, Any] = {"residual": again, "x": x, "weight": weight}
        called = graph.call_function(
            torch.ops.higher_order.auto_functionalized, (torch.ops.eepo.add_product.default,), given
        )
        called.meta["val"] = (None, total.meta["val"])
        after = graph.call_function(operator.getitem, (called, 1))
    after.meta = dict(total.meta)
    total.replace_all_uses_with(after)
    graph.erase_node(total)
