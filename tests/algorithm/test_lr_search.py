"""The search for the unlearning rate, on KL curves with known answers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from eepo.algorithm import SearchResult, lr_above_floor, lr_for_kl
from eepo.algorithm.lr_search import LR_BOUNDS, MAX_TRIES


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
    lr = lr_for_kl(kl_of, 1e-3, start)
    assert lr == pytest.approx(math.sqrt(1e-3 / 40), rel=0.06)
    assert len(kl_of.rates) <= MAX_TRIES


def test_a_start_that_meets_the_target_needs_one_try() -> None:
    kl_of = CountingKL(lambda lr: 40 * lr**2)
    start = math.sqrt(1e-3 / 40)
    assert lr_for_kl(kl_of, 1e-3, start) == start
    assert kl_of.rates == [start]


@pytest.mark.parametrize("power", [1, 3, 4, 6])
def test_other_powers_than_the_square_meet_the_target(power: int) -> None:
    """Trained policies show the fourth power and more."""
    lr = lr_for_kl(lambda lr: (100 * lr) ** power, 1e-3, 3e-3)
    assert (100 * lr) ** power == pytest.approx(1e-3, rel=0.15)


def test_nan_and_infinite_kl_lower_the_rate() -> None:
    def kl_of(lr: float) -> float:
        return math.nan if lr > 0.5 else math.inf if lr > 0.05 else 40 * lr**2

    assert lr_for_kl(kl_of, 1e-3, 3.0) == pytest.approx(math.sqrt(1e-3 / 40), rel=0.06)


def test_rates_stay_within_the_bounds() -> None:
    kl_of = CountingKL(lambda lr: 0.0)
    assert 1e-3 < lr_for_kl(kl_of, 1e-3, 1e-3) <= LR_BOUNDS[1]
    assert len(kl_of.rates) == MAX_TRIES
    assert lr_for_kl(lambda lr: math.nan, 1e-3, 1e-8) == LR_BOUNDS[0]


def test_the_kl_of_rounding_is_subtracted() -> None:
    """The step has KL 4 η². Rounding adds .0015, which is above the default target."""
    result = lr_above_floor(lambda lr: 4 * lr**2 + 1.5e-3, 1e-3, 1e-2, has_floor=True)
    assert result.lr == pytest.approx((1e-3 / 4) ** 0.5, rel=0.06)
    assert result.kl == pytest.approx(1e-3, rel=0.11)
    assert result.floor == pytest.approx(1.5e-3, rel=0.01)
    exact = lr_above_floor(lambda lr: 4 * lr**2, 1e-3, 1e-2, has_floor=False)
    assert exact.lr == pytest.approx((1e-3 / 4) ** 0.5, rel=0.06)
    assert exact.floor == 0


@pytest.mark.parametrize("has_floor", [True, False])
def test_if_no_rate_has_an_effect_the_start_is_returned(has_floor: bool) -> None:
    assert lr_above_floor(lambda lr: 0.0, 1e-3, 1e-2, has_floor) == SearchResult(1e-2, 0.0, 0.0)
