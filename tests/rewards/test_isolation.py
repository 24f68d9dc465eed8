"""Checks grading processes: limits hold, a death affects one completion, order is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eepo.config import CountdownConfig, RewardConfig
from eepo.rewards import build_grader, build_reward
from eepo.rewards.exact import ExactReward
from eepo.rewards.isolation import MAX_LOST, PooledReward
from eepo.types import Prompt, UserError, Verdict

GRADER = """
import ctypes, os, subprocess, time

helper = subprocess.Popen(["sleep", "3600"])  # as a sandbox for code that is started once

def grade(answer, text):
    text, _, number = text.partition("#")  # completions must differ to be graded each
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
    if text == "exit 3":
        os._exit(3)
    if text == "close":
        os.closerange(0, 256)
    if text == "session":
        return subprocess.Popen(["sleep", "3600"], start_new_session=True).pid
    if text == "session and crash":
        with open(answer, "w") as file:
            file.write(str(subprocess.Popen(["sleep", "3600"], start_new_session=True).pid))
        ctypes.string_at(0)
    if text == "session and sleep":
        print(subprocess.Popen(["sleep", "3600"], start_new_session=True).pid, flush=True)
        time.sleep(3600)
    if text == "helper":
        return helper.pid if os.path.exists(f"/proc/{helper.pid}") else 0
    if text == "sleep":
        time.sleep(3600)
    if text == "pid":
        return float(os.getpid())
    print("noise on the standard output")
    return answer == text
"""

Pool = Callable[..., PooledReward]

linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux gives orphans a new parent that can find them"
)


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    (tmp_path / "my_grader.py").write_text(GRADER)
    monkeypatch.chdir(tmp_path)
    pools: list[PooledReward] = []

    def build(**options: float) -> PooledReward:
        settings: dict[str, Any] = {"num_workers": 2, "cpu_seconds": 0.3, "memory_mb": 256}
        config = RewardConfig(name="my_grader:grade", **(settings | options))
        reward = build_reward(config, CountdownConfig())
        assert isinstance(reward, PooledReward)
        pools.append(reward)
        return reward

    yield build
    for reward in pools:
        reward.close()


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """End a test that hangs. Its limits are seconds."""

    def fail(*_: object) -> None:
        raise TimeoutError("the test took over 100 s")

    previous = signal.signal(signal.SIGALRM, fail)
    signal.alarm(100)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


def grade(reward: PooledReward, *texts: str, answer: object = "right") -> list[Verdict]:
    return reward.grade([Prompt("", "", (), answer)] * len(texts), texts)


def test_verdicts_are_in_order_even_if_processes_die(pool: Pool) -> None:
    reasons = [
        ("right", ""),
        ("spin", "time-out"),
        ("wrong", ""),
        ("power", "time-out"),
        ("swell", "out of memory"),
        ("crash", "crashed"),
        ("leave", "crashed"),
        ("exit 3", "crashed"),
        ("\ud800", ""),
        ("\x00", ""),
        ("right ", ""),
    ] * 2
    texts = [text for text, _ in reasons]
    verdicts = grade(pool(), *texts)
    assert [verdict.reason for verdict in verdicts] == [reason for _, reason in reasons]
    pairs = zip(texts, verdicts, strict=True)
    assert [text for text, verdict in pairs if verdict.reward] == ["right"] * 2


def test_errors_of_the_function_reach_the_user_and_grading_goes_on(pool: Pool) -> None:
    reward = pool()
    with pytest.raises(UserError, match=r"my_grader:grade.*KeyError: 'no such thing'"):
        grade(reward, "right", "spin", "fail", "right", "wrong")
    assert [verdict.reward for verdict in grade(reward, "wrong", "right")] == [0.0, 1.0]


def test_equal_pairs_are_graded_once(pool: Pool) -> None:
    started = time.monotonic()
    verdicts = grade(pool(num_workers=1, cpu_seconds=1.0), *["spin"] * 50)
    assert {verdict.reason for verdict in verdicts} == {"time-out"}
    assert time.monotonic() - started < 20


def test_a_killed_process_is_replaced(pool: Pool) -> None:
    reward = pool(num_workers=1)
    assert grade(reward, "right")[0].reward == 1.0
    (worker,) = reward._workers
    os.killpg(worker._process.pid, signal.SIGKILL)
    # The request in flight may be lost, but it gets a verdict.
    assert grade(reward, "right")[0].reward in (0.0, 1.0)
    assert grade(reward, "right")[0].reward == 1.0


def test_all_workers_start_before_the_first_completion(pool: Pool) -> None:
    reward = pool(num_workers=3)
    reward.start()
    started = [worker._process.pid for worker in reward._workers]
    assert len(started) == 3
    grade(reward, "right", "wrong", "spin")
    assert [worker._process.pid for worker in reward._workers] == started


def test_a_killed_idle_child_changes_no_verdict(pool: Pool) -> None:
    """The child may die with half of the next request read. Repeat, because timing matters."""
    reward = pool(num_workers=1)
    for _ in range(20):
        child = int(grade(reward, "pid")[0].reward)
        os.kill(child, signal.SIGKILL)
        verdicts = grade(reward, "right", "wrong" * 30_000, " right")
        assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, 0.0]


def test_a_sleeping_function_reaches_the_wall_clock_limit(pool: Pool) -> None:
    started = time.monotonic()
    verdicts = grade(pool(num_workers=1, wall_seconds=0.5), "sleep", "right")
    assert time.monotonic() - started < 20
    assert [(verdict.reward, verdict.reason) for verdict in verdicts] == [
        (0.0, "time-out"),
        (1.0, ""),
    ]


@pytest.mark.parametrize(
    ("attack", "cause"), [("exit 3", "exit code 3"), ("close", "closed pipes"), ("crash", "fault")]
)
def test_a_function_that_always_ends_its_process_is_an_error(
    pool: Pool, attack: str, cause: str
) -> None:
    texts = [f"{attack}#{number}" for number in range(100)]
    line = rf"my_grader:grade.* no verdict on {MAX_LOST} completions in a row.* {cause}"
    with pytest.raises(UserError, match=line):
        grade(pool(), *texts)


def test_a_function_that_always_waits_is_an_error(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eepo.rewards.isolation.MAX_LOST", 3)
    with pytest.raises(UserError, match=r"3 completions in a row.* reward.wall_seconds = 0.3"):
        grade(pool(wall_seconds=0.3, cpu_seconds=0.1), *[f"sleep#{number}" for number in range(9)])


def test_some_lost_completions_do_not_end_grading(pool: Pool) -> None:
    texts = ["exit 3", "close", "right", "close", "leave"] * 10
    reward = pool(num_workers=1)
    verdicts = grade(reward, *[f"{text}#{number}" for number, text in enumerate(texts)])
    assert [verdict.reward for verdict in verdicts] == [float(text == "right") for text in texts]
    assert {verdict.reason for verdict in verdicts} == {"", "crashed"}


def test_completions_that_reach_a_limit_never_end_grading(pool: Pool) -> None:
    texts = [
        f"{text}#{number}" for number in range(MAX_LOST // 2 + 5) for text in ("spin", "swell")
    ]
    verdicts = grade(pool(cpu_seconds=0.05), *texts)
    assert {verdict.reason for verdict in verdicts} <= {"time-out", "out of memory"}


def test_a_child_that_dies_before_each_request_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import os\nos.register_at_fork(after_in_child=lambda: os._exit(7))\ngrade = None\n"
    (tmp_path / "dying.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("eepo.rewards.isolation.MAX_LOST", 2)
    reward = PooledReward("dying:grade", RewardConfig(num_workers=1))
    with pytest.raises(UserError, match=r"2 completions in a row.* exit code 7"):
        grade(reward, "a", "b", "c")


@pytest.mark.parametrize("source", ["import os; os._exit(0)", "import os; os.closerange(0, 99)"])
def test_a_module_that_ends_its_process_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    (tmp_path / "leaving.py").write_text(f"{source}\ngrade = len\n")
    monkeypatch.chdir(tmp_path)
    reward = PooledReward("leaving:grade", RewardConfig(num_workers=1))
    with pytest.raises(UserError, match=r"leaving:grade.*did not start"):
        grade(reward, "a", "b")


def test_the_import_does_not_count_for_the_wall_clock_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import time\ntime.sleep(1.5)\ndef grade(answer, text): return 1.0\n"
    (tmp_path / "slow_import.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    reward = PooledReward("slow_import:grade", RewardConfig(num_workers=1, wall_seconds=1.0))
    assert grade(reward, "a")[0].reward == 1.0
    reward.close()


def test_threads_can_share_a_pool(pool: Pool) -> None:
    reward = pool()
    results: dict[int, list[float]] = {}

    def work(number: int) -> None:
        verdicts = grade(reward, *map(str, range(30)), answer=str(number))
        results[number] = [verdict.reward for verdict in verdicts]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [float(n == number) for n in range(30)] for number in range(4)}


def test_gold_answers_may_be_any_json_value(pool: Pool) -> None:
    assert grade(pool(), "x", answer={"a": [1, None, "\ud800"]})[0].reward == 0.0


def test_grading_processes_end_with_their_parent(tmp_path: Path) -> None:
    (tmp_path / "my_grader.py").write_text(GRADER)
    code = """
from eepo.config import RewardConfig
from eepo.rewards.isolation import PooledReward
from eepo.types import Prompt
reward = PooledReward("my_grader:grade", RewardConfig(num_workers=1))
print(int(reward.grade([Prompt("", "", (), "")], ["pid"])[0].reward), flush=True)
import os; os._exit(1)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    _wait_for_end(int(done.stdout.split()[-1]))


@linux_only
def test_no_process_is_started_again_while_python_ends(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python stops the processes at its end, while a daemon thread may still grade."""
    reward = pool()
    assert grade(reward, "right")[0].reward == 1
    for worker in reward._workers:
        worker.stop()
    with monkeypatch.context() as patch:
        patch.setattr(threading.main_thread(), "is_alive", lambda: False)
        with pytest.raises(UserError, match="interrupted by the end of the process"):
            grade(reward, "right")
    assert grade(reward, "right")[0].reward == 1


def test_processes_of_a_function_end_with_the_pool(pool: Pool) -> None:
    reward = pool(num_workers=1)
    session = int(grade(reward, "session")[0].reward)
    assert _alive(session)  # a later completion may need it
    reward.close()
    assert not _alive(session)


@linux_only
def test_processes_of_a_child_end_when_it_dies_and_those_of_the_module_do_not(
    pool: Pool, tmp_path: Path
) -> None:
    reward, file = pool(num_workers=1), tmp_path / "pid"
    assert grade(reward, "session and crash", answer=str(file))[0].reason == "crashed"
    assert not _alive(int(file.read_text()))
    helper = int(grade(reward, "helper")[0].reward)
    assert _alive(helper)
    reward.close()
    assert not _alive(helper)


@linux_only
def test_processes_of_a_function_end_with_a_killed_trainer(tmp_path: Path) -> None:
    (tmp_path / "my_grader.py").write_text(GRADER)
    code = """
from eepo.config import RewardConfig
from eepo.rewards.isolation import PooledReward
from eepo.types import Prompt
reward = PooledReward("my_grader:grade", RewardConfig(num_workers=1))
reward.grade([Prompt("", "", (), "")], ["session and sleep"])
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as trainer:
        assert trainer.stderr is not None
        session = int(trainer.stderr.readline())  # what a function prints goes to stderr
        assert _alive(session)
        trainer.kill()
    _wait_for_end(session)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")  # a zombie is not alive
    return not (status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] == "Z")


def _wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 10
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(pid)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "nothing",
            "must be one of auto, countdown, exact, shortcut, math, guess_or_reason, "
            "reasoning_gym, or module:function",
        ),
        ("no_such_module:grade", "no module no_such_module"),
        ("os:", "module:function"),
        (":grade", "module:function"),
        ("my grader:x", "no module"),
    ],
)
def test_unknown_rewards_are_refused(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build_reward(RewardConfig(name=name), CountdownConfig())


def test_a_missing_function_is_refused(pool: Pool) -> None:
    pool()
    with pytest.raises(UserError, match=r"my_grader:no_such.*my_grader.py has no function no_such"):
        build_reward(RewardConfig(name="my_grader:no_such", num_workers=1), CountdownConfig())


def test_a_function_that_a_star_import_may_provide_is_accepted(pool: Pool, tmp_path: Path) -> None:
    pool()
    source = "from my_grader import *  # caf\u00e9"
    (tmp_path / "forwarding.py").write_text(source, encoding="latin-1")
    assert build_reward(RewardConfig(name="forwarding:grade", num_workers=1), CountdownConfig())


@pytest.mark.parametrize("name", ["countdown", "reasoning_gym", "auto", "nothing"])
def test_text_graders_are_math_exact_and_user_functions(name: str) -> None:
    allowed = "math, guess_or_reason, exact or module:function"
    with pytest.raises(UserError, match=f"--reward {name} must be {allowed}"):
        build_grader(RewardConfig(name=name))
    assert isinstance(build_grader(RewardConfig(name="exact")), ExactReward)


def test_grading_processes_import_no_torch() -> None:
    code = "import sys, eepo.rewards.math, eepo.rewards.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_grading_process_prints_nothing(pool: Pool, capfd: pytest.CaptureFixture[str]) -> None:
    reward = PooledReward("eepo.rewards.math:grade", RewardConfig(num_workers=1))
    reward.grade([Prompt("", "", (), "1")], ["1"])
    reward.close()
    assert capfd.readouterr() == ("", "")
