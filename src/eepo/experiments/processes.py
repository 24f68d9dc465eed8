"""Several commands at a time, each a process with a log of its own. One that fails does not disturb the others.

Each is a process group of its own, so that Ctrl-C in a terminal does not reach it past us: asked to stop, we ask every
one to end after what it is doing (SIGTERM); asked again, we end them with all that they started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Job:
    title: str
    command: tuple[str, ...]
    log: Path  # both streams; written anew


class Process(Protocol):
    """What is asked of one, as `subprocess` has it; it leads a process group."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def wait(self) -> int: ...


@dataclass
class StopRequests:
    number: int = 0


def start(
    job: Job, environment: Mapping[str, str], held_open: Sequence[int]
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
            pass_fds=held_open,
        )


def run_jobs(
    jobs: Sequence[Job],
    at_a_time: int,
    environment: Mapping[str, str],
    ended: Callable[[Job, int], None],
    stopping: Callable[[], None] = lambda: None,
    held_open: Sequence[int] = (),  # file descriptors that the processes keep
    starter: Callable[[Job, Mapping[str, str], Sequence[int]], Process] = start,
) -> bool:
    """Call `ended` with the exit code of every job that came to its own end, `stopping` when asked to stop.

    Returns whether all jobs were run.
    """
    waiting, running, told = deque(jobs), dict[int, tuple[Job, Process]](), 0
    with stop_requests() as stop:
        try:
            while running or (waiting and not stop.number):
                while waiting and len(running) < at_a_time and not stop.number:
                    job = waiting.popleft()
                    process = starter(job, environment, held_open)
                    running[process.pid] = (job, process)
                if stop.number > told:
                    told = stop.number
                    stopping()
                    _ask([process for _, process in running.values()], told)
                time.sleep(POLL_SECONDS)
                for pid, (job, process) in list(running.items()):
                    if (code := process.poll()) is not None:
                        del running[pid]
                        if code == 0 or not stop.number:
                            ended(job, code)
        finally:
            _ask([process for _, process in running.values()], 2)
    return not stop.number


def why_ended(job: Job, code: int) -> str:
    """The last line of its log, where a user's mistake or a traceback ends; and the signal, if one ended it."""
    with job.log.open("rb") as log:
        log.seek(max(0, job.log.stat().st_size - 4096))
        lines = log.read().decode("utf-8", "replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")
    ending = f"ended by {signal.Signals(-code).name}; last line: " if code < 0 else ""
    return ending + "".join(c for c in last if c.isprintable())


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Counts Ctrl-C and SIGTERM, instead of ending at once."""
    stop = StopRequests()

    def count(number: int, frame: Any) -> None:
        stop.number += 1

    before = {number: signal.signal(number, count) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ask(processes: Sequence[Process], number: int) -> None:
    """The first time only the process itself: what it has started must live until it has saved its work."""
    for process in processes:
        if process.poll() is not None:
            continue
        if number == 1:
            process.terminate()
        else:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
