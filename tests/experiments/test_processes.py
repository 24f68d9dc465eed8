"""Commands side by side: failures stay alone, a stop is kind first and final the second time."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from eepo.experiments.processes import Job, run_jobs, why_ended

SECONDS = 20.0  # after which something hangs


def shell(folder: Path, name: str, script: str) -> Job:
    return Job(name, ("/bin/sh", "-c", script), folder / name / "log.txt")


def collect(jobs: list[Job], at_a_time: int = 2) -> tuple[bool, dict[str, int]]:
    codes: dict[str, int] = {}
    whole = run_jobs(jobs, at_a_time, os.environ, lambda job, code: codes.update({job.title: code}))
    return whole, codes


def once(there: Callable[[], bool], act: Callable[[], object]) -> threading.Thread:
    """Act as soon as something is there, beside the test."""

    def watch() -> None:
        end = time.monotonic() + SECONDS
        while not there() and time.monotonic() < end:
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_one_that_fails_does_not_lose_the_others(tmp_path: Path) -> None:
    scripts = {
        "good": "echo fine",
        "bad": "echo first; echo 'eepo: the reason' >&2; echo; exit 3",
        "after": "echo too",
    }
    jobs = [shell(tmp_path, name, script) for name, script in scripts.items()]
    whole, codes = collect(jobs, at_a_time=1)
    assert whole
    assert codes == {"good": 0, "bad": 3, "after": 0}
    assert why_ended(jobs[1], 3) == "eepo: the reason"
    assert jobs[2].log.read_text() == "too\n"


def test_a_signal_that_ended_a_job_is_named(tmp_path: Path) -> None:
    job = shell(tmp_path, "killed", "printf 'at work\\033[31m'; kill -9 $$")
    assert collect([job])[1] == {"killed": -9}
    assert why_ended(job, -9) == "ended by SIGKILL; last line: at work[31m", (
        "nothing that a terminal would obey"
    )


def test_a_log_is_of_the_last_start(tmp_path: Path) -> None:
    collect([shell(tmp_path, "job", "echo old reason; exit 1")])
    silent = shell(tmp_path, "job", "exit 1")
    collect([silent])
    assert why_ended(silent, 1) == "its log is empty"


@pytest.mark.parametrize(("at_a_time", "together"), [(1, 1), (2, 2)])
def test_no_more_run_at_a_time_than_asked_for(
    at_a_time: int, together: int, tmp_path: Path
) -> None:
    count = f"touch {tmp_path}/on.$$; ls {tmp_path} | grep -c on; sleep 0.4; rm {tmp_path}/on.$$"
    jobs = [shell(tmp_path, f"job{number}", count) for number in range(4)]
    assert collect(jobs, at_a_time)[0]
    assert max(int(job.log.read_text()) for job in jobs) == together


def test_asked_once_jobs_end_in_their_own_time_and_no_other_starts(tmp_path: Path) -> None:
    """What a job itself has started is left alone: it may be needed to save the work."""
    ready, child = tmp_path / "ready", tmp_path / "child"
    script = (
        "import signal, subprocess, sys, time\n"
        f"child = subprocess.Popen(['/bin/sh', '-c', 'sleep 0.6; echo lived > {child}'])\n"
        "signal.signal(signal.SIGTERM, lambda *_: (child.wait(), print('saved', flush=True), sys.exit(2)))\n"
        f"open('{ready}', 'w').close()\n"
        "time.sleep(60)\n"
    )
    jobs = [
        Job("kind", (sys.executable, "-c", script), tmp_path / "kind.txt"),
        shell(tmp_path, "next", "echo started"),
    ]
    thread = once(ready.exists, lambda: os.kill(os.getpid(), signal.SIGTERM))
    whole, codes = collect(jobs, at_a_time=1)
    thread.join()
    assert not whole
    assert codes == {}, "one that was asked to stop has not failed"
    assert jobs[0].log.read_text() == "saved\n"
    assert child.read_text() == "lived\n"
    assert not jobs[1].log.exists()


def test_asked_twice_everything_ends_at_once(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    job = shell(tmp_path, "deaf", f"trap '' TERM; sleep 61 & echo $! > {pid}; wait; wait; sleep 60")

    def twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)

    begun = time.monotonic()
    thread = once(lambda: pid.exists() and bool(pid.read_text().strip()), twice)
    assert not collect([job])[0]
    thread.join()
    assert time.monotonic() - begun < SECONDS
    end = time.monotonic() + SECONDS
    while _alive(int(pid.read_text())) and time.monotonic() < end:
        time.sleep(0.02)
    assert not _alive(int(pid.read_text())), "what it started has ended too"


def test_signals_are_as_before_afterwards(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    collect([shell(tmp_path, "job", "true")])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def _alive(pid: int) -> bool:
    """A zombie that nobody waits for has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
