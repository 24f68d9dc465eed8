"""The vLLM engine gets merged weights of a LoRA policy (`make test-vllm`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("peft", reason="peft is not installed")

from typer.testing import CliRunner

from eepo.cli import app
from eepo.rollout.vllm import installed_version

if installed_version() is None:
    pytest.skip(
        "vLLM is not installed; `make test-vllm` creates an environment with it",
        allow_module_level=True,
    )


def test_a_lora_run_samples_from_theta_and_from_theta_prime(tmp_path: Path) -> None:
    knobs = {
        "rollout.engine": "vllm",
        "model.lora_rank": "4",
        "algorithm.gate": "always",
        "algorithm.unlearn_lr": "auto",
        "algorithm.unlearn_kl_target": "1e-2",
        "algorithm.max_new_tokens": "12",
        "algorithm.group_size": "4",
        "training.num_steps": "3",
        "training.prompts_per_step": "8",
        "training.prompts_per_mini_batch": "8",
        "training.learning_rate": "3e-3",
        "task.num_evaluation": "2",
        "evaluation.num_samples": "1",
    }
    changes = [word for key, value in knobs.items() for word in ("--set", f"{key}={value}")]
    out = tmp_path / "run"
    result = CliRunner().invoke(app, ["train", "countdown/eepo", "--out", str(out), *changes])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    # The engine's log-probabilities are those of base plus adapter, also after updates.
    assert all(abs(row["mismatch_kl"]) < 1e-5 for row in rows)
    assert all(row["unlearn/kl"] > 1e-3 for row in rows)
    assert all(row["unlearn/weights_changed_share"] > 0.8 for row in rows)
