"""Converts between lists of rows and the padded tensors that TRL works with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass
class PaddedBatch:
    """B completions, padded as TRL does: prompts on the left, completions on the right."""

    rows: list[int]  # indices of the B completions in their stage
    input_ids: Tensor  # [B, P + T]
    attention_mask: Tensor  # [B, P + T]
    mask: Tensor  # [B, T] bool: True on completion tokens


def pad_batch(
    stage: tuple[Any, ...],  # what TRL's `_generate` returns: ids of prompts and completions first
    rows: list[int],
    pad_id: int,
    device: torch.device,
) -> PaddedBatch:
    """Pad the token ids of some rows of a stage."""
    ids, masks = [], []
    for column, side in ((stage[0], "left"), (stage[1], "right")):
        parts = [torch.tensor(column[row]) for row in rows]
        ids.append(pad_sequence(parts, True, pad_id, padding_side=side))
        masks.append(pad_sequence([torch.ones_like(ids) for ids in parts], True, padding_side=side))
    input_ids, attention_mask = torch.cat(ids, 1), torch.cat(masks, 1)
    mask = masks[1].bool()
    return PaddedBatch(rows, input_ids.to(device), attention_mask.to(device), mask.to(device))


def unpad_rows(values: Tensor, batch: PaddedBatch) -> dict[int, Tensor]:  # [B, T] -> B of [T_k]
    """Cut off the padding. The keys are the batch's row indices."""
    lengths = batch.mask.sum(1).tolist()
    rows = zip(batch.rows, values, lengths, strict=True)
    return {row: row_values[:length] for row, row_values, length in rows}


def pad_rows(rows: list[Tensor], shape: torch.Size) -> Tensor:  # B of [T_k] -> [B, T]
    """Pad rows with zeros on the right."""
    grid = rows[0].new_zeros(shape)
    for padded_row, row in zip(grid, rows, strict=True):
        padded_row[: len(row)] = row
    return grid


def interleave_stages(first: Any, second: Any) -> Any:
    """Alternate the rows of both stages in a value that TRL returns for a rollout.

    Lists are interleaved, dictionaries key by key. Of other values, stage 1's is returned.
    """
    if type(first) is not type(second):
        raise TypeError(f"stages returned a {type(first).__name__} and a {type(second).__name__}")
    if isinstance(first, dict):
        return {name: interleave_stages(first[name], second[name]) for name in first}
    if isinstance(first, list):
        return [row for pair in zip(first, second, strict=True) for row in pair]
    return first
