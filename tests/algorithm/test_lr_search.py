"""The search for the unlearning rate, on KL curves with known answers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from eepo.algorithm import SearchResult, lr_above_floor, lr_for_kl, lr_search
from eepo.algorithm.lr_search import FLOOR_INTERVAL, LR_BOUNDS, MAX_TRIES


class CountingKL:
    """Wraps a KL curve and keeps the rates that were tried."""

    def __init__(self, kl_of: Callable[[float], float]) -> None:
        self.kl_of, self.rates = kl_of, list[float]()

    def __call__(self, lr: float) -> float:
        self.rates.append(lr)
        return self.kl_of(lr)


@pytest.mark.parametrize("start", [1e-6, 1e-3, 1.0])
def test_a_quadratic_curve_needs_few_tries(start: float) -> None:
    kl_of = CountingKL(lambda lr: 40 * lr**2)
    lr = lr_for_kl(kl_of, 1e-3, SearchResult(start)).lr
    assert kl_of.kl_of(lr) == pytest.approx(1e-3, rel=0.5)
    assert len(kl_of.rates) <= MAX_TRIES


def test_a_start_that_meets_the_target_needs_one_try() -> None:
    kl_of = CountingKL(lambda lr: 40 * lr**2)
    start = math.sqrt(1e-3 / 40)
    assert lr_for_kl(kl_of, 1e-3, SearchResult(start)).lr == start
    assert kl_of.rates == [start]


@pytest.mark.parametrize("power", [1, 3, 4, 6])
def test_other_powers_than_the_square_meet_the_target(power: int) -> None:
    """Trained policies show the fourth power and more."""
    result = lr_for_kl(lambda lr: (100 * lr) ** power, 1e-3, SearchResult(3e-3))
    assert result.kl == (100 * result.lr) ** power == pytest.approx(1e-3, rel=0.5)


def test_nan_and_infinite_kl_lower_the_rate() -> None:
    def kl_of(lr: float) -> float:
        return math.nan if lr > 0.5 else math.inf if lr > 0.05 else 40 * lr**2

    assert lr_for_kl(kl_of, 1e-3, SearchResult(3.0)).kl == pytest.approx(1e-3, rel=0.5)


def test_rates_stay_within_the_bounds() -> None:
    kl_of = CountingKL(lambda lr: 0.0)
    assert 1e-3 < lr_for_kl(kl_of, 1e-3, SearchResult(1e-3)).lr <= LR_BOUNDS[1]
    assert len(kl_of.rates) == MAX_TRIES
    assert lr_for_kl(lambda lr: math.nan, 1e-3, SearchResult(1e-8)).lr == LR_BOUNDS[0]


@pytest.mark.parametrize("has_floor", [True, False])
def test_the_kl_of_rounding_is_subtracted(has_floor: bool) -> None:
    """The step has KL 4 η². Rounding adds .0015, which is above the default target."""
    rounding = 1.5e-3 if has_floor else 0.0
    result = lr_above_floor(lambda lr: 4 * lr**2 + rounding, 1e-3, SearchResult(1e-2), has_floor)
    assert result.kl == pytest.approx(4 * result.lr**2, rel=0.02)
    assert result.kl == pytest.approx(1e-3, rel=0.5)
    assert result.floor == pytest.approx(rounding, rel=0.01)


@pytest.mark.parametrize("has_floor", [True, False])
def test_if_no_rate_has_an_effect_the_start_is_returned(has_floor: bool) -> None:
    result = lr_above_floor(lambda lr: 0.0, 1e-3, SearchResult(1e-2), has_floor)
    assert (result.lr, result.kl, result.floor) == (1e-2, 0.0, 0.0)


def test_the_next_search_starts_with_the_slope_of_the_last_one() -> None:
    """The KL jumps where another token becomes the most likely one."""

    def sharp(threshold: float) -> CountingKL:
        return CountingKL(lambda lr: 1e-6 * lr**2 + 0.3 * (lr / threshold) ** 40)

    first = lr_for_kl(sharp(0.05), 1e-3, SearchResult(1e-3))
    assert first.slope > 20
    nearby = sharp(0.055)  # the curve of the next step is shifted by 10 %
    assert lr_for_kl(nearby, 1e-3, first).kl == pytest.approx(1e-3, rel=0.5)
    without_slope = sharp(0.055)
    lr_for_kl(without_slope, 1e-3, SearchResult(first.lr))
    assert len(nearby.rates) == 2 < len(without_slope.rates)


def test_a_small_floor_is_measured_again_only_after_some_searches() -> None:
    kl_of = CountingKL(lambda lr: 4 * lr**2 + 1e-6)
    result = SearchResult(1e-2)
    for _ in range(2 * FLOOR_INTERVAL + 1):
        result = lr_above_floor(kl_of, 1e-3, result, has_floor=True)
    floors = [lr for lr in kl_of.rates if lr < 1e-3]
    assert len(floors) == 3


def test_a_floor_near_the_target_is_measured_in_every_search() -> None:
    kl_of = CountingKL(lambda lr: 4 * lr**2 + 2e-4)
    result = SearchResult(1e-2)
    for _ in range(5):
        result = lr_above_floor(kl_of, 1e-3, result, has_floor=True)
    assert len([lr for lr in kl_of.rates if lr < 1e-3]) == 5


def test_a_target_below_the_floor_is_a_warning_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lr_search, "_WARNED", set())
    for _ in range(2):
        lr_above_floor(lambda lr: 4 * lr**2 + 3e-3, 1e-3, SearchResult(1e-2), has_floor=True)
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith("unlearn_kl_target = 0.001 is below 0.00300")
    assert "larger target" in message
    caplog.clear()
    lr_above_floor(lambda lr: 4 * lr**2 + 3e-3, 1e-2, SearchResult(1e-2), has_floor=True)
    assert not caplog.records
