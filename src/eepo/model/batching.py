"""Cut ragged completions into micro-batches of a bounded number of tokens.

A micro-batch is either packed (sequences laid end to end, no padding) or padded (rows sorted by
length). In a packed micro-batch, consecutive completions of one prompt share it: the prompt's
tokens are stored and computed once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eepo.types import Completion, Prompt


class FullSequences(NamedTuple):
    """Lists the M tokens of B packed sequences, shared prompts repeated."""

    token_indices: Tensor  # [M] indices into the N packed tokens
    cu_seqlens: Tensor  # [B + 1] int32: start of each sequence in `token_indices`, then the end


class PackedLayout(NamedTuple):
    """Says where each of B sequences lies among the packed tokens."""

    cu_seqlens: Tensor  # [B + 1] int32: start of each sequence, then the end
    max_seqlen: int  # with prompts, also where they are stored in an earlier sequence
    # None if no prompt is shared. Either all micro-batches of a call have it or none: a compiled
    # layer would otherwise be compiled twice.
    full: FullSequences | None = None


@dataclass
class Padded:
    """B sequences, padded on the right to the longest."""

    input_ids: Tensor  # [B, L]
    attention_mask: Tensor  # [B, L]


@dataclass
class Packed:
    """B sequences laid end to end, without the prompts that repeat the previous one: N tokens."""

    input_ids: Tensor  # [1, N]
    position_ids: Tensor  # [1, N]
    layout: PackedLayout


@dataclass
class MicroBatch:
    """Holds B rows of a batch. T is their longest completion, C the sum of completion lengths."""

    rows: list[int]  # B indices into the batch that this one was cut from
    inputs: Padded | Packed  # prompts followed by completions
    predictors: Tensor  # [C] indices into the flattened inputs: the states before each target
    targets: Tensor  # [C] completion tokens
    target_indices: Tensor  # [C] indices of the targets in a flattened [B, T]
    mask: Tensor  # [B, T] bool: True on completion tokens

    def pad(self, values: Sequence[Sequence[float]]) -> Tensor:
        """Select per-token values of these rows from the whole batch -> [B, T], 0 on padding."""
        flat = _flatten([values[row] for row in self.rows], torch.float32)
        return self.scatter(to_device(flat, self.mask.device))

    def scatter(self, values: Tensor) -> Tensor:  # [C] -> [B, T]
        """Write one value per target into a padded tensor, 0 on padding."""
        flat = values.new_zeros(self.mask.numel()).index_copy(0, self.target_indices, values)
        return flat.view(self.mask.shape)

    def pick(self, values: Sequence[float]) -> Tensor:
        """Select per-row values of these rows from the whole batch -> [B]."""
        selected = torch.tensor([values[row] for row in self.rows], dtype=torch.float32)
        return to_device(selected, self.mask.device)


def micro_batches(
    pairs: Sequence[tuple[Prompt, Completion]],
    max_tokens: int,
    device: torch.device,
    packed: bool = False,
    rows: Sequence[int] | None = None,
) -> Iterator[MicroBatch]:
    """Cut `pairs`, or only these `rows` of them, into micro-batches of at most `max_tokens` tokens.

    Padding counts as tokens. A row with more than `max_tokens` gets a micro-batch of its own.
    """
    order = list(range(len(pairs)) if rows is None else rows)
    if not packed:
        order.sort(key=lambda row: -sum(_lengths(pairs[row])))
    share_prompts = packed and any(_repeats_previous([prompt for prompt, _ in pairs]))
    for start, end in _split([pairs[row] for row in order], max_tokens, packed):
        chosen = order[start:end]
        if packed:
            yield _collate_packed(chosen, pairs, device, share_prompts)
        else:
            yield _collate_padded(chosen, pairs, device)


def evenly_spaced(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced indices below `count`; all of them if `most` is 0."""
    if 0 < most < count:
        return [index * count // most for index in range(most)]
    return list(range(count))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to a GPU without a synchronization, which would wait for all queued work."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _split(
    pairs: Sequence[tuple[Prompt, Completion]], max_tokens: int, packed: bool
) -> Iterator[tuple[int, int]]:
    """Yield start and end of each micro-batch. Pairs to be padded must be sorted, longest first."""
    repeats = _repeats_previous([prompt for prompt, _ in pairs])
    start = size = 0
    for index, pair in enumerate(pairs):
        num_prompt, num_completion = _lengths(pair)
        if packed:
            size += num_completion + (0 if repeats[index] else num_prompt)
        else:
            size = (index + 1 - start) * sum(_lengths(pairs[start]))
        if size > max_tokens and index > start:
            yield start, index
            start, size = index, num_prompt + num_completion
    if pairs:
        yield start, len(pairs)


def _lengths(pair: tuple[Prompt, Completion]) -> tuple[int, int]:
    return len(pair[0].token_ids), len(pair[1].token_ids)


def _repeats_previous(prompts: Sequence[Prompt]) -> list[bool]:
    """Tell for each prompt whether it has the same tokens as the one before it."""
    neighbours = pairwise(prompt.token_ids for prompt in prompts)
    same = [before is after or before == after for before, after in neighbours]
    return [False, *same][: len(prompts)]


def _collate_packed(
    rows: list[int],
    pairs: Sequence[tuple[Prompt, Completion]],
    device: torch.device,
    share_prompts: bool,
) -> MicroBatch:
    chosen = [pairs[row] for row in rows]
    repeats = _repeats_previous([prompt for prompt, _ in chosen])
    parts: list[Sequence[int]] = []
    for (prompt, completion), repeated in zip(chosen, repeats, strict=True):
        parts += [() if repeated else prompt.token_ids, completion.token_ids]
    index = _TokenIndex.packed(chosen, torch.tensor(repeats))
    inputs = index.pack(_flatten(parts, torch.int64), share_prompts, device)
    return _micro_batch(rows, pairs, inputs, index, device)


def _collate_padded(
    rows: list[int], pairs: Sequence[tuple[Prompt, Completion]], device: torch.device
) -> MicroBatch:
    chosen = [pairs[row] for row in rows]
    parts = [
        ids for prompt, completion in chosen for ids in (prompt.token_ids, completion.token_ids)
    ]
    index = _TokenIndex.padded(chosen)
    lengths = index.num_prompt + index.num_completion
    inputs = _pad(_flatten(parts, torch.int64), lengths, device)
    return _micro_batch(rows, pairs, inputs, index, device)


def _micro_batch(
    rows: list[int],
    pairs: Sequence[tuple[Prompt, Completion]],
    inputs: Padded | Packed,
    index: _TokenIndex,
    device: torch.device,
) -> MicroBatch:
    counts = index.num_completion
    longest = int(counts.max())
    target_indices = _repeat(longest * torch.arange(len(rows)), counts) + _ranges(counts)
    targets = _flatten([pairs[row][1].token_ids for row in rows], torch.int64)
    return MicroBatch(
        rows=list(rows),
        inputs=inputs,
        predictors=to_device(index.predictors(), device),
        targets=to_device(targets, device),
        target_indices=to_device(target_indices, device),
        mask=to_device(torch.arange(longest) < counts.unsqueeze(1), device),
    )


@dataclass
class _TokenIndex:
    """Computes where the tokens of B sequences lie in the flattened inputs, from lengths alone."""

    num_prompt: Tensor  # [B]
    num_completion: Tensor  # [B]
    num_omitted: Tensor  # [B] prompt tokens that are stored in an earlier sequence
    prompt_starts: Tensor  # [B]
    completion_starts: Tensor  # [B]

    @classmethod
    def packed(cls, pairs: Sequence[tuple[Prompt, Completion]], repeats: Tensor) -> _TokenIndex:
        num_prompt, num_completion = _length_tensors(pairs)
        num_omitted = torch.where(repeats, num_prompt, 0)
        starts = _starts(num_prompt + num_completion - num_omitted)
        rows = torch.arange(len(pairs))
        first_of_group = torch.where(repeats, 0, rows).cummax(0).values
        completion_starts = starts + num_prompt - num_omitted
        prompt_starts = starts[first_of_group]
        return cls(num_prompt, num_completion, num_omitted, prompt_starts, completion_starts)

    @classmethod
    def padded(cls, pairs: Sequence[tuple[Prompt, Completion]]) -> _TokenIndex:
        num_prompt, num_completion = _length_tensors(pairs)
        starts = int((num_prompt + num_completion).max()) * torch.arange(len(pairs))
        num_omitted = torch.zeros_like(num_prompt)
        return cls(num_prompt, num_completion, num_omitted, starts, starts + num_prompt)

    def predictors(self) -> Tensor:
        """Return the [C] indices of the states that predict completion tokens."""
        within = _ranges(self.num_completion)
        last_of_prompt = _repeat(self.prompt_starts + self.num_prompt - 1, self.num_completion)
        before_completion = _repeat(self.completion_starts - 1, self.num_completion)
        return torch.where(within == 0, last_of_prompt, before_completion + within)

    def pack(self, tokens: Tensor, share_prompts: bool, device: torch.device) -> Packed:
        full_lengths = self.num_prompt + self.num_completion
        lengths = full_lengths - self.num_omitted
        positions = _ranges(lengths) + _repeat(self.num_omitted, lengths)
        both = to_device(torch.stack([tokens, positions]), device)
        full = self._full_sequences(device) if share_prompts else None
        layout = PackedLayout(_cu_seqlens(lengths, device), int(full_lengths.max()), full)
        return Packed(both[:1], both[1:], layout)

    def _full_sequences(self, device: torch.device) -> FullSequences:
        lengths = self.num_prompt + self.num_completion
        within = _ranges(lengths)
        columns = self.num_prompt, self.prompt_starts, self.completion_starts
        num_prompt, prompts, completions = (_repeat(column, lengths) for column in columns)
        in_prompt = within < num_prompt
        indices = torch.where(in_prompt, prompts + within, completions + within - num_prompt)
        return FullSequences(to_device(indices, device), _cu_seqlens(lengths, device))


def _length_tensors(pairs: Sequence[tuple[Prompt, Completion]]) -> tuple[Tensor, Tensor]:
    num_prompt, num_completion = zip(*map(_lengths, pairs), strict=True)
    return torch.tensor(num_prompt), torch.tensor(num_completion)


def _pad(tokens: Tensor, lengths: Tensor, device: torch.device) -> Padded:
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    input_ids = torch.zeros(mask.shape, dtype=torch.int64)
    input_ids[mask] = tokens
    return Padded(to_device(input_ids, device), to_device(mask.long(), device))


def _cu_seqlens(lengths: Tensor, device: torch.device) -> Tensor:
    return to_device(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(), device)


def _starts(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths


def _ranges(lengths: Tensor) -> Tensor:
    """Concatenate 0, 1, ..., length - 1 of every length."""
    return torch.arange(int(lengths.sum())) - _repeat(_starts(lengths), lengths)


def _repeat(values: Tensor, counts: Tensor) -> Tensor:
    """Repeat each value; numpy's repeat does not start all threads for a small array."""
    return torch.from_numpy(np.repeat(values.numpy(), counts.numpy()))


def _flatten(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    numbers = array("q" if dtype == torch.int64 else "f", chain.from_iterable(rows))
    return torch.frombuffer(numbers, dtype=dtype)
