"""Ends the processes that a grading function has started, also those in sessions of their own.

This needs Linux. On other systems only the process group of the worker is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
KILL_SECONDS = 2.0  # a process in an uninterruptible wait may not end for minutes


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent ends, so that `descendants` finds it."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        arguments = (option, value, 0, 0, 0)
        ctypes.CDLL(None).prctl(*map(ctypes.c_ulong, arguments))


def descendants(root: int, keep: Collection[int] = ()) -> list[int]:
    """Return the running descendants of `root`, without those in `keep` and their descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    for pid, parent in _running_processes():
        if pid not in keep:
            children[parent].append(pid)
    found = list(children[root])
    for pid in found:  # grows while it is read
        found += children[pid]
    return found


def _running_processes() -> Iterator[tuple[int, int]]:
    """Yield (process id, parent's process id); nothing on systems without /proc."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            stat = path.read_bytes()
        except OSError:  # it has ended since
            continue
        # The name, in parentheses, may contain spaces and parentheses.
        state, parent = stat.rpartition(b")")[2].split()[:2]
        if state not in (b"Z", b"X"):
            yield int(path.parent.name), int(parent)


def kill_descendants(root: int, keep: Collection[int] = ()) -> None:
    """Kill the descendants of `root`, which has called `adopt_orphans`, until none is left.

    Another process than this one is stopped first, so that it starts no new ones.
    """
    if root != os.getpid():
        with contextlib.suppress(ProcessLookupError):
            os.kill(root, signal.SIGSTOP)
    deadline = time.monotonic() + KILL_SECONDS
    while (found := descendants(root, keep)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def kill_group(leader: int) -> None:
    """Kill a process group, which may be empty."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
