"""Attention of one new token in each row over its own cached keys and values, which lie in pages.

Only the pages of a row's live length are read. The new key and value enter the cache on the way. With few rows the
pages of each are split among several programs, so that the whole card reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 256  # that keep a card busy: with fewer, rows are split
MOST_SPLITS = 16  # of a row
WARPS = 4  # of a program
STAGES = 5  # how many pages ahead it reads


@triton.jit
def _capped(scores, softcap, SOFTCAP: tl.constexpr):
    if SOFTCAP:
        scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
    return scores


@triton.jit
def _faded(tops, totals, sums, new_tops):
    """What was summed so far, beside scores up to `new_tops`."""
    fade = tl.where(tops == float("-inf"), 0.0, tl.exp(tops - new_tops))
    return totals * fade, sums * fade[:, None]


@triton.jit
def _decode_kernel(
    query, query_row, query_head, new_key, key_row, key_head, new_value, value_row, value_head,
    key_pages, value_pages, page_stride, tables, table_stride, positions,
    out, part_sums, part_tops, part_totals,
    scale, softcap, window,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
    PAGE: tl.constexpr, SPLITS: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    position = tl.load(positions + row)
    group = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED)
    inside = tl.arange(0, PAGE)
    own = (group < GROUP)[:, None] & (dims < SIZE)[None, :]
    heads = head * GROUP + group
    q = tl.load(
        query + row * query_row + heads[:, None] * query_head + dims[None, :], mask=own, other=0.0
    )

    tops = tl.full([ROWS], float("-inf"), tl.float32)
    totals = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, PADDED], tl.float32)
    first = tl.maximum(position - window + 1, 0) if WINDOW else 0  # the oldest place it may look at
    first_page = first // PAGE
    num_pages = (position + PAGE - 1) // PAGE - first_page
    each = (num_pages + SPLITS - 1) // SPLITS
    start = first_page + split * each
    for index in range(start, tl.minimum(start + each, first_page + num_pages)):
        page = tl.load(tables + row * table_stride + index).to(tl.int64)
        base = page * page_stride + head * PAGE * SIZE
        place = index * PAGE + inside
        seen = (place < position) & (place >= first)
        block = base + inside[:, None] * SIZE + dims[None, :]
        there = seen[:, None] & (dims < SIZE)[None, :]
        k = tl.load(key_pages + block, mask=there, other=0.0)
        v = tl.load(value_pages + block, mask=there, other=0.0)
        scores = _capped(
            tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, softcap, SOFTCAP
        )
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_tops = tl.maximum(tops, tl.max(scores, 1))
        masses = tl.where(seen[None, :], tl.exp(scores - new_tops[:, None]), 0.0)
        totals, sums = _faded(tops, totals, sums, new_tops)
        totals += tl.sum(masses, 1)
        sums += tl.dot(masses.to(v.dtype), v, input_precision=PRECISION)
        tops = new_tops

    if split == 0:  # the new token attends to itself, and enters the cache
        k = tl.load(new_key + row * key_row + head * key_head + dims, mask=dims < SIZE, other=0.0)
        v = tl.load(
            new_value + row * value_row + head * value_head + dims, mask=dims < SIZE, other=0.0
        )
        scores = _capped(
            tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale, softcap, SOFTCAP
        )
        new_tops = tl.maximum(tops, scores)
        masses = tl.exp(scores - new_tops)
        totals, sums = _faded(tops, totals, sums, new_tops)
        totals += masses
        sums += masses[:, None] * v.to(tl.float32)[None, :]
        tops = new_tops
        page = tl.load(tables + row * table_stride + position // PAGE).to(tl.int64)
        target = page * page_stride + head * PAGE * SIZE + (position % PAGE) * SIZE + dims
        tl.store(key_pages + target, k.to(key_pages.dtype.element_ty), mask=dims < SIZE)
        tl.store(value_pages + target, v.to(value_pages.dtype.element_ty), mask=dims < SIZE)

    line = row * NUM_HEADS + heads
    if SPLITS == 1:
        result = (sums / totals[:, None]).to(out.dtype.element_ty)
        tl.store(out + line[:, None] * SIZE + dims[None, :], result, mask=own)
    else:
        part = line * SPLITS + split
        tl.store(part_tops + part, tops, mask=group < GROUP)
        tl.store(part_totals + part, totals, mask=group < GROUP)
        tl.store(part_sums + part[:, None] * SIZE + dims[None, :], sums, mask=own)


@triton.jit
def _join_kernel(
    out,
    part_sums,
    part_tops,
    part_totals,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    line = tl.program_id(0)
    dims = tl.arange(0, PADDED)
    splits = line * SPLITS + tl.arange(0, SPLITS)
    tops = tl.load(part_tops + splits)
    weights = tl.exp(tops - tl.max(tops, 0))
    total = tl.sum(weights * tl.load(part_totals + splits), 0)
    parts = tl.load(
        part_sums + splits[:, None] * SIZE + dims[None, :], mask=(dims < SIZE)[None, :], other=0.0
    )
    result = tl.sum(parts * weights[:, None], 0) / total
    tl.store(out + line * SIZE + dims, result.to(out.dtype.element_ty), mask=dims < SIZE)


def paged_attention(
    query: Tensor,  # [B, H, D]
    key: Tensor,  # [B, K, D] of the new tokens
    value: Tensor,  # [B, K, D]
    key_pages: Tensor,  # [pages, K, page, D]
    value_pages: Tensor,
    tables: Tensor,  # [>= B, M] int32: each row's pages
    positions: Tensor,  # [>= B] int64: of the new tokens, which is how many are cached
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
) -> Tensor:  # [B, H, D]
    num_rows, num_heads, size = query.shape
    num_key_heads, page = key_pages.shape[1], key_pages.shape[2]
    group, padded = num_heads // num_key_heads, max(16, triton.next_power_of_2(size))
    splits = num_splits(num_rows * num_key_heads)
    out = torch.empty(num_rows, num_heads, size, dtype=query.dtype, device=query.device)
    part_sums = part_tops = part_totals = out
    if splits > 1:
        part_sums = torch.empty(
            num_rows, num_heads, splits, size, dtype=torch.float32, device=query.device
        )
        part_tops, part_totals = (torch.empty_like(part_sums[..., 0]) for _ in range(2))
    _decode_kernel[(num_rows, num_key_heads, splits)](
        query, query.stride(0), query.stride(1), key, key.stride(0), key.stride(1), value, value.stride(0),
        value.stride(1), key_pages, value_pages, key_pages.stride(0), tables, tables.stride(0), positions,
        out, part_sums, part_tops, part_totals, scale, softcap, window,
        NUM_HEADS=num_heads, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), SIZE=size,
        PADDED=padded, PAGE=page, SPLITS=splits, SOFTCAP=softcap > 0, WINDOW=window > 0,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", num_warps=WARPS,
        num_stages=num_stages(2 * page * padded * key_pages.element_size(), _shared_bytes(query.device)),
    )  # fmt: skip
    if splits > 1:
        _join_kernel[(num_rows * num_heads,)](
            out, part_sums, part_tops, part_totals, SIZE=size, PADDED=padded,
            SPLITS=splits, num_warps=1,
        )  # fmt: skip
    return out


def num_splits(num_programs: int) -> int:
    """A power of two that gives the card enough programs."""
    splits = 1
    while splits < MOST_SPLITS and num_programs * splits < PROGRAMS:
        splits *= 2
    return splits


def num_stages(page_bytes: int, shared_bytes: int) -> int:
    """Fewer where the card could not hold as many pages of keys and values at once.

    Compilers hold fewer than that, but not all of them equally few.
    """
    return STAGES if STAGES * page_bytes <= shared_bytes else min(STAGES, 3)


def _shared_bytes(device: torch.device) -> int:
    """What a program can have of the card's fast memory; 0 where torch does not say."""
    known = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return getattr(known, "shared_memory_per_block_optin", 0)
