"""Checks the generator of hostile answers, and that the maths grader rejects a sample of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from eepo.config import RewardConfig
from eepo.rewards.isolation import PooledReward
from eepo.types import Prompt

_SPEC = importlib.util.spec_from_file_location(
    "hostile_answers", Path(__file__).with_name("hostile_answers.py")
)
assert _SPEC is not None
assert _SPEC.loader is not None
hostile = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(hostile)


def test_the_same_seed_gives_the_same_answers() -> None:
    answers = list(hostile.hostile_answers(1, 200))
    assert answers == list(hostile.hostile_answers(1, 200))
    assert answers != list(hostile.hostile_answers(2, 200))
    assert len(set(answers)) > 150


def test_a_sample_of_hostile_answers_is_rejected() -> None:
    pairs = list(hostile.hostile_answers(0, 50))
    reward = PooledReward("eepo.rewards.math:grade", RewardConfig(num_workers=2))
    try:
        prompts = [Prompt("", "", (), gold) for gold, _ in pairs]
        verdicts = reward.grade(prompts, [text for _, text in pairs])
    finally:
        reward.close()
    accepted = [pair for pair, v in zip(pairs, verdicts, strict=True) if v.reward > 0]
    assert accepted == []
