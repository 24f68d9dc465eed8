"""Sample one token per row from its logits, and advance the row's state.

The result is that of `reference.sample_tokens`. Each block of a row's vocabulary has its own
program, so that few rows also keep the whole GPU busy. A second kernel joins the blocks of a row
and reads the block with the sampled token once more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eepo.kernels.row_state import Outputs, RowState

BLOCK = 2048
GOLDEN = tl.constexpr(-7046029254386353131)  # splitmix64's constants, as int64
MIX_1 = tl.constexpr(-4658895280553007687)
MIX_2 = tl.constexpr(-7723592293110705685)


@triton.jit
def _uniform(key, position):
    """Compute `reference.uniforms`, by splitmix64."""
    mixed = key + (position + 1) * GOLDEN
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * MIX_1
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * MIX_2
    mixed = mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)
    return ((mixed >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _scale(inverse_temperature):
    """Load the factor on logits; greedy rows report the distribution at temperature 1."""
    inverse = tl.load(inverse_temperature)
    return tl.where(inverse == 0.0, 1.0, inverse)


@triton.jit
def _scaled_logits(row, block, scale, vocabulary, BLOCK: tl.constexpr):
    token = block * BLOCK + tl.arange(0, BLOCK)
    return tl.load(row + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32) * scale


@triton.jit
def _block_sums(values, maximum):
    """Sum exp(value - maximum), and the same weighted by the values."""
    # The maximum is -inf if no token of the block is possible.
    masses = tl.exp(values - tl.where(maximum == float("-inf"), 0.0, maximum))
    return tl.sum(masses, 0), tl.sum(tl.where(masses > 0, masses * values, 0.0), 0)


@triton.jit
def _block_kernel(
    logits, logits_stride, sources, slots, inverse_temperature, live, parts, vocabulary,
    PADDED_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a block's maximum and sums. One program per row and block."""
    row, block = tl.program_id(0), tl.program_id(1)
    if tl.load(live + tl.load(slots + row)) == 0:
        return
    source = logits + tl.load(sources + row) * logits_stride
    values = _scaled_logits(source, block, _scale(inverse_temperature), vocabulary, BLOCK)
    maximum = tl.max(values, 0)
    block_sum, block_weighted = _block_sums(values, maximum)
    part = parts + row * 3 * PADDED_BLOCKS + block
    tl.store(part, maximum)
    tl.store(part + PADDED_BLOCKS, block_sum)
    tl.store(part + 2 * PADDED_BLOCKS, block_weighted)


@triton.jit
def _join_kernel(
    parts, logits, logits_stride, sources, slots, inverse_temperature, end_tokens,
    tokens, positions, num_sampled, limits, keys, outputs, live,
    out_tokens, out_logprobs, out_entropies, out_lengths, out_finished, out_stride,
    vocabulary,
    NUM_BLOCKS: tl.constexpr, PADDED_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    NUM_END_TOKENS: tl.constexpr,
):  # fmt: skip
    """Sample a block by its mass, then a token in it; write the results. One program per row."""
    slot = tl.load(slots + tl.program_id(0))
    if tl.load(live + slot) == 0:
        return
    blocks = tl.arange(0, PADDED_BLOCKS)
    part = parts + tl.program_id(0) * 3 * PADDED_BLOCKS + blocks
    exists = blocks < NUM_BLOCKS
    block_maxima = tl.load(part, mask=exists, other=float("-inf"))
    block_sums = tl.load(part + PADDED_BLOCKS, mask=exists, other=0.0)
    block_weighted = tl.load(part + 2 * PADDED_BLOCKS, mask=exists, other=0.0)
    maximum = tl.max(block_maxima, 0)
    rescale = tl.exp(block_maxima - maximum)
    total = tl.sum(block_sums * rescale, 0)
    weighted = tl.sum(block_weighted * rescale, 0)

    row = logits + tl.load(sources + tl.program_id(0)) * logits_stride
    scale = _scale(inverse_temperature)
    greedy = tl.load(inverse_temperature) == 0.0
    index = tl.load(num_sampled + slot)
    cumulative = tl.cumsum((block_sums * rescale).to(tl.float64), 0)
    target = _uniform(tl.load(keys + slot), index) * tl.max(cumulative, 0)
    chosen = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), 0), NUM_BLOCKS - 1)
    chosen = tl.where(greedy, tl.argmax(block_maxima, 0), chosen)  # the first of equal maxima
    mass_before = tl.max(tl.where(blocks < chosen, cumulative, 0.0), 0)
    values = _scaled_logits(row, chosen, scale, vocabulary, BLOCK)
    within = tl.cumsum(tl.exp(values - maximum).to(tl.float64), 0)
    # Rounding must not push the target out of the block.
    target = tl.minimum(target - mass_before, tl.max(within, 0) * (1.0 - 1e-12))
    offset = tl.where(greedy, tl.argmax(values, 0), tl.sum((within <= target).to(tl.int32), 0))
    # Whatever the logits are, NaN included, the token stays in the vocabulary.
    token = tl.minimum(chosen * BLOCK + offset, vocabulary - 1)

    lse = maximum + tl.log(total)
    output = tl.load(outputs + slot) * out_stride + index
    tl.store(out_tokens + output, token)
    tl.store(out_logprobs + output, tl.load(row + token).to(tl.float32) * scale - lse)
    tl.store(out_entropies + output, lse - weighted / total)
    is_end = tl.load(end_tokens + tl.arange(0, NUM_END_TOKENS)) == token
    ended = tl.sum(is_end.to(tl.int32), 0) > 0
    tl.store(out_lengths + tl.load(outputs + slot), (index + 1).to(tl.int32))
    tl.store(out_finished + tl.load(outputs + slot), ended.to(tl.int32))
    tl.store(tokens + slot, token.to(tl.int64))
    tl.store(positions + slot, tl.load(positions + slot) + 1)
    tl.store(num_sampled + slot, index + 1)
    tl.store(live + slot, ((index + 1 < tl.load(limits + slot)) & (ended == 0)).to(tl.int32))


def sample_tokens(
    logits: Tensor,  # [P, V]
    sources: Tensor,  # [B] int64: the row of `logits` to sample from
    slots: Tensor,  # [B] int64: the slot that the token is for
    inverse_temperature: Tensor,  # [1] fp32; 0 selects the most likely token
    end_tokens: Tensor,  # [E] int64, E a power of two, padded with -1
    state: RowState,
    outputs: Outputs,
) -> None:
    """Sample a token for each live slot, write it into `outputs` and advance the slot's `state`."""
    num_blocks = triton.cdiv(logits.shape[1], BLOCK)
    padded = triton.next_power_of_2(num_blocks)
    inputs = logits, logits.stride(0), sources, slots, inverse_temperature
    state_and_outputs = (
        state.tokens, state.positions, state.num_sampled, state.limits, state.keys,
        state.outputs, state.live,
        outputs.tokens, outputs.logprobs, outputs.entropies, outputs.lengths, outputs.finished,
        outputs.tokens.stride(0),
    )  # fmt: skip
    # Maxima, sums and weighted sums: 12 bytes for a block of 8 KB of logits
    parts = torch.empty(len(slots), 3, padded, device=logits.device)
    _block_kernel[(len(slots), num_blocks)](
        *inputs, state.live, parts, logits.shape[1], PADDED_BLOCKS=padded, BLOCK=BLOCK, num_warps=4
    )
    _join_kernel[(len(slots),)](
        parts, *inputs, end_tokens, *state_and_outputs, logits.shape[1],
        NUM_BLOCKS=num_blocks, PADDED_BLOCKS=padded, BLOCK=BLOCK, NUM_END_TOKENS=len(end_tokens),
        num_warps=8,
    )  # fmt: skip
