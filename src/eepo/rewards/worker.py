"""One grading process, run by `isolation.py`: a line in, a line out, forever.

It imports the judge once and forks. The child grades under limits that the kernel holds (CPU time by a timer whose
signal kills, memory by its address space), so no completion can hang or swell it, not even inside a C function. When
a child dies, the parent says so and forks the next one in milliseconds: nothing is imported again.
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

from eepo.rewards.isolation import IDLE
from eepo.types import Verdict

OUT_OF_MEMORY = 3  # exit code of a child that ran into its limit
MAX_WORDS = 300  # characters of a reason or an answer that travel: a line fits into one atomic write to a pipe


def main() -> None:
    name, cpu_seconds, memory_mb = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    replies = os.dup(1)
    os.dup2(2, 1)  # what a judge prints is not a reply
    judge = load_judge(name)
    current = mmap.mmap(-1, 8)  # shared with the child: which item it is at
    _write(replies, {"ready": name})
    while True:
        pid = os.fork()
        if pid == 0:
            _limit_memory(memory_mb)
            _serve(judge, cpu_seconds, current, replies)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            return
        (item,) = struct.unpack("q", current[:])
        current[:] = struct.pack("q", IDLE)
        _write(replies, {"item": item, "died": _cause(status)})


def load_judge(name: str) -> Callable[[Any, str], Any]:
    """`module:function`, as a recipe's `reward.name` writes it."""
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(module), function)


def as_verdict(result: Any, text: str) -> Verdict:
    """A user's function may return just a number or a truth value."""
    if isinstance(result, Verdict):
        return result
    reward = float(result)
    if not math.isfinite(reward):
        raise ValueError(f"a reward must be finite, got {reward}")
    return Verdict(reward, text.strip() or None, "")


def _serve(
    judge: Callable[[Any, str], Any], cpu_seconds: float, current: mmap.mmap, replies: int
) -> None:
    """Grade items until the input ends. Never returns: a forked child must not run its parent's code."""
    lines = os.fdopen(0, "rb", closefd=False)
    try:
        while line := lines.readline():
            try:
                item, answer, text = json.loads(line)
            except (
                ValueError
            ):  # the end of a request that a killed child had begun to read; it is sent again
                continue
            current[:] = struct.pack("q", item)
            signal.setitimer(
                signal.ITIMER_PROF, cpu_seconds
            )  # SIGPROF's default action ends the process
            reply = _judged(judge, answer, text)
            signal.setitimer(signal.ITIMER_PROF, 0)
            current[:] = struct.pack("q", IDLE)
            _write(replies, {"item": item} | reply)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BrokenPipeError:
        pass
    os._exit(0)


def _judged(judge: Callable[[Any, str], Any], answer: Any, text: str) -> dict[str, Any]:
    try:
        verdict = as_verdict(judge(answer, text), text)
    except MemoryError:
        raise
    except Exception as error:  # the user's function, or a bug of ours: it is raised again where grading was asked for
        return {"error": f"{type(error).__name__}: {error}"[:MAX_WORDS]}
    found = verdict.answer[:MAX_WORDS] if verdict.answer is not None else None
    return {"reward": verdict.reward, "answer": found, "reason": verdict.reason[:MAX_WORDS]}


def _limit_memory(memory_mb: int) -> None:
    """Beyond what the process starts with. Only Linux counts address space; elsewhere the CPU limit must do."""
    size = Path("/proc/self/statm")
    if size.exists():
        start = int(size.read_text().split()[0]) * resource.getpagesize()
        limit = start + memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _cause(status: int) -> str:
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return "time-out"
    killed = (
        os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    )  # by the kernel, short of memory
    swollen = os.WIFEXITED(status) and os.WEXITSTATUS(status) == OUT_OF_MEMORY
    return "out of memory" if killed or swollen else "crashed"


def _write(replies: int, reply: dict[str, Any]) -> None:
    os.write(replies, json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main()
