"""Grades in separate processes that can be killed, so that no completion can stop or slow a run.

The time limit is CPU time, which the kernel counts, so a loaded machine changes no verdict. A
wall-clock limit ends functions that wait. Requests and replies are JSON lines. A worker has one
request at a time, so a dead worker always belongs to a known completion.

A user's function is trusted less than our own code: it may end its process, write into its pipes or
never return. Each of these gives the completion reward 0. If it happens on many completions in a
row, the function is at fault, and the run ends with an error.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from eepo.config import RewardConfig
from eepo.rewards.descendants import kill_descendants, kill_group
from eepo.types import Prompt, UserError, Verdict

# Characters of a completion that are read, from its end, where the answer is.
MAX_TEXT = 100_000
MAX_WORKERS = 8  # by default
MAX_REPLY = 2**16  # bytes; a worker's own replies are shorter
MAX_SENDS = 5  # of one request; it is sent again if an idle worker has died
MAX_LOST = 20  # completions in a row without a verdict, and without reaching a CPU or memory limit
NO_REQUEST = 0  # request id of an idle worker; real ids are random and positive
START_SECONDS = 600.0  # for the import of the function's module
STOP_SECONDS = 0.5  # for a worker that was told to stop, before it is killed


class PooledReward:
    """Grades with a function `module:function` in workers.

    The function receives the gold answer and the text. With `sends_row` it may also receive the
    prompt and the columns of the row (`arguments.py`).
    """

    def __init__(self, function: str, config: RewardConfig, sends_row: bool = False) -> None:
        self.function = function
        self.sends_row = sends_row
        self.config = config
        self.num_workers = config.num_workers or min(os.cpu_count() or 1, MAX_WORKERS)
        self._workers: list[_Worker] = []
        self._losses = _Losses(function)
        self._lock = threading.Lock()

    def grade(
        self,
        prompts: Sequence[Prompt],
        texts: Sequence[str],
        progress: Callable[[int], None] = lambda num_graded: None,
    ) -> list[Verdict]:
        """Return the verdicts in order.

        Equal pairs are graded once, because collapsed policies repeat themselves.
        """
        problems = [self._as_json(prompt) for prompt in prompts]
        pairs = [(problem, text[-MAX_TEXT:]) for problem, text in zip(problems, texts, strict=True)]
        counts: dict[tuple[str, str], int] = {}
        for pair in pairs:
            counts[pair] = counts.get(pair, 0) + 1
        distinct = list(counts)
        with self._lock:
            try:
                verdicts = self._run(distinct, lambda index: progress(counts[distinct[index]]))
            except BaseException:
                # A worker that still has a request would send its reply into the next batch.
                self.close()
                raise
        by_pair = dict(zip(distinct, verdicts, strict=True))
        return [by_pair[pair] for pair in pairs]

    def _as_json(self, prompt: Prompt) -> str:
        """Return what the function may receive of a prompt: gold answer, text and columns."""
        row = (prompt.text, dict(prompt.columns)) if self.sends_row else ("", {})
        return json.dumps((prompt.answer, *row))

    def start(self) -> None:
        """Start the workers, and wait until the first one has imported the function.

        A missing package is then reported before a model is loaded, not at the first completion.
        The other workers import the function while the model is loaded.
        """
        with self._lock:
            if not self._workers:
                worker = self._new_worker()
                worker.wait_until_ready()
                others = [self._new_worker() for _ in range(self.num_workers - 1)]
                self._workers = [worker, *others]

    def _new_worker(self) -> _Worker:
        return _Worker(self.function, self.config, self._losses)

    def close(self) -> None:
        """End all workers. The next `grade` starts new ones."""
        for worker in self._workers:
            worker.stop()
        self._workers = []

    def _run(self, items: list[tuple[str, str]], on_done: Callable[[int], None]) -> list[Verdict]:
        verdicts: list[Verdict | None] = [None] * len(items)
        remaining = iter(range(len(items)))
        while len(self._workers) < min(self.num_workers, len(items)):
            self._workers.append(self._new_worker())
        busy = [worker for worker in self._workers if _send_next(worker, remaining, items)]
        while busy:
            ready = _wait_for_pipes(busy, min(1.0, self.config.wall_seconds))
            for worker in list(busy):
                verdict = worker.exchange() if worker in ready else None
                verdict = verdict or worker.end_if_blocked()
                if verdict is not None:
                    verdicts[worker.item_index] = verdict
                    on_done(worker.item_index)
                    if not _send_next(worker, remaining, items):
                        busy.remove(worker)
        return [verdict for verdict in verdicts if verdict is not None]


def _wait_for_pipes(workers: list[_Worker], seconds: float) -> set[_Worker]:
    """Wait at most `seconds`; return the workers that can be read from or written to.

    The selector is new each time, because a restarted worker has new pipes.
    """
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.stdout, selectors.EVENT_READ, worker)
            if worker.outgoing:
                selector.register(worker.stdin, selectors.EVENT_WRITE, worker)
        return {key.data for key, _ in selector.select(seconds)}


def _send_next(worker: _Worker, remaining: Iterator[int], items: list[tuple[str, str]]) -> bool:
    """Send the next item to the worker; return False if none is left."""
    index = next(remaining, None)
    if index is None:
        return False
    worker.send(index, *items[index])
    return True


class _Losses:
    """Counts completions in a row without a verdict, and blames the function for too many."""

    def __init__(self, function: str) -> None:
        self.function = function
        self._num_lost = 0

    def add(self, cause: str) -> None:
        self._num_lost += 1
        if self._num_lost == MAX_LOST:
            self.reset()
            raise UserError(
                f'reward.name = "{self.function}" gave no verdict on {MAX_LOST} completions '
                f"in a row; cause of the last: {cause}"
            )

    def reset(self) -> None:
        self._num_lost = 0


class _Worker:
    """Controls one process that runs `worker.py`, and replaces it when it is lost."""

    def __init__(self, function: str, config: RewardConfig, losses: _Losses) -> None:
        self.function = function
        self.config = config
        self.item_index = 0  # in the batch, of the item that is being graded
        self.outgoing = b""  # bytes of the request that the pipe has not taken yet
        self._losses = losses
        self._request = b""
        self._request_id = NO_REQUEST
        self._sent_at = 0.0
        self._num_sends = 0
        self._start()

    def _start(self) -> None:
        limits = [str(self.config.cpu_seconds), str(self.config.memory_mb)]
        process = subprocess.Popen(
            [sys.executable, "-m", "eepo.rewards.worker", self.function, *limits],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the trainer only, which ends its step first
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self.stdin, self.stdout = process.stdin.fileno(), process.stdout.fileno()
        # A worker that stops reading or writing must not stop the trainer.
        os.set_blocking(self.stdin, False)
        os.set_blocking(self.stdout, False)
        self._process = process
        self.stop = weakref.finalize(self, _end, process)
        self.outgoing, self._incoming, self._ready = b"", b"", False

    def wait_until_ready(self) -> None:
        """Wait until the function's module is imported; raise a `UserError` if that fails."""
        self._sent_at = time.monotonic()
        while not self._ready:
            _wait_for_pipes([self], 1.0)
            self.exchange()
            self.end_if_blocked()

    def send(self, item_index: int, problem: str, text: str) -> None:
        """Send a request. `problem` is JSON already."""
        if not self.stop.alive:  # it was stopped
            if not threading.main_thread().is_alive():  # by Python, which ends
                raise UserError("grading was interrupted by the end of the process")
            self._start()
        self.item_index, self._sent_at, self._num_sends = item_index, time.monotonic(), 0
        # Random, so that a function cannot reply to a request that it has not received.
        self._request_id = secrets.randbits(62) + 1
        self._request = f"[{self._request_id}, {problem}, {json.dumps(text)}]\n".encode()
        self._send_request()

    def _send_request(self) -> None:
        self._num_sends += 1
        self.outgoing += self._request
        self._write()

    def _write(self) -> None:
        """Write what the pipe takes now."""
        try:
            self.outgoing = self.outgoing[os.write(self.stdin, self.outgoing) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.outgoing = b""
            # If the process never started, the next read reports that.
            if self._ready and self._num_sends < MAX_SENDS:  # it was killed while it was idle
                self.stop()
                self._start()
                self._send_request()

    def exchange(self) -> Verdict | None:
        """Write and read without waiting; return the verdict on the last request if it is there."""
        if self.outgoing:
            self._write()
        try:
            chunk = os.read(self.stdout, MAX_REPLY)
        except BlockingIOError:
            return None
        if not chunk:
            return self._stop_after_loss("the end of its process")
        *lines, self._incoming = (self._incoming + chunk).split(b"\n")
        if len(self._incoming) > MAX_REPLY:
            return self._stop_after_loss(f"{MAX_REPLY} bytes in the pipe of the verdicts")
        for line in lines:
            try:
                verdict = self._handle(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                return self._stop_after_loss(f"{line[:40]!r} in the pipe of the verdicts")
            if verdict is not None:
                return verdict
        return None

    def _handle(self, reply: dict[str, Any]) -> Verdict | None:
        """Return the verdict on the last request, or None for any other reply."""
        if "ready" in reply and not self._ready:
            # The import of the module does not count for the limit of the first completion.
            self._ready, self._sent_at = True, time.monotonic()
        elif reply.get("request") == NO_REQUEST:
            # An idle child has died. It may have read half of the request.
            if self._num_sends == MAX_SENDS:
                return self._stop_after_loss(reply.get("how", reply["died"]))
            # A second verdict on the request would be skipped.
            self._send_request()
        elif reply.get("request") == self._request_id:
            return self._conclude(reply)
        return None

    def _conclude(self, reply: dict[str, Any]) -> Verdict:
        if "error" in reply:
            raise UserError(
                f'reward.name = "{self.function}" failed on a completion: {reply["error"]}'
            )
        if "died" in reply:
            if "how" in reply:
                self._losses.add(reply["how"])
            return _ungraded(reply["died"])
        verdict = Verdict(reply["reward"], reply["answer"], reply["reason"], reply["label"])
        self._losses.reset()
        return verdict

    def _stop_after_loss(self, cause: str, reason: str = "crashed") -> Verdict:
        """Stop the whole process, not only its child. The next request starts it again."""
        if not self._ready:
            raise UserError(
                f'reward.name = "{self.function}": the grading process did not start; '
                "its error is printed above"
            )
        self._losses.add(cause)
        self.stop()
        return _ungraded(reason)

    def end_if_blocked(self) -> Verdict | None:
        """Stop the process if it exceeds the wall-clock limit.

        The CPU limit does not end a function that sleeps or waits for a network.
        """
        seconds, limit = time.monotonic() - self._sent_at, self.config.wall_seconds
        if self._ready and seconds > limit:
            return self._stop_after_loss(f"reward.wall_seconds = {limit:g}", "time-out")
        if not self._ready and seconds > START_SECONDS:
            raise UserError(
                f'reward.name = "{self.function}": the import took over {START_SECONDS:g} s'
            )
        return None


def _ungraded(reason: str) -> Verdict:
    """Return the verdict on a completion that has an answer, but one that could not be graded."""
    return Verdict(0.0, f"({reason})", reason)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a worker and everything that it has started.

    The worker does this itself when its input is closed. If it hangs, it is killed.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    deadline = time.monotonic() + STOP_SECONDS
    while not (ended := _has_ended(process)) and time.monotonic() < deadline:
        time.sleep(0.001)
    if not ended:
        kill_descendants(process.pid)
    kill_group(process.pid)  # before `wait`: the kernel may give the id to another process then
    process.wait()
    process.stdout.close()


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Tell whether a process has ended. Leave it in the process table where possible."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.poll() is not None
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # another library has waited for it
        return True
