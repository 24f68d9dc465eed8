"""Searches the unlearning rate η whose step has a given KL(θ‖θ′): `unlearn_lr = "auto"`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

log = logging.getLogger(__name__)

MAX_TRIES = 10
CLOSE_ENOUGH = 1.1  # a KL within this factor of the target ends the search
LR_BOUNDS = (1e-9, 1e3)
SLOPE_BOUNDS = (1.0, 64.0)
NEGLIGIBLE = 1e-2  # times a rate: such a step has about 1e-4 of its KL
FLOOR_INTERVAL = 10  # searches that use one measurement of a small floor


@dataclass(frozen=True)
class SearchResult:
    """The result of a search, and where the next search starts."""

    lr: float = 1e-3
    kl: float = 0.0  # above the floor
    floor: float = 0.0  # KL that rounding adds to every step, however small
    # of log KL against log η near the target: 2 for small steps, far more where the KL jumps
    # because another token becomes the most likely one
    slope: float = 2.0
    floor_age: int = FLOOR_INTERVAL  # searches since the floor was measured


def lr_for_kl(kl_of: Callable[[float], float], target: float, start: SearchResult) -> SearchResult:
    """Find a rate whose step has about `target` KL. `kl_of(lr)` measures the KL of a step.

    Follow the slope between the last two tries, inside the bracket that all tries leave. The first
    slope is that of the last search, because consecutive steps are alike. If no try is close
    enough, return the largest rate that stayed below the target.
    """
    lr, slope, low, high = start.lr, start.slope, LR_BOUNDS[0], LR_BOUNDS[1]
    previous: tuple[float, float] | None = None  # log lr, log kl
    tried = {low: 0.0}
    for _ in range(MAX_TRIES):
        kl = tried[lr] = kl_of(lr)
        current = (math.log(lr), math.log(kl)) if 0 < kl < math.inf else None
        slope = _slope(previous, current) or slope
        if target / CLOSE_ENOUGH <= kl <= target * CLOSE_ENOUGH:
            return replace(start, lr=lr, kl=kl, slope=slope)
        if kl < target:
            low = max(low, lr)
        else:  # too large, or NaN
            high = min(high, lr)
        lr = lr * _factor(current, slope, target, increase=kl < target)
        if not low < lr < high:
            lr = math.sqrt(low * high)
        previous = current or previous
    return replace(start, lr=low, kl=max(tried[low], 0.0), slope=slope)


def lr_above_floor(
    kl_of: Callable[[float], float], target: float, start: SearchResult, has_floor: bool
) -> SearchResult:
    """Search as `lr_for_kl` does, but subtract the KL that rounding alone causes.

    With bf16 weights or passes (`has_floor`) every step, however small, has a KL that comes from
    rounding. A search for the whole KL would stop at a step that does nothing. A floor that is
    small compared with the target is not measured every time.
    """
    floor, age = start.floor, start.floor_age + 1
    if not has_floor:  # an earlier part of the run may have had one
        floor, age = 0.0, FLOOR_INTERVAL
    elif age > FLOOR_INTERVAL or 10 * floor > target:
        floor, age = kl_of(start.lr * NEGLIGIBLE), 1
    if floor > target:
        _warn_below_floor(target, floor)
    moves = False

    def kl_above_floor(lr: float) -> float:
        nonlocal moves
        kl = kl_of(lr) - floor
        moves = moves or kl > 0 or math.isnan(kl)
        return kl

    found = lr_for_kl(kl_above_floor, target, start)
    if not moves:  # saturated: no rate moves θ
        found = replace(start, kl=0.0)
    return replace(found, floor=floor, floor_age=age)


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


def _slope(
    previous: tuple[float, float] | None, current: tuple[float, float] | None
) -> float | None:
    """Return the slope between two tries on log scales, within bounds; None if there is none."""
    if previous is None or current is None or previous[0] == current[0]:
        return None
    slope = (current[1] - previous[1]) / (current[0] - previous[0])
    return min(max(slope, SLOPE_BOUNDS[0]), SLOPE_BOUNDS[1])


def _factor(
    current: tuple[float, float] | None, slope: float, target: float, increase: bool
) -> float:
    """Return the factor from a try to the next one: at most 10, at least 1/10."""
    if current is None:
        return 10.0 if increase else 0.1
    step = (math.log(target) - current[1]) / slope
    return math.exp(min(max(step, -math.log(10)), math.log(10)))
