"""`eepo export-verl`: the paper's numbers under verl's names. verl's own reading of them is in tests/adapters/verl."""

from __future__ import annotations

import shlex

import pytest
from typer.testing import CliRunner

from eepo import recipe
from eepo.adapters.verl.export import command_line, overrides
from eepo.adapters.verl.reward import exact, math
from eepo.cli import app
from eepo.types import UserError


def test_the_command_line_has_the_papers_numbers() -> None:
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


def test_set_changes_what_is_printed() -> None:
    result = CliRunner().invoke(
        app, ["export-verl", "paper/qwen3-8b-base+eepo", "--set", "algorithm.gate=step"]
    )
    assert "eepo.gate=step" in result.stdout
    assert "data.max_response_length=6144" in result.stdout


def test_grpo_is_one_stage_without_eepos_knobs() -> None:
    line = command_line(recipe.load_run("paper/qwen2.5-3b+grpo"))
    ours = [word for word in line.split() if word.startswith("eepo.") and "=" in word]
    assert ours == ["eepo.num_stages=1", "eepo.failure_weight=1.0", "eepo.rare_weight=0.0"]


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("countdown/eepo", "training.seed=0", 'task.name = "countdown"'),
        ("paper/qwen2.5-3b+eepo", "algorithm.saturation=exact", 'saturation = "exact"'),
        ("paper/qwen2.5-3b+eepo", "algorithm.advantage_baseline=stage", "advantage_baseline"),
    ],
)
def test_what_verl_cannot_do_is_refused(name: str, change: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        list(overrides(recipe.load_run(name, [change])))


def test_a_kl_target_is_exported() -> None:
    knobs = ["algorithm.unlearn_lr=auto", "algorithm.unlearn_kl_target=0.03"]
    found = dict(overrides(recipe.load_run("paper/qwen2.5-3b+eepo", knobs)))
    assert (found["eepo.unlearn_lr"], found["eepo.unlearn_kl_target"]) == ("auto", 0.03)


def test_types_are_exported_where_a_recipe_names_them() -> None:
    """Left to verl, both are bfloat16: one type."""
    one, other = (
        {
            key: value
            for key, value in overrides(recipe.load_run("paper/qwen2.5-3b+eepo", knobs))
            if "dtype" in key
        }
        for knobs in ([], ["rollout.dtype=float32", "model.compute_dtype=float32"])
    )
    assert one == {}
    assert {key.split(".")[1] for key in other} == {"actor", "ref", "rollout"}
    assert set(other.values()) == {"float32"}


def test_weights_of_advantages_are_exported() -> None:
    knobs = [
        "algorithm.failure_weight=0.5",
        "algorithm.rare_weight=0.25",
        "algorithm.stage2_negative_advantages=false",
    ]
    one, two = (
        dict(overrides(recipe.load_run(f"paper/qwen2.5-3b+{name}", knobs)))
        for name in ("grpo", "eepo")
    )
    assert one["eepo.failure_weight"] == two["eepo.failure_weight"] == 0.5
    assert one["eepo.rare_weight"] == two["eepo.rare_weight"] == 0.25
    assert two["eepo.later_advantages"] == "positive"
    with pytest.raises(
        UserError, match=r'stage2_negative_advantages=False .* allowed: "all"'
    ):  # no stages in verl then
        list(overrides(recipe.load_run("paper/qwen2.5-3b+eepo", [*knobs, "algorithm.gate=never"])))


def test_our_graders_as_verls_reward_function() -> None:
    assert math("", r"So it is \boxed{\frac{1}{2}}.", "0.5") == {"score": 1.0, "acc": 1.0}
    assert math("", r"So it is \boxed{3}.", "0.5", {"index": 1}, num_turns=1)["score"] == 0
    assert exact("", " 12", "12")["score"] == 1
