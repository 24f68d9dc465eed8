"""An entropy bonus whose weight follows a target entropy."""

from __future__ import annotations

import json

import pytest

from eepo.algorithm.entropy_target import EntropyTarget
from eepo.config import AlgorithmConfig

OPTIONS = AlgorithmConfig(
    entropy_target=0.5, entropy_coef=0.01, entropy_coef_step=0.01, entropy_coef_max=0.03
)


def test_the_weight_rises_below_the_target_and_falls_above_it() -> None:
    """The weight of a step is decided by earlier steps; above the target it is switched off."""
    target = EntropyTarget(OPTIONS)
    entropies = [0.4, 0.4, 0.4, 0.4, 0.6, 0.6, 0.4, 0.6, 0.6, 0.6, 0.4]
    used = [target.next_coef(entropy) for entropy in entropies]
    expected = [0.01, 0.02, 0.03, 0.03, 0.0, 0.0, 0.01, 0.0, 0.0, 0.0, 0.0]
    assert used == pytest.approx(expected)


def test_a_resumed_controller_continues_with_the_same_weight() -> None:
    first = EntropyTarget(OPTIONS)
    first.next_coef(0.3)
    second = EntropyTarget(OPTIONS)
    second.load_state(json.loads(json.dumps(first.state())))
    assert second.coef == first.coef == 0.02
    assert second.next_coef(0.3) == first.next_coef(0.3)


def test_without_a_target_there_is_no_state() -> None:
    target = EntropyTarget(AlgorithmConfig(entropy_coef=0.02))
    assert target.next_coef(0.0) == target.next_coef(9.0) == 0.02
    assert target.state() == {}
