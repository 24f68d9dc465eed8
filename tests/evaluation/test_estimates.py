"""Tests of the estimates, against enumeration and numbers computed by hand."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eepo.evaluation.estimates import (
    bootstrap_interval,
    grouped_bootstrap_interval,
    majority_accuracy,
    pass_at_k,
    powers_of_two,
    seed_and_problem_interval,
    seed_interval,
)


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(num_samples: int) -> None:
    for num_correct in range(num_samples + 1):
        marks = [True] * num_correct + [False] * (num_samples - num_correct)
        for k in range(1, num_samples + 1):
            subsets = list(itertools.combinations(marks, k))
            expected = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(expected, abs=1e-12)


@given(st.integers(1, 400), st.data())
def test_pass_at_k_is_the_exact_quotient_of_binomials(
    num_samples: int, data: st.DataObject
) -> None:
    num_correct, k = data.draw(st.integers(0, num_samples)), data.draw(st.integers(1, num_samples))
    without = Fraction(math.comb(num_samples - num_correct, k), math.comb(num_samples, k))
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(float(1 - without), abs=1e-11)


def test_pass_at_k_is_unbiased() -> None:
    """The mean over all outcomes of 6 samples, each correct with p = 0.2, is 1 − 0.8^k."""
    for k in range(1, 7):
        chances = [math.comb(6, n) * 0.2**n * 0.8 ** (6 - n) for n in range(7)]
        mean = sum(chance * pass_at_k(6, n, k) for n, chance in enumerate(chances))
        assert mean == pytest.approx(1 - 0.8**k, abs=1e-12)


@given(st.integers(1, 200), st.data())
def test_pass_at_1_is_the_mean_and_pass_at_k_never_falls_with_k(
    num_samples: int, data: st.DataObject
) -> None:
    num_correct = data.draw(st.integers(0, num_samples))
    curve = [pass_at_k(num_samples, num_correct, k) for k in powers_of_two(num_samples)]
    assert curve[0] == pytest.approx(num_correct / num_samples)
    assert curve == sorted(curve)
    assert curve[-1] == (1.0 if num_correct else 0.0)


@pytest.mark.parametrize(
    ("num_samples", "num_correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)]
)
def test_pass_at_k_refuses_impossible_counts(num_samples: int, num_correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="correct"):
        pass_at_k(num_samples, num_correct, k)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (24, [1, 2, 4, 8, 16, 24]), (32, [1, 2, 4, 8, 16, 32])],
)
def test_powers_of_two_end_with_the_limit_itself(limit: int, expected: list[int]) -> None:
    assert powers_of_two(limit) == expected


def test_bootstrap_interval_matches_the_normal_interval_for_many_problems() -> None:
    values = [1.0] * 120 + [0.0] * 280
    low, high = bootstrap_interval(values)
    half = 1.96 * math.sqrt(0.3 * 0.7 / 400)
    assert low == pytest.approx(0.3 - half, abs=0.005)
    assert high == pytest.approx(0.3 + half, abs=0.005)


def test_bootstrap_interval_covers_the_mean_of_a_known_distribution_95_times_in_100() -> None:
    """Pass rates follow Beta(2, 3), mean 0.4.

    With only 60 problems the interval is slightly too narrow.
    """
    rng = random.Random(0)
    covered = 0
    for seed in range(600):
        low, high = bootstrap_interval(
            [rng.betavariate(2, 3) for _ in range(60)], draws=500, seed=seed
        )
        covered += low <= 0.4 <= high
    assert covered / 600 == pytest.approx(0.945, abs=0.025)


def test_grouped_bootstrap_resamples_problems_within_each_group() -> None:
    """The standard deviation of (m₁ + m₂) / 2 is ½ √(s₁²/n₁ + s₂²/n₂)."""
    small, large = [1.0, 0.0] * 15, [1.0] * 100 + [0.0] * 300
    low, high = grouped_bootstrap_interval([small, large], draws=4000)
    half = 1.96 * math.sqrt(0.25 / 30 + 0.1875 / 400) / 2
    assert low == pytest.approx(0.375 - half, abs=0.01)
    assert high == pytest.approx(0.375 + half, abs=0.01)
    assert grouped_bootstrap_interval([[0.0] * 9, [1.0] * 5]) == (0.5, 0.5)


def test_groups_of_equal_size_are_resampled_independently() -> None:
    values = [1.0, 0.0] * 20
    low, high = bootstrap_interval(values)
    grouped_low, grouped_high = grouped_bootstrap_interval([values] * 4)
    assert grouped_high - grouped_low == pytest.approx((high - low) / 2, rel=0.15)


def test_the_interval_over_seeds_and_problems_adds_both_parts() -> None:
    """Seeds have means .3 and .5; problems have means .2, .4 and .6."""
    seeds = [[[0.1, 0.3, 0.5]], [[0.3, 0.5, 0.7]]]
    over_seeds = 12.706 * math.sqrt(0.02 / 2)
    over_problems = 4.303 * math.sqrt(0.04 / 3)
    half = math.hypot(over_seeds, over_problems)
    interval = seed_and_problem_interval(seeds)
    assert interval == pytest.approx((0.4 - half, 0.4 + half))
    # The same problems twice: half of the variance over problems, the same over seeds.
    twice = [groups * 2 for groups in seeds]
    half = math.hypot(over_seeds, over_problems / math.sqrt(2))
    assert seed_and_problem_interval(twice) == pytest.approx((0.4 - half, 0.4 + half))
    assert seed_and_problem_interval(seeds[:1]) is None
    assert seed_and_problem_interval([[[0.5]], [[0.5]]]) == (0.5, 0.5)


def test_the_interval_over_seeds_and_problems_covers_the_mean_of_both() -> None:
    """The rate is .5 + seed + problem. Single draws vary, too."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        seeds, problems = rng.normal(0, 0.03, (4, 1)), rng.normal(0, 0.1, (1, 30))
        rates = np.clip(0.5 + seeds + problems, 0, 1)
        draws = rng.binomial(8, rates) / 8
        low, high = seed_and_problem_interval([[row] for row in draws])
        covered += low <= 0.5 <= high
    assert covered / 400 >= 0.94


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ("a+ a+ b- c-", 1.0),
        ("a+ b- b- c-", 0.0),
        ("a+ a+ b- b-", 0.5),
        ("a+ b- c-", 1 / 3),
        (". . . a+", 1.0),  # completions without an answer do not vote
        (". . .", 0.0),
        ("a+ a- b-", 0.5),  # the grader accepts only one of two equal answers
        ("", 0.0),
    ],
)
def test_majority_accuracy_averages_over_ties(votes: str, expected: float) -> None:
    words = votes.split()
    answers = [None if word == "." else word[0] for word in words]
    correct = [word.endswith("+") for word in words]
    assert majority_accuracy(answers, correct) == pytest.approx(expected)


def test_bootstrap_interval_has_no_width_without_spread() -> None:
    assert bootstrap_interval([0.25] * 10) == (0.25, 0.25)
    assert bootstrap_interval([0.7]) == (0.7, 0.7)


def test_bootstrap_interval_is_repeatable() -> None:
    rng = random.Random(0)
    values = [rng.random() for _ in range(30)]
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)
    assert bootstrap_interval(values, seed=3) != bootstrap_interval(values, seed=4)


def test_seed_interval_uses_the_t_distribution() -> None:
    # Mean 2, standard deviation 1; t is 4.303 for 2 degrees of freedom.
    interval = seed_interval([1.0, 2.0, 3.0])
    assert interval == pytest.approx((2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3)))


def test_seed_interval_of_two_seeds_is_wide() -> None:
    assert seed_interval([0.4, 0.6]) == pytest.approx((0.5 - 1.2706, 0.5 + 1.2706))


def test_seed_interval_covers_the_mean_95_times_in_100() -> None:
    rng = random.Random(0)
    covered = 0
    for _ in range(4000):
        low, high = seed_interval([rng.gauss(0, 1) for _ in range(5)]) or (0.0, 0.0)
        covered += low <= 0 <= high
    assert covered / 4000 == pytest.approx(0.95, abs=0.015)


def test_one_seed_has_no_interval() -> None:
    assert seed_interval([0.5]) is None


def test_seed_interval_of_more_seeds_than_the_table_has() -> None:
    values = [float(index % 2) for index in range(32)]  # 31 degrees of freedom
    low, high = seed_interval(values) or (0.0, 0.0)
    assert (low + high) / 2 == pytest.approx(0.5)
    assert 1.95 < (high - low) / 2 / (math.sqrt(8 / 31) / math.sqrt(32)) < 2.05
