"""Tests command lines with verl's parser, and the hooks of verl that the adapter relies on."""

from __future__ import annotations

import pytest

pytest.importorskip("verl", reason="needs its own environment: make test-verl")

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.import_utils import load_extern_object
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker

from eepo import recipe
from eepo.adapters.verl.export import overrides
from eepo.adapters.verl.launch import CONFIG, store_config
from eepo.adapters.verl.options import ADVANTAGE_KNOBS, KNOBS, default_section, read_options
from eepo.config import AlgorithmConfig
from eepo.types import UserError

EEPO_SETTINGS = [  # a user adds these to an existing launch script
    "actor_rollout_ref.actor.strategy=fsdp2",
    "algorithm.rollout_correction.bypass_mode=true",
]
GRPO_SETTINGS = [
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=8",
    "algorithm.adv_estimator=grpo",
]


def compose_config(line: list[str]) -> dict[str, Any]:
    """Return the config that verl reads from a command line."""
    store_config(ConfigStore.instance())
    with initialize_config_module("verl.trainer.config", version_base=None):
        config: Any = OmegaConf.to_container(compose(CONFIG, line), resolve=True)
    return config


def test_two_more_settings_give_the_eepo_of_the_paper() -> None:
    config = compose_config([*GRPO_SETTINGS, *EEPO_SETTINGS])
    assert config["eepo"] == default_section()
    assert read_options(config) == AlgorithmConfig()


def test_the_eepo_section_can_be_overridden() -> None:
    options = read_options(
        compose_config(
            [
                *GRPO_SETTINGS,
                *EEPO_SETTINGS,
                "eepo.gate=step",
                "eepo.unlearn_lr=1e-3",
                "eepo.num_stages=4",
            ]
        )
    )
    assert options == AlgorithmConfig(gate="step", unlearn_lr=1e-3, num_stages=4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([], "actor.strategy = fsdp must be fsdp2"),
        (EEPO_SETTINGS[:1], "bypass_mode = False must be True"),
        ([*EEPO_SETTINGS, "actor_rollout_ref.rollout.n=7"], "rollout.n = 7"),
        ([*EEPO_SETTINGS, "trainer.v1.trainer_mode=colocate_async"], "trainer_mode"),
        ([*EEPO_SETTINGS, "actor_rollout_ref.model.lora_rank=16"], "lora_rank = 16"),
        ([*EEPO_SETTINGS[1:], "model_engine=megatron"], "actor.strategy = megatron must be fsdp2"),
        ([*EEPO_SETTINGS, "eepo.unlearn_eps=0.9"], "eepo.unlearn_eps = 0.9"),
        ([*EEPO_SETTINGS, "eepo.credit=full"], "bypass_mode = True must be False"),
        (
            [
                *EEPO_SETTINGS,
                "eepo.saturation=exact",
                "actor_rollout_ref.model.use_fused_kernels=true",
            ],
            "use_fused_kernels = True must be False",
        ),
    ],
)
def test_wrong_settings_are_rejected(line: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_options(compose_config([*GRPO_SETTINGS, *line]))


@pytest.mark.parametrize("knobs", [[], ["algorithm.credit=full", "algorithm.saturation=exact"]])
@pytest.mark.parametrize(
    "name", ["qwen2.5-3b+grpo", "qwen3-8b-base+eepo", "llama-3.2-3b-instruct+eepo_more_rollouts"]
)
def test_verl_reads_the_settings_of_an_exported_recipe(name: str, knobs: list[str]) -> None:
    config = recipe.load_run(f"paper/{name}", knobs)
    line = [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in overrides(config)
    ]
    options = read_options(compose_config(line))
    names = KNOBS if options.num_stages > 1 else ("num_stages", *ADVANTAGE_KNOBS)
    for knob in ("group_size", "temperature", *names):
        assert getattr(options, knob) == getattr(config.algorithm, knob)


def test_verl_reads_the_dtypes_of_an_exported_recipe() -> None:
    dtypes = ["rollout.dtype=float32", "model.compute_dtype=float32"]
    config = recipe.load_run("paper/qwen2.5-3b+eepo", dtypes)
    line = [f"{key}={str(value).lower()}" for key, value in overrides(config)]
    roles = compose_config(line)["actor_rollout_ref"]
    assert roles["rollout"]["dtype"] == "float32"
    for role in ("actor", "ref"):
        param_dtype = roles[role]["fsdp_config"]["mixed_precision"]["param_dtype"]
        assert PrecisionType.to_dtype(param_dtype) == torch.float32


def test_a_wrong_setting_gives_one_error_line_and_ray_does_not_start() -> None:
    line = [*GRPO_SETTINGS, *EEPO_SETTINGS, "actor_rollout_ref.rollout.n=5"]
    line += ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none"]
    process = subprocess.run(
        [sys.executable, "-m", "eepo.adapters.verl", *line],
        capture_output=True,
        text=True,
        timeout=180,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )
    assert process.returncode == 2
    errors = [text for text in process.stderr.splitlines() if text.startswith("eepo:")]
    message = "actor_rollout_ref.rollout.n = 5 must be a multiple of eepo.num_stages = 2"
    assert errors == [f"eepo: {message}"]
    assert "Traceback" not in process.stderr
    assert "ray init" not in process.stdout


@pytest.mark.parametrize(
    ("hook", "arguments"),
    [
        (PPOTrainer.prepare_step, ["self"]),
        (PPOTrainer._next_train_batch, ["self", "num_prompts"]),
        (PPOTrainer._submit_batch_to_rollout, ["self", "batch"]),
        (PPOTrainer._build_replay_buffer, ["self"]),
        (PPOTrainer._init_resource_pool_mgr, ["self"]),
        (PPOTrainer._get_required_batch_multiple, ["self", "dp_size"]),
        (
            PPOTrainer._balance_batch,
            ["self", "batch", "metrics", "logging_prefix", "keep_minibatch"],
        ),
        (PPOTrainer._compute_advantage, ["self", "batch", "metrics"]),
        (
            PPOTrainer._compute_metrics,
            ["self", "batch", "metrics", "timing_raw", "global_steps", "epoch"],
        ),
        (PPOTrainer._save_checkpoint, ["self"]),
        (PPOTrainer._load_checkpoint, ["self"]),
        (PPOTrainer._compute_old_log_prob, ["self", "batch", "metrics"]),
        (ActorRolloutRefWorker.update_weights, ["self", "global_steps", "mode"]),
        (
            FSDPEngineWithLMHead.prepare_model_outputs,
            ["self", "output", "output_args", "micro_batch", "logits_processor_func"],
        ),
        (FSDPEngineWithLMHead._gather_and_unpad_packed, ["self", "tensor", "pad_size"]),
    ],
)
def test_hooks_of_verl_have_the_expected_signatures(
    hook: Callable[..., Any], arguments: list[str]
) -> None:
    assert list(inspect.signature(hook).parameters) == arguments


def test_verl_corrects_no_rollouts_by_default() -> None:
    """Full credit relies on it: a correction would compare θ's probabilities with θ′'s."""
    full = ["actor_rollout_ref.actor.strategy=fsdp2", "eepo.credit=full"]
    config = compose_config([*GRPO_SETTINGS, *full])
    correction = config["algorithm"]["rollout_correction"]
    assert (correction["rollout_is"], correction["rollout_rs"]) == (None, None)
    assert correction["bypass_mode"] is False
    assert read_options(config) == AlgorithmConfig(credit="full")


def test_verl_registers_its_synchronous_trainer_as_sync() -> None:
    assert TRAINER_REGISTRY["sync"] is PPOTrainerSync


def test_verl_loads_the_grader_by_its_exported_name() -> None:
    grade = load_extern_object("pkg://eepo.adapters.verl.reward", "math")
    assert grade("", r"\boxed{4}", "4")["score"] == 1
