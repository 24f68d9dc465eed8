"""Grading in processes that can be killed: what a model wrote must not be able to stop, slow or swell a run.

Time is CPU time, counted by the kernel, so a loaded machine changes no verdict. Items and verdicts travel as JSON
lines; one worker has one item at a time, so a death is always somebody's.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from eepo.config import RewardConfig
from eepo.types import Prompt, UserError, Verdict

MAX_TEXT = (
    100_000  # characters of a completion that are read, from its end: the answer stands there
)
MAX_WORKERS = 8  # by default
IDLE = 0  # the number of no item: a child that waits for one
BLOCKED_SECONDS = (
    60.0  # of wall-clock without an answer, beyond 20 times the CPU limit: it waits for nothing
)


class PooledReward:
    """A `Reward` whose judge, `module:function` called with (answer, text), runs in the workers."""

    def __init__(self, judge: str, config: RewardConfig) -> None:
        self.judge = judge
        self.config = config
        self.num_workers = config.num_workers or min(os.cpu_count() or 1, MAX_WORKERS)
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()

    def grade(
        self,
        prompts: Sequence[Prompt],
        texts: Sequence[str],
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[Verdict]:
        """In order. A pair that occurs twice is graded once: collapsed policies repeat themselves."""
        answers = [json.dumps(prompt.answer) for prompt in prompts]
        pairs = [(answer, text[-MAX_TEXT:]) for answer, text in zip(answers, texts, strict=True)]
        counts: dict[tuple[str, str], int] = {}
        for pair in pairs:
            counts[pair] = counts.get(pair, 0) + 1
        distinct = list(counts)
        with self._lock:
            try:
                verdicts = self._run(distinct, lambda place: progress(counts[distinct[place]]))
            except (
                BaseException
            ):  # a worker with an item in flight would answer into the next batch
                self.close()
                raise
        found = dict(zip(distinct, verdicts, strict=True))
        return [found[pair] for pair in pairs]

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()
        self._workers = []

    def _run(self, items: list[tuple[str, str]], done: Callable[[int], None]) -> list[Verdict]:
        verdicts: list[Verdict | None] = [None] * len(items)
        waiting = iter(range(len(items)))
        while len(self._workers) < min(self.num_workers, len(items)):
            self._workers.append(_Worker(self.judge, self.config))
        busy = [worker for worker in self._workers if _hand_out(worker, waiting, items)]
        while busy:
            ready = _with_replies(busy)
            for worker in list(busy):
                verdict = worker.verdict() if worker in ready else worker.blocked()
                if verdict is not None:
                    verdicts[worker.item] = verdict
                    done(worker.item)
                    if not _hand_out(worker, waiting, items):
                        busy.remove(worker)
        return [verdict for verdict in verdicts if verdict is not None]


def _with_replies(workers: list[_Worker]) -> set[_Worker]:
    """Those with something to read, within a second. A selector of its own: a replaced worker has a new pipe."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker, selectors.EVENT_READ, worker)
        return {key.data for key, _ in selector.select(timeout=1.0)}


def _hand_out(worker: _Worker, waiting: Any, items: list[tuple[str, str]]) -> bool:
    item = next(waiting, None)
    if item is not None:
        worker.send(item, *items[item])
    return item is not None


class _Worker:
    """The near end of one `worker.py`."""

    def __init__(self, judge: str, config: RewardConfig) -> None:
        self.judge = judge
        self.config = config
        self.item = 0  # place in the batch of what it is grading
        self._serial = 0  # of what it is grading, since its start; 0 is an idle child's
        self._sent = 0.0
        self._request = b""
        self._start()

    def _start(self) -> None:
        limits = [str(self.config.cpu_seconds), str(self.config.memory_mb)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "eepo.rewards.worker", self.judge, *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the trainer, which ends its step first
        )
        self._stop = weakref.finalize(self, _end, self._process)
        self._buffer = b""
        self._ready = False

    def fileno(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def send(self, item: int, answer: str, text: str) -> None:
        self.item, self._sent = item, time.monotonic()
        self._serial += 1
        self._request = f"[{self._serial}, {answer}, {json.dumps(text)}]\n".encode()
        self._write()

    def verdict(self) -> Verdict | None:
        """Of the item sent last; None if what there is to read is about something else: an idle child that died."""
        reply = self._line()
        while reply and reply.get("item") != self._serial:
            self._ready = True
            if (
                "died" in reply and reply["item"] == IDLE
            ):  # perhaps with our request half read; answered twice, no harm
                self._write()
            if b"\n" not in self._buffer:
                return None
            reply = self._line()
        if reply is None:
            return self._lost()
        if "error" in reply:
            raise UserError(
                f'reward.name = "{self.judge}" failed on a completion: {reply["error"]}'
            )
        if "died" in reply:
            return _unanswered(reply["died"])
        return Verdict(reply["reward"], reply["answer"], reply["reason"])

    def _write(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(self._request)
            self._process.stdin.flush()
        except BrokenPipeError:
            if self._ready:  # somebody killed the whole process while it was idle
                self.stop()
                self._start()
                self._write()
            # else it did not start: reading from it will tell

    def _lost(self) -> Verdict:
        """The whole process is gone, not just its child."""
        if not self._ready:
            raise UserError(
                f'reward.name = "{self.judge}": its process did not start; its error stands above'
            )
        self.stop()
        self._start()
        return _unanswered("crashed")

    def blocked(self) -> Verdict | None:
        """CPU time cannot end a judge that sleeps or waits for a network: far beyond it, the clock does."""
        if time.monotonic() - self._sent < BLOCKED_SECONDS + 20 * self.config.cpu_seconds:
            return None
        self.stop()
        self._start()
        return _unanswered("time-out")

    def stop(self) -> None:
        self._stop()

    def _line(self) -> dict[str, Any] | None:
        """The next reply; None at the end of the process. Replies are written whole: reading one never waits long."""
        while b"\n" not in self._buffer:
            chunk = os.read(self.fileno(), 65536)
            if not chunk:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)


def _unanswered(reason: str) -> Verdict:
    """There was an answer, but not one that could be judged."""
    return Verdict(0.0, f"({reason})", reason)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process, and the child it has forked: both are in its own session."""
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):
            stream.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
