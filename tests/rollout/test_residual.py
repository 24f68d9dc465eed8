"""A residual is added by the product before it: where it is cheap to compute once more for that, and nowhere else."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from torch.nn.functional import linear, silu

from eepo.rollout import fused_linear
from eepo.rollout.residual import add_in_products

IN_PLACE = torch.ops.higher_order.auto_functionalized
CAN_GENERATE = (
    any(map(shutil.which, ("gcc", "clang")))
    and Path(sysconfig.get_path("include"), "Python.h").is_file()
)


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def num_in_place(work: Callable[..., Any], *given: Tensor) -> int:
    """Products of `work` that add to what is there. Its results must be what they were, and its inputs untouched."""
    counts: list[int] = []

    def passed(graph: Any, inputs: Any) -> Any:
        add_in_products(graph.graph)
        graph.recompile()
        counts.append(sum(node.target is IN_PLACE for node in graph.graph.nodes))
        return graph

    backend = aot_autograd(fw_compiler=passed, decompositions=select_decomp_table())
    with torch.inference_mode():
        before, expected = [one.clone() for one in given], work(*given)
        got = torch.compile(work, backend=backend, dynamic=True)(*given)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(*pair) for pair in zip(before, given, strict=True))
    (count,) = counts
    return count


A, B, X, W = numbers(1, 5, 8), numbers(1, 5, 8) + 1, numbers(1, 5, 12), numbers(8, 12)


def test_a_residual_that_is_a_sum_takes_the_product() -> None:
    assert num_in_place(lambda a, b, x, w: (a + b) + linear(x, w), A, B, X, W) == 1
    assert (
        num_in_place(lambda a, b, x, w: linear(x, w) + (a + b), A, B, X, W) == 1
    )  # the other way round
    assert (
        num_in_place(lambda a, b, x, w: (a + b) + linear(x, w), A[0], B[0], X[0], W) == 1
    )  # no view
    assert (
        num_in_place(lambda a, b, x, w: (a + b) + linear(x * (a + b).sum(), w), A, B, X, W) == 1
    )  # read before
    heads = A.view(5, 2, 4), B.view(5, 2, 4), X, W
    assert (
        num_in_place(lambda a, b, x, w: (a + b) + linear(x, w).view(5, 2, 4), *heads) == 1
    )  # seen in another shape


def later(a: Tensor, b: Tensor, x: Tensor, w: Tensor) -> Any:
    residual = a + b
    return residual + linear(x, w), residual * 2


def in_a_view(a: Tensor, b: Tensor, x: Tensor, w: Tensor) -> Any:
    residual = a + b
    part = residual[:, 1:]
    return residual + linear(x, w), part.sin()


def product_too(a: Tensor, b: Tensor, x: Tensor, w: Tensor) -> Any:
    product = linear(x, w)
    return (a + b) + product, product.sin()


def turned(a: Tensor, b: Tensor, x: Tensor, w: Tensor) -> Any:
    """Its elements lie in another order than the product's."""
    return (a.transpose(1, 2) + b.transpose(1, 2)).transpose(1, 2) + linear(x, w)


@pytest.mark.parametrize("work", [
    later,
    in_a_view,
    lambda a, b, x, w: (r := a[0] + b[0]) + linear(r, w[:, :8]),  # the product's own factor
])  # fmt: skip
def test_who_else_reads_the_residual_reads_what_it_was(work: Any) -> None:
    assert num_in_place(work, A, B, X, W) == 1


@pytest.mark.parametrize(
    "work",
    [
        product_too,
        turned,
        lambda a, b, x, w: a + linear(x, w),  # of an input
        lambda a, b, x, w: torch.add(a + b, linear(x, w), alpha=2),
        lambda a, b, x, w: (a + b) + linear(x, w, w[:, 0]),  # with a bias
        lambda a, b, x, w: (a + b)[:, :1] + linear(x, w),  # one line for all
        lambda a, b, x, w: (
            (a.double() + b.double()) + linear(x, w)
        ),  # rounded less than it would be
        lambda a, b, x, w: (a + b) * linear(x, w),
        lambda a, b, x, w: linear(x, w) + 1.0,
    ],
)
def test_others_stay(work: Any) -> None:
    assert num_in_place(work, A, B, X, W) == 0


def test_two_sums_with_one_residual_have_one_each() -> None:
    assert (
        num_in_place(
            lambda a, b, x, w: ((r := a + b) + linear(x, w), r + linear(x.cos(), w)), A, B, X, W
        )
        == 2
    )


class Layer(nn.Module):
    """As a decoder's after its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.o, self.up, self.down = (
            nn.Linear(*sizes, bias=False) for sizes in ((8, 8), (8, 24), (24, 8))
        )
        self.norm = nn.RMSNorm(8)

    def forward(self, attended: Tensor, hidden: Tensor) -> Tensor:
        hidden = hidden + self.o(attended)
        return hidden + self.down(silu(self.up(self.norm(hidden))))


@pytest.mark.skipif(not CAN_GENERATE, reason="needs a C compiler and Python's headers")
def test_the_generated_code_copies_no_residual_and_leaves_the_inputs_alone() -> None:
    torch.manual_seed(0)
    layer = Layer()
    compiled = torch.compile(layer, dynamic=True, options=fused_linear.OPTIONS)
    with torch.inference_mode():
        for num_tokens in (5, 3, 1):
            given = numbers(1, num_tokens, 8), numbers(1, num_tokens, 8).sin()
            before = [one.clone() for one in given]
            got, codes = run_and_get_code(compiled, *given)
            torch.testing.assert_close(got, layer(*given), rtol=1e-5, atol=1e-5)
            assert all(torch.equal(*pair) for pair in zip(before, given, strict=True))
            for code in codes:
                called = code[code.index("def call(") :]
                assert called.count("eepo.add_product.default(") == 1
                assert called.count("extern_kernels.mm(") == 2
                assert (
                    called.count("cpp_fused") == 2
                )  # the first sum with its norm, and the activation
                assert "clone" not in called
                assert "copy" not in called
