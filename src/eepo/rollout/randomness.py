"""Random numbers that belong to a row, not to a batch.

The draw for (seed, stream, prompt, sample, position) is a hash of exactly these, so it is the same however rows are
batched, split, reordered or resumed. No generator state exists, hence none can be lost.
"""

from __future__ import annotations

import hashlib

from eepo.kernels.reference import uniforms
from eepo.types import Prompt, Sampling

__all__ = ["row_key", "uniforms"]


def row_key(sampling: Sampling, prompt: Prompt, sample: int) -> int:
    """A signed 64-bit key for one row."""
    name = f"{sampling.seed}\0{sampling.stream}\0{prompt.id}\0{sample}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)
