"""Grading in the background: order, errors, and a process that ends meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import pytest

from eepo.algorithm.background_grader import BackgroundGrader
from eepo.types import Completion, Prompt, Verdict

PROMPTS = [Prompt(str(index), "", (2,)) for index in range(2)]


def groups(text: str) -> list[list[Completion]]:
    return [[Completion((2,), (-0.5,), text, True)] * 2 for _ in PROMPTS]


class Recorder:
    """Grades slowly, and records the order and the threads."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.busy = threading.Lock()

    def grade(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        assert self.busy.acquire(blocking=False), "two batches at a time"
        self.started.append(texts[0])
        time.sleep(0.01)
        self.busy.release()
        if texts[0] == "3":
            raise ValueError("a bug")
        return [
            Verdict(float(text), prompt.id) for prompt, text in zip(prompts, texts, strict=True)
        ]


def test_batches_are_graded_in_the_order_of_submission() -> None:
    reward, grader = Recorder(), BackgroundGrader()
    futures = [grader.submit(reward, PROMPTS, groups(str(number))) for number in range(6)]
    for number, future in enumerate(futures):
        if number == 3:
            with pytest.raises(ValueError, match="a bug"):
                future.result()
        else:
            assert [v.answer for v in future.result()] == ["0", "0", "1", "1"]
            assert {v.reward for v in future.result()} == {number}
    assert reward.started == [str(number) for number in range(6)]


ENDS_WHILE_GRADING = """
import time
from eepo.algorithm.background_grader import BackgroundGrader
from eepo.types import Completion, Prompt
class Sleep:
    def grade(self, prompts, texts):
        print("grading", flush=True)
        time.sleep(600)
prompt = Prompt("p", "", (2,))
for _ in range(2):
    BackgroundGrader().submit(Sleep(), [prompt], [[Completion((2,), (-0.5,), "1", True)]])
time.sleep(1)
raise KeyboardInterrupt
"""


def test_a_process_ends_while_completions_are_graded() -> None:
    command = [sys.executable, "-c", ENDS_WHILE_GRADING]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "grading" in result.stdout
    assert "KeyboardInterrupt" in result.stderr
