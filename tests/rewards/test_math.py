"""The mathematics grader as a whole: in its processes, on good input and on hostile input."""

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
from eepo.rewards.math import judge
from eepo.types import Prompt, Verdict

from .hostile import hostile_answers

LIMIT_MB = 512


def ask(gold: str) -> Prompt:
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
def test_a_verdict_says_what_was_found_and_why(gold: str, text: str, verdict: Verdict) -> None:
    assert judge(gold, text) == verdict


def test_pairs_written_by_someone_who_had_not_read_the_grader() -> None:
    """Each line of `pairs.jsonl`: what a mathematician accepts and rejects, exploits among them."""
    rows = [
        json.loads(line)
        for line in Path(__file__).with_name("pairs.jsonl").read_text().splitlines()
    ]
    assert len(rows) > 800
    wrong = [row for row in rows if judge(row["gold"], row["completion"]).correct != row["correct"]]
    assert wrong == []


def test_correct_answers_share_one_key_however_they_are_written() -> None:
    keys = {
        judge("x+1", text).answer
        for text in (r"\boxed{x+1}", r"\boxed{1+x}", r"\boxed{\frac{2x+2}{2}}")
    }
    assert len(keys) == 1


def test_the_corpus_is_as_large_as_it_says() -> None:
    assert len(hostile_answers()) > 200


def test_hostile_answers_are_all_answered_wrong_and_the_pool_goes_on(reward: PooledReward) -> None:
    """One at a time, so that each has a time of its own; a busy machine gets another chance."""
    planted = Path("/tmp/eepo-was-here")
    reward.grade([ask("42")], [r"\boxed{42}"])  # starts a process
    for name, text in hostile_answers().items():
        seconds, verdict = _timed(reward, text)
        for _ in range(3):
            if seconds > 2:
                seconds, verdict = _timed(reward, text)
        assert seconds < 2, name
        assert verdict.reward == 0.0, name
        assert verdict.reason in REASONS, (name, verdict.reason)
    assert not planted.exists()
    assert [
        verdict.reward for verdict in reward.grade([ask("42")] * 2, [r"\boxed{42}", r"\boxed{43}"])
    ] == [1.0, 0.0]


REASONS = {"different", "no answer found", "unparsable", "time-out", "out of memory", "crashed"}


def _timed(reward: PooledReward, text: str) -> tuple[float, Verdict]:
    started = time.monotonic()
    (verdict,) = reward.grade([ask("42")], [text])
    return time.monotonic() - started, verdict


def test_hostile_golds_do_no_harm_either(reward: PooledReward) -> None:
    golds = ["9^{9^{9^9}}", "(" * 500, "\x00", "\ud800", "", r"\frac{\frac", "1" * 5000]
    verdicts = reward.grade([ask(gold) for gold in golds], [r"\boxed{42}"] * len(golds))
    assert [verdict.reward for verdict in verdicts] == [0.0] * len(golds)


def test_a_loaded_machine_changes_no_verdict() -> None:
    """A process that gets no CPU is not out of time: it is stopped for longer than its limit, then goes on."""
    reward = PooledReward("eepo.rewards.math:judge", RewardConfig(num_workers=1, cpu_seconds=0.5))
    try:
        reward.grade([ask("1")], [r"\boxed{1}"])
        started = time.monotonic()
        (worker,) = reward._workers
        pid = worker._process.pid
        _pause(pid, 1.5)
        (verdict,) = reward.grade([ask("(x+1)^2")], [r"\boxed{x^2+2x+1}"])
        assert time.monotonic() - started > 1
        assert verdict.reason == "same expression"
    finally:
        reward.close()


def _pause(group: int, seconds: float) -> None:
    """Stop the grader's processes now, and let them go on after a while."""
    os.killpg(group, signal.SIGSTOP)
    threading.Timer(seconds, os.killpg, (group, signal.SIGCONT)).start()


def test_a_thousand_ordinary_completions_take_seconds(reward: PooledReward) -> None:
    golds = [rf"\frac{{{n}}}{{{n + 1}}}" if n % 3 else str(n) for n in range(500)]
    golds += [rf"{n}\sqrt{{{n + 1}}}" for n in range(500)]
    texts = [rf"Step by step, we get \boxed{{{gold}}}." for gold in golds[1:] + golds[:1]]
    reward.grade([ask("1")] * 2, ["1", "2"])
    started = time.monotonic()
    done: list[int] = []
    verdicts = reward.grade([ask(gold) for gold in golds], texts, done.append)
    assert sum(verdict.reward for verdict in verdicts) < 10
    assert sum(done) == 1000
    assert (
        time.monotonic() - started < 60
    )  # a few seconds alone on two cores; generous, as tests share them
