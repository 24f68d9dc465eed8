"""Errors of the vLLM engine before vLLM starts, and without vLLM installed."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from eepo import recipe
from eepo.assemble import build_trainer
from eepo.config import RunConfig
from eepo.experiments.doctor import examine
from eepo.rollout import vllm
from eepo.runs.progress import Progress
from eepo.types import UserError

VLLM = ('rollout.engine="vllm"',)


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide vLLM if it is installed."""
    find_spec = vllm.importlib.util.find_spec
    monkeypatch.setattr(
        vllm.importlib.util, "find_spec", lambda name: None if name == "vllm" else find_spec(name)
    )


def run_config(*overrides: str) -> RunConfig:
    return recipe.load_run("demo/eepo", VLLM + overrides)


@pytest.mark.usefixtures("no_vllm")
def test_a_run_without_vllm_says_what_to_install_and_creates_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"vLLM is not installed; pip install 'eepo\[vllm\]'"):
        build_trainer(run_config(), tmp_path / "run", False, Progress(Console(file=io.StringIO())))
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_vllm")
def test_the_doctor_reports_that_vllm_is_missing() -> None:
    findings = {}
    for finding in examine("demo/eepo", (*VLLM, "task.num_evaluation=2"), num_prompts=1):
        findings[finding.name] = finding
    assert findings["engine"].level == "fail"
    assert "pip install 'eepo[vllm]'" in findings["engine"].text
    assert "samples" in findings, "other checks still run"


def test_the_doctor_reports_nothing_about_the_builtin_engine() -> None:
    first = [
        finding.name
        for _, finding in zip(range(3), examine("demo/eepo", num_prompts=1), strict=False)
    ]
    assert "engine" not in first


@pytest.mark.parametrize("knob", ["algorithm.temperature", "evaluation.temperature"])
def test_a_temperature_that_vllm_would_raise_is_refused_when_the_recipe_is_read(knob: str) -> None:
    with pytest.raises(
        UserError,
        match=rf"{knob} must be at least 0\.01 with rollout.engine = \"vllm\", got 0\.005",
    ):
        run_config(f"{knob}=0.005")
    assert recipe.load_run("demo/eepo", [f"{knob}=0.005"]), "the built-in engine accepts it"


def test_half_precision_on_the_cpu_is_refused() -> None:
    with pytest.raises(
        UserError, match=r'rollout\.dtype = "bfloat16" .* on the CPU; allowed: auto, float32'
    ):
        vllm.check_dtype(torch.bfloat16, torch.device("cpu"))
    vllm.check_dtype(torch.float32, torch.device("cpu"))
    vllm.check_dtype(torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize(
    ("device", "platform", "line"),
    [
        ("cpu", "cuda", "is built for cuda, and model.device is cpu"),
        ("cuda:0", "cpu", "is built for cpu, and model.device is cuda"),
        ("cuda:2", "cuda", "set CUDA_VISIBLE_DEVICES=2 and model.device = cuda"),
    ],
)
def test_a_device_that_vllm_would_not_use_is_refused(device: str, platform: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        vllm.check_device(torch.device(device), platform)


@pytest.mark.parametrize(
    ("device", "platform"), [("cpu", "cpu"), ("cuda", "cuda"), ("cuda:0", "cuda")]
)
def test_a_device_that_vllm_would_use_is_accepted(device: str, platform: str) -> None:
    vllm.check_device(torch.device(device), platform)


def test_knobs_that_only_change_memory_may_change_when_a_run_is_resumed() -> None:
    from eepo.runs.knobs import FREE_TO_CHANGE

    knobs: dict[str, Any] = dataclasses.asdict(run_config().rollout)
    assert {f"rollout.{name}" for name in knobs} & FREE_TO_CHANGE == {
        "rollout.max_rows",
        "rollout.gpu_memory_share",
        "rollout.merge_lora",
    }
