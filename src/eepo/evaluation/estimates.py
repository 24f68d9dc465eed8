"""Estimates unbiased pass@k, and 95 % intervals over problems, over seeds, or over both."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Groups = Sequence[Sequence[float]]  # one value per problem, grouped, such as by benchmark


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the probability that k samples, drawn without replacement, contain a correct one."""
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(
            f"need 0 <= {num_correct} correct <= {num_samples} samples and 1 <= k = {k} <= samples"
        )
    if num_samples - num_correct < k:
        return 1.0
    factors = range(num_samples - num_correct + 1, num_samples + 1)
    return 1.0 - math.prod(1.0 - k / factor for factor in factors)


def powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4, ... and `limit` itself: the values of k of a pass@k curve."""
    ks = [2**power for power in range(limit.bit_length()) if 2**power <= limit]
    return ks if ks[-1] == limit else [*ks, limit]


def majority_accuracy(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Return the probability that the most common answer is correct; ties are broken at random.

    Completions without an answer do not vote. A grader may accept only some of the completions that
    give the same answer. Then the share of accepted ones counts.
    """
    votes: dict[str, list[bool]] = {}
    for answer, is_correct in zip(answers, correct, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(is_correct)
    if not votes:
        return 0.0
    most_votes = max(map(len, votes.values()))
    shares = [sum(marks) / most_votes for marks in votes.values() if len(marks) == most_votes]
    return sum(shares) / len(shares)


def bootstrap_interval(
    values: Sequence[float], draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean over problems."""
    return grouped_bootstrap_interval([values], draws, seed)


def grouped_bootstrap_interval(
    groups: Sequence[Sequence[float]], draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean of group means.

    Problems are resampled within each group. The groups stay fixed.
    """
    generator = np.random.default_rng(seed)
    means = np.zeros(draws)
    for group in groups:
        array = np.asarray(group, dtype=float)
        picks = generator.integers(0, len(array), (draws, len(array)))
        means += array[picks].mean(1) / len(groups)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom, so that SciPy is not needed.
T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def seed_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % t-interval of the mean over seeds; None for a single seed."""
    if len(values) < 2:
        return None
    mean, half = sum(values) / len(values), _half_width(values)
    return mean - half, mean + half


def seed_and_problem_interval(seeds: Sequence[Groups]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of group means, over seeds and problems.

    All seeds must have the same problems. The half-widths over seeds and over problems are added
    like those of independent errors. Sampling noise counts in both, so the interval tends to be too
    wide. None for a single seed.
    """
    if len(seeds) < 2:
        return None
    over_seeds = _half_width([_mean_of_means(groups) for groups in seeds])
    by_problem = [np.mean(group, axis=0) for group in zip(*seeds, strict=True)]
    squares = [_half_width(values) ** 2 if len(values) > 1 else 0.0 for values in by_problem]
    over_problems = math.sqrt(sum(squares)) / len(by_problem)
    mean, half = _mean_of_means(by_problem), math.hypot(over_seeds, over_problems)
    return mean - half, mean + half


def _mean_of_means(groups: Groups) -> float:
    return float(np.mean([np.mean(group) for group in groups]))


def _half_width(values: Sequence[float] | np.ndarray) -> float:
    """Return half of the width of the 95 % t-interval of the mean of two or more values."""
    degrees = len(values) - 1
    quantile = T_QUANTILES[degrees - 1] if degrees <= len(T_QUANTILES) else 1.96
    return quantile * float(np.std(values, ddof=1)) / math.sqrt(len(values))
