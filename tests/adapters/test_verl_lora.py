"""Tests `eepo export-verl` of recipes with LoRA."""

from __future__ import annotations

import pytest

from eepo import recipe
from eepo.adapters.verl.export import overrides
from eepo.types import UserError


def test_one_stage_uses_the_lora_of_verl() -> None:
    knobs = ["model.lora_rank=16", "model.lora_alpha=32"]
    settings = dict(overrides(recipe.load_run("paper/qwen2.5-3b+grpo", knobs)))
    assert settings["actor_rollout_ref.model.lora_rank"] == 16
    assert settings["actor_rollout_ref.model.lora_alpha"] == 32
    assert settings["actor_rollout_ref.model.target_modules"] == "all-linear"
    assert settings["actor_rollout_ref.rollout.load_format"] == "safetensors"
    knobs.append('model.lora_targets=["q_proj", "v_proj"]')
    settings = dict(overrides(recipe.load_run("paper/qwen2.5-3b+grpo", knobs)))
    assert settings["actor_rollout_ref.model.target_modules"] == ["q_proj", "v_proj"]


def test_without_lora_nothing_is_set() -> None:
    settings = dict(overrides(recipe.load_run("paper/qwen2.5-3b+grpo")))
    assert not any("lora" in key or "load_format" in key for key in settings)


def test_unlearning_stages_with_lora_are_one_line() -> None:
    config = recipe.load_run("paper/qwen2.5-3b+eepo", ["model.lora_rank=16"])
    with pytest.raises(
        UserError, match=r"^model.lora_rank = 16 cannot be exported to verl with alg"
    ):
        dict(overrides(config))
