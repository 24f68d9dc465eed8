"""AdamW's update of one tensor whose moments are kept in bf16 or in 8 bits: all of it in one pass, nothing beside it.

The plain forms, and why they round at random, are in `optimizers.py`. Draws are the same to the bit, the rest is so up
to rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # weights of one program


@triton.jit
def _mixed(value):
    value = (value ^ (value >> 16)) * 0x7FEB352D
    value = (value ^ (value >> 15)) * 0x846CA68B
    return value ^ (value >> 16)


@triton.jit
def _draws(places, key, index):
    """32 random bits for each place."""
    first = tl.load(key).to(tl.uint32, bitcast=True)
    second = tl.load(key + 1).to(tl.uint32, bitcast=True)
    return _mixed(_mixed(places.to(tl.uint32) ^ first) ^ second ^ index.to(tl.uint32))


@triton.jit
def _moved(weight, first, second, rates, EPS: tl.constexpr):
    rate, correction, decay = tl.load(rates), tl.load(rates + 1), tl.load(rates + 2)
    return weight - (rate * first / (tl.sqrt_rn(second) * correction + EPS) + decay * weight)


@triton.jit
def _rounded(values, draws):
    """To bf16, up or down at random."""
    bits = values.to(tl.uint32, bitcast=True) + (draws & 0xFFFF)
    return (bits & 0xFFFF0000).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit(do_not_specialize=["index", "count"])
def _bf16_kernel(weight, gradient, first, second, rates, key, index, count,
                 KEEP_1: tl.constexpr, KEEP_2: tl.constexpr, EPS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = places < count
    g = tl.load(gradient + places, mask=there, other=0.0)
    old_first = tl.load(first + places, mask=there, other=0.0).to(tl.float32)
    old_second = tl.load(second + places, mask=there, other=0.0).to(tl.float32)
    new_first = old_first + KEEP_1 * (g - old_first)
    new_second = old_second + KEEP_2 * (g * g - old_second)
    w = tl.load(weight + places, mask=there, other=0.0)
    tl.store(weight + places, _moved(w, new_first, new_second, rates, EPS), mask=there)
    draws = _draws(places, key, index)
    tl.store(first + places, _rounded(new_first, draws), mask=there)
    tl.store(second + places, _rounded(new_second, draws >> 16), mask=there)


@triton.jit
def _fourth_power(value):
    square = value * value
    return square * square


@triton.jit
def _codes(sizes, draws, LEVELS: tl.constexpr):
    """[blocks, BLOCK] sizes -> whole numbers 0..LEVELS, up or down at random, and the largest of each block."""
    scales = tl.max(sizes, 1)
    shares = sizes / tl.maximum(scales, 1.1754943508222875e-38)[:, None]
    below = tl.minimum(tl.floor(tl.sqrt_rn(tl.sqrt_rn(shares)) * LEVELS), LEVELS - 1)
    low, high = _fourth_power(below / LEVELS), _fourth_power((below + 1) / LEVELS)
    chance = ((draws & 0xFFFF).to(tl.float32) + 0.5) / 65536
    return below + (shares - low > chance * (high - low)).to(tl.float32), scales


@triton.jit(do_not_specialize=["index", "count", "num_blocks"])
def _8bit_kernel(weight, gradient, first, first_scale, second, second_scale, rates, key, index, count, num_blocks,
                 KEEP_1: tl.constexpr, KEEP_2: tl.constexpr, EPS: tl.constexpr, LEVELS_1: tl.constexpr,
                 LEVELS_2: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    blocks = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    own, there = blocks < num_blocks, places < count
    inside = own[:, None]  # codes reach to the end of the last block, weights may not
    g = tl.load(gradient + places, mask=there, other=0.0)
    roots = tl.load(first + places, mask=inside, other=0).to(tl.float32) / LEVELS_1
    size = tl.load(first_scale + blocks, mask=own, other=0.0)[:, None]
    old_first = _fourth_power(roots) * tl.where(roots < 0, -size, size)
    roots = tl.load(second + places, mask=inside, other=0).to(tl.float32) / LEVELS_2
    old_second = _fourth_power(roots) * tl.load(second_scale + blocks, mask=own, other=0.0)[:, None]
    new_first = old_first + KEEP_1 * (g - old_first)
    new_second = old_second + KEEP_2 * (g * g - old_second)
    w = tl.load(weight + places, mask=there, other=0.0)
    tl.store(weight + places, _moved(w, new_first, new_second, rates, EPS), mask=there)
    draws = _draws(places, key, index)
    codes, scales = _codes(tl.abs(new_first), draws, LEVELS_1)
    tl.store(first + places, tl.where(new_first < 0, -codes, codes).to(tl.int8), mask=inside)
    tl.store(first_scale + blocks, scales, mask=own)
    codes, scales = _codes(new_second, draws >> 16, LEVELS_2)
    codes = tl.maximum(
        codes, (new_second > 0).to(tl.float32)
    )  # 0 would make the next step 1 / EPS times too large
    tl.store(second + places, codes.to(tl.uint8), mask=inside)
    tl.store(second_scale + blocks, scales, mask=own)


def update_bf16(
    weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, rates: Tensor, key: Tensor, index: int,
    betas: tuple[float, float], eps: float,
) -> None:  # fmt: skip
    count = weight.numel()
    _bf16_kernel[(triton.cdiv(count, TILE),)](
        weight, gradient, first, second, rates, key, index, count,
        KEEP_1=1 - betas[0], KEEP_2=1 - betas[1], EPS=eps, TILE=TILE,
    )  # fmt: skip


def update_8bit(
    weight: Tensor, gradient: Tensor, first: Tensor, first_scale: Tensor, second: Tensor, second_scale: Tensor,
    rates: Tensor, key: Tensor, index: int, betas: tuple[float, float], eps: float, levels: tuple[int, int],
) -> None:  # fmt: skip
    count, num_blocks = weight.numel(), len(first_scale)
    block = len(first) // num_blocks
    rows = TILE // block
    _8bit_kernel[(triton.cdiv(num_blocks, rows),)](
        weight, gradient, first, first_scale, second, second_scale, rates, key, index, count, num_blocks,
        KEEP_1=1 - betas[0], KEEP_2=1 - betas[1], EPS=eps, LEVELS_1=levels[0], LEVELS_2=levels[1], BLOCK=block,
        ROWS=rows,
    )  # fmt: skip
