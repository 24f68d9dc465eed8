"""One draw for each row from its logits, and the row's books: the vocabulary is read once, and one block of it twice.

What it draws is what `reference.sample_tokens` draws. Each block of each row has a program of its own, so that the whole card
reads, however few rows there are; a second kernel joins what these found.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eepo.kernels.row_state import Outputs, RowState

BLOCK = 2048
GOLDEN = tl.constexpr(-7046029254386353131)  # splitmix64's numbers, as int64
MIX_1 = tl.constexpr(-4658895280553007687)
MIX_2 = tl.constexpr(-7723592293110705685)


@triton.jit
def _uniform(key, position):
    """splitmix64, as `randomness.uniforms`."""
    mixed = key + (position + 1) * GOLDEN
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * MIX_1
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * MIX_2
    mixed = mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)
    return ((mixed >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _scale_of(inverse_temperature):
    inverse = tl.load(inverse_temperature)
    return tl.where(
        inverse == 0.0, 1.0, inverse
    )  # greedy reports the distribution at temperature 1


@triton.jit
def _values_of(row, block, scale, vocabulary, BLOCK: tl.constexpr):
    place = block * BLOCK + tl.arange(0, BLOCK)
    return tl.load(row + place, mask=place < vocabulary, other=float("-inf")).to(tl.float32) * scale


@triton.jit
def _masses_of(values, top):
    """Relative to `top`; their sum, and that of each times its value."""
    masses = tl.exp(values - tl.where(top == float("-inf"), 0.0, top))  # no token may be possible
    return tl.sum(masses, 0), tl.sum(tl.where(masses > 0, masses * values, 0.0), 0)


@triton.jit
def _block_kernel(logits, logits_stride, sources, slots, inverse_temperature, live, parts, vocabulary,
                  PADDED_BLOCKS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One program a row and block: the block's highest value, and sums relative to it."""
    row, block = tl.program_id(0), tl.program_id(1)
    if tl.load(live + tl.load(slots + row)) == 0:
        return
    source = logits + tl.load(sources + row) * logits_stride
    values = _values_of(source, block, _scale_of(inverse_temperature), vocabulary, BLOCK)
    top = tl.max(values, 0)
    block_sum, block_weighted = _masses_of(values, top)
    part = parts + row * 3 * PADDED_BLOCKS + block
    tl.store(part, top)
    tl.store(part + PADDED_BLOCKS, block_sum)
    tl.store(part + 2 * PADDED_BLOCKS, block_weighted)


@triton.jit
def _join_kernel(
    parts, logits, logits_stride, sources, slots, inverse_temperature, ends,
    tokens, positions, num_drawn, limits, keys, outputs, live,
    out_tokens, out_logprobs, out_entropies, out_lengths, out_finished, out_stride,
    vocabulary,
    NUM_BLOCKS: tl.constexpr, PADDED_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, NUM_ENDS: tl.constexpr,
):  # fmt: skip
    """One program a row, after those of its blocks: a block by what blocks weigh, then a token in it; and the books."""
    slot = tl.load(slots + tl.program_id(0))
    if tl.load(live + slot) == 0:
        return
    blocks = tl.arange(0, PADDED_BLOCKS)
    part = parts + tl.program_id(0) * 3 * PADDED_BLOCKS + blocks
    there = blocks < NUM_BLOCKS
    block_tops = tl.load(part, mask=there, other=float("-inf"))
    block_sums = tl.load(part + PADDED_BLOCKS, mask=there, other=0.0)
    block_weighted = tl.load(part + 2 * PADDED_BLOCKS, mask=there, other=0.0)
    top = tl.max(block_tops, 0)
    fade = tl.exp(block_tops - top)
    total = tl.sum(block_sums * fade, 0)
    weighted = tl.sum(block_weighted * fade, 0)

    row = logits + tl.load(sources + tl.program_id(0)) * logits_stride
    scale = _scale_of(inverse_temperature)
    greedy = tl.load(inverse_temperature) == 0.0
    position = tl.load(num_drawn + slot)
    cumulative = tl.cumsum((block_sums * fade).to(tl.float64), 0)
    target = _uniform(tl.load(keys + slot), position) * tl.max(cumulative, 0)
    chosen = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), 0), NUM_BLOCKS - 1)
    chosen = tl.where(greedy, tl.argmax(block_tops, 0), chosen)  # the first of equals
    before = tl.max(tl.where(blocks < chosen, cumulative, 0.0), 0)
    values = _values_of(row, chosen, scale, vocabulary, BLOCK)
    within = tl.cumsum(tl.exp(values - top).to(tl.float64), 0)
    target = tl.minimum(
        target - before, tl.max(within, 0) * (1.0 - 1e-12)
    )  # rounding must not leave the block
    inside = tl.where(greedy, tl.argmax(values, 0), tl.sum((within <= target).to(tl.int32), 0))
    token = tl.minimum(
        chosen * BLOCK + inside, vocabulary - 1
    )  # whatever logits hold, no other row is read

    log_total = top + tl.log(total)
    line = tl.load(outputs + slot) * out_stride + position
    tl.store(out_tokens + line, token)
    tl.store(out_logprobs + line, tl.load(row + token).to(tl.float32) * scale - log_total)
    tl.store(out_entropies + line, log_total - weighted / total)
    ended = tl.sum((tl.load(ends + tl.arange(0, NUM_ENDS)) == token).to(tl.int32), 0) > 0
    tl.store(out_lengths + tl.load(outputs + slot), (position + 1).to(tl.int32))
    tl.store(out_finished + tl.load(outputs + slot), ended.to(tl.int32))
    tl.store(tokens + slot, token.to(tl.int64))
    tl.store(positions + slot, tl.load(positions + slot) + 1)
    tl.store(num_drawn + slot, position + 1)
    tl.store(live + slot, ((position + 1 < tl.load(limits + slot)) & (ended == 0)).to(tl.int32))


def sample_tokens(
    logits: Tensor,  # [P, V]
    sources: Tensor,  # [B] int64: the row of `logits` each draw is from
    slots: Tensor,  # [B] int64: whose draw it is
    inverse_temperature: Tensor,  # [1] fp32; 0 takes the likeliest token
    ends: Tensor,  # [E] int64, E a power of two: tokens that end a row; -1 is none
    state: RowState,
    outputs: Outputs,
) -> None:
    """Draws for those of `slots` that are live, writes them into `outputs`, moves their `state` on."""
    num_blocks = triton.cdiv(logits.shape[1], BLOCK)
    padded = triton.next_power_of_2(num_blocks)
    given = logits, logits.stride(0), sources, slots, inverse_temperature
    books = (
        ends, state.tokens, state.positions, state.num_drawn, state.limits, state.keys, state.outputs, state.live,
        outputs.tokens, outputs.logprobs, outputs.entropies, outputs.lengths, outputs.finished,
        outputs.tokens.stride(0), logits.shape[1],
    )  # fmt: skip
    sizes = {
        "NUM_BLOCKS": num_blocks,
        "PADDED_BLOCKS": padded,
        "BLOCK": BLOCK,
        "NUM_ENDS": len(ends),
    }
    # Highest values, sums, sums weighted by value: 12 bytes for a block, of which logits take 8 KB.
    parts = torch.empty(len(slots), 3, padded, device=logits.device)
    _block_kernel[(len(slots), num_blocks)](
        *given, state.live, parts, logits.shape[1], PADDED_BLOCKS=padded, BLOCK=BLOCK, num_warps=4
    )
    _join_kernel[(len(slots),)](parts, *given, *books, **sizes, num_warps=8)
