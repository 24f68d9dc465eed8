"""Checks the math grader in its processes, on normal and on hostile input."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eepo.config import DatasetConfig, RewardConfig
from eepo.rewards import build_reward
from eepo.rewards.isolation import PooledReward
from eepo.rewards.math import grade
from eepo.types import Prompt, Verdict

from .hostile import hostile_answers

LIMIT_MB = 512


def prompt_for(gold: str) -> Prompt:
    return Prompt("", "", (), gold)


@pytest.fixture(scope="module")
def reward() -> Iterator[PooledReward]:
    reward = build_reward(
        RewardConfig(name="math", num_workers=2, cpu_seconds=0.3, memory_mb=LIMIT_MB),
        DatasetConfig(),
    )
    assert isinstance(reward, PooledReward)
    yield reward
    reward.close()


@pytest.mark.parametrize(
    ("gold", "text", "verdict"),
    [
        ("42", r"so \boxed{42}", Verdict(1.0, "42", "same text")),
        ("1/2", r"so \boxed{0.5}", Verdict(1.0, "1/2", "same number")),
        (r"so \boxed{1/2}", r"\boxed{0.5}", Verdict(1.0, "1/2", "same number")),
        ("x+1", r"\boxed{1+x}", Verdict(1.0, "x+1", "same expression")),
        ("42", r"so \boxed{41}", Verdict(0.0, "41", "different")),
        ("42", "I do not know", Verdict(0.0, None, "no answer found")),
        ("x+1", r"\boxed{\frac{\frac}}", Verdict(0.0, r"\frac{\frac}", "unparsable")),
    ],
)
def test_verdict_has_reward_answer_and_reason(gold: str, text: str, verdict: Verdict) -> None:
    assert grade(gold, text) == verdict


def test_blindly_written_pairs_are_graded_correctly() -> None:
    """The author of `pairs.jsonl` had not seen the grader. Some pairs try to exploit it."""
    lines = Path(__file__).with_name("pairs.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) > 800
    wrong = [row for row in rows if grade(row["gold"], row["completion"]).correct != row["correct"]]
    assert wrong == []


def test_correct_answers_have_one_key_in_any_spelling() -> None:
    keys = {
        grade("x+1", text).answer
        for text in (r"\boxed{x+1}", r"\boxed{1+x}", r"\boxed{\frac{2x+2}{2}}")
    }
    assert len(keys) == 1


def test_there_are_more_than_200_hostile_answers() -> None:
    assert len(hostile_answers()) > 200


def test_a_sample_of_hostile_answers_is_rejected(reward: PooledReward) -> None:
    texts = list(hostile_answers().values())[::40]
    verdicts = reward.grade([prompt_for("42")] * (len(texts) + 1), [*texts, r"\boxed{42}"])
    assert [verdict.reward for verdict in verdicts] == [0.0] * len(texts) + [1.0]
    assert {verdict.reason for verdict in verdicts[:-1]} <= REASONS


@pytest.mark.slow
def test_hostile_answers_are_rejected_quickly_and_grading_goes_on(reward: PooledReward) -> None:
    """Grade one at a time to measure each. On a busy machine, measure again."""
    planted = Path("/tmp/eepo-was-here")
    reward.grade([prompt_for("42")], [r"\boxed{42}"])  # starts a grading process
    for name, text in hostile_answers().items():
        seconds, verdict = _timed(reward, text)
        for _ in range(3):
            if seconds > 2:
                seconds, verdict = _timed(reward, text)
        assert seconds < 2, name
        assert verdict.reward == 0.0, name
        assert verdict.reason in REASONS, (name, verdict.reason)
    assert not planted.exists()
    verdicts = reward.grade([prompt_for("42")] * 2, [r"\boxed{42}", r"\boxed{43}"])
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0]


REASONS = {"different", "no answer found", "unparsable", "time-out", "out of memory", "crashed"}


def _timed(reward: PooledReward, text: str) -> tuple[float, Verdict]:
    started = time.monotonic()
    (verdict,) = reward.grade([prompt_for("42")], [text])
    return time.monotonic() - started, verdict


def test_hostile_gold_answers_do_no_harm(reward: PooledReward) -> None:
    golds = ["9^{9^{9^9}}", "(" * 500, "\x00", "\ud800", "", r"\frac{\frac", "1" * 5000]
    verdicts = reward.grade([prompt_for(gold) for gold in golds], [r"\boxed{42}"] * len(golds))
    assert [verdict.reward for verdict in verdicts] == [0.0] * len(golds)


@pytest.mark.slow
def test_a_loaded_machine_changes_no_verdict() -> None:
    """A process that is stopped for longer than its CPU limit must not time out."""
    reward = PooledReward("eepo.rewards.math:grade", RewardConfig(num_workers=1, cpu_seconds=2))
    try:
        # The first formula imports SymPy, which takes CPU time.
        reward.grade([prompt_for("(x+2)^2")], [r"\boxed{x^2+4x+4}"])
        started = time.monotonic()
        (worker,) = reward._workers
        pid = worker._process.pid
        _pause(pid, 3)
        (verdict,) = reward.grade([prompt_for("(x+1)^2")], [r"\boxed{x^2+2x+1}"])
        assert time.monotonic() - started > 2.5
        assert verdict.reason == "same expression"
    finally:
        reward.close()


def _pause(group: int, seconds: float) -> None:
    """Stop the processes of a group now, and continue them after `seconds`."""
    os.killpg(group, signal.SIGSTOP)
    threading.Timer(seconds, os.killpg, (group, signal.SIGCONT)).start()


@pytest.mark.slow
def test_a_thousand_normal_completions_take_seconds(reward: PooledReward) -> None:
    golds = [rf"\frac{{{n}}}{{{n + 1}}}" if n % 3 else str(n) for n in range(500)]
    golds += [rf"{n}\sqrt{{{n + 1}}}" for n in range(500)]
    texts = [rf"Step by step, we get \boxed{{{gold}}}." for gold in golds[1:] + golds[:1]]
    reward.grade([prompt_for("1")] * 2, ["1", "2"])
    started = time.monotonic()
    progress: list[int] = []
    verdicts = reward.grade([prompt_for(gold) for gold in golds], texts, progress.append)
    assert sum(verdict.reward for verdict in verdicts) < 10
    assert sum(progress) == 1000
    assert time.monotonic() - started < 60  # takes a few seconds on two idle cores
