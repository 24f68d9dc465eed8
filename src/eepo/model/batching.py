"""Ragged completions into micro-batches, bounded by tokens: packed where that can be, else sorted by length.

Packed, completions of one prompt share it: its tokens stand there once, and are computed once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
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
    """B sequences laid end to end, a prompt that follows itself left out: N tokens."""

    input_ids: Tensor  # [1, N]
    position_ids: Tensor  # [1, N]
    starts: Tensor  # [B + 1] int32: where each begins, and the end
    longest: int  # of the whole sequences
    whole: Whole | None = (
        None  # if any batch of these pairs leaves prompts out: compiled layers want them all alike
    )


@dataclass
class Whole:
    """B sequences, each with its prompt: M tokens."""

    places: Tensor  # [M] of their tokens among the N
    starts: Tensor  # [B + 1] int32: where each begins in `places`, and the end


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
        return self.spread(
            send(_flat([values[row] for row in self.rows], torch.float32), self.mask.device)
        )

    def spread(self, values: Tensor) -> Tensor:  # [C] -> [B, T]
        """Zero on padding."""
        flat = values.new_zeros(self.mask.numel()).index_copy(0, self.places, values)
        return flat.view(self.mask.shape)

    def pick(self, values: Sequence[float]) -> Tensor:
        """Per-row values of the whole batch -> [B] for these rows."""
        return send(
            torch.tensor([values[row] for row in self.rows], dtype=torch.float32), self.mask.device
        )


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
    order = list(range(len(pairs)) if rows is None else rows)
    if not packed:
        order.sort(key=lambda row: -sum(_lengths(pairs[row])))
    grouped = packed and any(_shared([prompt for prompt, _ in pairs]))
    for start, end in _cuts([pairs[row] for row in order], max_tokens, packed):
        yield _collate(order[start:end], pairs, device, packed, grouped)


def evenly(count: int, most: int) -> list[int]:
    """At most `most` places of `count`, evenly spread; all of them if `most` is 0."""
    return (
        [place * count // most for place in range(most)] if 0 < most < count else list(range(count))
    )


def _cuts(
    pairs: Sequence[tuple[Prompt, Completion]], max_tokens: int, packed: bool
) -> Iterator[tuple[int, int]]:
    """Of `pairs`, longest first if they are padded."""
    start = size = 0
    for end, (pair, shared) in enumerate(
        zip(pairs, _shared([prompt for prompt, _ in pairs]), strict=True)
    ):
        before, own = _lengths(pair)
        size = (
            size + own + (0 if shared else before)
            if packed
            else (end + 1 - start) * sum(_lengths(pairs[start]))
        )
        if size > max_tokens and end > start:
            yield start, end
            start, size = end, before + own
    if pairs:
        yield start, len(pairs)


def _lengths(pair: tuple[Prompt, Completion]) -> tuple[int, int]:
    return len(pair[0].token_ids), len(pair[1].token_ids)


def _shared(prompts: Sequence[Prompt]) -> list[bool]:
    """Whether each is the one before it."""
    pairs = pairwise(prompt.token_ids for prompt in prompts)
    return [False, *(one is other or one == other for one, other in pairs)][: len(prompts)]


def _collate(
    rows: list[int],
    pairs: Sequence[tuple[Prompt, Completion]],
    device: torch.device,
    packed: bool,
    grouped: bool,
) -> MicroBatch:
    """Tokens are touched one by one only to be copied; their places are computed from lengths."""
    prompts, completions = (
        [pairs[row][0] for row in rows],
        [pairs[row][1].token_ids for row in rows],
    )
    shared = _shared(prompts) if packed else [False] * len(rows)
    before, own = (
        torch.tensor(part) for part in zip(*(_lengths(pairs[row]) for row in rows), strict=True)
    )  # [B]
    parts = [
        () if left_out else prompt.token_ids
        for prompt, left_out in zip(prompts, shared, strict=True)
    ]
    tokens = _flat(
        [ids for pair in zip(parts, completions, strict=True) for ids in pair], torch.int64
    )
    layout = _Layout(before, own, torch.tensor(shared), packed)
    longest, within = int(own.max()), _ranges(own)
    return MicroBatch(
        rows=list(rows),
        inputs=layout.pack(tokens, grouped, device)
        if packed
        else _pad(tokens, before + own, device),
        predictors=send(layout.predictors(), device),
        targets=send(_flat(completions, torch.int64), device),
        places=send(_repeat(longest * torch.arange(len(rows)), own) + within, device),
        mask=send(torch.arange(longest) < own.unsqueeze(1), device),
    )


class _Layout:
    """Where the tokens of B sequences stand in the flattened inputs."""

    def __init__(
        self, before: Tensor, own: Tensor, shared: Tensor, packed: bool
    ) -> None:  # [B] each
        self.before, self.own = before, own  # tokens of prompts and of completions
        self.left_out = torch.where(
            shared, before, 0
        )  # of a prompt that the sequence before it has, too
        rows = torch.arange(len(own))
        width = int((before + own).max())
        begins = _begins(before + own - self.left_out) if packed else width * rows
        self.prompts = begins[
            torch.where(shared, 0, rows).cummax(0).values
        ]  # [B] where each one's prompt begins
        self.completions = begins + before - self.left_out

    def predictors(self) -> Tensor:
        """[C] of the states that predict completion tokens: the end of the prompt, then one after the other."""
        within = _ranges(self.own)
        first, later = (
            _repeat(part - 1, self.own) for part in (self.prompts + self.before, self.completions)
        )
        return torch.where(within == 0, first, later + within)

    def pack(self, tokens: Tensor, grouped: bool, device: torch.device) -> Packed:
        lengths = self.before + self.own - self.left_out
        positions = _ranges(lengths) + _repeat(self.left_out, lengths)
        both = send(torch.stack([tokens, positions]), device)
        whole = self._whole(device) if grouped else None
        return Packed(
            both[:1], both[1:], _starts(lengths, device), int((self.before + self.own).max()), whole
        )

    def _whole(self, device: torch.device) -> Whole:
        lengths = self.before + self.own
        within = _ranges(lengths)
        columns = self.before, self.prompts, self.completions
        before, prompts, completions = (_repeat(column, lengths) for column in columns)
        places = torch.where(within < before, prompts + within, completions + within - before)
        return Whole(send(places, device), _starts(lengths, device))


def _pad(tokens: Tensor, lengths: Tensor, device: torch.device) -> Padded:
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    input_ids = torch.zeros(mask.shape, dtype=torch.int64)
    input_ids[mask] = tokens
    return Padded(send(input_ids, device), send(mask.long(), device))


def _starts(lengths: Tensor, device: torch.device) -> Tensor:
    return send(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(), device)


def _begins(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths


def _ranges(lengths: Tensor) -> Tensor:
    """0, 1, … for each of the lengths, one after the other."""
    return torch.arange(int(lengths.sum())) - _repeat(_begins(lengths), lengths)


def _repeat(values: Tensor, counts: Tensor) -> Tensor:
    """Each of them so many times. torch's own way wakes every thread, for however little."""
    return torch.from_numpy(np.repeat(values.numpy(), counts.numpy()))


def _flat(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    numbers = array("q" if dtype == torch.int64 else "f", chain.from_iterable(rows))
    return torch.frombuffer(numbers, dtype=dtype)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """To the card without waiting for it: a plain copy would wait until all that is queued there is done."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
