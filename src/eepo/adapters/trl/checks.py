"""Checks of a built trainer: settings that `EEPOConfig` cannot see."""

from __future__ import annotations

from typing import Any

import torch

from eepo.types import UserError


def check_trainer(trainer: Any) -> None:
    """Raise an error for the first thing that two-stage rollouts do not support."""
    _check_rollout(trainer)
    _check_model(trainer)
    _check_parallelism(trainer)


def _check_rollout(trainer: Any) -> None:
    environments = trainer.environment_factories
    if trainer.tools or trainer.rollout_func is not None or environments is not None:
        raise UserError(
            "tools, rollout_func and environment_factory must not be set: "
            "only plain rollouts can be split into stages"
        )
    if trainer._is_vlm:
        kind = type(trainer.processing_class).__name__
        raise UserError(f"processing_class must be a tokenizer (text only), got {kind}")


def _check_model(trainer: Any) -> None:
    model = trainer.model
    for name, weight in model.named_parameters():
        if weight.requires_grad and weight.dtype != torch.float32:
            raise UserError(
                f'model: {name} is {weight.dtype}, must be float32 (dtype="float32"): other '
                "dtypes round the unlearning step away; bf16 = True still computes in bfloat16"
            )
    if trainer.options.unlearn_lr == "auto" and (dropout := active_dropout(model)):
        raise UserError(
            f"model: {dropout} must be 0 with unlearn_kl_target: dropout noise would change the KL"
        )


def _check_parallelism(trainer: Any) -> None:
    accelerator, args = trainer.accelerator, trainer.args
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    fsdp1 = kind == "FSDP" and not accelerator.is_fsdp2
    if kind in ("DEEPSPEED", "MEGATRON_LM") or fsdp1:
        raise UserError(
            f"accelerate: distributed_type = {kind} must be none, DDP or FSDP with fsdp_version 2"
        )
    accumulation = args.gradient_accumulation_steps
    rollout_interval = args.steps_per_generation * trainer.num_iterations
    if kind == "FSDP" and rollout_interval % accumulation:
        raise UserError(
            "with FSDP, steps_per_generation * num_iterations must be a multiple of "
            f"gradient_accumulation_steps = {accumulation}, got {rollout_interval}"
        )


def active_dropout(model: Any) -> str:
    """Return name and probability of the first dropout above 0; an empty string if none is."""
    modules = (
        (name, module.p)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Dropout)
    )
    attention = ("attention_dropout", model.config.to_dict().get("attention_dropout"))
    dropouts = (attention, *modules)
    return next((f"{name} = {probability}" for name, probability in dropouts if probability), "")
