"""Tests of parallel commands: failures, logs, and the two kinds of stop."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from eepo.experiments.processes import Job, failure_reason, run_jobs

TIMEOUT_SECONDS = 20.0


def shell(folder: Path, name: str, script: str) -> Job:
    return Job(name, ("/bin/sh", "-c", script), folder / name / "log.txt")


def run(jobs: list[Job], num_parallel: int = 2) -> tuple[bool, dict[str, int]]:
    """Return whether all jobs were run, and their exit codes by title."""
    codes: dict[str, int] = {}

    def on_exit(job: Job, code: int) -> None:
        codes[job.title] = code

    return run_jobs(jobs, num_parallel, os.environ, on_exit), codes


def call_when(condition: Callable[[], bool], action: Callable[[], object]) -> threading.Thread:
    """Call `action` in a thread as soon as `condition` holds."""

    def watch() -> None:
        end = time.monotonic() + TIMEOUT_SECONDS
        while not condition() and time.monotonic() < end:
            time.sleep(0.02)
        action()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_a_failed_job_does_not_affect_the_others(tmp_path: Path) -> None:
    scripts = {
        "good": "echo fine",
        "bad": "echo first; echo 'eepo: the reason' >&2; echo; exit 3",
        "after": "echo too",
    }
    jobs = [shell(tmp_path, name, script) for name, script in scripts.items()]
    completed, codes = run(jobs, num_parallel=1)
    assert completed
    assert codes == {"good": 0, "bad": 3, "after": 0}
    assert failure_reason(jobs[1], 3) == "eepo: the reason"
    assert jobs[2].log.read_text() == "too\n"


def test_the_reason_names_the_signal_without_control_characters(tmp_path: Path) -> None:
    job = shell(tmp_path, "killed", "printf 'at work\\033[31m'; kill -9 $$")
    assert run([job])[1] == {"killed": -9}
    # The escape character is removed, so that a log cannot control the terminal.
    assert failure_reason(job, -9) == "ended by SIGKILL; last line: at work[31m"


def test_a_log_is_overwritten_at_each_start(tmp_path: Path) -> None:
    run([shell(tmp_path, "job", "echo old reason; exit 1")])
    silent = shell(tmp_path, "job", "exit 1")
    run([silent])
    assert failure_reason(silent, 1) == "the log is empty"


def test_jobs_start_in_the_order_of_their_positions(tmp_path: Path) -> None:
    ended = []

    def on_exit(job: Job, code: int) -> list[Job]:
        ended.append(job.title)
        if job.title != "first":
            return []
        return [replace(shell(tmp_path, f"new-{n}", "true"), position=n) for n in (4, 2, 3)]

    positions = {"third": 3, "first": 1, "second": 2}
    jobs = [replace(shell(tmp_path, n, "true"), position=p) for n, p in positions.items()]
    assert run_jobs(jobs, 1, os.environ, on_exit)
    assert ended == ["first", "new-2", "second", "new-3", "third", "new-4"]


@pytest.mark.parametrize(("num_parallel", "most"), [(1, 1), (2, 2)])
def test_at_most_num_parallel_jobs_run_together(
    num_parallel: int, most: int, tmp_path: Path
) -> None:
    count = f"touch {tmp_path}/on.$$; ls {tmp_path} | grep -c on; sleep 0.4; rm {tmp_path}/on.$$"
    jobs = [shell(tmp_path, f"job{number}", count) for number in range(4)]
    assert run(jobs, num_parallel)[0]
    assert max(int(job.log.read_text()) for job in jobs) == most


def test_the_first_stop_lets_jobs_finish_and_starts_no_other(tmp_path: Path) -> None:
    """The children of a job are not stopped: the job may need them to save its work."""
    ready, child = tmp_path / "ready", tmp_path / "child"
    script = (
        "import signal, subprocess, sys, time\n"
        f"child = subprocess.Popen(['/bin/sh', '-c', 'sleep 0.6; echo finished > {child}'])\n"
        "def save(*_):\n"
        "    child.wait(); print('saved', flush=True); sys.exit(2)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        f"open('{ready}', 'w').close()\n"
        "time.sleep(60)\n"
    )
    jobs = [
        Job("stopped", (sys.executable, "-c", script), tmp_path / "stopped.txt"),
        shell(tmp_path, "next", "echo started"),
    ]
    thread = call_when(ready.exists, lambda: os.kill(os.getpid(), signal.SIGTERM))
    completed, codes = run(jobs, num_parallel=1)
    thread.join()
    assert not completed
    assert codes == {}, "a stopped job is not reported as failed"
    assert jobs[0].log.read_text() == "saved\n"
    assert child.read_text() == "finished\n"
    assert not jobs[1].log.exists()


def test_the_second_stop_kills_jobs_and_their_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    job = shell(
        tmp_path,
        "ignores_sigterm",
        f"trap '' TERM; sleep 61 & echo $! > {pid}; wait; wait; sleep 60",
    )

    def stop_twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)

    started = time.monotonic()
    thread = call_when(lambda: pid.exists() and bool(pid.read_text().strip()), stop_twice)
    assert not run([job])[0]
    thread.join()
    assert time.monotonic() - started < TIMEOUT_SECONDS
    end = time.monotonic() + TIMEOUT_SECONDS
    while _alive(int(pid.read_text())) and time.monotonic() < end:
        time.sleep(0.02)
    assert not _alive(int(pid.read_text())), "the child process has ended"


def test_signal_handlers_are_restored(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run([shell(tmp_path, "job", "true")])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def _alive(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
