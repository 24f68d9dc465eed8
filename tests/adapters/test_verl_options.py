"""What the adapter reads from a verl config, and what it refuses, as plain dictionaries: no verl is needed for it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from eepo.adapters.verl.options import default_section, read_options, weighs
from eepo.config import AlgorithmConfig
from eepo.types import UserError

CONFIG: dict[
    str, Any
] = {  # the part of a resolved verl config that matters, as a user of EEPO has it
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
    """`CONFIG` with dotted keys, written with two underscores for a dot."""
    config = copy.deepcopy(CONFIG)
    for key, value in values.items():
        *parents, name = key.split("__")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    return config


def test_nothing_said_is_the_papers_eepo() -> None:
    assert read_options(CONFIG) == AlgorithmConfig()
    assert read_options(changed(eepo=default_section())) == AlgorithmConfig()


def test_knobs_are_read_and_sampling_is_verls() -> None:
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
    ("key", "value", "said"),
    [
        ("eepo__gat", "step", "eepo.gat = step"),
        ("eepo__gate", "tokens", 'eepo.gate = "tokens" must be one of "token", "step"'),
        ("eepo__unlearn_lr", -1, "eepo.unlearn_lr = -1 must be a number >= 0"),
        ("eepo__unlearn_lr", "slow", 'eepo.unlearn_lr = "slow"'),
        ("eepo__unlearn_kl_target", 0, "eepo.unlearn_kl_target = 0 must be a number > 0"),
        ("eepo__debug", "yes", "eepo.debug = yes must be true or false"),
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
        ("algorithm__filter_groups", {"enable": True}, "filter_groups.enable = True"),
        ("eepo__rare_weight", 0.5, "adv_estimator = None must be grpo: eepo's weights"),
        (
            "eepo",
            {"gate": "never", "later_advantages": "positive"},
            "later_advantages = positive must be all with",
        ),
        ("eepo__failure_weight", 2, "eepo.failure_weight = 2 must be a number >= 0 and <= 1"),
        ("eepo__unlearn_on", "none", 'eepo.unlearn_on = "none" must be one of "all", "rewarded"'),
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
def test_what_cannot_work_is_refused_in_one_line(key: str, value: Any, said: str) -> None:
    with pytest.raises(UserError) as error:
        read_options(changed(**{key: value}))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_weights_of_advantages_ask_for_what_they_need_and_no_more() -> None:
    grpo = {"eepo__num_stages": 1, "algorithm__adv_estimator": "grpo"}
    silent = {"actor_rollout_ref__rollout__calculate_log_probs": False}
    assert read_options(changed(**grpo, **silent, eepo__failure_weight=0.5)).failure_weight == 0.5
    with pytest.raises(
        UserError, match=r"calculate_log_probs = False must be True: eepo\.rare_weight"
    ):
        read_options(changed(**grpo, **silent, eepo__rare_weight=0.5))
    elsewhere = changed(
        **grpo, eepo__failure_weight=0.5, trainer__v1__trainer_mode="colocate_async"
    )
    with pytest.raises(UserError, match="trainer_mode = colocate_async must be sync: advantages"):
        read_options(elsewhere)
    assert not weighs(read_options(changed(eepo={"num_stages": 1, "later_advantages": "positive"})))


def test_rewards_of_a_model_come_too_late_for_forgetting_rewarded_completions() -> None:
    config = changed(reward__reward_model__enable=True)
    assert read_options(config).unlearn_on == "all"
    for choice in ("rewarded", "unrewarded", "zero_variance"):
        with pytest.raises(
            UserError, match=f"unlearn_on = {choice} needs rewards before stage 2.*reward_model"
        ):
            read_options(config | {"eepo": {"unlearn_on": choice}})


def test_one_completion_a_stage_is_always_stuck() -> None:
    with pytest.raises(
        UserError,
        match=r"rollout\.n = 2 must be more than eepo\.num_stages = 2 with eepo\.unlearn_on",
    ):
        read_options(changed(eepo__unlearn_on="zero_variance", actor_rollout_ref__rollout__n=2))


def test_one_stage_is_stock_grpo_and_asks_for_nothing() -> None:
    config = changed(
        eepo__num_stages=1,
        actor_rollout_ref__actor__strategy="megatron",
        actor_rollout_ref__rollout__n=7,
    )
    assert read_options(config).num_stages == 1
