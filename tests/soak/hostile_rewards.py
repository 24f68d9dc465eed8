"""Lists reward functions that attack the process that runs them, with the outcome of each.

`reward.name = "hostile_rewards:NAME"` selects one, with this folder as working directory or in
PYTHONPATH. Grading processes import this module, so it imports little. Some of the functions wait
forever: set `reward.wall_seconds` to a few seconds. The outcomes are those of a few completions. A
function that loses `eepo.rewards.isolation.MAX_LOST` completions in a row ends with an error line.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from eepo.types import Verdict

# Set this variable to a unique text: `strays` finds the processes of that run which still exist.
RUN_VARIABLE = "HOSTILE_RUN"
ANY = ""  # a verdict that the function has given itself, with any reason


@dataclass(frozen=True)
class Outcome:
    """What grading a few completions must end with: verdicts, or one error line."""

    reasons: frozenset[str] = frozenset()  # of the verdicts; they have reward 0 except for ANY
    error: str = ""  # a part of the error line

    def allows(self, reward: float, reason: str) -> bool:
        """Tell whether this may be a verdict on a completion."""
        return ANY in self.reasons or (reward == 0.0 and reason in self.reasons)


HOSTILE_REWARDS: dict[str, Outcome] = {}
Attack = Callable[[Any, str], Any]


def gives(*reasons: str) -> Callable[[Attack], Attack]:
    """Register a function whose completions get verdicts with one of these reasons."""
    return _register(Outcome(reasons=frozenset(reasons)))


def fails(error: str) -> Callable[[Attack], Attack]:
    """Register a function that ends grading with an error line that contains `error`."""
    return _register(Outcome(error=error))


def _register(outcome: Outcome) -> Callable[[Attack], Attack]:
    def register(function: Attack) -> Attack:
        HOSTILE_REWARDS[function.__name__] = outcome
        return function

    return register


def strays(run: str) -> list[int]:
    """Return the processes whose environment or command line contains `run`, without our own.

    A grading process has the environment of the process that started it.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            texts = [(folder / name).read_bytes() for name in ("environ", "cmdline")]
        except OSError:  # it has ended, or it belongs to another user
            continue
        if any(run.encode() in text for text in texts) and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


# --- ends its own process


@gives("crashed")
def closes_all_descriptors(answer: Any, text: str) -> float:
    os.closerange(0, 4096)
    return 1.0


@gives("crashed", "time-out")
def closes_all_descriptors_and_opens_files(answer: Any, text: str) -> float:
    """Get the pipes' numbers for other files, so that replies go there."""
    os.closerange(3, 4096)
    for _ in range(16):
        os.dup(os.open(os.devnull, os.O_RDWR))
    return 1.0


@gives("crashed")
def exits_with_0(answer: Any, text: str) -> NoReturn:
    os._exit(0)


@gives("crashed")
def exits_with_3(answer: Any, text: str) -> NoReturn:
    os._exit(3)


@gives("crashed")
def raises_system_exit(answer: Any, text: str) -> NoReturn:
    sys.exit(3)


@gives("crashed")
def raises_keyboard_interrupt(answer: Any, text: str) -> NoReturn:
    raise KeyboardInterrupt


@gives("crashed")
def reads_address_0(answer: Any, text: str) -> float:
    ctypes.string_at(0)
    return 1.0


@gives("killed")
def kills_itself(answer: Any, text: str) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


@gives("crashed")
def kills_its_parent(answer: Any, text: str) -> float:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(3600)
    return 1.0


@gives("crashed")
def kills_its_process_group(answer: Any, text: str) -> float:
    os.killpg(0, signal.SIGKILL)
    return 1.0


@gives("crashed")
def aborts_later(answer: Any, text: str) -> float:
    """Die from a timer that goes off while the process waits for nothing in particular."""
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    time.sleep(3600)
    return 1.0


@gives("crashed", ANY)
def replaces_getpid(answer: Any, text: str) -> float:
    os.getpid = lambda: 0
    return 1.0


# --- uses up time or memory


@gives("time-out")
def spins(answer: Any, text: str) -> NoReturn:
    while True:
        pass


@gives("time-out")
def spins_without_the_timer(answer: Any, text: str) -> NoReturn:
    signal.signal(signal.SIGPROF, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_PROF, 0)
    while True:
        pass


@gives("time-out")
def sleeps(answer: Any, text: str) -> float:
    time.sleep(3600)
    return 1.0


@gives("time-out")
def sleeps_with_all_signals_blocked(answer: Any, text: str) -> float:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(3600)
    return 1.0


@gives("time-out")
def stops_itself(answer: Any, text: str) -> float:
    os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0


@gives("out of memory")
def takes_10_gigabytes(answer: Any, text: str) -> float:
    return float(len(b"x" * (10 * 2**30)))


@gives("out of memory", "time-out")
def takes_memory_in_steps(answer: Any, text: str) -> NoReturn:
    blocks = []
    while True:
        blocks.append(bytearray(2**24))


@fails("RecursionError")
def recurses(answer: Any, text: str) -> float:
    return recurses(answer, text)


@gives("crashed", "out of memory", "time-out")
def recurses_without_limit(answer: Any, text: str) -> float:
    sys.setrecursionlimit(2**31 - 1)
    return float(len(repr(_nested(10**7))))


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


# --- writes into the pipes


@gives(ANY)
def prints_garbage(answer: Any, text: str) -> float:
    print('{"request": 1, "reward": 1}\n\x00\x1b[2J' * 10, flush=True)
    os.write(1, b"\xff\xfe garbage\n")
    return 0.5


@gives("crashed")
def writes_garbage_to_all_descriptors(answer: Any, text: str) -> float:
    _write_everywhere(b"garbage\n")
    return 1.0


@gives("crashed")
def writes_json_of_other_types(answer: Any, text: str) -> float:
    _write_everywhere(b"[1, 2]\n" + b"[" * 5000 + b"\n")
    return 1.0


@gives("crashed", "time-out")
def writes_an_endless_line(answer: Any, text: str) -> NoReturn:
    while True:
        _write_everywhere(b"x" * 4096)


@gives("time-out")
def writes_endless_replies_to_other_requests(answer: Any, text: str) -> NoReturn:
    signal.signal(signal.SIGPROF, signal.SIG_IGN)
    while True:
        _write_everywhere(b'{"request": 1, "reward": 1.0}\n{"ready": ""}\n' * 50)


@gives(ANY)
def forges_the_next_replies(answer: Any, text: str) -> float:
    """Reply to every request id that a counter could reach."""
    verdict = {"reward": 1.0, "answer": "forged", "reason": "forged", "label": ""}
    lines = [json.dumps({"request": number} | verdict) for number in range(1, 200)]
    _write_everywhere("".join(f"{line}\n" for line in lines).encode())
    return 0.0


@gives("forged", "time-out")
def replies_early_and_sleeps(answer: Any, text: str) -> float:
    """Reply to the request under way, then never read the next one."""
    frame: Any = sys._getframe()
    while "request_id" not in frame.f_locals:
        frame = frame.f_back
    verdict = {"reward": 0.0, "answer": None, "reason": "forged", "label": ""}
    reply = {"request": frame.f_locals["request_id"]} | verdict
    _write_everywhere(json.dumps(reply).encode() + b"\n")
    time.sleep(3600)
    return 1.0


def _write_everywhere(data: bytes) -> None:
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, data)


@gives(ANY)
def replies_with_100_megabytes(answer: Any, text: str) -> Verdict:
    huge = "\U0001f600" * (25 * 10**6)
    return Verdict(0.0, huge, huge, huge)


# --- changes its process


@gives(ANY)
def replaces_the_standard_streams(answer: Any, text: str) -> float:
    sys.stdin = sys.stdout = sys.stderr = io.StringIO()
    return 0.0


@gives(ANY)
def closes_the_standard_streams(answer: Any, text: str) -> float:
    os.closerange(0, 3)
    return 0.0


@gives(ANY)
def reads_the_standard_input(answer: Any, text: str) -> float:
    return float(len(os.read(0, 100)))


@fails("EOFError")
def asks_the_user(answer: Any, text: str) -> float:
    return float(input("reward: "))


@gives(ANY)
def changes_the_working_directory(answer: Any, text: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
    return 0.0


@gives(ANY)
def forgets_all_modules(answer: Any, text: str) -> float:
    sys.modules.clear()
    return 0.0


@gives(ANY)
def lowers_its_limits(answer: Any, text: str) -> float:
    import resource

    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(limit, (0, 0))
    return 0.0


@gives(ANY)
def leaves_threads(answer: Any, text: str) -> float:
    for daemon in (True, False):
        threading.Thread(target=time.sleep, args=(3600,), daemon=daemon).start()
    return 0.0


@gives(ANY, "time-out")
def leaves_a_busy_thread(answer: Any, text: str) -> float:
    """Its CPU time counts for the next completion of the process."""
    threading.Thread(target=spins, args=(answer, text)).start()
    return 0.0


# --- starts processes


@gives(ANY)
def forks_and_both_reply(answer: Any, text: str) -> float:
    return float(os.fork() == 0)


@gives(ANY)
def forks_sleeping_copies(answer: Any, text: str) -> float:
    for _ in range(5):
        if os.fork() == 0:
            time.sleep(3600)
    return 0.0


@gives(ANY)
def starts_a_session(answer: Any, text: str) -> float:
    _start_process()
    return 0.0


@gives(ANY)
def starts_a_session_without_environment(answer: Any, text: str) -> float:
    _start_process(env={})
    return 0.0


@gives("crashed")
def starts_a_session_and_exits(answer: Any, text: str) -> NoReturn:
    _start_process()
    os._exit(1)


@gives("time-out")
def starts_a_session_and_sleeps(answer: Any, text: str) -> NoReturn:
    _start_process()
    time.sleep(3600)
    os._exit(1)


@gives(ANY)
def starts_a_daemon(answer: Any, text: str) -> float:
    """Fork twice, as daemons do, so that the process has no living parent."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return 0.0
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if os.fork() == 0:
        os.closerange(0, 4096)
        time.sleep(3600)
    os._exit(0)


def _start_process(**options: Any) -> None:
    """Start a process that outlives its parent. Its command line names the run."""
    sleep = "import time; time.sleep(3600)"
    command = [sys.executable, "-c", sleep, os.environ.get(RUN_VARIABLE, "")]
    subprocess.Popen(command, start_new_session=True, **options)


# --- returns or raises something unexpected


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no text")


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Vector:
    """Looks like a tensor with two elements."""

    def __float__(self) -> float:
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")

    def __repr__(self) -> str:
        return "tensor([0., 1.])"


def _returns(name: str, value: Any, error: str) -> None:
    """Define and register a function that returns `value`, as another module would define it."""

    def function(answer: Any, text: str) -> Any:
        return value() if callable(value) else value

    function.__name__ = name
    globals()[name] = fails(error)(function)


_returns("returns_none", None, "must return a Verdict, a number or a bool, got None")
_returns("returns_a_text", "1.0", "must return a Verdict, a number or a bool, got '1.0'")
_returns("returns_a_list", [1.0], "must return a Verdict, a number or a bool, got [1.0]")
_returns("returns_a_complex_number", 1j, "must return a Verdict, a number or a bool, got 1j")
_returns("returns_an_unprintable_object", Unprintable(), "got <Unprintable instance")
_returns("returns_nan", float("nan"), "must be a number from -1e9 to 1e9, got nan")
_returns("returns_infinity", float("inf"), "must be a number from -1e9 to 1e9, got inf")
_returns("returns_a_huge_number", -1e30, "must be a number from -1e9 to 1e9, got -1e+30")
_returns("returns_a_huge_integer", 10**400, "must be a number from -1e9 to 1e9, got 1000")
_returns("returns_a_vector", Vector(), "must be a number from -1e9 to 1e9, got tensor([0., 1.])")


def _verdict(name: str, error: str, **fields: Any) -> None:
    """Register a function that builds a `Verdict` with wrong fields."""
    values = {"reward": 1.0, "answer": None} | fields
    _returns(name, lambda: Verdict(**values), error)


_verdict(
    "verdict_with_nan",
    "the reward must be a number from -1e9 to 1e9, got nan",
    reward=1e999 - 1e999,
)
_verdict("verdict_with_infinity", "from -1e9 to 1e9, got inf", reward=1e999)
_verdict("verdict_with_a_text_as_reward", "from -1e9 to 1e9, got '1'", reward="1")
_verdict("verdict_without_reward", "from -1e9 to 1e9, got None", reward=None)
_verdict("verdict_with_a_vector", "from -1e9 to 1e9, got tensor([0., 1.])", reward=Vector())
_verdict("verdict_with_a_number_as_answer", "Verdict.answer must be a str or None, got 5", answer=5)
_verdict("verdict_with_a_number_as_reason", "Verdict.reason must be a str, got 3", reason=3)
_verdict("verdict_without_label", "Verdict.label must be a str, got None", label=None)


@fails("KeyError: 'no such key'")
def raises_an_error(answer: Any, text: str) -> NoReturn:
    raise KeyError("no such key")


@fails("UnprintableError")
def raises_an_unprintable_error(answer: Any, text: str) -> NoReturn:
    raise UnprintableError


@fails("ValueError: line 1")
def raises_a_long_error(answer: Any, text: str) -> NoReturn:
    raise ValueError("line 1\nline 2\x1b[2J" + "x" * 10**7)
