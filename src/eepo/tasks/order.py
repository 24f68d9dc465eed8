"""Orders training problems: new ones without end, or a finite set shuffled in each epoch."""

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


def training_names(position: int, num_train: int, seed: int, order_seed: int) -> tuple[str, str]:
    """Return (prompt id, name of the draw) of a generated problem at a position in training.

    With `num_train = 0` every position is a new problem. Otherwise the id contains the epoch: one
    step may contain a problem in two epochs.
    """
    if not num_train:
        return (f"train/{order_seed}/{position}",) * 2
    epoch, index = shuffled_index(position, num_train, f"{seed}/{order_seed}")
    return f"train/{epoch}/{index}", f"train/{index}"


@lru_cache(maxsize=2)  # one training step may contain problems of two epochs
def _epoch_order(num_problems: int, seed: str) -> list[int]:
    order = list(range(num_problems))
    random.Random(seed).shuffle(order)
    return order
