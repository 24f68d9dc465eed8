"""LoRA: which layers get an adapter, and which combinations of knobs cannot work.

The base weights are frozen, in the dtype of matrix products (bf16 on a GPU). The adapter is the
trained policy, in fp32. `peft` computes with it (extra `lora`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from eepo.config import ModelConfig, RolloutConfig, RunConfig
from eepo.model import loading
from eepo.model.compilation import decoder_layers
from eepo.model.memory import Shape
from eepo.types import UserError

ADAPTER = "default"  # peft's name for the only adapter
BASE_LAYER = "base_layer"  # peft's name for the layer that an adapter is added to
# Names of linear layers in the decoders of common families
KNOWN_TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("qkv_proj", "gate_up_proj", "dense", "fc1", "fc2", "c_fc", "c_proj"),
    *("query_key_value", "dense_h_to_4h", "dense_4h_to_h"),
)


def check(config: RunConfig, device: torch.device) -> None:
    """Raise an error for the first thing that LoRA does not support. This loads no weights."""
    if not config.model.lora_rank:
        return
    knob = f"model.lora_rank = {config.model.lora_rank}"
    if importlib.util.find_spec("peft") is None:
        raise UserError(f"{knob}: peft is not installed; pip install 'eepo[lora]'")
    if not config.rollout.merge_lora:
        _check_sharing(config, device)
    model = loading.meta_model(config.model)
    if quantization := getattr(model.config, "quantization_config", None):
        method = _quantization_method(quantization)
        raise UserError(
            f'{knob}: model.path = "{config.model.path}" is quantized ({method}); '
            "LoRA needs base weights that are not quantized"
        )
    _check_untied(model, target_names(model, config.model))


def _check_sharing(config: RunConfig, device: torch.device) -> None:
    """Check that the engine can compute with the policy's base weights."""
    if config.rollout.engine == "vllm":
        raise UserError(
            'rollout.merge_lora = false with rollout.engine = "vllm": vLLM has its own copy of the '
            'weights; use merge_lora = true, or rollout.engine = "builtin"'
        )
    rollout = loading.pick_dtype(config.rollout.dtype, device)
    training = loading.pick_dtype(config.model.compute_dtype, device)
    if rollout != training:
        names = [str(dtype).removeprefix("torch.") for dtype in (rollout, training)]
        raise UserError(
            f"rollout.merge_lora = false needs one dtype for the shared base weights, but rollouts "
            f"are in {names[0]} (rollout.dtype) and training in {names[1]} (model.compute_dtype)"
        )


def _quantization_method(quantization: Any) -> str:
    settings = quantization if isinstance(quantization, dict) else vars(quantization)
    method = settings.get("quant_method", "unknown method")
    return str(getattr(method, "value", method))


def _check_untied(model: Any, names: Sequence[str]) -> None:
    """Refuse targets that share a weight: merged, it would need two values."""
    owners: dict[int, str] = {}
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        first = owners.setdefault(id(weight), path)
        tied = {path.split(".")[-1], first.split(".")[-1]}
        if first != path and tied & set(names):
            raise UserError(
                f"model.lora_targets: {path} is tied to {first}; allowed: layers that are not tied"
            )


def target_names(model: Any, config: ModelConfig) -> list[str]:
    """Return the names of the layers that get an adapter, such as q_proj. The model may be meta.

    Only linear layers of the decoder are allowed. An adapter of the output layer would need its own
    head, and where the output layer is tied to the embedding, it would change both.
    """
    present = _linear_names(decoder_layers(model))
    if not config.lora_targets:
        known = [name for name in present if name in KNOWN_TARGETS]
        if not known:
            family = type(model).__name__
            names = f"one of {', '.join(present)} in model.lora_targets, or " if present else ""
            raise UserError(
                f"model.lora_rank = {config.lora_rank}: {family} has no linear layers with known "
                f"names; allowed: {names}lora_rank = 0"
            )
        return known
    for name in config.lora_targets:
        if name in present:
            continue
        outside = {path.split(".")[-1] for path, _ in model.named_modules()}
        reason = "is no linear layer of the model"
        if name in outside:
            reason = "is not a linear layer inside the decoder layers"
            if name == "lm_head" and model.config.get_text_config().tie_word_embeddings:
                reason = "is tied to the embedding"
        raise UserError(
            f'model.lora_targets: "{name}" {reason}; allowed: {", ".join(present) or "none"}'
        )
    return list(config.lora_targets)


def _linear_names(layers: Sequence[nn.Module]) -> list[str]:
    names = {
        path.split(".")[-1]: None  # a dictionary keeps the order
        for layer in layers
        for path, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    }
    return list(names)


def with_adapter(shape: Shape, config: ModelConfig) -> Shape:
    """Add the sizes of an adapter to a model's shape, without loading the model."""
    return add_sizes(shape, loading.meta_model(config), config) if config.lora_rank else shape


def add_sizes(shape: Shape, model: Any, config: ModelConfig) -> Shape:
    """Add the sizes of an adapter of `model`, which may be meta, to its shape."""
    names, layers = target_names(model, config), decoder_layers(model)
    adapter = sum(
        config.lora_rank * (module.in_features + module.out_features)
        for layer in layers
        for path, module in layer.named_modules()
        if isinstance(module, nn.Linear) and path.split(".")[-1] in names
    )
    inside = sum(weight.numel() for layer in layers for weight in layer.parameters())
    outside = shape.num_parameters - inside
    return replace(shape, num_adapter_parameters=adapter, num_outside_layers=outside)


def add_adapter(model: Any, config: ModelConfig, seed: int) -> None:
    """Freeze the model and add an adapter that changes nothing yet: A is random, B is 0."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=target_names(model, config),
        base_model_name_or_path=loading.absolute(config.path),
        revision=config.revision,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):  # peft draws on the CPU
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, model, ADAPTER)
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            # Autocast casts the inputs. peft would first cast them to the adapter's fp32.
            module.cast_input_dtype_enabled = False
    for weight in adapter_weights(model).values():
        weight.data = weight.data.float()


def adapter_weights(model: Any) -> dict[str, nn.Parameter]:
    """Return the trained weights by name: A and B of every target layer."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def shared_weights(
    model: Any, config: ModelConfig, rollout: RolloutConfig, dtype: torch.dtype
) -> list[nn.Parameter]:
    """Return the base weights that an engine with weights in `dtype` shares with the policy.

    Merging changes the decoder layers only. Vectors are not shared: the policy has them in fp32.
    """
    if not config.lora_rank:
        return []
    layers = decoder_layers(model) if rollout.merge_lora else []
    inside = {id(weight) for layer in layers for weight in layer.parameters()}
    trained = {id(weight) for weight in adapter_weights(model).values()} if not layers else set()
    return [
        weight
        for weight in model.parameters()
        if weight.ndim > 1 and weight.dtype == dtype and id(weight) not in inside | trained
    ]
