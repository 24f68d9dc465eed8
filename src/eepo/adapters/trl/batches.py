"""Ragged rows of a rollout, and what TRL pads them to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass
class MicroBatch:
    """Some completions, padded as TRL pads: prompts on the left, completions on the right."""

    input_ids: Tensor  # [B, P + T]
    attention_mask: Tensor  # [B, P + T]
    mask: Tensor  # [B, T] bool: True on completion tokens


def micro_batch(
    prompts: list[Tensor], completions: list[Tensor], pad_id: int, device: torch.device
) -> MicroBatch:
    """Ragged token ids -> padded."""
    ids, masks = [], []
    for rows, side in ((prompts, "left"), (completions, "right")):
        ids.append(pad_sequence(rows, batch_first=True, padding_value=pad_id, padding_side=side))
        masks.append(
            pad_sequence(
                [torch.ones_like(row) for row in rows], batch_first=True, padding_side=side
            )
        )
    return MicroBatch(
        torch.cat(ids, 1).to(device), torch.cat(masks, 1).to(device), masks[1].bool().to(device)
    )


def rows_of(values: Tensor, mask: Tensor) -> list[Tensor]:  # [B, T] -> B of [T_k]
    return [row[: int(length)] for row, length in zip(values, mask.sum(1), strict=True)]


def padded(rows: list[Tensor], shape: torch.Size) -> Tensor:  # [T_k] each -> [B, T]
    """The first B rows, zero on the right."""
    grid = rows[0].new_zeros(shape)
    for place, row in zip(grid, rows, strict=False):
        place[: len(row)] = row
    return grid


def interleaved(first: Any, second: Any) -> Any:
    """Rows of both stages, in turn, in every part of what TRL returns of a rollout, whichever parts a version has."""
    if type(first) is not type(second):
        raise TypeError(f"stages returned a {type(first).__name__} and a {type(second).__name__}")
    if isinstance(first, dict):
        return {name: interleaved(first[name], second[name]) for name in first}
    if isinstance(first, list):
        return [row for pair in zip(first, second, strict=True) for row in pair]
    return first
