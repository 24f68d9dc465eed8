"""x @ wᵀ + bias where x has few rows: what it takes is the time in which the matrix can be read.

So the matrix is cut into tiles of some columns, with several tiles on their way from memory at a time. Where these give
the card too few programs, several share the columns of one, each over a stretch of the sum; a second kernel adds their
parts, always in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 128  # about one for each multiprocessor of a large card: each has some 48 KB on their way, which is enough
MAX_SPLITS = 8


class Tile(NamedTuple):
    """How the work is cut."""

    columns: int = 64  # of the result, in one program
    depth: int = 128  # of the sum, in one load
    num_warps: int = 4
    num_stages: int = 4  # loads on their way
    splits: int = 0  # programs that share a sum; 0: as many as the card has room for


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(x, x_stride, matrix, matrix_stride, bias, out, num_rows, num_columns, length,
                    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
                    BIAS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    split = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = tl.arange(0, DEPTH)
    own_rows, own_columns = rows < num_rows, columns < num_columns
    x_lines = x + rows[:, None] * x_stride
    matrix_lines = matrix + columns.to(tl.int64)[:, None] * matrix_stride
    blocks = (length + DEPTH - 1) // DEPTH
    each = (blocks + tl.num_programs(1) - 1) // tl.num_programs(1)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(split * each, tl.minimum(split * each + each, blocks)):
        places = block * DEPTH + inside
        there = True if EVEN else (places < length)[None, :]
        left = tl.load(x_lines + places[None, :], mask=own_rows[:, None] & there, other=0.0)
        right = tl.load(matrix_lines + places[None, :], mask=own_columns[:, None] & there, other=0.0)
        sums = tl.dot(left, tl.trans(right), sums, input_precision=PRECISION)
    if BIAS:
        sums += tl.load(bias + columns, mask=own_columns, other=0.0).to(tl.float32)[None, :]
    line = (split * num_rows + rows).to(tl.int64)
    target = out + line[:, None] * num_columns + columns[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=own_rows[:, None] & own_columns[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def _sum_kernel(parts, bias, out, size, num_columns, num_splits, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = place < size
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(num_splits):
        total += tl.load(parts + split * size + place, mask=own, other=0.0)
    if BIAS:
        total += tl.load(bias + place % num_columns, mask=own, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=own)


def thin_product(
    x: Tensor,  # [M, K]
    matrix: Tensor,  # [N, K], of the type of x
    bias: Tensor | None = None,  # [N]
    dtype: torch.dtype | None = None,  # of the result; that of x, if none is said. Sums are fp32
    tile: Tile | None = None,
) -> Tensor:  # [M, N]
    (num_rows, length), num_columns = x.shape, matrix.shape[0]
    tile = tile or tile_for(num_rows)
    splits = tile.splits or num_splits(triton.cdiv(num_columns, tile.columns), triton.cdiv(length, tile.depth))
    x, matrix = (part if part.stride(1) == 1 else part.contiguous() for part in (x, matrix))
    out = torch.empty(num_rows, num_columns, dtype=dtype or x.dtype, device=x.device)
    parts = out if splits == 1 else out.new_empty(splits, num_rows, num_columns, dtype=torch.float32)
    _product_kernel[(triton.cdiv(num_columns, tile.columns), splits)](
        x, x.stride(0), matrix, matrix.stride(0), bias, parts, num_rows, num_columns, length,
        ROWS=max(16, triton.next_power_of_2(num_rows)), COLUMNS=tile.columns, DEPTH=tile.depth,
        EVEN=length % tile.depth == 0, BIAS=bias is not None and splits == 1,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if splits > 1:
        _sum_kernel[(triton.cdiv(out.numel(), 1024),)](
            parts, bias, out, out.numel(), num_columns, splits, BIAS=bias is not None, BLOCK=1024, num_warps=4
        )
    return out


def tile_for(num_rows: int) -> Tile:
    """x is read once for each tile of columns: many rows want wide ones, or that takes longer than the matrix.

    What is on its way takes shared memory: two programs are to fit beside each other.
    """
    if num_rows <= 64:
        return Tile() if num_rows <= 32 else Tile(num_stages=3)
    return Tile(columns=128, depth=64, num_warps=8, num_stages=3)


def num_splits(num_programs: int, num_blocks: int) -> int:
    """A power of two that gives the card enough programs, each with at least two blocks to sum."""
    splits = 1
    while splits < MAX_SPLITS and num_programs * splits < PROGRAMS and num_blocks >= 4 * splits:
        splits *= 2
    return splits
