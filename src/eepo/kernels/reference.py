"""Plain torch versions of the kernels, for tests and for machines without Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from eepo.kernels.row_state import Outputs, RowState

GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's constants
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def sample(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Sample from [B, V] logits -> tokens, log-probabilities, entropies, each [B].

    `uniform` has one random number in [0, 1) per row: invert the cumulative distribution. The
    cumulative sum is in fp64, which still separates neighbours among 150,000 probabilities.
    Temperature 0 selects the most likely token.
    """
    distribution = (logits / temperature if temperature > 0 else logits).log_softmax(-1)  # [B, V]
    probabilities = distribution.exp()
    if temperature > 0:
        cumulative = probabilities.double().cumsum(-1)
        target = uniform.unsqueeze(1) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target, right=True).squeeze(1)
        tokens = tokens.clamp(max=logits.shape[1] - 1)
    else:
        tokens = logits.argmax(-1)
    entropies = -(probabilities * distribution.clamp(min=-1e30)).sum(-1)  # 0 · log 0 is 0
    return tokens, distribution.gather(1, tokens.unsqueeze(1)).squeeze(1), entropies


def uniforms(keys: Tensor, positions: Tensor | int) -> Tensor:
    """Map [B] int64 row keys to [B] float64 in [0, 1): splitmix64 in wrapping int64 arithmetic."""
    if isinstance(positions, int):
        positions = torch.tensor(positions, device=keys.device)
    mixed = keys + (positions + 1) * _signed(GOLDEN)
    mixed = (mixed ^ _shift(mixed, 30)) * _signed(MIX_1)
    mixed = (mixed ^ _shift(mixed, 27)) * _signed(MIX_2)
    mixed = mixed ^ _shift(mixed, 31)
    return _shift(mixed, 11).to(torch.float64) * 2.0**-53


def sample_tokens(
    logits: Tensor,
    sources: Tensor,
    slots: Tensor,
    inverse_temperature: Tensor,
    end_tokens: Tensor,
    state: RowState,
    outputs: Outputs,
) -> None:
    """Do what `sampling.sample_tokens` does."""
    live = state.live[slots].bool()
    slots, logits = slots[live], logits[sources[live]].float()
    inverse = float(inverse_temperature)
    index, lines = state.num_sampled[slots], state.outputs[slots]
    uniform = uniforms(state.keys[slots], index)
    tokens, logprobs, entropies = sample(logits, uniform, 1 / inverse if inverse else 0.0)
    outputs.tokens[lines, index] = tokens.int()
    outputs.logprobs[lines, index], outputs.entropies[lines, index] = logprobs, entropies
    ended = torch.isin(tokens, end_tokens)
    outputs.lengths[lines], outputs.finished[lines] = (index + 1).int(), ended.int()
    state.tokens[slots], state.num_sampled[slots] = tokens, index + 1
    state.positions[slots] += 1
    state.live[slots] = ((index + 1 < state.limits[slots]) & ~ended).int()


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_tables: Tensor,
    positions: Tensor,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
) -> Tensor:
    """Do what `paged_attention.paged_attention` does, but read all pages of the tables."""
    (num_rows, num_heads, _), page_size = query.shape, key_pages.shape[2]
    tables, positions = page_tables[:num_rows].long(), positions[:num_rows]
    pages = tables.gather(1, (positions // page_size).unsqueeze(1)).squeeze(1)
    offsets = positions % page_size
    key_pages[pages, :, offsets], value_pages[pages, :, offsets] = key, value
    keys, values = (_rows_of(pages, tables, num_heads) for pages in (key_pages, value_pages))
    cached = torch.arange(keys.shape[1], device=query.device)
    visible = cached <= positions[:, None]
    if window:
        visible &= cached > positions[:, None] - window
    scores = torch.einsum("bhd,blhd->bhl", query.float(), keys.float()) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    probabilities = scores.masked_fill(~visible.unsqueeze(1), -torch.inf).softmax(-1)
    # Entries that were never written may hold NaN.
    values = torch.where(visible[:, :, None, None], values.float(), 0.0)
    return torch.einsum("bhl,blhd->bhd", probabilities, values).to(query.dtype)


def _rows_of(pages: Tensor, tables: Tensor, num_heads: int) -> Tensor:  # [B, L, H, D]
    """Collect the cache entries of each row, and repeat key heads for grouped queries."""
    rows = pages[tables].transpose(2, 3).flatten(1, 2)  # [B, L, K, D]
    return rows.repeat_interleave(num_heads // rows.shape[2], 2)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Shift right logically: torch shifts int64 arithmetically."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value
