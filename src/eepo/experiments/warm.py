"""Starts `python -m MODULE` in processes forked from one that has imported torch.

The import takes about six seconds of CPU time, which matters for hundreds of short runs.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from typing import Any

from eepo.experiments.processes import Job


class WarmStarter:
    """Starts jobs for `processes.run_jobs`.

    torch reads its number of threads when it is imported, so that of the first starter stays.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["eepo.assemble"])
        before = dict(os.environ)
        os.environ.update(environment)
        try:
            forkserver.ensure_running()
        finally:
            os.environ.clear()
            os.environ.update(before)

    def __call__(
        self, job: Job, environment: Mapping[str, str], inherited_fds: Sequence[int]
    ) -> Forked:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        job.log.write_bytes(b"")  # a job that dies at once has a log, too
        handles = [_Inherited(descriptor) for descriptor in inherited_fds]
        process = self._context.Process(target=_run, args=(job, dict(environment), handles))
        process.start()
        return Forked(process)


class Forked:
    """Gives a process of `multiprocessing` the methods of `subprocess.Popen`."""

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


class _Inherited:
    """A file descriptor that stays open in the forked process."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_inherited, (DupFd(self.descriptor),)


def _open_inherited(duplicate: Any) -> _Inherited:
    return _Inherited(duplicate.detach())


def _run(job: Job, environment: dict[str, str], handles: Sequence[_Inherited]) -> None:
    """Run the module that the command names. `handles` stay open until the process ends."""
    os.setpgid(0, 0)  # Ctrl-C in a terminal is for the process that started us
    os.environ.update(environment)
    with job.log.open("wb") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
    _, option, module, *arguments = job.command
    assert option == "-m", job.command
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
