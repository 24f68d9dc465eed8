"""Attention of one new token per row over the row's cached keys and values, which are in pages.

Only the pages that a row has filled are read. The new key and value are written into the cache on
the way. If there are few rows, each row's pages are split over several programs, so that the whole
GPU reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 256  # keep a GPU busy; with fewer, rows are split
MAX_SPLITS = 16  # of a row
WARPS = 4  # per program
STAGES = 5  # pages that a program loads ahead


@triton.jit
def _softcapped(scores, softcap, SOFTCAP: tl.constexpr):
    if SOFTCAP:
        scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
    return scores


@triton.jit
def _rescaled(maxima, totals, sums, new_maxima):
    """Make sums that are relative to `maxima` relative to `new_maxima`."""
    rescale = tl.where(maxima == float("-inf"), 0.0, tl.exp(maxima - new_maxima))
    return totals * rescale, sums * rescale[:, None]


@triton.jit
def _decode_kernel(
    query, query_row, query_head, new_key, key_row, key_head, new_value, value_row, value_head,
    key_pages, value_pages, page_stride, page_tables, table_stride, positions,
    out, part_sums, part_maxima, part_totals,
    scale, softcap, window,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    PADDED: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr, SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with the query heads of one key head. One program per row, key head and split."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    position = tl.load(positions + row)
    group = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED)
    offsets = tl.arange(0, PAGE)
    query_mask = (group < GROUP)[:, None] & (dims < SIZE)[None, :]
    heads = head * GROUP + group
    query_offsets = row * query_row + heads[:, None] * query_head + dims[None, :]
    q = tl.load(query + query_offsets, mask=query_mask, other=0.0)

    maxima = tl.full([ROWS], float("-inf"), tl.float32)
    totals = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, PADDED], tl.float32)
    first = tl.maximum(position - window + 1, 0) if WINDOW else 0  # oldest visible position
    first_page = first // PAGE
    num_pages = (position + PAGE - 1) // PAGE - first_page
    pages_per_split = (num_pages + SPLITS - 1) // SPLITS
    start = first_page + split * pages_per_split
    for index in range(start, tl.minimum(start + pages_per_split, first_page + num_pages)):
        page = tl.load(page_tables + row * table_stride + index).to(tl.int64)
        base = page * page_stride + head * PAGE * SIZE
        cached = index * PAGE + offsets
        visible = (cached < position) & (cached >= first)
        block = base + offsets[:, None] * SIZE + dims[None, :]
        block_mask = visible[:, None] & (dims < SIZE)[None, :]
        k = tl.load(key_pages + block, mask=block_mask, other=0.0)
        v = tl.load(value_pages + block, mask=block_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        scores = _softcapped(scores, softcap, SOFTCAP)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_maxima = tl.maximum(maxima, tl.max(scores, 1))
        masses = tl.where(visible[None, :], tl.exp(scores - new_maxima[:, None]), 0.0)
        totals, sums = _rescaled(maxima, totals, sums, new_maxima)
        totals += tl.sum(masses, 1)
        sums += tl.dot(masses.to(v.dtype), v, input_precision=PRECISION)
        maxima = new_maxima

    if split == 0:  # the new token attends to itself and enters the cache
        key_offsets = row * key_row + head * key_head + dims
        value_offsets = row * value_row + head * value_head + dims
        k = tl.load(new_key + key_offsets, mask=dims < SIZE, other=0.0)
        v = tl.load(new_value + value_offsets, mask=dims < SIZE, other=0.0)
        scores = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
        scores = _softcapped(scores, softcap, SOFTCAP)
        new_maxima = tl.maximum(maxima, scores)
        masses = tl.exp(scores - new_maxima)
        totals, sums = _rescaled(maxima, totals, sums, new_maxima)
        totals += masses
        sums += masses[:, None] * v.to(tl.float32)[None, :]
        maxima = new_maxima
        page = tl.load(page_tables + row * table_stride + position // PAGE).to(tl.int64)
        target = page * page_stride + head * PAGE * SIZE + (position % PAGE) * SIZE + dims
        tl.store(key_pages + target, k.to(key_pages.dtype.element_ty), mask=dims < SIZE)
        tl.store(value_pages + target, v.to(value_pages.dtype.element_ty), mask=dims < SIZE)

    output = row * NUM_HEADS + heads
    if SPLITS == 1:
        result = (sums / totals[:, None]).to(out.dtype.element_ty)
        tl.store(out + output[:, None] * SIZE + dims[None, :], result, mask=query_mask)
    else:
        part = output * SPLITS + split
        tl.store(part_maxima + part, maxima, mask=group < GROUP)
        tl.store(part_totals + part, totals, mask=group < GROUP)
        tl.store(part_sums + part[:, None] * SIZE + dims[None, :], sums, mask=query_mask)


@triton.jit
def _join_kernel(
    out, part_sums, part_maxima, part_totals,
    SIZE: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one row and head. One program per row and head."""
    output = tl.program_id(0)
    dims = tl.arange(0, PADDED)
    splits = output * SPLITS + tl.arange(0, SPLITS)
    maxima = tl.load(part_maxima + splits)
    weights = tl.exp(maxima - tl.max(maxima, 0))
    total = tl.sum(weights * tl.load(part_totals + splits), 0)
    part_offsets = splits[:, None] * SIZE + dims[None, :]
    parts = tl.load(part_sums + part_offsets, mask=(dims < SIZE)[None, :], other=0.0)
    result = tl.sum(parts * weights[:, None], 0) / total
    tl.store(out + output * SIZE + dims, result.to(out.dtype.element_ty), mask=dims < SIZE)


def paged_attention(
    query: Tensor,  # [B, H, D] of the new tokens
    key: Tensor,  # [B, K, D]
    value: Tensor,  # [B, K, D]
    key_pages: Tensor,  # [pages, K, page size, D]
    value_pages: Tensor,  # [pages, K, page size, D]
    page_tables: Tensor,  # [>= B, M] int32: each row's pages
    positions: Tensor,  # [>= B] int64: of the new tokens, equal to the number of cached ones
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
) -> Tensor:  # [B, H, D]
    """Attend over the cached tokens and the new one, and write the new one into the cache."""
    num_rows, num_heads, size = query.shape
    num_key_heads, page = key_pages.shape[1], key_pages.shape[2]
    group, padded = num_heads // num_key_heads, max(16, triton.next_power_of_2(size))
    splits = num_splits(num_rows * num_key_heads)
    out = torch.empty(num_rows, num_heads, size, dtype=query.dtype, device=query.device)
    part_sums = part_maxima = part_totals = out
    if splits > 1:
        part_shape = num_rows, num_heads, splits, size
        part_sums = torch.empty(part_shape, dtype=torch.float32, device=query.device)
        part_maxima, part_totals = (torch.empty_like(part_sums[..., 0]) for _ in range(2))
    page_bytes = 2 * page * padded * key_pages.element_size()
    _decode_kernel[(num_rows, num_key_heads, splits)](
        query, query.stride(0), query.stride(1), key, key.stride(0), key.stride(1),
        value, value.stride(0), value.stride(1),
        key_pages, value_pages, key_pages.stride(0), page_tables, page_tables.stride(0), positions,
        out, part_sums, part_maxima, part_totals, scale, softcap, window,
        NUM_HEADS=num_heads, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), SIZE=size,
        PADDED=padded, PAGE=page, SPLITS=splits, SOFTCAP=softcap > 0, WINDOW=window > 0,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=WARPS, num_stages=num_stages(page_bytes, _shared_memory_bytes(query.device)),
    )  # fmt: skip
    if splits > 1:
        _join_kernel[(num_rows * num_heads,)](
            out, part_sums, part_maxima, part_totals,
            SIZE=size, PADDED=padded, SPLITS=splits, num_warps=1,
        )  # fmt: skip
    return out


def num_splits(num_programs: int) -> int:
    """Return the splits per row, a power of two, that give the GPU enough programs."""
    splits = 1
    while splits < MAX_SPLITS and num_programs * splits < PROGRAMS:
        splits *= 2
    return splits


def num_stages(page_bytes: int, shared_memory_bytes: int) -> int:
    """Return how many pages to load ahead: fewer if shared memory cannot hold them all.

    Compilers may need less than that, but versions differ in how much less.
    """
    return STAGES if STAGES * page_bytes <= shared_memory_bytes else min(STAGES, 3)


def _shared_memory_bytes(device: torch.device) -> int:
    """Return the shared memory available to a program; 0 if torch does not report it."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return getattr(properties, "shared_memory_per_block_optin", 0)
