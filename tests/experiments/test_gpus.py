"""Parallel runs are spread over GPUs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from eepo.experiments.gpus import GpuPool, visible_gpus
from eepo.experiments.processes import Job
from eepo.experiments.warm import WarmStarter


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ["0", "1"]),
        ("3, 1", ["3", "1"]),
        ("GPU-ab,GPU-cd", ["GPU-ab", "GPU-cd"]),
        ("0,1,-1,2", ["0", "1"]),  # CUDA ignores what follows an invalid name
    ],
)
def test_gpus_have_the_names_that_the_user_gave(
    given: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert visible_gpus() == expected


def test_without_a_visible_gpu_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_a_job_gets_the_gpu_with_the_fewest_jobs() -> None:
    pool = GpuPool(["0", "1"])
    assert [pool.take(title)["CUDA_VISIBLE_DEVICES"] for title in "abc"] == ["0", "1", "0"]
    pool.release("a")
    pool.release("c")
    assert pool.take("d") == {"CUDA_VISIBLE_DEVICES": "0"}
    assert pool.take("e") == {"CUDA_VISIBLE_DEVICES": "0"}
    assert pool.take("f") == {"CUDA_VISIBLE_DEVICES": "1"}


def test_one_gpu_needs_no_choice() -> None:
    assert GpuPool([]).take("a") == GpuPool(["0"]).take("a") == {}


def test_a_forked_job_sees_the_chosen_gpu(tmp_path: Path) -> None:
    """The process that is forked has imported torch, but has not looked for GPUs yet."""
    (tmp_path / "shown.py").write_text(
        "import os, torch\nprint(os.environ['CUDA_VISIBLE_DEVICES'], torch.cuda.is_initialized())\n"
    )
    job = Job("a", (sys.executable, "-m", "shown"), tmp_path / "log.txt")
    environment = dict(os.environ) | {"CUDA_VISIBLE_DEVICES": "5"}
    before = sys.path[:]
    sys.path.insert(0, str(tmp_path))
    try:
        assert WarmStarter(environment)(job, environment, ()).wait() == 0
    finally:
        sys.path[:] = before
    assert job.log.read_text().split() == ["5", "False"]
