"""Searches the unlearning rate η whose step has a given KL(θ‖θ′): `unlearn_lr = "auto"`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

MAX_TRIES = 10
CLOSE_ENOUGH = 1.1  # a KL within this factor of the target ends the search
LR_BOUNDS = (1e-9, 1e3)
NEGLIGIBLE = 1e-2  # times a rate: such a step has about 1e-4 of its KL


@dataclass(frozen=True)
class SearchResult:
    lr: float
    kl: float  # above the floor
    floor: float  # KL that rounding adds to every step, however small


def lr_for_kl(kl_of: Callable[[float], float], target: float, start: float) -> float:
    """Return a rate whose step has about `target` KL. `kl_of(lr)` measures the KL of a step.

    The KL of small steps grows with the square of the rate, that of larger steps faster. So follow
    the slope between the last two tries, inside the bracket that all tries leave. If no try is
    close enough, return the largest rate that stayed below the target.
    """
    lr, low, high = start, LR_BOUNDS[0], LR_BOUNDS[1]
    previous: tuple[float, float] | None = None  # log lr, log kl
    for _ in range(MAX_TRIES):
        kl = kl_of(lr)
        if target / CLOSE_ENOUGH <= kl <= target * CLOSE_ENOUGH:
            return lr
        if kl < target:
            low = max(low, lr)
        else:  # too large, or NaN
            high = min(high, lr)
        current = (math.log(lr), math.log(kl)) if 0 < kl < math.inf else None
        lr = min(max(_next_lr(previous, current, lr, target, kl < target), low), high)
        if lr in (low, high):
            lr = math.sqrt(low * high)
        previous = current
    return low


def lr_above_floor(
    kl_of: Callable[[float], float], target: float, start: float, has_floor: bool
) -> SearchResult:
    """Search as `lr_for_kl` does, but subtract the KL that rounding alone causes.

    With bf16 weights or passes (`has_floor`) every step, however small, has a KL that comes from
    rounding. A search for the whole KL would stop at a step that does nothing.
    """
    floor = kl_of(start * NEGLIGIBLE) if has_floor else 0.0
    if floor > target:
        _warn_below_floor(target, floor)
    tries: dict[float, float] = {}

    def kl_above_floor(lr: float) -> float:
        tries[lr] = kl_of(lr) - floor
        return tries[lr]

    lr = lr_for_kl(kl_above_floor, target, start)
    if not any(kl > 0 or math.isnan(kl) for kl in tries.values()):  # saturated: no rate moves θ
        lr = start
    return SearchResult(lr, max(tries.get(lr, 0.0), 0.0), floor)


_WARNED: set[float] = set()


def _warn_below_floor(target: float, floor: float) -> None:
    """Warn once per target: rounding hides a KL that small."""
    if target in _WARNED:
        return
    _WARNED.add(target)
    log.warning(
        "unlearn_kl_target = %g is below %g, the KL that rounding alone causes; use a larger "
        "target, or float32 for the rollout weights and the training passes",
        target,
        floor,
    )


def _next_lr(
    previous: tuple[float, float] | None,
    current: tuple[float, float] | None,
    lr: float,
    target: float,
    increase: bool,
) -> float:
    """Extrapolate the last two tries to the target on log scales, by at most a factor of 10."""
    if current is None:
        return lr * 10 if increase else lr / 10
    slope = 2.0
    if previous is not None and previous[0] != current[0]:
        slope = (current[1] - previous[1]) / (current[0] - previous[0])
    step = (math.log(target) - current[1]) / min(max(slope, 1.0), 8.0)
    return lr * math.exp(min(max(step, -math.log(10)), math.log(10)))
