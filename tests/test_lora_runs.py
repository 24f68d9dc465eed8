"""Whole LoRA runs: resumed runs, files, the shared engine, evaluation, and errors."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from eepo import recipe
from eepo.assemble import build_evaluation, build_trainer, build_warmup
from eepo.config import ModelConfig, RunConfig, WarmupConfig
from eepo.evaluation.options import BenchmarkOptions
from eepo.model import loading
from eepo.runs.jsonl import read_records
from eepo.runs.progress import Progress
from eepo.types import UserError

pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.usefixtures("one_thread")
RANK = 4


def tiny(**sections: dict[str, Any]) -> RunConfig:
    tables: dict[str, Any] = {
        "name": "eepo",
        "model": {"lora_rank": RANK},
        "task": {"num_evaluation": 3},
        "algorithm": {
            **{"group_size": 4, "max_new_tokens": 10, "kl_coef": 0.01},
            **{"gate": "always", "unlearn_lr": "auto"},
        },
        "training": {
            **{"num_steps": 3, "prompts_per_step": 4, "prompts_per_mini_batch": 2},
            **{"learning_rate": 3e-3, "checkpoint_every": 1, "keep_checkpoints": 3},
        },
        "evaluation": {"num_samples": 2},
    }
    for section, knobs in sections.items():
        tables[section] = tables.get(section, {}) | knobs
    return recipe.parse(RunConfig, tables, "test")


def run(config: RunConfig, out: Path, resume: bool = False) -> Path:
    build_trainer(config, out, resume, Progress(Console(file=io.StringIO()))).run()
    return out


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows without times."""
    clock = ("seconds", "tokens_per_second")
    rows = read_records(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(clock)} for row in rows]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    return run(tiny(), tmp_path_factory.mktemp("lora") / "run")


def test_training_moves_the_adapter_and_unlearning_has_an_effect(finished: Path) -> None:
    rows = metrics(finished)
    assert all(row["unlearn/kl"] > 1e-4 for row in rows)
    assert all(row["unlearn/weights_changed_share"] > 0.9 for row in rows)
    assert all(abs(row["mismatch_kl"]) < 1e-8 for row in rows)
    base, final = (
        loading.load_model(ModelConfig(), torch.device("cpu")),
        weights(finished / "final"),
    )
    changed = {name for name, w in base.named_parameters() if not torch.equal(w, final[name])}
    assert len(changed) == 4 * 7  # all matrices of four layers; no norm and no embedding


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    finished: Path, step: int, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "final")
    for later in range(step + 1, 4):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{later:06d}")
    (tmp_path / "run" / "last_checkpoint.json").unlink()
    resumed = run(tiny(), tmp_path / "run", resume=True)
    assert metrics(resumed) == metrics(finished)
    for name in ("final/adapter/adapter_model", "checkpoints/step-000003/training"):
        left, right = (load_file(f / f"{name}.safetensors") for f in (resumed, finished))
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.slow
def test_a_run_may_be_resumed_with_a_shared_base(finished: Path, tmp_path: Path) -> None:
    """This saves memory, and changes only how sums are rounded."""
    shutil.copytree(finished, tmp_path / "run")
    longer = {"num_steps": 4, "prompts_per_step": 4, "prompts_per_mini_batch": 2}
    config = tiny(training=longer, rollout={"merge_lora": False})
    rows = metrics(run(config, tmp_path / "run", resume=True))
    assert rows[:3] == metrics(finished)
    assert abs(rows[3]["mismatch_kl"]) < 1e-8


def test_a_checkpoint_holds_the_adapter_only_and_can_be_loaded(finished: Path) -> None:
    checkpoint = finished / "checkpoints" / "step-000003"
    tensors = load_file(checkpoint / "adapter_model.safetensors")
    assert all("lora_" in name for name in tensors)
    moments = load_file(checkpoint / "training.safetensors")
    assert all("lora_" in name for name in moments if name != "rng")
    assert sum(t.numel() for t in tensors.values()) < 0.2 * sum(
        w.numel() for w in weights(finished / "final").values()
    )
    loaded = loading.load_model(ModelConfig(path=str(checkpoint)), torch.device("cpu"))
    final = AutoModelForCausalLM.from_pretrained(finished / "final")
    for (name, left), right in zip(loaded.named_parameters(), final.parameters(), strict=True):
        torch.testing.assert_close(left, right, msg=name)


@pytest.mark.slow
def test_an_engine_that_shares_the_base_gives_the_same_run(finished: Path, tmp_path: Path) -> None:
    shared = run(tiny(rollout={"merge_lora": False}), tmp_path / "run")
    # The sums of merged and separate products are rounded differently.
    for left, right in zip(metrics(finished), metrics(shared), strict=True):
        for key in ("reward", "entropy", "unlearn/kl", "grad_norm"):
            assert left[key] == pytest.approx(right[key], rel=1e-2), key


@pytest.mark.slow
def test_checkpointing_smaller_moments_and_bf16_train_too(tmp_path: Path) -> None:
    config = tiny(
        model={"lora_rank": RANK, "gradient_checkpointing": True, "compute_dtype": "bfloat16"},
        rollout={"dtype": "bfloat16", "merge_lora": False},
        training={"optimizer": "adamw_8bit", "num_steps": 1},
    )
    [row] = metrics(run(config, tmp_path / "run"))
    assert row["unlearn/weights_changed_share"] > 0.5
    assert row["unlearn/kl"] > 1e-4


def test_final_weights_and_checkpoints_can_be_evaluated(finished: Path, tmp_path: Path) -> None:
    rewards = []
    for name in ("final", "checkpoints/step-000003"):
        options = BenchmarkOptions(model=str(finished / name), num_samples=2)
        progress = Progress(Console(file=io.StringIO()))
        build_evaluation(options, tmp_path / name, progress).run()
        rows = read_records(next((tmp_path / name).rglob("*.jsonl")))
        rewards.append([(row["id"], row["text"]) for row in rows])
    assert rewards[0] == rewards[1]


def test_a_warm_start_trains_all_weights(tmp_path: Path) -> None:
    config = WarmupConfig(model=ModelConfig(path="scratch", lora_rank=RANK))
    with pytest.raises(UserError, match=r"^model.lora_rank = 4 in a warm start"):
        build_warmup(config, tmp_path, False, Progress(Console(file=io.StringIO())))


def test_a_wrong_target_is_reported_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(loading, "load_model", fail)
    config = tiny(model={"lora_rank": RANK, "lora_targets": ["lm_head"]})
    with pytest.raises(UserError, match='"lm_head" is tied to the embedding'):
        run(config, tmp_path / "run")
