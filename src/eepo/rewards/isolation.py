"""Grades in separate processes that can be killed, so that no completion can stop or slow a run.

The time limit is CPU time, which the kernel counts, so a loaded machine changes no verdict.
Requests and replies are JSON lines. A worker has one request at a time, so a dead worker always
belongs to a known completion.
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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from eepo.config import RewardConfig
from eepo.types import Prompt, UserError, Verdict

# Characters of a completion that are read, from its end, where the answer is.
MAX_TEXT = 100_000
MAX_WORKERS = 8  # by default
NO_REQUEST = 0  # request id of an idle worker; real ids start at 1
# Wall-clock limit of one completion, in addition to 20 times the CPU limit. It ends functions that
# wait for something and use no CPU time.
BLOCKED_SECONDS = 60.0


class PooledReward:
    """Grades with a function `module:function`, called with (gold answer, text), in workers."""

    def __init__(self, function: str, config: RewardConfig) -> None:
        self.function = function
        self.config = config
        self.num_workers = config.num_workers or min(os.cpu_count() or 1, MAX_WORKERS)
        self._workers: list[_Worker] = []
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
        golds = [json.dumps(prompt.answer) for prompt in prompts]
        pairs = [(gold, text[-MAX_TEXT:]) for gold, text in zip(golds, texts, strict=True)]
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

    def close(self) -> None:
        """End all workers. The next `grade` starts new ones."""
        for worker in self._workers:
            worker.stop()
        self._workers = []

    def _run(self, items: list[tuple[str, str]], on_done: Callable[[int], None]) -> list[Verdict]:
        verdicts: list[Verdict | None] = [None] * len(items)
        remaining = iter(range(len(items)))
        while len(self._workers) < min(self.num_workers, len(items)):
            self._workers.append(_Worker(self.function, self.config))
        busy = [worker for worker in self._workers if _send_next(worker, remaining, items)]
        while busy:
            ready = _with_replies(busy)
            for worker in list(busy):
                verdict = worker.verdict() if worker in ready else worker.end_if_blocked()
                if verdict is not None:
                    verdicts[worker.item_index] = verdict
                    on_done(worker.item_index)
                    if not _send_next(worker, remaining, items):
                        busy.remove(worker)
        return [verdict for verdict in verdicts if verdict is not None]


def _with_replies(workers: list[_Worker]) -> set[_Worker]:
    """Wait at most a second; return the workers with something to read.

    The selector is new each time, because a restarted worker has a new pipe.
    """
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker, selectors.EVENT_READ, worker)
        return {key.data for key, _ in selector.select(timeout=1.0)}


def _send_next(worker: _Worker, remaining: Iterator[int], items: list[tuple[str, str]]) -> bool:
    """Send the next item to the worker; return False if none is left."""
    index = next(remaining, None)
    if index is None:
        return False
    worker.send(index, *items[index])
    return True


class _Worker:
    """Controls one process that runs `worker.py`, and restarts it when it is lost."""

    def __init__(self, function: str, config: RewardConfig) -> None:
        self.function = function
        self.config = config
        self.item_index = 0  # in the batch, of the item that is being graded
        self._request_id = NO_REQUEST  # counts up over all batches
        self._sent_at = 0.0
        self._request = b""
        self._start()

    def _start(self) -> None:
        limits = [str(self.config.cpu_seconds), str(self.config.memory_mb)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "eepo.rewards.worker", self.function, *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the trainer only, which ends its step first
        )
        self._stop = weakref.finalize(self, _kill, self._process)
        self._buffer = b""
        self._ready = False

    def fileno(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def send(self, item_index: int, gold: str, text: str) -> None:
        """Send a request. `gold` is JSON already."""
        self.item_index, self._sent_at = item_index, time.monotonic()
        self._request_id += 1
        self._request = f"[{self._request_id}, {gold}, {json.dumps(text)}]\n".encode()
        self._write()

    def verdict(self) -> Verdict | None:
        """Read the verdict on the last request; return None if it is still to come.

        Other messages may come first: that the process is ready, or that an idle child died.
        """
        reply = self._read_reply()
        while reply and reply.get("request") != self._request_id:
            self._ready = True
            if "died" in reply and reply["request"] == NO_REQUEST:
                # It may have read half of the request. A second verdict on it would be skipped.
                self._write()
            if b"\n" not in self._buffer:
                return None
            reply = self._read_reply()
        if reply is None:
            return self._restart_after_loss()
        if "error" in reply:
            raise UserError(
                f'reward.name = "{self.function}" failed on a completion: {reply["error"]}'
            )
        if "died" in reply:
            return _ungraded(reply["died"])
        return Verdict(reply["reward"], reply["answer"], reply["reason"], reply["label"])

    def _write(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(self._request)
            self._process.stdin.flush()
        except BrokenPipeError:
            # If the process never started, the next read reports that.
            if self._ready:  # the process was killed while it was idle
                self.stop()
                self._start()
                self._write()

    def _restart_after_loss(self) -> Verdict:
        """Restart the process after it ended as a whole, not only its child."""
        if not self._ready:
            raise UserError(
                f'reward.name = "{self.function}": the grading process did not start; '
                "its error is printed above"
            )
        self.stop()
        self._start()
        return _ungraded("crashed")

    def end_if_blocked(self) -> Verdict | None:
        """Restart the process if it exceeds the wall-clock limit.

        The CPU limit does not end a function that sleeps or waits for a network.
        """
        if time.monotonic() - self._sent_at < BLOCKED_SECONDS + 20 * self.config.cpu_seconds:
            return None
        self.stop()
        self._start()
        return _ungraded("time-out")

    def stop(self) -> None:
        self._stop()

    def _read_reply(self) -> dict[str, Any] | None:
        """Read the next reply; return None if the process has ended.

        Replies are written in one piece, so that reading one never waits long.
        """
        while b"\n" not in self._buffer:
            chunk = os.read(self.fileno(), 65536)
            if not chunk:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)


def _ungraded(reason: str) -> Verdict:
    """Return the verdict on a completion that has an answer, but one that could not be graded."""
    return Verdict(0.0, f"({reason})", reason)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its forked child, which share a process group."""
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):
            stream.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
