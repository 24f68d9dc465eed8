"""Runs `eepo` commands in processes forked from one that has imported torch, to save time."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess

from eepo.cli import main
from eepo.experiments.processes import Job


class WarmStarter:
    """For `processes.run_jobs`. All commands have the environment that the starter is made with."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["eepo.assemble"])

    def __call__(
        self, job: Job, environment: Mapping[str, str], inherited_fds: Sequence[int]
    ) -> Forked:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        job.log.write_bytes(b"")  # one that dies at once has a log, too
        process = self._context.Process(target=_run, args=(job,))
        process.start()
        return Forked(process)


class Forked:
    """A process as `subprocess` shows it."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid: int = process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self) -> int:
        self._process.join()
        return self._process.exitcode or 0


def _run(job: Job) -> None:
    os.setpgid(0, 0)  # Ctrl-C is for who started us
    with job.log.open("wb") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
    sys.argv = list(job.command)
    try:
        main()
    except Exception:  # a traceback of our own, where the log is read
        traceback.print_exc()
        sys.exit(1)
