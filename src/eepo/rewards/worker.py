"""Runs one grading process: reads a request per line, writes a reply per line (`isolation.py`).

The process imports the grading function once and forks a child, which grades. The kernel limits
the child's CPU time (by a timer whose signal kills) and its memory (by its address space). So no
completion can hang the child or exhaust memory, not even inside of a C function. When a child
dies, the parent reports it and forks the next one within milliseconds, without a new import.
"""

from __future__ import annotations

import importlib
import json
import math
import mmap
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eepo.rewards.isolation import NO_REQUEST
from eepo.types import Verdict

OUT_OF_MEMORY = 3  # exit code of a child that reached its memory limit
MAX_LABEL = 60  # characters
MAX_REPLY_TEXT = 300  # characters of a reason or an answer: a reply must fit into one atomic write

GradingFunction = Callable[[Any, str], Any]  # (gold answer, completion) → Verdict or a number


def main() -> None:
    """Fork a child that grades, and replace it when it dies."""
    name, cpu_seconds, memory_mb = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    replies = os.dup(1)
    os.dup2(2, 1)  # what a grading function prints must not mix with the replies
    function = load_function(name)
    current = mmap.mmap(-1, 8)  # shared with the child: the id of the request that it is grading
    _write(replies, {"ready": name})
    while True:
        pid = os.fork()
        if pid == 0:
            _limit_memory(memory_mb)
            _serve(function, cpu_seconds, current, replies)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            return
        (request_id,) = struct.unpack("q", current[:])
        current[:] = struct.pack("q", NO_REQUEST)
        _write(replies, {"request": request_id, "died": _cause_of_death(status)})


def load_function(name: str) -> GradingFunction:
    """Import `module:function`, the form that `reward.name` has in a recipe."""
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(module), function)


def as_verdict(result: Any, text: str) -> Verdict:
    """Convert the result of a user's function, which may be a Verdict, a number or a bool."""
    if isinstance(result, Verdict):
        return result
    reward = float(result)
    if not math.isfinite(reward):
        raise ValueError(f"a reward must be finite, got {reward}")
    return Verdict(reward, text.strip() or None, "")


def _serve(function: GradingFunction, cpu_seconds: float, current: mmap.mmap, replies: int) -> None:
    """Grade requests until the input ends, then exit.

    Never returns: a forked child must not run the code of its parent.
    """
    lines = os.fdopen(0, "rb", closefd=False)
    try:
        while line := lines.readline():
            try:
                request_id, gold, text = json.loads(line)
            except ValueError:
                # The rest of a request that a killed child had begun to read. It is sent again.
                continue
            current[:] = struct.pack("q", request_id)
            # The default action of the timer's signal, SIGPROF, ends the process.
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            reply = _grade(function, gold, text)
            signal.setitimer(signal.ITIMER_PROF, 0)
            current[:] = struct.pack("q", NO_REQUEST)
            _write(replies, {"request": request_id} | reply)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BrokenPipeError:
        pass
    os._exit(0)


def _grade(function: GradingFunction, gold: Any, text: str) -> dict[str, Any]:
    try:
        verdict = as_verdict(function(gold, text), text)
    except MemoryError:
        raise
    except Exception as error:  # reported to the trainer's process, which raises a UserError
        return {"error": f"{type(error).__name__}: {error}"[:MAX_REPLY_TEXT]}
    answer = verdict.answer[:MAX_REPLY_TEXT] if verdict.answer is not None else None
    reason, label = verdict.reason[:MAX_REPLY_TEXT], verdict.label[:MAX_LABEL]
    return {"reward": verdict.reward, "answer": answer, "reason": reason, "label": label}


def _limit_memory(memory_mb: int) -> None:
    """Limit the memory beyond what the process starts with.

    Only Linux limits address space. On other systems only the CPU limit holds.
    """
    size = Path("/proc/self/statm")
    if size.exists():
        start = int(size.read_text().split()[0]) * resource.getpagesize()
        limit = start + memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _cause_of_death(status: int) -> str:
    if os.WIFEXITED(status):
        return "out of memory" if os.WEXITSTATUS(status) == OUT_OF_MEMORY else "crashed"
    if os.WTERMSIG(status) == signal.SIGPROF:
        return "time-out"
    # The kernel kills with SIGKILL when memory is short.
    return "out of memory" if os.WTERMSIG(status) == signal.SIGKILL else "crashed"


def _write(replies: int, reply: dict[str, Any]) -> None:
    os.write(replies, json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main()
