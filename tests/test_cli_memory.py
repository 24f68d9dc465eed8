"""Tests that a lack of host memory is one line, and that the run can be resumed afterwards."""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eepo.runs.checkpoint import Checkpointer
from eepo.runs.memory_errors import MIN_MEGABYTES

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(sys.platform != "linux", reason="macOS does not enforce RLIMIT_AS"),
]

Eepo = Callable[..., SimpleNamespace]
SMALL = (
    "training.num_steps=3",
    "training.prompts_per_step=4",
    "training.prompts_per_mini_batch=2",
    "training.checkpoint_every=1",
    "algorithm.group_size=4",
    "algorithm.max_new_tokens=12",
    "task.num_evaluation=2",
    "evaluation.num_samples=2",
    "evaluation.every=0",
)


def settings(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


@pytest.fixture
def eepo(run_eepo: Eepo) -> Eepo:
    return run_eepo


@contextlib.contextmanager
def memory_limit(more_megabytes: int) -> Iterator[None]:
    """Allow this process only so much more memory than it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more_megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_model_that_does_not_fit_is_one_line(eepo: Eepo, tmp_path: Path) -> None:
    recipe = tmp_path / "large.toml"
    recipe.write_text(
        'name = "large"\n[model]\npath = "scratch"\ndevice = "cpu"\n'
        "[scratch]\nhidden_size = 8192\nintermediate_size = 65536\nnum_layers = 1\nnum_heads = 8\n"
    )
    with memory_limit(300):
        result = eepo("warmup", recipe, "--out", "w")
    [line] = result.err.splitlines()
    assert result.code == 1
    assert line.startswith("eepo: out of memory (tried to allocate ")
    assert "model.micro_batch_tokens" in line
    assert "--resume" in line


def test_a_checkpoint_that_cannot_be_saved_is_one_line_and_the_run_resumes(
    eepo: Eepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = ("train", "countdown/eepo", "--out", "run", *settings(*SMALL))
    original, saved = Checkpointer.save, []

    def save(self: Checkpointer, *arguments: Any) -> Any:
        saved.append(arguments)
        if len(saved) == 2:
            raise MemoryError
        return original(self, *arguments)

    monkeypatch.setattr(Checkpointer, "save", save)
    result = eepo(*train)
    [line] = result.err.splitlines()
    assert result.code == 1
    assert line.startswith("eepo: out of memory; free memory or raise its limit")
    assert eepo(*train, "--resume").code == 0
    rows = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows] == [1, 2, 3]


@pytest.mark.parametrize("megabytes", [500, 700])
def test_a_process_without_memory_for_its_libraries_prints_one_line(
    megabytes: int, tmp_path: Path
) -> None:
    """Without the check, OpenBLAS prints errors of its own, or torch crashes."""
    result = train_with_limit(megabytes, tmp_path)
    [line] = result.stderr.splitlines()
    assert result.returncode == 2
    assert f"only {megabytes} MB of memory" in line
    assert f"at least {MIN_MEGABYTES} MB" in line


@pytest.mark.slow
def test_a_process_with_the_least_memory_fails_in_one_line_or_runs(tmp_path: Path) -> None:
    result = train_with_limit(MIN_MEGABYTES, tmp_path)
    assert result.returncode == 0 or len(result.stderr.splitlines()) == 1


def train_with_limit(megabytes: int, folder: Path) -> subprocess.CompletedProcess[str]:
    limit = f"ulimit -v {megabytes * 1024}; "
    command = f"{sys.executable} -m eepo train countdown/eepo --out run --set training.num_steps=0"
    return subprocess.run(
        ["bash", "-c", limit + command], capture_output=True, text=True, cwd=folder, timeout=300
    )
