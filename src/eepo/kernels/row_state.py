"""State of the rows of a decode step, and the buffers that receive their completions."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass
class RowState:
    """Device tensors of R slots, read and advanced by each sampled token.

    A slot decodes one row. The values of a slot without a live row are meaningless.
    """

    tokens: Tensor  # [R] int64: sampled last, input of the next step
    positions: Tensor  # [R] int64: position of that token in its sequence
    num_sampled: Tensor  # [R] int64: tokens sampled so far
    limits: Tensor  # [R] int64: value of num_sampled at which the row ends
    keys: Tensor  # [R] int64: random key of the row
    outputs: Tensor  # [R] int64: the row's line in `Outputs`
    live: Tensor  # [R] int32: 1 while the slot decodes a row

    @classmethod
    def empty(cls, num_slots: int, device: torch.device) -> RowState:
        """Create a state in which all slots are empty."""
        tensors = {
            field.name: torch.zeros(num_slots, dtype=torch.int64, device=device)
            for field in fields(cls)
        }
        return cls(**tensors | {"live": torch.zeros(num_slots, dtype=torch.int32, device=device)})


@dataclass
class Outputs:
    """Sampled tokens and their scores, one line per completion."""

    tokens: Tensor  # [N, T] int32
    logprobs: Tensor  # [N, T] fp32
    entropies: Tensor  # [N, T] fp32
    lengths: Tensor  # [N] int32
    finished: Tensor  # [N] int32: 1 if an end token was sampled, 0 if the limit was reached
