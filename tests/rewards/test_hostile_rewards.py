"""Checks that reward functions which attack their process end in a verdict or in one error line."""

from __future__ import annotations

import importlib
import math
import sys
import uuid
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eepo.config import RewardConfig
from eepo.rewards.isolation import PooledReward
from eepo.rewards.worker import Grader, grade_one
from eepo.types import Prompt, UserError, Verdict

SOAK = Path(__file__).parents[1] / "soak"

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(SOAK)
    hostile_rewards = importlib.import_module("hostile_rewards")

# A few that need different defences.
FAST = [
    "closes_all_descriptors",
    "raises_system_exit",
    "forges_the_next_replies",
    "replies_early_and_sleeps",
    "writes_an_endless_line",
    "forks_and_both_reply",
    "starts_a_daemon",
    "verdict_with_nan",
]
# The conversion of results is checked below, without a process for each.
SLOW = [
    name
    for name in hostile_rewards.HOSTILE_REWARDS
    if name not in FAST and not name.startswith(("returns_", "verdict_"))
]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Mark the processes of a test, and check that none of them is left."""
    name = uuid.uuid4().hex
    monkeypatch.setenv(hostile_rewards.RUN_VARIABLE, name)
    monkeypatch.chdir(SOAK)
    yield name
    assert hostile_rewards.strays(name) == []


@pytest.mark.skipif(sys.platform != "linux", reason="other systems limit no memory")
@pytest.mark.parametrize("name", [*FAST, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_a_hostile_function_ends_in_verdicts_or_one_error_line(name: str, run: str) -> None:
    outcome = hostile_rewards.HOSTILE_REWARDS[name]
    verdicts, error = grade(f"hostile_rewards:{name}")
    if outcome.error:
        assert outcome.error in error
        assert f'reward.name = "hostile_rewards:{name}" failed on a completion' in error
        assert len(error.splitlines()) == 1
        assert len(error) < 1000
    else:
        assert error == ""
        assert [v for v in verdicts if not outcome.allows(v.reward, v.reason)] == []


def grade(function: str) -> tuple[list[Verdict], str]:
    """Return the verdicts on two completions, or the error line."""
    limits: dict[str, Any] = {"cpu_seconds": 0.2, "wall_seconds": 2.0, "memory_mb": 256}
    reward = PooledReward(function, RewardConfig(num_workers=1, **limits))
    texts = ["a", "b" * 100_000]  # the second does not fit into a pipe
    try:
        return reward.grade([Prompt("", "", (), "1")] * 2, texts), ""
    except UserError as error:
        return [], str(error)
    finally:
        reward.close()


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 1e10, 10**400, "1", None, [1.0], 1j]
)
def test_a_verdict_needs_a_number_as_reward(value: Any) -> None:
    with pytest.raises(UserError, match="reward must be a number from -1e9 to 1e9, got"):
        Verdict(value, None)


@pytest.mark.parametrize("value", [np.ones(2), torch.ones(2), torch.tensor(math.nan)])
def test_a_verdict_needs_a_single_number_as_reward(value: Any) -> None:
    with pytest.raises(
        UserError, match=r"reward must be a number from -1e9 to 1e9, got (array|tens)"
    ):
        Verdict(value, None)


@pytest.mark.parametrize(
    "value", [True, 1, Fraction(1), np.float32(1), np.int64(1), np.bool_(True), torch.tensor(1.0)]
)
def test_a_verdict_converts_numbers_to_float(value: Any) -> None:
    assert type(Verdict(value, None).reward) is float
    assert Verdict(value, None) == Verdict(1.0, None)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"answer": 5}, "Verdict.answer must be a str or None, got 5"),
        ({"answer": b"5"}, "Verdict.answer must be a str or None, got b'5'"),
        ({"reason": None}, "Verdict.reason must be a str, got None"),
        ({"reason": 3}, "Verdict.reason must be a str, got 3"),
        ({"label": ("a", "b")}, r"Verdict.label must be a str, got \('a', 'b'\)"),
    ],
)
def test_a_verdict_needs_texts(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        Verdict(**({"reward": 1.0, "answer": None} | fields))


@pytest.mark.parametrize(
    "name",
    [name for name in hostile_rewards.HOSTILE_REWARDS if name.startswith(("returns_", "verdict_"))],
)
def test_wrong_results_are_refused_when_they_are_graded(name: str) -> None:
    reply = grade_one(Grader.of(getattr(hostile_rewards, name)), "1", "1")
    assert hostile_rewards.HOSTILE_REWARDS[name].error in reply["error"]
