"""Ragged completions into micro-batches: sorted by length and bounded by tokens; packed where that can be."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

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
        return self.spread(send(_flat([values[row] for row in self.rows], torch.float32), self.mask.device))

    def spread(self, values: Tensor) -> Tensor:  # [C] -> [B, T]
        """Zero on padding."""
        flat = values.new_zeros(self.mask.numel()).index_copy(0, self.places, values)
        return flat.view(self.mask.shape)

    def pick(self, values: Sequence[float]) -> Tensor:
        """Per-row values of the whole batch -> [B] for these rows."""
        return send(torch.tensor([values[row] for row in self.rows], dtype=torch.float32), self.mask.device)


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
    """Tokens are touched one by one only to be copied; their places are computed from lengths."""
    prompts = [pairs[row][0].token_ids for row in rows]
    completions = [pairs[row][1].token_ids for row in rows]
    before, own = (torch.tensor([len(ids) for ids in part]) for part in (prompts, completions))  # [B] tokens
    longest, width = int(own.max()), int((before + own).max())
    begins = _begins(before + own) if packed else width * torch.arange(len(rows))  # in the flattened inputs
    within = _ranges(own)
    mask = torch.arange(longest) < own.unsqueeze(1)
    tokens = _flat([ids for pair in zip(prompts, completions, strict=True) for ids in pair], torch.int64)
    return MicroBatch(
        rows=list(rows),
        inputs=_pack(tokens, before + own, device) if packed else _pad(tokens, before + own, device),
        predictors=send((begins + before - 1).repeat_interleave(own) + within, device),
        targets=send(_flat(completions, torch.int64), device),
        places=send((longest * torch.arange(len(rows))).repeat_interleave(own) + within, device),
        mask=send(mask, device),
    )


def _pad(tokens: Tensor, lengths: Tensor, device: torch.device) -> Padded:
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    input_ids = torch.zeros(mask.shape, dtype=torch.int64)
    input_ids[mask] = tokens
    return Padded(send(input_ids, device), send(mask.long(), device))


def _pack(tokens: Tensor, lengths: Tensor, device: torch.device) -> Packed:
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    both = send(torch.stack([tokens, _ranges(lengths)]), device)
    return Packed(both[:1], both[1:], send(starts, device), int(lengths.max()))


def _begins(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths


def _ranges(lengths: Tensor) -> Tensor:
    """0, 1, … for each of the lengths, one after the other."""
    return torch.arange(int(lengths.sum())) - _begins(lengths).repeat_interleave(lengths)


def _flat(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    numbers = array("q" if dtype == torch.int64 else "f", chain.from_iterable(rows))
    return torch.frombuffer(numbers, dtype=dtype)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """To the card without waiting for it: a plain copy would wait until all that is queued there is done."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
