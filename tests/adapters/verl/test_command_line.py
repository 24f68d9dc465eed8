"""verl's own reading of command lines, ours and those that recipes export; and the hooks that the adapter stands on."""

from __future__ import annotations

import pytest

pytest.importorskip("verl", reason="verl has an environment of its own: make test-verl")

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
from verl.workers.engine_workers import ActorRolloutRefWorker

from eepo import recipe
from eepo.adapters.verl.export import overrides
from eepo.adapters.verl.launch import CONFIG, store_config
from eepo.adapters.verl.options import KNOBS, default_section, read_options
from eepo.config import AlgorithmConfig
from eepo.types import UserError

OURS = [  # what a user adds to the launch script that he has
    "actor_rollout_ref.actor.strategy=fsdp2",
    "algorithm.rollout_correction.bypass_mode=true",
]
HIS = [
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=8",
    "algorithm.adv_estimator=grpo",
]


def composed(line: list[str]) -> dict[str, Any]:
    store_config(ConfigStore.instance())
    with initialize_config_module("verl.trainer.config", version_base=None):
        config: Any = OmegaConf.to_container(compose(CONFIG, line), resolve=True)
    return config


def test_two_lines_more_are_the_papers_eepo() -> None:
    config = composed([*HIS, *OURS])
    assert config["eepo"] == default_section()
    assert read_options(config) == AlgorithmConfig()


def test_the_section_is_overridden_as_any_other() -> None:
    options = read_options(
        composed([*HIS, *OURS, "eepo.gate=step", "eepo.unlearn_lr=1e-3", "eepo.num_stages=4"])
    )
    assert options == AlgorithmConfig(gate="step", unlearn_lr=1e-3, num_stages=4)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([], "actor.strategy = fsdp must be fsdp2"),
        (OURS[:1], "bypass_mode = False must be True"),
        ([*OURS, "actor_rollout_ref.rollout.n=7"], "rollout.n = 7"),
        ([*OURS, "trainer.v1.trainer_mode=colocate_async"], "trainer_mode"),
        ([*OURS, "actor_rollout_ref.model.lora_rank=16"], "lora_rank = 16"),
        ([*OURS[1:], "model_engine=megatron"], "actor.strategy = megatron must be fsdp2"),
        ([*OURS, "eepo.unlearn_eps=0.9"], "eepo.unlearn_eps = 0.9"),
    ],
)
def test_refusals_under_verls_own_defaults(line: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_options(composed([*HIS, *line]))


@pytest.mark.parametrize(
    "name", ["qwen2.5-3b+grpo", "qwen3-8b-base+eepo", "llama-3.2-3b-instruct+eepo_more_rollouts"]
)
def test_verl_reads_what_a_recipe_exports(name: str) -> None:
    config = recipe.load_run(f"paper/{name}")
    line = [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in overrides(config)
    ]
    options = read_options(composed(line))
    for knob in (
        "group_size",
        "temperature",
        "num_stages",
        *(KNOBS if options.num_stages > 1 else ()),
    ):
        assert getattr(options, knob) == getattr(config.algorithm, knob)


def test_verl_reads_the_types_that_a_recipe_exports() -> None:
    types = ["rollout.dtype=float32", "model.compute_dtype=float32"]
    config = recipe.load_run("paper/qwen2.5-3b+eepo", types)
    found = composed([f"{key}={str(value).lower()}" for key, value in overrides(config)])[
        "actor_rollout_ref"
    ]
    assert found["rollout"]["dtype"] == "float32"
    for scored in ("actor", "ref"):
        products = found[scored]["fsdp_config"]["mixed_precision"]["param_dtype"]
        assert PrecisionType.to_dtype(products) == torch.float32


def test_a_mistake_is_one_line_and_starts_nothing() -> None:
    line = [*HIS, *OURS, "actor_rollout_ref.rollout.n=5", "hydra.run.dir=."]
    found = subprocess.run(
        [
            sys.executable,
            "-m",
            "eepo.adapters.verl",
            *line,
            "hydra.output_subdir=null",
            "hydra/job_logging=none",
        ],
        capture_output=True,
        text=True,
        timeout=180,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )
    assert found.returncode == 2
    said = [text for text in found.stderr.splitlines() if text.startswith("eepo:")]
    assert said == [
        "eepo: actor_rollout_ref.rollout.n = 5 must be a multiple of eepo.num_stages = 2"
    ]
    assert "Traceback" not in found.stderr
    assert "ray init" not in found.stdout


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
        (ActorRolloutRefWorker.update_weights, ["self", "global_steps", "mode"]),
    ],
)
def test_the_hooks_are_where_the_adapter_expects_them(
    hook: Callable[..., Any], arguments: list[str]
) -> None:
    assert list(inspect.signature(hook).parameters) == arguments


def test_the_trainers_name_is_the_synchronous_ones() -> None:
    assert TRAINER_REGISTRY["sync"] is PPOTrainerSync


def test_our_grader_is_found_under_the_name_that_is_exported() -> None:
    grade = load_extern_object("pkg://eepo.adapters.verl.reward", "math")
    assert grade("", r"\boxed{4}", "4")["score"] == 1
