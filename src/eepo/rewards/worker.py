"""Runs one grading process: reads a request per line, writes a reply per line (`isolation.py`).

The process imports the grading function once and forks a child, which grades. The kernel limits
the child's CPU time (by a timer whose signal kills) and its memory (by its address space). So no
completion can hang the child or exhaust memory, not even inside of a C function. When a child
dies, the parent kills what the child has started, reports the death and forks the next child
within milliseconds, without a new import.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import mmap
import os
import reprlib
import resource
import select
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eepo.rewards.arguments import Parameters, call, parameters_of
from eepo.rewards.descendants import (
    adopt_orphans,
    descendants,
    end_with_parent,
    kill_descendants,
    kill_group,
)
from eepo.rewards.isolation import NO_REQUEST
from eepo.rewards.user_code import load_module, split_name
from eepo.types import UserError, Verdict

EMPTY: Mapping[str, Any] = {}
MAX_LABEL = 60  # characters
MAX_REPLY_TEXT = 300  # characters of a reason or an answer
# How often the parent looks for ended processes, in milliseconds, with and without `pidfd_open`.
POLL_MS, POLL_MS_WITHOUT_PIDFD = 1000, 20


@dataclass(frozen=True)
class Grader:
    """A grading function, which returns a Verdict or a number, and its parameters."""

    function: Callable[..., Any]
    parameters: Parameters

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Grader:
        parameters = parameters_of(function)
        parameters.check()
        return cls(function, parameters)


class SharedState:
    """Memory that a child shares with its parent, so that it can be read after a death.

    A user's function cannot fake it by its exit code.
    """

    RUNNING, OUT_OF_MEMORY, PIPES_CLOSED, END_OF_INPUT = range(4)

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 16)

    @property
    def request_id(self) -> int:
        """The request that the child is grading."""
        return struct.unpack_from("q", self._memory, 0)[0]

    @request_id.setter
    def request_id(self, value: int) -> None:
        struct.pack_into("q", self._memory, 0, value)

    @property
    def status(self) -> int:
        return struct.unpack_from("q", self._memory, 8)[0]

    @status.setter
    def status(self, value: int) -> None:
        struct.pack_into("q", self._memory, 8, value)


@dataclass(frozen=True)
class Pipes:
    """The file descriptors of requests and replies."""

    requests: int
    replies: int

    @classmethod
    def take(cls) -> Pipes:
        """Move the pipes away from the standard input and output.

        A function, or a process that it starts, must not read requests or print replies.
        """
        requests, replies = os.dup(0), os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        return cls(requests, replies)

    def reply(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self.replies, data) :]


def main() -> None:
    """Fork a child that grades, and replace it when it dies, until the input ends."""
    name, cpu_seconds, memory_mb = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    pipes, state = Pipes.take(), SharedState()
    adopt_orphans()
    atexit.register(_end_all, os.getpid())  # also if the import fails
    os.environ["EEPO_GRADING"] = name  # a script that trains on import gets an error
    grader = Grader.of(getattr(load_module(name), split_name(name)[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a module may have changed it
    # Processes that the module has started on import serve all children.
    helpers = descendants(os.getpid()) if _has_children() else []
    with contextlib.suppress(BrokenPipeError):  # the trainer has ended
        pipes.reply({"ready": name})
        while True:
            state.request_id, state.status = NO_REQUEST, SharedState.RUNNING
            child = os.fork()
            if child == 0:
                _limit_memory(memory_mb)
                _serve(grader, cpu_seconds, state, pipes)
            exit_status = _wait(child, pipes.requests)
            if exit_status is None or state.status == SharedState.END_OF_INPUT:
                break
            if _has_children():
                kill_descendants(os.getpid(), keep=helpers)
            cause = _cause_of_death(exit_status, state.status)
            pipes.reply({"request": state.request_id} | cause)
    _end_all(os.getpid())  # before Python waits for threads that the module has started


def as_verdict(result: Any, text: str) -> Verdict:
    """Convert the result of a user's function, which may be a Verdict, a number or a bool."""
    if isinstance(result, Verdict):
        return result
    if not hasattr(result, "__float__"):
        raise UserError(f"it must return a Verdict, a number or a bool, got {reprlib.repr(result)}")
    return Verdict(result, text.strip() or None)  # it converts the number to a float


def _serve(grader: Grader, cpu_seconds: float, state: SharedState, pipes: Pipes) -> None:
    """Grade requests until the input ends, then exit.

    Never returns: a forked child must not run the code of its parent.
    """
    end_with_parent()
    lines, pid = os.fdopen(pipes.requests, "rb", closefd=False), os.getpid()
    try:
        while line := lines.readline():
            try:
                request_id, problem, text = json.loads(line)
                gold, prompt, columns = problem
            except (ValueError, TypeError):
                # The rest of a request that a killed child had begun to read. It is sent again.
                continue
            state.request_id = request_id
            # The default action of the timer's signal, SIGPROF, ends the process.
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            try:
                reply = grade_one(grader, gold, text, prompt, columns)
            finally:
                if os.getpid() != pid:  # a copy of this process that the function has forked
                    os._exit(0)
            signal.setitimer(signal.ITIMER_PROF, 0)
            pipes.reply({"request": request_id} | reply)
            state.request_id = NO_REQUEST
        state.status = SharedState.END_OF_INPUT
    except MemoryError:
        state.status = SharedState.OUT_OF_MEMORY
    except OSError:  # the function has closed the pipes, or the trainer has ended
        state.status = SharedState.PIPES_CLOSED
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def grade_one(
    grader: Grader, gold: Any, text: str, prompt: str = "", columns: Mapping[str, Any] = EMPTY
) -> dict[str, Any]:
    """Return the reply. Every error is reported to the trainer's process, which raises it."""
    try:
        result = call(grader.function, grader.parameters, text, gold, prompt, columns)
        verdict = as_verdict(result, text)
    except MemoryError:
        raise
    except UserError as error:
        return {"error": str(error)[:MAX_REPLY_TEXT]}
    except Exception as error:
        return {"error": _describe(error)}
    except BaseException as error:
        # `exit()` in code that a function runs for a completion. `except Exception` misses it.
        return {"died": "crashed", "how": _describe(error)}
    answer = verdict.answer[:MAX_REPLY_TEXT] if verdict.answer is not None else None
    reason, label = verdict.reason[:MAX_REPLY_TEXT], verdict.label[:MAX_LABEL]
    return {"reward": verdict.reward, "answer": answer, "reason": reason, "label": label}


def _describe(error: BaseException) -> str:
    """Return the type and message. It does not fail if `str(error)` does."""
    line = "".join(traceback.format_exception_only(error)).strip()
    return line[:MAX_REPLY_TEXT]


def _limit_memory(memory_mb: int) -> None:
    """Limit the memory beyond what the process starts with.

    Only Linux limits address space. On other systems only the CPU limit holds.
    """
    size = Path("/proc/self/statm")
    if size.exists():
        start = int(size.read_text().split()[0]) * resource.getpagesize()
        limit = start + memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _wait(child: int, requests: int) -> int | None:
    """Return the child's exit status when it has ended, or None when the trainer has ended."""
    poller = select.poll()
    poller.register(requests, 0)  # reports only that the other end was closed
    with contextlib.ExitStack() as stack:
        timeout = POLL_MS_WITHOUT_PIDFD
        with contextlib.suppress(AttributeError, OSError):  # another system or an old kernel
            descriptor = os.pidfd_open(child)
            stack.callback(os.close, descriptor)
            poller.register(descriptor, select.POLLIN)
            timeout = POLL_MS
        while True:
            if any(descriptor == requests for descriptor, _ in poller.poll(timeout)):
                return None
            for pid, status in _ended_children():
                if pid == child:
                    return status


def _ended_children() -> Iterator[tuple[int, int]]:
    """Yield (process id, exit status) of all children that have ended, adopted ones included."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def _has_children() -> bool:
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return True
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _end_all(pid: int) -> None:
    """Kill everything that this process has started, and its process group with itself."""
    if os.getpid() != pid:  # a copy that the module has forked
        return
    if _has_children():
        kill_descendants(pid)
    if os.getpgrp() == pid:
        kill_group(pid)


def _cause_of_death(exit_status: int, status: int) -> dict[str, str]:
    """Return the reason of the verdict. `how` is set if no limit explains the death."""
    if status == SharedState.OUT_OF_MEMORY:
        return {"died": "out of memory"}
    if status == SharedState.PIPES_CLOSED:
        return {"died": "crashed", "how": "closed pipes of the grading process"}
    if os.WIFEXITED(exit_status):
        return {"died": "crashed", "how": f"exit code {os.WEXITSTATUS(exit_status)}"}
    number = os.WTERMSIG(exit_status)
    if number == signal.SIGPROF:
        return {"died": "time-out"}
    # The kernel kills with SIGKILL when memory is short.
    reason = "killed" if number == signal.SIGKILL else "crashed"
    return {"died": reason, "how": signal.strsignal(number) or f"signal {number}"}


if __name__ == "__main__":
    main()
