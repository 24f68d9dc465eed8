"""Random numbers that belong to a row, not to a batch.

The random number for (seed, stream, prompt, sample, position) is a hash of exactly these values.
It is the same however rows are batched, split, reordered or resumed. There is no generator state
that could be lost.
"""

from __future__ import annotations

import hashlib

from eepo.kernels.reference import uniforms
from eepo.types import Prompt, Sampling

__all__ = ["row_key", "uniforms"]


def row_key(sampling: Sampling, prompt: Prompt, sample: int) -> int:
    """Return the signed 64-bit key of one row, which determines all its random numbers."""
    name = f"{sampling.seed}\0{sampling.stream}\0{prompt.id}\0{sample}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)
