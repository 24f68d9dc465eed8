"""Shuffles a finite problem set anew in each epoch."""

from __future__ import annotations

import random
from functools import lru_cache


def shuffled_index(position: int, num_problems: int, seed: str) -> tuple[int, int]:
    """Return (epoch, index of the problem) for a position in training.

    Each epoch contains every problem once, in a different order. The result is a pure function of
    the arguments, so a run resumes from its position alone.
    """
    epoch, offset = divmod(position, num_problems)
    return epoch, _epoch_order(num_problems, f"{seed}/epoch/{epoch}")[offset]


@lru_cache(maxsize=2)  # one training step may contain problems of two epochs
def _epoch_order(num_problems: int, seed: str) -> list[int]:
    order = list(range(num_problems))
    random.Random(seed).shuffle(order)
    return order
