"""Matrix products of decode steps in which few rows are left, in the engine's own model: by a kernel of ours.

Modules keep their names and their weights, in place: only their class changes. The number of rows is looked at when a
product is asked for, inside an operator that torch sees as one: so a compiled layer stays one for all sizes, and a CUDA
graph holds what its own size wants.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from eepo import kernels
from eepo.compiled import decoder_layers
from eepo.head import wide_product

log = logging.getLogger(__name__)

MOST_ROWS = 0  # that count as few; 0: none do, until that is timed to be faster (benchmarks/few_rows.py)
TYPES = {torch.bfloat16}  # of weights that are read this way
CLOSE = 0.01  # relative: rounding to bf16 alone is 0.002
SCHEMA = "(Tensor x, Tensor weight, Tensor? bias) -> Tensor"


@torch.library.custom_op("eepo::thin_linear", mutates_args=(), schema=SCHEMA)
def thin_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_rows = x.numel() // x.shape[-1]
    if not 0 < num_rows <= MOST_ROWS or x.dtype != weight.dtype:
        return linear(x, weight, bias)
    product = kernels.chosen("thin_product", x.device)
    return product(x.reshape(num_rows, -1), weight, bias).view(*x.shape[:-1], -1)


@thin_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class ThinLinear(nn.Linear):
    """A linear map that has no gradient, and is fast where few rows come in."""

    def forward(self, x: Tensor) -> Tensor:
        return thin_linear(x, self.weight, self.bias)


def logits_product(rows: Tensor, matrix: Tensor) -> Tensor:
    """[N, H], [V, H] -> [N, V] fp32, for the head of the same model."""
    if not 0 < len(rows) <= MOST_ROWS or matrix.dtype not in TYPES or rows.dtype != matrix.dtype:
        return wide_product(rows, matrix)
    return kernels.chosen("thin_product", rows.device)(rows, matrix, None, torch.float32)


def adopt(model: Any) -> bool:
    """Whether `model`, which nobody trains, now multiplies few rows this way. If it should and cannot, a line says why.

    The head is then to be asked for `logits_product`s.
    """
    maps = [part for layer in decoder_layers(model) for part in layer.modules() if type(part) is nn.Linear]
    maps = [part for part in maps if part.weight.dtype in TYPES]
    if not MOST_ROWS or not maps or not kernels.available(model.device):
        return False
    reason = _trouble(maps, model.get_output_embeddings().weight)
    if reason:
        log.warning("few rows are multiplied as many are, which is slower: %s", reason)
        return False
    for part in maps:
        part.__class__ = ThinLinear
    return True


@torch.inference_mode()
def _trouble(maps: list[nn.Linear], head: Tensor) -> str:
    """In a few words; nothing if products of each shape are torch's. Each power of two of rows is another kernel."""
    from triton import TritonError

    sizes = sorted({1, MOST_ROWS, *(1 << power for power in range(5, MOST_ROWS.bit_length()))})
    shapes = {(part.weight.shape, part.bias is None): part for part in maps}
    gaps = []
    try:
        for num_rows in sizes:
            for part in shapes.values():
                x = _rows(num_rows, part.weight)
                gaps.append(_gap(thin_linear(x, part.weight, part.bias), linear(x, part.weight, part.bias)))
            x = _rows(num_rows, head)
            gaps.append(_gap(logits_product(x, head), wide_product(x, head)))
    except (RuntimeError, TritonError) as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return "" if all(gap <= CLOSE for gap in gaps) else f"products are off by {max(gaps):.1g}"  # or no numbers


def _rows(num_rows: int, weight: Tensor) -> Tensor:
    """Something to multiply with, the same for everyone."""
    places = torch.arange(num_rows * weight.shape[1], dtype=torch.float32, device=weight.device)
    return torch.sin(places).to(weight.dtype).view(num_rows, -1)


def _gap(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).float().norm() / theirs.float().norm().clamp(min=1e-30))
