"""Ragged completions into padded micro-batches: sorted by length, bounded by tokens, so little is padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eepo.types import Completion, Prompt


@dataclass
class MicroBatch:
    """Some rows of a batch. T is the longest completion among them, L the longest prompt and completion together."""

    rows: list[int]  # B places in the batch it was cut from
    input_ids: Tensor  # [B, L] prompt then completion, padded on the right
    attention_mask: Tensor  # [B, L]
    targets: Tensor  # [B, T] completion tokens
    mask: Tensor  # [B, T] bool: True on completion tokens
    positions: Tensor  # [B, T] place in L of the hidden state that predicts each target

    def pad(self, values: Sequence[Sequence[float]]) -> Tensor:
        """Per-token values of the whole batch -> [B, T] for these rows, zero on padding."""
        return _padded([values[row] for row in self.rows], torch.float32).to(self.mask.device)

    def pick(self, values: Sequence[float]) -> Tensor:
        """Per-row values of the whole batch -> [B] for these rows."""
        return torch.tensor([values[row] for row in self.rows], dtype=torch.float32, device=self.mask.device)


def micro_batches(
    pairs: Sequence[tuple[Prompt, Completion]], max_tokens: int, device: torch.device
) -> Iterator[MicroBatch]:
    """Cut `pairs` into micro-batches of at most `max_tokens` padded tokens (one row may exceed it alone)."""
    lengths = [len(prompt.token_ids) + len(completion.token_ids) for prompt, completion in pairs]
    order = sorted(range(len(pairs)), key=lambda row: -lengths[row])
    start = 0
    while start < len(order):
        num_rows = max(1, max_tokens // lengths[order[start]])
        yield _collate(order[start : start + num_rows], pairs, device)
        start += num_rows


def _collate(rows: list[int], pairs: Sequence[tuple[Prompt, Completion]], device: torch.device) -> MicroBatch:
    """Padded as lists, then made tensors at once: small tensors for each row would cost more than the model."""
    prompts = [pairs[row][0].token_ids for row in rows]
    completions = [pairs[row][1].token_ids for row in rows]
    sequences = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    positions = [range(len(prompt) - 1, len(whole) - 1) for prompt, whole in zip(prompts, sequences, strict=True)]
    return MicroBatch(
        rows=list(rows),
        input_ids=_padded(sequences, torch.long).to(device),
        attention_mask=_padded([[1] * len(whole) for whole in sequences], torch.long).to(device),
        targets=_padded(completions, torch.long).to(device),
        mask=_padded([[True] * len(completion) for completion in completions], torch.bool).to(device),
        positions=_padded(positions, torch.long).to(device),
    )


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """Ragged rows -> [rows, longest], zero on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *([0] * (longest - len(row)))] for row in rows], dtype=dtype)
