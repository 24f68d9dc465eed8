"""The order of a finite problem set: every epoch holds each problem once, in an order of its own."""

from __future__ import annotations

import random
from functools import lru_cache


def place(position: int, num_problems: int, seed: str) -> tuple[int, int]:
    """(epoch, index of the problem) at a position of training: pure, so a run resumes from one number."""
    epoch, offset = divmod(position, num_problems)
    return epoch, _epoch_order(num_problems, f"{seed}/epoch/{epoch}")[offset]


@lru_cache(maxsize=2)  # a step may cross the border of two epochs
def _epoch_order(num_problems: int, seed: str) -> list[int]:
    order = list(range(num_problems))
    random.Random(seed).shuffle(order)
    return order
