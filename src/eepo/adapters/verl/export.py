"""A recipe of ours as a command line for verl: the same numbers under verl's names."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

from eepo.adapters.verl.options import KNOBS, WEIGHTS
from eepo.config import DatasetConfig, RunConfig
from eepo.types import UserError

ALLOWED: dict[str, tuple[object, ...]] = {  # of [algorithm], where verl can less than we can
    "advantage_baseline": ("group",),
}
ALLOWED_IN_STAGES: dict[str, tuple[object, ...]] = {  # with more than one
    "saturation": ("stop",),
}
FILES = ("TRAIN_FILES", "VAL_FILES")  # shell variables: verl reads Parquet files of its own layout


def command_line(config: RunConfig) -> str:
    """For a shell, one setting a line. Where the recipe says nothing, verl's own default stands."""
    lines = ["python -m eepo.adapters.verl"]
    lines += [
        f'data.{split}_files="${name}"' for split, name in zip(("train", "val"), FILES, strict=True)
    ]
    lines += [shlex.quote(f"{key}={_word(value)}") for key, value in overrides(config)]
    return " \\\n    ".join(lines)


def overrides(config: RunConfig) -> Iterator[tuple[str, object]]:
    """verl's key and the recipe's value, section by section."""
    task = config.task
    if not isinstance(task, DatasetConfig):
        raise UserError(f'task.name = "{task.name}" cannot be exported to verl; allowed: "dataset"')
    _check(config, ALLOWED)
    yield "data.train_batch_size", config.training.prompts_per_step
    yield "data.max_prompt_length", task.max_prompt_tokens
    yield "data.max_response_length", config.algorithm.max_new_tokens
    yield "data.filter_overlong_prompts", True
    yield from _model(config)
    yield from _actor(config)
    yield from _rollout(config)
    yield from _trainer(config)
    if config.algorithm.num_stages > 1:
        _check(config, ALLOWED_IN_STAGES)
        if config.algorithm.gate == "never":
            _check(config, {"later_advantages": ("all",)})  # verl has no stages then
        yield from ((f"eepo.{name}", getattr(config.algorithm, name)) for name in KNOBS)
    else:
        yield "eepo.num_stages", 1
        yield from ((f"eepo.{name}", getattr(config.algorithm, name)) for name in WEIGHTS)


def _check(config: RunConfig, knobs: dict[str, tuple[object, ...]]) -> None:
    for name, allowed in knobs.items():
        if (value := getattr(config.algorithm, name)) not in allowed:
            choices = ", ".join(map(json.dumps, allowed))
            raise UserError(
                f"algorithm.{name} = {json.dumps(value)} cannot be exported to verl; allowed: {choices}"
            )


def _model(config: RunConfig) -> Iterator[tuple[str, object]]:
    yield "actor_rollout_ref.model.path", config.model.path
    yield "actor_rollout_ref.model.trust_remote_code", config.model.trust_remote_code
    yield (
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        config.model.gradient_checkpointing,
    )


def _actor(config: RunConfig) -> Iterator[tuple[str, object]]:
    """FSDP2 with fp32 weights: what the adapter asks for. Micro-batches by tokens, as ours are."""
    algorithm, training = config.algorithm, config.training
    actor = "actor_rollout_ref.actor"
    yield f"{actor}.strategy", "fsdp2"
    yield f"{actor}.ppo_mini_batch_size", training.prompts_per_mini_batch
    yield f"{actor}.use_dynamic_bsz", True
    yield f"{actor}.ppo_max_token_len_per_gpu", config.model.micro_batch_tokens
    yield f"{actor}.optim.lr", training.learning_rate
    yield f"{actor}.optim.weight_decay", training.weight_decay
    yield f"{actor}.optim.clip_grad", training.max_grad_norm
    yield f"{actor}.clip_ratio_low", algorithm.clip_low
    yield f"{actor}.clip_ratio_high", algorithm.clip_high
    yield f"{actor}.loss_agg_mode", "token-mean"
    yield f"{actor}.entropy_coeff", algorithm.entropy_coef
    yield f"{actor}.use_kl_loss", algorithm.kl_coef > 0
    yield f"{actor}.kl_loss_coef", algorithm.kl_coef
    yield f"{actor}.kl_loss_type", "low_var_kl"  # verl's name of k3
    if config.model.compute_dtype != "auto":
        for scored in ("actor", "ref"):  # verl's file lacks the key: hydra adds it
            yield (
                f"+actor_rollout_ref.{scored}.fsdp_config.mixed_precision.param_dtype",
                config.model.compute_dtype,
            )


def _rollout(config: RunConfig) -> Iterator[tuple[str, object]]:
    rollout = "actor_rollout_ref.rollout"
    yield f"{rollout}.name", "vllm"
    yield f"{rollout}.n", config.algorithm.group_size
    yield f"{rollout}.temperature", config.algorithm.temperature
    if config.rollout.dtype != "auto":
        yield f"{rollout}.dtype", config.rollout.dtype
    yield f"{rollout}.calculate_log_probs", True
    yield "algorithm.adv_estimator", "grpo"
    yield (
        "algorithm.rollout_correction.bypass_mode",
        True,
    )  # denominators from the weights that sampled
    if config.reward.name in ("auto", "math", "exact"):
        yield "reward.custom_reward_function.path", "pkg://eepo.adapters.verl.reward"
        yield (
            "reward.custom_reward_function.name",
            "exact" if config.reward.name == "exact" else "math",
        )


def _trainer(config: RunConfig) -> Iterator[tuple[str, object]]:
    yield "trainer.total_training_steps", config.training.num_steps
    yield "trainer.save_freq", config.training.checkpoint_every or -1
    yield "trainer.test_freq", config.evaluation.every or -1
    yield "trainer.max_actor_ckpt_to_keep", config.training.keep_checkpoints
    yield "trainer.project_name", config.logging.project
    yield "trainer.experiment_name", config.name


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
