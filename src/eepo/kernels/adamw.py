"""AdamW's update of one tensor with moments in bf16 or 8 bits, in one pass without temporaries.

The plain versions, and the reasons for stochastic rounding, are in `model/optimizers.py`. Random
bits are equal to the bit; all other values are equal up to rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # weights per program


@triton.jit
def _mix(value):
    value = (value ^ (value >> 16)) * 0x7FEB352D
    value = (value ^ (value >> 15)) * 0x846CA68B
    return value ^ (value >> 16)


@triton.jit
def _random_bits(indices, random_key, tensor_index):
    """Return 32 random bits per index."""
    first = tl.load(random_key).to(tl.uint32, bitcast=True)
    second = tl.load(random_key + 1).to(tl.uint32, bitcast=True)
    return _mix(_mix(indices.to(tl.uint32) ^ first) ^ second ^ tensor_index.to(tl.uint32))


@triton.jit
def _stepped(weight, first, second, rates, EPS: tl.constexpr):
    rate, correction, decay = tl.load(rates), tl.load(rates + 1), tl.load(rates + 2)
    return weight - (rate * first / (tl.sqrt_rn(second) * correction + EPS) + decay * weight)


@triton.jit
def _round_to_bf16(values, random_bits):
    """Round stochastically."""
    bits = values.to(tl.uint32, bitcast=True) + (random_bits & 0xFFFF)
    return (bits & 0xFFFF0000).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit(do_not_specialize=["tensor_index", "count"])
def _bf16_kernel(
    weight, gradient, first, second, rates, random_key, tensor_index, count,
    KEEP_1: tl.constexpr, KEEP_2: tl.constexpr, EPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    indices = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = indices < count
    g = tl.load(gradient + indices, mask=inside, other=0.0)
    old_first = tl.load(first + indices, mask=inside, other=0.0).to(tl.float32)
    old_second = tl.load(second + indices, mask=inside, other=0.0).to(tl.float32)
    new_first = old_first + KEEP_1 * (g - old_first)
    new_second = old_second + KEEP_2 * (g * g - old_second)
    w = tl.load(weight + indices, mask=inside, other=0.0)
    tl.store(weight + indices, _stepped(w, new_first, new_second, rates, EPS), mask=inside)
    bits = _random_bits(indices, random_key, tensor_index)
    tl.store(first + indices, _round_to_bf16(new_first, bits), mask=inside)
    tl.store(second + indices, _round_to_bf16(new_second, bits >> 16), mask=inside)


@triton.jit
def _fourth_power(value):
    square = value * value
    return square * square


@triton.jit
def _codes(sizes, random_bits, LEVELS: tl.constexpr):
    """Encode sizes [blocks, BLOCK] as integers 0..LEVELS and block maxima; round stochastically."""
    scales = tl.max(sizes, 1)
    shares = sizes / tl.maximum(scales, 1.1754943508222875e-38)[:, None]
    lower = tl.minimum(tl.floor(tl.sqrt_rn(tl.sqrt_rn(shares)) * LEVELS), LEVELS - 1)
    low, high = _fourth_power(lower / LEVELS), _fourth_power((lower + 1) / LEVELS)
    threshold = ((random_bits & 0xFFFF).to(tl.float32) + 0.5) / 65536
    return lower + (shares - low > threshold * (high - low)).to(tl.float32), scales


@triton.jit(do_not_specialize=["tensor_index", "count", "num_blocks"])
def _8bit_kernel(
    weight, gradient, first, first_scale, second, second_scale, rates, random_key, tensor_index,
    count, num_blocks,
    KEEP_1: tl.constexpr, KEEP_2: tl.constexpr, EPS: tl.constexpr, LEVELS_1: tl.constexpr,
    LEVELS_2: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    blocks = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    indices = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    # Codes fill the last block; weights may end before it.
    block_inside, inside = blocks < num_blocks, indices < count
    code_inside = block_inside[:, None]
    g = tl.load(gradient + indices, mask=inside, other=0.0)
    roots = tl.load(first + indices, mask=code_inside, other=0).to(tl.float32) / LEVELS_1
    scale = tl.load(first_scale + blocks, mask=block_inside, other=0.0)[:, None]
    old_first = _fourth_power(roots) * tl.where(roots < 0, -scale, scale)
    roots = tl.load(second + indices, mask=code_inside, other=0).to(tl.float32) / LEVELS_2
    scale = tl.load(second_scale + blocks, mask=block_inside, other=0.0)[:, None]
    old_second = _fourth_power(roots) * scale
    new_first = old_first + KEEP_1 * (g - old_first)
    new_second = old_second + KEEP_2 * (g * g - old_second)
    w = tl.load(weight + indices, mask=inside, other=0.0)
    tl.store(weight + indices, _stepped(w, new_first, new_second, rates, EPS), mask=inside)
    bits = _random_bits(indices, random_key, tensor_index)
    codes, scales = _codes(tl.abs(new_first), bits, LEVELS_1)
    codes = tl.where(new_first < 0, -codes, codes)
    tl.store(first + indices, codes.to(tl.int8), mask=code_inside)
    tl.store(first_scale + blocks, scales, mask=block_inside)
    codes, scales = _codes(new_second, bits >> 16, LEVELS_2)
    # A positive second moment stays positive: with code 0, EPS alone would divide the next step.
    codes = tl.maximum(codes, (new_second > 0).to(tl.float32))
    tl.store(second + indices, codes.to(tl.uint8), mask=code_inside)
    tl.store(second_scale + blocks, scales, mask=block_inside)


def update_bf16(
    weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor,
    rates: Tensor, random_key: Tensor, tensor_index: int,
    betas: tuple[float, float], eps: float,
) -> None:  # fmt: skip
    count = weight.numel()
    _bf16_kernel[(triton.cdiv(count, TILE),)](
        weight, gradient, first, second, rates, random_key, tensor_index, count,
        KEEP_1=1 - betas[0], KEEP_2=1 - betas[1], EPS=eps, TILE=TILE,
    )  # fmt: skip


def update_8bit(
    weight: Tensor, gradient: Tensor,
    first: Tensor, first_scale: Tensor, second: Tensor, second_scale: Tensor,
    rates: Tensor, random_key: Tensor, tensor_index: int,
    betas: tuple[float, float], eps: float, levels: tuple[int, int],
) -> None:  # fmt: skip
    count, num_blocks = weight.numel(), len(first_scale)
    block = len(first) // num_blocks
    rows = TILE // block
    _8bit_kernel[(triton.cdiv(num_blocks, rows),)](
        weight, gradient, first, first_scale, second, second_scale, rates, random_key, tensor_index,
        count, num_blocks,
        KEEP_1=1 - betas[0], KEEP_2=1 - betas[1], EPS=eps, LEVELS_1=levels[0], LEVELS_2=levels[1],
        BLOCK=block, ROWS=rows,
    )  # fmt: skip
