"""Runs several commands at a time, each in a process with its log. Failures stay independent.

Each command leads its own process group, so Ctrl-C in a terminal reaches only this process. The
first request to stop asks every command to finish its current step (SIGTERM). The second request
kills the commands and all processes that they have started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Job:
    title: str
    command: tuple[str, ...]
    log: Path  # stdout and stderr; overwritten at each start
    position: int = 0  # jobs with a lower one start first


class Process(Protocol):
    """Lists the methods of `subprocess.Popen` that are used. The process leads a process group."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def wait(self) -> int: ...


Starter = Callable[[Job, Mapping[str, str], Sequence[int]], Process]


@dataclass
class StopRequests:
    number: int = 0


def start(
    job: Job, environment: Mapping[str, str], inherited_fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("wb") as log:
        return subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            process_group=0,
            pass_fds=inherited_fds,
        )


def run_jobs(
    jobs: Sequence[Job],
    num_parallel: int,
    environment: Mapping[str, str],
    on_exit: Callable[[Job, int], Iterable[Job] | None],
    on_stop: Callable[[], None] = lambda: None,
    inherited_fds: Sequence[int] = (),  # file descriptors that stay open in the processes
    starter: Starter = start,
) -> bool:
    """Run all jobs; return False if the user stopped them.

    `on_exit` is called with the exit code of each job, except for jobs that end because of a stop.
    It may return jobs that can run now: they run before waiting ones of the same position.
    `on_stop` is called at each request to stop.
    """
    waiting, running = _in_order(jobs), dict[int, tuple[Job, Process]]()
    num_handled_requests = 0
    with stop_requests() as stop:
        try:
            while running or (waiting and not stop.number):
                while waiting and len(running) < num_parallel and not stop.number:
                    job = waiting.pop(0)
                    process = starter(job, environment, inherited_fds)
                    running[process.pid] = (job, process)
                if stop.number > num_handled_requests:
                    num_handled_requests = stop.number
                    on_stop()
                    _end([process for _, process in running.values()], kill=stop.number > 1)
                time.sleep(POLL_SECONDS)
                for pid, (job, process) in list(running.items()):
                    if (code := process.poll()) is not None:
                        del running[pid]
                        if code == 0 or not stop.number:
                            waiting = _in_order([*(on_exit(job, code) or ()), *waiting])
        finally:
            _end([process for _, process in running.values()], kill=True)
    return not stop.number


def _in_order(jobs: Iterable[Job]) -> list[Job]:
    return sorted(jobs, key=lambda job: job.position)


def failure_reason(job: Job, code: int) -> str:
    """Return the last line of the log, and the name of the signal if a signal ended the job.

    The last line is the message of a user error, or the end of a traceback.
    """
    with job.log.open("rb") as log:
        log.seek(max(0, job.log.stat().st_size - 4096))
        lines = log.read().decode("utf-8", "replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "the log is empty")
    prefix = f"ended by {signal.Signals(-code).name}; last line: " if code < 0 else ""
    return prefix + "".join(c for c in last if c.isprintable())


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Count Ctrl-C and SIGTERM instead of ending at once."""
    stop = StopRequests()

    def count(number: int, frame: Any) -> None:
        stop.number += 1

    before = {number: signal.signal(number, count) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(processes: Sequence[Process], kill: bool) -> None:
    for process in processes:
        if process.poll() is not None:
            continue
        if kill:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has only just been forked and leads no group yet
                os.kill(process.pid, signal.SIGKILL)
            process.wait()
        else:
            # Only the process itself: it may need its children to save its work.
            process.terminate()
