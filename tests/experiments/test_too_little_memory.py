"""Runs that run out of memory beside others continue later; a run that is alone fails."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eepo.experiments import processes, runner
from eepo.experiments.processes import Job, Process
from eepo.experiments.warm import WarmStarter

from .tiny_plans import TINY, make, run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "visible_gpus", lambda: [])


class Crowded:
    """Starts jobs. Those that share the memory with others end as they do if it runs out."""

    end = "exit('eepo: out of memory (tried to allocate 2.00 GiB)')"

    def __init__(self, environment: Any) -> None:
        self.start = WarmStarter(environment)

    def __call__(self, job: Job, environment: Any, inherited: Sequence[int]) -> Process:
        if float(environment["EEPO_GPU_SHARE"]) == 1:
            return self.start(job, environment, inherited)
        words = (sys.executable, "-c", self.end)
        return processes.start(replace(job, command=words), environment, inherited)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "why"),
    [(Crowded.end, "out of memory"), ("import os; os.kill(os.getpid(), 9)", "killed")],
)
def test_runs_that_have_too_little_memory_together_continue_one_after_another(
    end: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "WarmStarter", Crowded)
    monkeypatch.setattr(Crowded, "end", end)
    methods = {"grpo": {}, "hot": {"weights": "grpo", "set": ["evaluation.temperature=1.4"]}}
    outcome, text = run(make(tmp_path, methods, seeds=[0, 1]), num_jobs=2)
    assert (outcome.num_done, outcome.failed) == (4, {})
    assert f"grpo seed 1: {why}; it continues later" in text
    assert not list(tmp_path.rglob("failed.txt"))


@pytest.mark.slow
def test_a_run_that_has_too_little_memory_alone_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "WarmStarter", Crowded)
    monkeypatch.setenv("EEPO_GPU_SHARE", "0.5")  # of a user who shares the GPU
    outcome, _ = run(make(tmp_path, {"grpo": {}}), num_jobs=2)
    assert outcome.failed["grpo seed 0"].startswith("eepo: out of memory")


@pytest.mark.parametrize(
    ("end", "continues"),
    [(Crowded.end, False), ("import os; os.kill(os.getpid(), 9)", True)],
)
def test_a_run_with_a_gpu_of_its_own_lacks_only_the_memory_of_the_machine(
    end: str, continues: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(runner, "WarmStarter", Crowded)
    monkeypatch.setattr(Crowded, "end", end)
    monkeypatch.setenv("EEPO_GPU_SHARE", "0.5")  # so that every job ends like this
    plan = make(tmp_path, {"grpo": {}}, set=[*TINY, "model.device=auto"], seeds=[0, 1])
    outcome, text = run(plan, num_jobs=2)
    assert len(outcome.failed) == 2
    assert ("it continues later" in text) == continues
