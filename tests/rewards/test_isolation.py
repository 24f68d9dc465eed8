"""Processes that grade: limits hold, deaths are somebody's, order is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eepo.config import CountdownConfig, RewardConfig
from eepo.rewards import build_grader, build_reward
from eepo.rewards.exact import ExactReward
from eepo.rewards.isolation import PooledReward
from eepo.types import Prompt, UserError, Verdict

JUDGE = """
import ctypes, os, time

def judge(answer, text):
    if text == "spin":
        while True:
            pass
    if text == "power":
        return len(str(9 ** 9 ** 8)) * 0
    if text == "swell":
        return len("x" * (3 * 2**30))
    if text == "crash":
        ctypes.string_at(0)
    if text == "fail":
        raise KeyError("no such thing")
    if text == "leave":
        os._exit(0)
    if text == "sleep":
        time.sleep(3600)
    if text == "pid":
        return float(os.getpid())
    print("noise on the standard output")
    return answer == text
"""

Pool = Callable[..., PooledReward]


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    (tmp_path / "my_judge.py").write_text(JUDGE)
    monkeypatch.chdir(tmp_path)
    made: list[PooledReward] = []

    def make(**options: float) -> PooledReward:
        settings = {"num_workers": 2, "cpu_seconds": 0.3, "memory_mb": 256} | options
        reward = build_reward(RewardConfig(name="my_judge:judge", **settings), CountdownConfig())  # type: ignore[arg-type]
        assert isinstance(reward, PooledReward)
        made.append(reward)
        return reward

    yield make
    for reward in made:
        reward.close()


def grade(reward: PooledReward, *texts: str, answer: object = "right") -> list[Verdict]:
    return reward.grade([Prompt("", "", (), answer)] * len(texts), texts)


def test_verdicts_come_in_order_whatever_happens_between(pool: Pool) -> None:
    texts = [
        "right",
        "spin",
        "wrong",
        "power",
        "swell",
        "crash",
        "leave",
        "\ud800",
        "\x00",
        "right ",
    ] * 2
    verdicts = grade(pool(), *texts)
    reasons = [
        "",
        "time-out",
        "",
        "time-out",
        "out of memory",
        "crashed",
        "crashed",
        "",
        "",
        "",
    ] * 2
    assert [verdict.reason for verdict in verdicts] == reasons
    assert [text for text, verdict in zip(texts, verdicts, strict=True) if verdict.reward] == [
        "right"
    ] * 2


def test_what_a_function_raises_reaches_the_user_and_the_pool_goes_on(pool: Pool) -> None:
    reward = pool()
    with pytest.raises(UserError, match=r"my_judge:judge.*KeyError: 'no such thing'"):
        grade(reward, "right", "spin", "fail", "right", "wrong")
    assert [verdict.reward for verdict in grade(reward, "wrong", "right")] == [0.0, 1.0]


def test_a_pair_that_occurs_often_is_graded_once(pool: Pool) -> None:
    started = time.monotonic()
    verdicts = grade(pool(num_workers=1, cpu_seconds=1.0), *["spin"] * 50)
    assert {verdict.reason for verdict in verdicts} == {"time-out"}
    assert time.monotonic() - started < 20


def test_a_killed_process_is_replaced(pool: Pool) -> None:
    reward = pool(num_workers=1)
    assert grade(reward, "right")[0].reward == 1.0
    (worker,) = reward._workers
    os.killpg(worker._process.pid, signal.SIGKILL)
    assert grade(reward, "right")[0].reward in (
        0.0,
        1.0,
    )  # the one in flight may be lost, but is answered
    assert grade(reward, "right")[0].reward == 1.0


def test_a_killed_idle_child_costs_nobody_a_verdict(pool: Pool) -> None:
    """Also when it dies with the next request half read: often, as only some moments are bad ones."""
    reward = pool(num_workers=1)
    for _ in range(20):
        child = int(grade(reward, "pid")[0].reward)
        os.kill(child, signal.SIGKILL)
        assert [
            verdict.reward for verdict in grade(reward, "right", "wrong" * 30_000, " right")
        ] == [1.0, 0.0, 0.0]


def test_a_function_that_waits_is_ended_by_the_clock(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eepo.rewards.isolation.BLOCKED_SECONDS", 0.0)
    verdicts = grade(pool(num_workers=1, cpu_seconds=0.1), "sleep", "right")
    assert [(verdict.reward, verdict.reason) for verdict in verdicts] == [
        (0.0, "time-out"),
        (1.0, ""),
    ]


def test_threads_may_share_a_pool(pool: Pool) -> None:
    reward = pool()
    results: dict[int, list[float]] = {}

    def work(number: int) -> None:
        results[number] = [
            v.reward for v in grade(reward, *(str(n) for n in range(30)), answer=str(number))
        ]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [float(n == number) for n in range(30)] for number in range(4)}


def test_answers_may_be_anything_that_json_holds(pool: Pool) -> None:
    assert grade(pool(), "x", answer={"a": [1, None, "\ud800"]})[0].reward == 0.0


def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    (tmp_path / "my_judge.py").write_text(JUDGE)
    code = """
from eepo.config import RewardConfig
from eepo.rewards.isolation import PooledReward
from eepo.types import Prompt
reward = PooledReward("my_judge:judge", RewardConfig(num_workers=1))
print(int(reward.grade([Prompt("", "", (), "")], ["pid"])[0].reward), flush=True)
import os; os._exit(1)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    child = int(done.stdout.split()[-1])
    deadline = time.monotonic() + 10
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(
        f"/proc/{pid}/stat"
    )  # one that has ended but whose parent has not looked is not alive
    return not (status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] == "Z")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "nothing",
            "must be one of auto, countdown, exact, math, reasoning_gym, or module:function",
        ),
        ("no_such_module:judge", "no module no_such_module"),
        ("os:", "module:function"),
        (":judge", "module:function"),
        ("my judge:x", "no module"),
    ],
)
def test_an_unknown_reward_is_refused_in_one_line(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build_reward(RewardConfig(name=name), CountdownConfig())


def test_a_function_that_is_not_there_is_said_so(pool: Pool) -> None:
    pool()
    with pytest.raises(UserError, match=r"my_judge:no_such.*my_judge.py has no function no_such"):
        build_reward(RewardConfig(name="my_judge:no_such", num_workers=1), CountdownConfig())


def test_a_function_that_another_module_brings_is_looked_for_later(
    pool: Pool, tmp_path: Path
) -> None:
    pool()
    (tmp_path / "forwarding.py").write_text(
        "from my_judge import *  # caf\u00e9", encoding="latin-1"
    )
    assert build_reward(RewardConfig(name="forwarding:judge", num_workers=1), CountdownConfig())


@pytest.mark.parametrize("name", ["countdown", "reasoning_gym", "auto", "nothing"])
def test_texts_are_graded_by_what_grades_texts(name: str) -> None:
    with pytest.raises(UserError, match=f"--reward {name} must be math, exact or module:function"):
        build_grader(RewardConfig(name=name))
    assert isinstance(build_grader(RewardConfig(name="exact")), ExactReward)


def test_grading_processes_import_no_torch() -> None:
    code = "import sys, eepo.rewards.math, eepo.rewards.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_grading_process_says_nothing_of_its_own(
    pool: Pool, capfd: pytest.CaptureFixture[str]
) -> None:
    reward = PooledReward("eepo.rewards.math:judge", RewardConfig(num_workers=1))
    reward.grade([Prompt("", "", (), "1")], ["1"])
    reward.close()
    assert capfd.readouterr() == ("", "")
