"""Checks many inputs in a fork of this process: a crash or an endless loop costs one input."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from table import Failure, Findings

from eepo.types import UserError

CASE_SECONDS = 60.0  # an input that takes longer hangs


def check_cases(
    check: Callable[[Any], float | None],
    cases: Sequence[Any],
    describe: Callable[[Any], str] = repr,
) -> Findings:
    """Call `check` with each case. It may return, or raise a `UserError` of one line.

    It may return seconds; else the time of the call counts. A `Failure` counts in the column that
    it names, every other exception as a traceback.
    """
    findings, first = Findings(tried=len(cases)), 0
    while first < len(cases):
        read, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _run_in_child(check, cases[first:], write)
        os.close(write)
        results, hung = _read_results(read, pid)
        os.close(read)
        for case, result in zip(cases[first:], results, strict=False):
            findings.slowest = max(findings.slowest, result["seconds"])
            if result["error"]:
                findings.add(result["column"], f"{describe(case)[:300]}: {result['error']}")
        first += len(results)
        if first < len(cases):  # the child did not come to the end
            column = "hangs" if hung else "tracebacks"
            findings.add(column, f"{describe(cases[first])[:300]}: the process died or was killed")
            first += 1
    return findings


def _read_results(pipe: int, pid: int) -> tuple[list[dict[str, Any]], bool]:
    """Return what the child has sent until its end, and whether it had to be killed."""
    data, hung = bytearray(), False
    while True:
        ready, _, _ = select.select([pipe], [], [], CASE_SECONDS)
        if not ready:
            os.kill(pid, signal.SIGKILL)
            hung = True
        part = os.read(pipe, 65536)
        if not part:
            break
        data += part
    os.waitpid(pid, 0)
    lines = [line for line in data.split(b"\n")[:-1] if line]
    return [json.loads(line) for line in lines], hung


def _run_in_child(
    check: Callable[[Any], float | None], cases: Sequence[Any], pipe: int
) -> NoReturn:
    """Check the cases and exit. What they print does not belong into the output of the soak."""
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        for case in cases:
            started = time.monotonic()
            seconds, column, error = _call(check, case)
            if seconds is None:
                seconds = time.monotonic() - started
            result = {"column": column, "error": error, "seconds": seconds}
            os.write(pipe, json.dumps(result).encode() + b"\n")
    finally:
        os._exit(0)


def _call(check: Callable[[Any], float | None], case: Any) -> tuple[float | None, str, str]:
    """Return the seconds that the check gives, and how it failed, as column and description."""
    try:
        return check(case), "tracebacks", ""
    except UserError as error:
        line = str(error)
        one_line = line.isprintable() and len(line) < 10_000
        return None, "tracebacks", "" if one_line else f"not one line: {line[:300]!r}"
    except Failure as failure:
        return None, failure.column, str(failure)
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename}:{place.lineno}"
        return None, "tracebacks", f"{type(error).__name__}: {str(error)[:200]} ({where})"
