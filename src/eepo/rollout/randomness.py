"""Random numbers that belong to a row, not to a batch.

The draw for (seed, stream, prompt, sample, position) is a hash of exactly these, so it is the same however rows are
batched, split, reordered or resumed. No generator state exists, hence none can be lost.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from eepo.types import Prompt, Sampling

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def row_key(sampling: Sampling, prompt: Prompt, sample: int) -> int:
    """A signed 64-bit key for one row."""
    name = f"{sampling.seed}\0{sampling.stream}\0{prompt.id}\0{sample}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)


def uniforms(keys: Tensor, position: int) -> Tensor:
    """[B] int64 row keys -> [B] float64 in [0, 1): splitmix64, in arithmetic that wraps as int64 does."""
    mixed = keys + _signed((position + 1) * _GOLDEN)
    mixed = (mixed ^ _shift(mixed, 30)) * _signed(_MIX_1)
    mixed = (mixed ^ _shift(mixed, 27)) * _signed(_MIX_2)
    mixed = mixed ^ _shift(mixed, 31)
    return _shift(mixed, 11).to(torch.float64) * 2.0**-53


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch shifts int64 arithmetically."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value
