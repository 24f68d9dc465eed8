"""Runs commands of the CLI, in fresh processes or in forks of this one, with a time limit.

A fresh process imports torch, which takes seconds. A fork has it already, so it reaches the code
under test at once.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

HANG_SECONDS = 600.0  # a command takes seconds, and minutes on a very busy machine
POLL_SECONDS = 0.004
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TERM": "dumb", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}


@dataclass(frozen=True)
class Outcome:
    code: int | None  # None: it had to be killed after HANG_SECONDS; negative: a signal ended it
    output: str
    errors: str

    @property
    def hung(self) -> bool:
        return self.code is None

    @property
    def has_traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.output + self.errors

    @property
    def is_one_line_error(self) -> bool:
        """Return whether the command ended as it does for a mistake of the user."""
        lines = [line for line in self.errors.splitlines() if line.strip()]
        return self.code in (1, 2) and len(lines) == 1 and lines[0].startswith("eepo: ")

    def last_line(self) -> str:
        lines = [line for line in (self.output + self.errors).splitlines() if line.strip()]
        return f"exit code {self.code}: {lines[-1] if lines else 'no output'}"


class Running:
    """A running command. Its output goes to pipes, because a limit on files must not reach it."""

    def __init__(self, pid: int, output: int, errors: int) -> None:
        self.pid, self._code = pid, None
        self._pipes = {output: bytearray(), errors: bytearray()}
        self._started = time.monotonic()
        for pipe in self._pipes:
            os.set_blocking(pipe, False)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def alive(self) -> bool:
        """Read what the command wrote, and return whether it still runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        self._read()
        return self._code is None

    def output(self) -> str:
        """Return what the command has printed so far."""
        self.alive()
        return bytes(next(iter(self._pipes.values()))).decode("utf-8", "replace")

    def kill(self, with_children: bool = True) -> None:
        """Send SIGKILL to the process, and to all processes that it has started."""
        pids = [self.pid, *(descendants(self.pid) if with_children else ())]
        for pid in pids if self.alive() else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(
        self, watch: Callable[[], bool] = lambda: False, with_children: bool = True
    ) -> Outcome:
        """Wait for the end, or until `watch` returns True; then kill the command."""
        while self.alive():
            if self.seconds > HANG_SECONDS:
                self.kill()
                return self._outcome(hung=True)
            if watch():
                self.kill(with_children)
            time.sleep(POLL_SECONDS)
        return self._outcome()

    def _outcome(self, hung: bool = False) -> Outcome:
        while self.alive():
            time.sleep(POLL_SECONDS)
        output, errors = (bytes(data).decode("utf-8", "replace") for data in self._pipes.values())
        for pipe in self._pipes:
            os.close(pipe)
        return Outcome(None if hung else self._code, output, errors)

    def _read(self) -> None:
        for pipe, data in self._pipes.items():
            try:
                while part := os.read(pipe, 65536):
                    data += part
            except BlockingIOError:
                pass


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [each for child in map(int, children) for each in (child, *descendants(child))]


def start_fresh(arguments: Sequence[str], folder: Path) -> Running:
    """Start `eepo ARGUMENTS` in a new interpreter."""
    return start_python(["-m", "eepo", *arguments], folder)


def start_python(arguments: Sequence[str], folder: Path) -> Running:
    """Start `python ARGUMENTS`. It leads its own process group, so Ctrl-C does not reach it."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=os.environ | ENVIRONMENT,
        process_group=0,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    pipes = [os.dup(process.stdout.fileno()), os.dup(process.stderr.fileno())]
    process.stdout.close()
    process.stderr.close()
    process.returncode = 0  # `Running` waits for it
    return Running(process.pid, *pipes)


def start_fork(arguments: Sequence[str], folder: Path, file_bytes: int | None = None) -> Running:
    """Start `eepo ARGUMENTS` in a fork; `file_bytes` limits the size of each file that it writes.

    This process must not have run torch: the threads of a parent do not exist in its forks.
    """
    import_everything()
    (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _run_in_child(arguments, folder, (out_write, err_write), file_bytes)
    os.close(out_write)
    os.close(err_write)
    return Running(pid, out_read, err_read)


def run_fork(arguments: Sequence[str], folder: Path, file_bytes: int | None = None) -> Outcome:
    return start_fork(arguments, folder, file_bytes).wait()


def import_everything() -> None:
    """Import what every command needs, so that forks do not."""
    os.environ.update(ENVIRONMENT)
    import torch
    import transformers

    import eepo.assemble
    import eepo.cli  # noqa: F401

    torch.set_num_threads(1)
    _ = transformers.LlamaForCausalLM, transformers.PreTrainedTokenizerFast


def _run_in_child(
    arguments: Sequence[str], folder: Path, pipes: tuple[int, int], file_bytes: int | None
) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)
        os.dup2(pipes[0], 1)
        os.dup2(pipes[1], 2)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1) for fd in (1, 2))
        os.chdir(folder)
        if file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
        code = _main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _main(arguments: Sequence[str]) -> int:
    from eepo.cli import main

    sys.argv = ["eepo", *arguments]
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0
