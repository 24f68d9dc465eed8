"""One draw for each row from its logits, and the row's books: the vocabulary is read once, and one block of it twice.

What it draws is what `reference.draw` draws.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from eepo.kernels.rows import Outputs, RowState

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
def _draw_kernel(
    logits, logits_stride, sources, slots, inverse_temperature, ends,
    tokens, positions, num_drawn, limits, keys, outputs, live,
    out_tokens, out_logprobs, out_entropies, out_lengths, out_finished, out_stride,
    vocabulary,
    NUM_BLOCKS: tl.constexpr, PADDED_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, NUM_ENDS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    slot = tl.load(slots + program)
    if tl.load(live + slot) == 0:
        return
    row = logits + tl.load(sources + program) * logits_stride
    inverse = tl.load(inverse_temperature)
    scale = tl.where(inverse == 0.0, 1.0, inverse)  # greedy reports the distribution at temperature 1
    inside = tl.arange(0, BLOCK)
    blocks = tl.arange(0, PADDED_BLOCKS)

    top = float("-inf")  # running maximum, and sums relative to it
    total = 0.0
    weighted = 0.0
    best_token = 0
    block_tops = tl.full([PADDED_BLOCKS], float("-inf"), tl.float32)
    block_sums = tl.zeros([PADDED_BLOCKS], tl.float32)
    for block in range(NUM_BLOCKS):
        place = block * BLOCK + inside
        known = place < vocabulary
        values = tl.load(row + place, mask=known, other=float("-inf")).to(tl.float32) * scale
        block_top = tl.max(values, 0)
        if block_top > top:
            best_token = block * BLOCK + tl.argmax(values, 0)
        new_top = tl.maximum(top, block_top)
        zero = tl.where(new_top == float("-inf"), 0.0, new_top)  # no token so far can be
        masses = tl.exp(values - zero)
        block_sum = tl.sum(masses, 0)
        total = total * tl.exp(top - zero) + block_sum
        weighted = weighted * tl.exp(top - zero) + tl.sum(tl.where(masses > 0, masses * values, 0.0), 0)
        top = new_top
        block_tops = tl.where(blocks == block, new_top, block_tops)
        block_sums = tl.where(blocks == block, block_sum, block_sums)

    position = tl.load(num_drawn + slot)
    draw = _uniform(tl.load(keys + slot), position)
    cumulative = tl.cumsum((block_sums * tl.exp(block_tops - top)).to(tl.float64), 0)
    target = draw * tl.max(cumulative, 0)
    chosen = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), 0), NUM_BLOCKS - 1)
    before = tl.max(tl.where(blocks < chosen, cumulative, 0.0), 0)
    place = chosen * BLOCK + inside
    known = place < vocabulary
    values = tl.load(row + place, mask=known, other=float("-inf")).to(tl.float32) * scale
    within = tl.cumsum(tl.exp(values - top).to(tl.float64), 0)
    target = tl.minimum(target - before, tl.max(within, 0) * (1.0 - 1e-12))  # rounding must not leave the block
    sampled = chosen * BLOCK + tl.sum((within <= target).to(tl.int32), 0)
    token = tl.where(inverse == 0.0, best_token, sampled)

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


def draw(
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
    _draw_kernel[(len(slots),)](
        logits, logits.stride(0), sources, slots, inverse_temperature, ends,
        state.tokens, state.positions, state.num_drawn, state.limits, state.keys, state.outputs, state.live,
        outputs.tokens, outputs.logprobs, outputs.entropies, outputs.lengths, outputs.finished,
        outputs.tokens.stride(0), logits.shape[1],
        NUM_BLOCKS=num_blocks, PADDED_BLOCKS=triton.next_power_of_2(num_blocks), BLOCK=BLOCK, NUM_ENDS=len(ends),
        num_warps=8,
    )  # fmt: skip
