"""Ragged completions into micro-batches: sorted by length and bounded by tokens; packed where that can be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eepo.types import Completion, Prompt


@dataclass
class Padded:
    """B sequences, filled up on the right to the longest."""

    input_ids: Tensor  # [B, L]
    attention_mask: Tensor  # [B, L]


@dataclass
class Packed:
    """B sequences laid end to end: N tokens."""

    input_ids: Tensor  # [1, N]
    position_ids: Tensor  # [1, N]
    starts: Tensor  # [B + 1] int32: where each begins, and the end
    longest: int


@dataclass
class MicroBatch:
    """Some rows of a batch. T is the longest completion among them, C their completion tokens together."""

    rows: list[int]  # B places in the batch it was cut from
    inputs: Padded | Packed  # prompts with their completions
    predictors: Tensor  # [C] places, in the flattened inputs, of the hidden states that predict completion tokens
    targets: Tensor  # [C] these tokens
    places: Tensor  # [C] their places in a flattened [B, T]
    mask: Tensor  # [B, T] bool: True on completion tokens

    def pad(self, values: Sequence[Sequence[float]]) -> Tensor:
        """Per-token values of the whole batch -> [B, T] for these rows, zero on padding."""
        return _padded([values[row] for row in self.rows], torch.float32).to(self.mask.device)

    def spread(self, values: Tensor) -> Tensor:  # [C] -> [B, T]
        """Zero on padding."""
        flat = values.new_zeros(self.mask.numel()).index_copy(0, self.places, values)
        return flat.view(self.mask.shape)

    def pick(self, values: Sequence[float]) -> Tensor:
        """Per-row values of the whole batch -> [B] for these rows."""
        return torch.tensor([values[row] for row in self.rows], dtype=torch.float32, device=self.mask.device)


def micro_batches(
    pairs: Sequence[tuple[Prompt, Completion]],
    max_tokens: int,
    device: torch.device,
    packed: bool = False,
    rows: Sequence[int] | None = None,
) -> Iterator[MicroBatch]:
    """Cut `pairs`, or these `rows` of them, into micro-batches of at most `max_tokens` tokens, padding counted.

    One row may exceed that alone.
    """
    lengths = [len(prompt.token_ids) + len(completion.token_ids) for prompt, completion in pairs]
    order = sorted(range(len(pairs)) if rows is None else rows, key=lambda row: -lengths[row])
    for start, end in _cuts([lengths[row] for row in order], max_tokens, packed):
        yield _collate(order[start:end], pairs, device, packed)


def evenly(count: int, most: int) -> list[int]:
    """At most `most` places of `count`, evenly spread; all of them if `most` is 0."""
    return [place * count // most for place in range(most)] if 0 < most < count else list(range(count))


def _cuts(lengths: list[int], max_tokens: int, packed: bool) -> Iterator[tuple[int, int]]:
    """Of `lengths`, longest first."""
    start = size = 0
    for end, length in enumerate(lengths):
        size = size + length if packed else (end + 1 - start) * lengths[start]
        if size > max_tokens and end > start:
            yield start, end
            start, size = end, length
    if lengths:
        yield start, len(lengths)


def _collate(
    rows: list[int], pairs: Sequence[tuple[Prompt, Completion]], device: torch.device, packed: bool
) -> MicroBatch:
    """Put together as lists, then made tensors at once: small tensors for each row would cost more than the model."""
    prompts = [pairs[row][0].token_ids for row in rows]
    completions = [pairs[row][1].token_ids for row in rows]
    sequences = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    inputs = (_pack if packed else _pad)(sequences, device)
    longest, width = max(map(len, completions)), max(map(len, sequences))
    predictors: list[int] = []
    places: list[int] = []
    begin = 0  # of the sequence, in the flattened inputs
    for row, (prompt, whole) in enumerate(zip(prompts, sequences, strict=True)):
        predictors += range(begin + len(prompt) - 1, begin + len(whole) - 1)
        places += range(row * longest, row * longest + len(whole) - len(prompt))
        begin += len(whole) if packed else width
    return MicroBatch(
        rows=list(rows),
        inputs=inputs,
        predictors=torch.tensor(predictors, device=device),
        targets=torch.tensor([token for completion in completions for token in completion], device=device),
        places=torch.tensor(places, device=device),
        mask=_padded([[True] * len(completion) for completion in completions], torch.bool).to(device),
    )


def _pad(sequences: list[tuple[int, ...]], device: torch.device) -> Padded:
    mask = _padded([[1] * len(whole) for whole in sequences], torch.long)
    return Padded(_padded(sequences, torch.long).to(device), mask.to(device))


def _pack(sequences: list[tuple[int, ...]], device: torch.device) -> Packed:
    lengths = torch.tensor([0, *map(len, sequences)], dtype=torch.int32)
    return Packed(
        input_ids=torch.tensor([[token for whole in sequences for token in whole]], device=device),
        position_ids=torch.tensor([[place for whole in sequences for place in range(len(whole))]], device=device),
        starts=lengths.cumsum(0, dtype=torch.int32).to(device),
        longest=max(map(len, sequences)),
    )


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """Ragged rows -> [rows, longest], zero on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *([0] * (longest - len(row)))] for row in rows], dtype=dtype)
