"""What a decode step knows of its rows, and where it writes what they drew."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass
class RowState:
    """Of R slots, on the device; a draw reads and moves it on. What a slot without a live row holds does not matter."""

    tokens: Tensor  # [R] int64: drawn last, to be fed next
    positions: Tensor  # [R] int64: the place of that token in its sequence
    num_drawn: Tensor  # [R] int64
    limits: Tensor  # [R] int64: num_drawn at which a row ends
    keys: Tensor  # [R] int64: whose random numbers
    outputs: Tensor  # [R] int64: the line of `Outputs` it writes to
    live: Tensor  # [R] int32

    @classmethod
    def of(cls, num_slots: int, device: torch.device) -> RowState:
        """Nobody lives yet."""
        counts = {
            part.name: torch.zeros(num_slots, dtype=torch.int64, device=device)
            for part in fields(cls)
        }
        return cls(**counts | {"live": torch.zeros(num_slots, dtype=torch.int32, device=device)})


@dataclass
class Outputs:
    """What was drawn, one line for each completion."""

    tokens: Tensor  # [N, T] int32
    logprobs: Tensor  # [N, T] fp32
    entropies: Tensor  # [N, T] fp32
    lengths: Tensor  # [N] int32
    finished: Tensor  # [N] int32: by an end, not by its limit
