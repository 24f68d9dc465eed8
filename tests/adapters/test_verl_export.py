"""Tests `eepo export-verl`. tests/adapters/verl tests that verl accepts the exported settings."""

from __future__ import annotations

import shlex

import pytest
from typer.testing import CliRunner

from eepo import recipe
from eepo.adapters.verl.cluster import Cluster
from eepo.adapters.verl.export import command_line, overrides
from eepo.adapters.verl.reward import exact, math
from eepo.cli import app
from eepo.types import UserError


def test_the_command_line_has_the_values_of_the_paper() -> None:
    result = CliRunner().invoke(app, ["export-verl", "paper/qwen2.5-3b+eepo"])
    assert result.exit_code == 0
    words = shlex.split(result.stdout.replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "eepo.adapters.verl"]
    settings = dict(word.split("=", 1) for word in words[3:])
    for key, value in {
        "data.train_files": "$TRAIN_FILES",
        "data.train_batch_size": "128",
        "data.max_response_length": "4096",
        "actor_rollout_ref.model.path": "Qwen/Qwen2.5-3B",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "64",
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.kl_loss_coef": "0.0001",
        "actor_rollout_ref.actor.entropy_coeff": "1e-05",
        "actor_rollout_ref.rollout.n": "8",
        "algorithm.rollout_correction.bypass_mode": "true",
        "eepo.num_stages": "2",
        "eepo.gate": "token",
        "eepo.gate_threshold": "0.3",
        "eepo.unlearn_lr": "0.003",
    }.items():
        assert settings[key] == value, key
    assert float(settings["actor_rollout_ref.actor.optim.lr"]) == 5e-7


def test_a_run_without_checkpoints_and_evaluations_still_has_them_at_the_end() -> None:
    knobs = ["training.checkpoint_every=0", "evaluation.every=0", "training.num_steps=70"]
    exported = dict(overrides(recipe.load_run("paper/qwen2.5-3b+grpo", knobs)))
    assert (exported["trainer.save_freq"], exported["trainer.test_freq"]) == (70, 70)


def test_gpus_and_tensor_parallelism_are_options() -> None:
    options = ["--gpus", "4", "--nodes", "2", "--tensor-parallel", "2"]
    result = CliRunner().invoke(app, ["export-verl", "paper/qwen2.5-3b+eepo", *options])
    settings = shlex.split(result.stdout.replace("\\\n", " "))
    assert "trainer.n_gpus_per_node=4" in settings
    assert "trainer.nnodes=2" in settings
    assert "actor_rollout_ref.rollout.tensor_model_parallel_size=2" in settings


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (Cluster(gpus=8, tensor_parallel=3), "--gpus 8 must be a multiple of --tensor-parallel 3"),
        (Cluster(gpus=2, nodes=2, tensor_parallel=4), "--gpus 2 must be a multiple of"),
        (Cluster(gpus=6), r"= 64 × 8 = 512 must be a multiple of --gpus × --nodes = 6"),
        (Cluster(gpus=8, nodes=3), r"must be a multiple of --gpus × --nodes = 24"),
    ],
)
def test_gpus_that_do_not_divide_the_work_are_rejected(cluster: Cluster, message: str) -> None:
    with pytest.raises(UserError, match=message):
        command_line(recipe.load_run("paper/qwen2.5-3b+eepo"), cluster)


def test_set_overrides_a_knob() -> None:
    result = CliRunner().invoke(
        app, ["export-verl", "paper/qwen3-8b-base+eepo", "--set", "algorithm.gate=step"]
    )
    assert "eepo.gate=step" in result.stdout
    assert "data.max_response_length=6144" in result.stdout


def test_grpo_is_exported_as_one_stage_without_unlearning_knobs() -> None:
    line = command_line(recipe.load_run("paper/qwen2.5-3b+grpo"), Cluster())
    section = [word for word in line.split() if word.startswith("eepo.") and "=" in word]
    assert section == ["eepo.num_stages=1", "eepo.failure_weight=1.0"]


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("countdown/eepo", "training.seed=0", 'task.name = "countdown"'),
        ("paper/qwen2.5-3b+eepo", "algorithm.advantage_baseline=stage", "advantage_baseline"),
        ("paper/qwen2.5-3b+eepo", "model.revision=v2", 'model.revision = "v2"'),
        ("paper/qwen2.5-3b+eepo", "rollout.stop=Problem:", 'rollout.stop = "Problem:"'),
        ("paper/qwen2.5-3b+eepo", "reward.name=own:grade", 'reward.name = "own:grade"'),
        ("paper/qwen2.5-3b+grpo", "algorithm.loss_normalisation=group", "loss_normalisation"),
    ],
)
def test_unsupported_knobs_are_rejected(name: str, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(overrides(recipe.load_run(name, [override])))


@pytest.mark.parametrize(
    "method",
    [path.stem for path in sorted((recipe.recipe_folders()[0] / "methods").glob("*.toml"))],
)
def test_methods_that_verl_would_not_use_are_rejected(method: str) -> None:
    with pytest.raises(UserError, match="cannot be exported to verl"):
        list(overrides(recipe.load_run(f"paper/qwen2.5-3b+eepo+{method}")))


@pytest.mark.parametrize(
    ("name", "credit", "bypass_mode"),
    [("eepo", "importance", True), ("eepo", "full", False), ("grpo", "full", True)],
)
def test_credit_and_saturation_are_exported(name: str, credit: str, bypass_mode: bool) -> None:
    knobs = [f"algorithm.credit={credit}", "algorithm.saturation=exact"]
    exported = dict(overrides(recipe.load_run(f"paper/qwen2.5-3b+{name}", knobs)))
    assert exported["algorithm.rollout_correction.bypass_mode"] is bypass_mode
    if name == "eepo":
        assert (exported["eepo.credit"], exported["eepo.saturation"]) == (credit, "exact")


def test_a_kl_target_is_exported() -> None:
    knobs = ["algorithm.unlearn_lr=auto", "algorithm.unlearn_kl_target=0.03"]
    exported = dict(overrides(recipe.load_run("paper/qwen2.5-3b+eepo", knobs)))
    assert (exported["eepo.unlearn_lr"], exported["eepo.unlearn_kl_target"]) == ("auto", 0.03)


def exported_dtypes(knobs: list[str]) -> dict[str, object]:
    config = recipe.load_run("paper/qwen2.5-3b+eepo", knobs)
    return {key: value for key, value in overrides(config) if "dtype" in key}


def test_dtypes_are_exported_only_if_the_recipe_sets_them() -> None:
    """verl's defaults are bfloat16 for both rollout and training."""
    assert exported_dtypes([]) == {}
    dtypes = exported_dtypes(["rollout.dtype=float32", "model.compute_dtype=float32"])
    assert {key.split(".")[1] for key in dtypes} == {"actor", "ref", "rollout"}
    assert set(dtypes.values()) == {"float32"}


def test_advantage_weights_are_exported() -> None:
    knobs = ["algorithm.failure_weight=0.5", "algorithm.stage2_negative_advantages=false"]
    grpo, eepo = (
        dict(overrides(recipe.load_run(f"paper/qwen2.5-3b+{name}", knobs)))
        for name in ("grpo", "eepo")
    )
    assert grpo["eepo.failure_weight"] == eepo["eepo.failure_weight"] == 0.5
    assert eepo["eepo.stage2_negative_advantages"] is False
    never = recipe.load_run("paper/qwen2.5-3b+eepo", [*knobs, "algorithm.gate=never"])
    message = "algorithm.stage2_negative_advantages = false cannot be exported .* allowed: true"
    with pytest.raises(UserError, match=message):
        list(overrides(never))


def test_graders_work_as_reward_functions_of_verl() -> None:
    assert math("", r"So it is \boxed{\frac{1}{2}}.", "0.5") == {"score": 1.0, "acc": 1.0}
    assert math("", r"So it is \boxed{3}.", "0.5", {"index": 1}, num_turns=1)["score"] == 0
    assert exact("", " 12", "12")["score"] == 1
