"""Converts a recipe to a verl command line: the same values under verl's names."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

from eepo.adapters.verl.options import ADVANTAGE_KNOBS, KNOBS
from eepo.config import DatasetConfig, RunConfig
from eepo.types import UserError

# The values of [algorithm] that verl supports, for knobs where it does not support all.
AllowedValues = dict[str, tuple[object, ...]]
ALLOWED: AllowedValues = {"advantage_baseline": ("group",)}
ALLOWED_WITHOUT_GATE: AllowedValues = {"stage2_negative_advantages": (True,)}
FILES = ("TRAIN_FILES", "VAL_FILES")  # shell variables: verl needs Parquet files in its own layout


def command_line(config: RunConfig) -> str:
    """Return a shell command with one setting per line. Other settings keep verl's defaults."""
    lines = ["python -m eepo.adapters.verl"]
    for split, variable in zip(("train", "val"), FILES, strict=True):
        lines.append(f'data.{split}_files="${variable}"')
    lines += [shlex.quote(f"{key}={_word(value)}") for key, value in overrides(config)]
    return " \\\n    ".join(lines)


def overrides(config: RunConfig) -> Iterator[tuple[str, object]]:
    """Yield verl's keys with the recipe's values, section by section."""
    task, algorithm = config.task, config.algorithm
    if not isinstance(task, DatasetConfig):
        raise UserError(f'task.name = "{task.name}" cannot be exported to verl; allowed: "dataset"')
    _check(config, ALLOWED)
    yield "data.train_batch_size", config.training.prompts_per_step
    yield "data.max_prompt_length", task.max_prompt_tokens
    yield "data.max_response_length", algorithm.max_new_tokens
    yield "data.filter_overlong_prompts", True
    yield from _model(config)
    yield from _actor(config)
    yield from _rollout(config)
    yield from _trainer(config)
    if algorithm.num_stages > 1:
        if algorithm.gate == "never":  # the adapter then samples without stages
            _check(config, ALLOWED_WITHOUT_GATE)
        yield from ((f"eepo.{name}", getattr(algorithm, name)) for name in KNOBS)
    else:
        yield "eepo.num_stages", 1
        yield from ((f"eepo.{name}", getattr(algorithm, name)) for name in ADVANTAGE_KNOBS)


def _check(config: RunConfig, allowed_values: AllowedValues) -> None:
    for name, allowed in allowed_values.items():
        if (value := getattr(config.algorithm, name)) not in allowed:
            choices = ", ".join(map(json.dumps, allowed))
            raise UserError(
                f"algorithm.{name} = {json.dumps(value)} cannot be exported to verl; "
                f"allowed: {choices}"
            )


def _model(config: RunConfig) -> Iterator[tuple[str, object]]:
    model = "actor_rollout_ref.model"
    yield f"{model}.path", config.model.path
    yield f"{model}.trust_remote_code", config.model.trust_remote_code
    yield f"{model}.enable_gradient_checkpointing", config.model.gradient_checkpointing


def _actor(config: RunConfig) -> Iterator[tuple[str, object]]:
    """Use FSDP2 with fp32 weights, which the adapter requires, and micro-batches by tokens."""
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
    yield f"{actor}.kl_loss_type", "low_var_kl"  # verl's name for k3
    if config.model.compute_dtype != "auto":
        for role in ("actor", "ref"):
            precision = f"actor_rollout_ref.{role}.fsdp_config.mixed_precision"
            # The + makes hydra add a key that verl's config file lacks.
            yield f"+{precision}.param_dtype", config.model.compute_dtype


def _rollout(config: RunConfig) -> Iterator[tuple[str, object]]:
    rollout = "actor_rollout_ref.rollout"
    yield f"{rollout}.name", "vllm"
    yield f"{rollout}.n", config.algorithm.group_size
    yield f"{rollout}.temperature", config.algorithm.temperature
    if config.rollout.dtype != "auto":
        yield f"{rollout}.dtype", config.rollout.dtype
    yield f"{rollout}.calculate_log_probs", True
    yield "algorithm.adv_estimator", "grpo"
    # True: the ratio's denominator is the probability under the weights that sampled.
    # False: verl computes it under θ, before the update.
    has_full_credit = config.algorithm.num_stages > 1 and config.algorithm.credit == "full"
    yield "algorithm.rollout_correction.bypass_mode", not has_full_credit
    if config.reward.name in ("auto", "math", "exact"):
        grader = "exact" if config.reward.name == "exact" else "math"
        yield "reward.custom_reward_function.path", "pkg://eepo.adapters.verl.reward"
        yield "reward.custom_reward_function.name", grader


def _trainer(config: RunConfig) -> Iterator[tuple[str, object]]:
    yield "trainer.total_training_steps", config.training.num_steps
    yield "trainer.save_freq", config.training.checkpoint_every or -1
    yield "trainer.test_freq", config.evaluation.every or -1
    yield "trainer.max_actor_ckpt_to_keep", config.training.keep_checkpoints
    yield "trainer.project_name", config.logging.project
    yield "trainer.experiment_name", config.name


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
