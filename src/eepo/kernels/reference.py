"""Every kernel in plain torch: what the kernels are tested against, and what runs without Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from eepo.kernels.row_state import Outputs, RowState

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def sample(logits: Tensor, draws: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """[B, V] logits, [B] draws in [0, 1) -> tokens, their log-probabilities, entropies, each [B].

    By inverting the cumulative distribution: one random number a token, whatever the vocabulary. In fp64, where the
    sum of 150,000 probabilities still tells neighbours apart. Temperature 0 takes the likeliest token.
    """
    distribution = (logits / temperature if temperature > 0 else logits).log_softmax(-1)  # [B, V]
    probabilities = distribution.exp()
    if temperature > 0:
        cumulative = probabilities.double().cumsum(-1)
        target = draws.unsqueeze(1) * cumulative[:, -1:]
        tokens = (
            torch.searchsorted(cumulative, target, right=True)
            .squeeze(1)
            .clamp(max=logits.shape[1] - 1)
        )
    else:
        tokens = logits.argmax(-1)
    entropies = -(probabilities * distribution.clamp(min=-1e30)).sum(-1)  # 0 · log 0 is 0
    return tokens, distribution.gather(1, tokens.unsqueeze(1)).squeeze(1), entropies


def uniforms(keys: Tensor, positions: Tensor | int) -> Tensor:
    """[B] int64 row keys -> [B] float64 in [0, 1): splitmix64, in arithmetic that wraps as int64 does."""
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
    ends: Tensor,
    state: RowState,
    outputs: Outputs,
) -> None:
    """As `sampling.sample_tokens`."""
    alive = state.live[slots].bool()
    slots, logits = slots[alive], logits[sources[alive]].float()
    inverse, drawn, lines = float(inverse_temperature), state.num_drawn[slots], state.outputs[slots]
    draws = uniforms(state.keys[slots], drawn)
    tokens, logprobs, entropies = sample(logits, draws, 1 / inverse if inverse else 0.0)
    outputs.tokens[lines, drawn] = tokens.int()
    outputs.logprobs[lines, drawn], outputs.entropies[lines, drawn] = logprobs, entropies
    ended = torch.isin(tokens, ends)
    outputs.lengths[lines], outputs.finished[lines] = (drawn + 1).int(), ended.int()
    state.tokens[slots], state.num_drawn[slots] = tokens, drawn + 1
    state.positions[slots] += 1
    state.live[slots] = ((drawn + 1 < state.limits[slots]) & ~ended).int()


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    tables: Tensor,
    positions: Tensor,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
) -> Tensor:
    """As `paged_attention.paged_attention`; reads every page of the table, live or not."""
    (num_rows, num_heads, _), page = query.shape, key_pages.shape[2]
    tables, positions = tables[:num_rows].long(), positions[:num_rows]
    pages = tables.gather(1, (positions // page).unsqueeze(1)).squeeze(1)
    key_pages[pages, :, positions % page], value_pages[pages, :, positions % page] = key, value
    keys, values = (
        part[tables].transpose(2, 3).flatten(1, 2) for part in (key_pages, value_pages)
    )  # [B, L, K, D]
    places = torch.arange(keys.shape[1], device=query.device)
    seen = places <= positions[:, None]
    if window:
        seen &= places > positions[:, None] - window
    keys, values = (
        part.repeat_interleave(num_heads // part.shape[2], 2) for part in (keys, values)
    )
    scores = torch.einsum("bhd,blhd->bhl", query.float(), keys.float()) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    masses = scores.masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(-1)
    values = torch.where(
        seen[:, :, None, None], values.float(), 0.0
    )  # what was never written may be anything
    return torch.einsum("bhl,blhd->bhd", masses, values).to(query.dtype)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch shifts int64 arithmetically."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value
