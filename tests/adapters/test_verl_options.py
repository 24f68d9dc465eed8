"""Tests the options of the verl adapter with plain dictionaries. They do not need verl."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from eepo.adapters.verl.options import default_section, has_advantage_weights, read_options
from eepo.config import AlgorithmConfig
from eepo.types import UserError

# The part of a resolved verl config that the adapter reads.
CONFIG: dict[str, Any] = {
    "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync", "sync": {}, "sampler": {}}},
    "algorithm": {
        "rollout_correction": {"bypass_mode": True, "rollout_is": None, "rollout_rs": None}
    },
    "actor_rollout_ref": {
        "hybrid_engine": True,
        "model": {"lora_rank": 0, "lora": {"rank": 0}, "lora_adapter_path": None},
        "actor": {
            "strategy": "fsdp2",
            "fsdp_config": {"model_dtype": "fp32", "qat": {"enable": False}},
        },
        "rollout": {
            "n": 8,
            "temperature": 1.0,
            "calculate_log_probs": True,
            "logprobs_mode": "processed_logprobs",
        },
    },
    "reward": {"reward_model": {"enable": False}},
}


def changed(**values: Any) -> dict[str, Any]:
    """Return `CONFIG` with other values. Keys have two underscores instead of a dot."""
    config = copy.deepcopy(CONFIG)
    for key, value in values.items():
        *parents, name = key.split("__")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    return config


def test_the_default_is_the_eepo_of_the_paper() -> None:
    assert read_options(CONFIG) == AlgorithmConfig()
    assert read_options(changed(eepo=default_section())) == AlgorithmConfig()


def test_knobs_come_from_the_section_and_sampling_from_verl() -> None:
    config = changed(
        eepo__gate="step",
        eepo__unlearn_lr=1,
        eepo__num_stages=4,
        actor_rollout_ref__rollout__n=12,
        actor_rollout_ref__rollout__temperature=0.7,
    )
    expected = AlgorithmConfig(
        gate="step", unlearn_lr=1.0, num_stages=4, group_size=12, temperature=0.7
    )
    assert read_options(config) == expected


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("eepo__gat", "step", "unknown key eepo.gat = step"),
        ("eepo__later_advantages", "positive", "unknown key eepo.later_advantages = positive"),
        ("eepo__rare_weight", 0.5, "unknown key eepo.rare_weight = 0.5"),
        ("eepo__gate", "tokens", 'eepo.gate = "tokens" must be one of "token", "step"'),
        ("eepo__unlearn_lr", -1, "eepo.unlearn_lr = -1 must be a number >= 0"),
        ("eepo__unlearn_lr", "slow", 'eepo.unlearn_lr = "slow"'),
        ("eepo__unlearn_kl_target", 0, "eepo.unlearn_kl_target = 0 must be a number > 0"),
        ("eepo__debug", "yes", "eepo.debug = yes must be true or false"),
        (
            "actor_rollout_ref__rollout__n",
            1,
            "verl's command line: actor_rollout_ref.rollout.n = 1 must be a whole number >= 2",
        ),
        (
            "actor_rollout_ref__rollout__temperature",
            0,
            "actor_rollout_ref.rollout.temperature = 0 must be a number > 0",
        ),
        (
            "actor_rollout_ref__rollout__n",
            7,
            "rollout.n = 7 must be a multiple of eepo.num_stages = 2",
        ),
        (
            "actor_rollout_ref__actor__strategy",
            "megatron",
            "actor.strategy = megatron must be fsdp2",
        ),
        ("actor_rollout_ref__actor__strategy", "fsdp", "actor.strategy = fsdp must be fsdp2"),
        (
            "actor_rollout_ref__actor__fsdp_config__model_dtype",
            "bf16",
            "model_dtype = bf16 must be fp32",
        ),
        (
            "actor_rollout_ref__actor__fsdp_config__mixed_precision",
            {"param_dtype": "fp16"},
            "param_dtype = fp16",
        ),
        ("actor_rollout_ref__model__lora_rank", 8, "lora_rank = 8"),
        ("actor_rollout_ref__model__lora__rank", 8, "lora.rank = 8"),
        ("actor_rollout_ref__model__lora_adapter_path", "a", "lora_adapter_path = a"),
        (
            "actor_rollout_ref__rollout__calculate_log_probs",
            False,
            "calculate_log_probs = False must be True",
        ),
        ("algorithm__rollout_correction__bypass_mode", False, "bypass_mode = False must be True"),
        ("algorithm__rollout_correction", None, "bypass_mode = None must be True"),
        ("algorithm__rollout_correction__rollout_is", "token", "rollout_is = token"),
        ("algorithm__rollout_correction__rollout_rs", "seq_mean_k1", "rollout_rs = seq_mean_k1"),
        ("eepo__credit", "half", 'eepo.credit = "half" must be one of "importance", "full"'),
        ("eepo__credit", "full", "bypass_mode = True must be False or None: eepo.credit = full"),
        ("eepo__saturation", "never", 'eepo.saturation = "never" must be one of "stop", "exact"'),
        ("algorithm__filter_groups", {"enable": True}, "filter_groups.enable = True"),
        ("eepo__failure_weight", 0.5, "adv_estimator = None must be grpo: advantage weights"),
        (
            "eepo",
            {"gate": "never", "stage2_negative_advantages": False},
            "eepo.stage2_negative_advantages = false must be true with eepo.gate = never",
        ),
        ("eepo__failure_weight", 2, "eepo.failure_weight = 2 must be a number >= 0 and <= 1"),
        ("eepo__unlearn_on", "none", 'eepo.unlearn_on = "none" must be one of "all", "rewarded"'),
        ("eepo__unlearn_on", "stuck", 'eepo.unlearn_on = "stuck" must be one of "all", "rewarded"'),
        ("eepo__unlearn_max_completions", -1, "eepo.unlearn_max_completions = -1"),
        ("trainer__use_v1", False, "trainer.use_v1 = False must be True"),
        (
            "trainer__v1__trainer_mode",
            "colocate_async",
            "trainer_mode = colocate_async must be sync",
        ),
        (
            "trainer__v1__trainer_mode",
            "separate_async",
            "trainer_mode = separate_async must be sync",
        ),
    ],
)
def test_a_wrong_setting_gives_one_error_line(key: str, value: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        read_options(changed(**{key: value}))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("correction", [None, {}, {"bypass_mode": False, "rollout_is": None}])
def test_full_credit_uses_the_denominators_that_verl_computes(correction: Any) -> None:
    config = changed(eepo__credit="full", algorithm__rollout_correction=correction)
    assert read_options(config).credit == "full"
    for name in ("rollout_is", "rollout_rs"):
        contradiction = {"bypass_mode": False, name: "token"}
        with pytest.raises(UserError, match=f"{name} = token must be None: .* are intended"):
            read_options(config | {"algorithm": {"rollout_correction": contradiction}})


def test_exact_saturation_is_rejected_with_fused_kernels() -> None:
    fused = {"actor_rollout_ref__model__use_fused_kernels": True}
    assert read_options(changed(**fused)).saturation == "stop"
    assert read_options(changed(eepo__saturation="exact")).saturation == "exact"
    with pytest.raises(UserError, match=r"use_fused_kernels = True must be False .* needs logits"):
        read_options(changed(**fused, eepo__saturation="exact"))


def test_advantage_weights_need_the_synchronous_trainer_but_no_logprobs() -> None:
    knobs = {
        "eepo__num_stages": 1,
        "eepo__failure_weight": 0.5,
        "algorithm__adv_estimator": "grpo",
        "actor_rollout_ref__rollout__calculate_log_probs": False,
    }
    options = read_options(changed(**knobs))
    assert options.failure_weight == 0.5
    assert has_advantage_weights(options)
    asynchronous = changed(**knobs, trainer__v1__trainer_mode="colocate_async")
    message = "trainer_mode = colocate_async must be sync: advantage weights"
    with pytest.raises(UserError, match=message):
        read_options(asynchronous)


def test_one_stage_has_no_stage_2_advantages_to_drop() -> None:
    grpo = {"num_stages": 1, "stage2_negative_advantages": False}
    assert not has_advantage_weights(read_options(changed(eepo=grpo)))


def test_unlearn_on_by_reward_is_rejected_with_a_reward_model() -> None:
    config = changed(reward__reward_model__enable=True)
    assert read_options(config).unlearn_on == "all"
    for choice in ("rewarded", "unrewarded", "zero_variance"):
        message = f"unlearn_on = {choice} needs rewards before stage 2.*reward_model"
        with pytest.raises(UserError, match=message):
            read_options(config | {"eepo": {"unlearn_on": choice}})


def test_zero_variance_needs_more_than_one_completion_per_stage() -> None:
    message = r"rollout\.n = 2 must be more than eepo\.num_stages = 2 with eepo\.unlearn_on"
    with pytest.raises(UserError, match=message):
        read_options(changed(eepo__unlearn_on="zero_variance", actor_rollout_ref__rollout__n=2))


def test_one_stage_has_no_requirements() -> None:
    config = changed(
        eepo__num_stages=1,
        actor_rollout_ref__actor__strategy="megatron",
        actor_rollout_ref__rollout__n=7,
    )
    assert read_options(config).num_stages == 1
