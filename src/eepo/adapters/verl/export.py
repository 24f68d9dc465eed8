"""Converts a recipe to a verl command line: the same values under verl's names."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from eepo.adapters.verl.cluster import Cluster
from eepo.adapters.verl.options import ADVANTAGE_KNOBS, KNOBS
from eepo.config import DatasetConfig, RunConfig
from eepo.types import UserError

# The values that verl supports, for knobs where it does not support all.
AllowedValues = dict[str, tuple[object, ...]]
ALLOWED: AllowedValues = {
    "model.revision": ("main",),
    "rollout.stop": ("",),
    "reward.name": ("auto", "math", "exact"),
    "algorithm.advantage_baseline": ("group",),
    "algorithm.loss_normalisation": ("mini_batch",),  # verl's token-mean
    # Methods of docs/methods.md. verl has some of them, under keys of its own.
    "algorithm.advantage": ("grpo",),
    "algorithm.loss": ("grpo",),
    "algorithm.success_weight": (1.0,),
    "algorithm.outcome_bonus": (0.0,),
    "algorithm.dynamic_sampling": (0,),
    "algorithm.entropy_target": ("off",),
    "algorithm.engine_ratio_cap": ("off",),
}
ALLOWED_WITHOUT_GATE: AllowedValues = {"algorithm.stage2_negative_advantages": (True,)}
FILES = {  # shell variables, for a command without exported data
    "data.train_files": "TRAIN_FILES",
    "data.val_files": "VAL_FILES",
}
# Hydra reads these words as values of other types.
KEYWORDS = ("null", "true", "false", "nan", "inf")

Setting = tuple[str, object]


def command_line(config: RunConfig, cluster: Cluster) -> str:
    """Return a shell command. The data files are shell variables, which the user sets."""
    files = [f'{key}="${variable}"' for key, variable in FILES.items()]
    return shell_lines([*files, *map(shell_word, settings(config, cluster).items())])


def settings(config: RunConfig, cluster: Cluster) -> dict[str, object]:
    """Return verl's keys and values, without the data files. Others keep verl's defaults."""
    values = dict([*overrides(config), *cluster.settings()])
    cluster.check(config)
    return values


def shell_lines(words: list[str]) -> str:
    """Return the command that trains, with one setting per line."""
    return " \\\n    ".join(["python -m eepo.adapters.verl", *words])


def shell_word(setting: Setting) -> str:
    key, value = setting
    return shlex.quote(f"{key}={hydra_word(value)}")


def hydra_word(value: object) -> str:
    """Write a value so that hydra, verl's parser, reads the same value back."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(hydra_word, value))}]"
    text = str(value)
    is_plain = re.fullmatch(r"[A-Za-z_/][\w./:+-]*", text) and text.lower() not in KEYWORDS
    return quote(text) if isinstance(value, str) and not is_plain else text


def quote(text: str) -> str:
    """Quote a text for hydra: it escapes quotes, and backslashes only in front of quotes."""
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', text)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)  # the closing quote follows
    return f'"{escaped}"'


def overrides(config: RunConfig) -> Iterator[Setting]:
    """Yield verl's keys with the recipe's values, section by section."""
    task, algorithm = config.task, config.algorithm
    if not isinstance(task, DatasetConfig):
        raise UserError(f'task.name = "{task.name}" cannot be exported to verl; allowed: "dataset"')
    _check(config, ALLOWED)
    yield "data.train_batch_size", config.training.prompts_per_step
    yield "data.max_prompt_length", task.max_prompt_tokens
    yield "data.max_response_length", algorithm.max_new_tokens
    yield "data.filter_overlong_prompts", True
    yield "data.seed", config.training.seed
    yield from _model(config)
    yield from _actor(config, longest=task.max_prompt_tokens + algorithm.max_new_tokens)
    yield from _rollout(config)
    yield from _trainer(config)
    if algorithm.num_stages > 1:
        if algorithm.gate == "never":  # the adapter then samples without stages
            _check(config, ALLOWED_WITHOUT_GATE)
        yield from ((f"eepo.{name}", getattr(algorithm, name)) for name in KNOBS)
    else:
        yield "eepo.num_stages", 1
        yield from ((f"eepo.{name}", getattr(algorithm, name)) for name in ADVANTAGE_KNOBS)


def _check(config: RunConfig, allowed_values: Mapping[str, tuple[object, ...]]) -> None:
    for key, allowed in allowed_values.items():
        section, name = key.split(".")
        value: Any = getattr(getattr(config, section), name)
        if value not in allowed:
            choices = ", ".join(map(json.dumps, allowed))
            raise UserError(
                f"{key} = {json.dumps(value)} cannot be exported to verl; allowed: {choices}"
            )


def _model(config: RunConfig) -> Iterator[Setting]:
    model = "actor_rollout_ref.model"
    yield f"{model}.path", config.model.path
    yield f"{model}.trust_remote_code", config.model.trust_remote_code
    yield f"{model}.enable_gradient_checkpointing", config.model.gradient_checkpointing
    if config.model.lora_rank:
        yield from _lora(config)


def _lora(config: RunConfig) -> Iterator[Setting]:
    """Use verl's own LoRA, which works with one stage.

    In verl, θ′ reaches the rollout through the state dict of the sharded model. verl's merged push
    of an adapter does not read it.
    """
    if config.algorithm.num_stages > 1:
        raise UserError(
            f"model.lora_rank = {config.model.lora_rank} cannot be exported to verl with "
            f"algorithm.num_stages = {config.algorithm.num_stages}; allowed: lora_rank = 0, or "
            "num_stages = 1"
        )
    model, alpha = "actor_rollout_ref.model", config.model.lora_alpha
    yield f"{model}.lora_rank", config.model.lora_rank
    yield f"{model}.lora_alpha", int(alpha) if alpha.is_integer() else alpha
    yield f"{model}.target_modules", list(config.model.lora_targets) or "all-linear"
    yield "actor_rollout_ref.rollout.load_format", "safetensors"  # vLLM loads the base itself


def _actor(config: RunConfig, longest: int) -> Iterator[Setting]:
    """Use FSDP2 with fp32 weights, which the adapter requires, and micro-batches by tokens.

    verl needs micro-batches that have space for the `longest` row, in tokens.
    """
    algorithm, training = config.algorithm, config.training
    actor = "actor_rollout_ref.actor"
    yield f"{actor}.strategy", "fsdp2"
    yield f"{actor}.ppo_mini_batch_size", training.prompts_per_mini_batch
    yield f"{actor}.use_dynamic_bsz", True
    yield f"{actor}.ppo_max_token_len_per_gpu", max(config.model.micro_batch_tokens, longest)
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


def _rollout(config: RunConfig) -> Iterator[Setting]:
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
    grader = "exact" if config.reward.name == "exact" else "math"
    yield "reward.custom_reward_function.path", "pkg://eepo.adapters.verl.reward"
    yield "reward.custom_reward_function.name", grader


def _trainer(config: RunConfig) -> Iterator[Setting]:
    num_steps, loggers = config.training.num_steps, ["console", "file"]
    yield "trainer.total_training_steps", num_steps
    yield "trainer.total_epochs", max(1, num_steps)  # the number of steps is the limit
    # Our trainer saves and evaluates at the end in any case. In verl, -1 would turn both off.
    yield "trainer.save_freq", config.training.checkpoint_every or num_steps
    yield "trainer.test_freq", config.evaluation.every or num_steps
    yield "trainer.val_before_train", config.evaluation.start
    yield "trainer.max_actor_ckpt_to_keep", config.training.keep_checkpoints
    yield "trainer.logger", loggers + [config.logging.to] * (config.logging.to != "none")
    yield "trainer.project_name", config.logging.project
    yield "trainer.experiment_name", config.name
