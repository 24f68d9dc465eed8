"""How much memory a run needs, from the model's shape alone: so that a recipe that cannot fit is told so at once.

Weights and moments are counted exactly. What a forward pass keeps is an estimate for decoders of today (attention, a
gated feed-forward part, norms), good to about a quarter (`docs/doctor.md`).
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eepo.config import RunConfig, compiles
from eepo.model.optimizers import MOMENT_BYTES
from eepo.types import UserError

FP32 = 4  # bytes
HEAD_BYTES = 20  # a logit of the policy's head, forward and backward (fitted)
CUDA_HEAD_BYTES = 6  # by the kernels: itself, and its gradient in bf16
DRAW_BYTES = 32  # a logit of the engine's: itself, softmax, and the cumulative sums in fp64
CUDA_DRAW_BYTES = 6  # by the kernels (fitted)
CACHE_ROOM = 1.5  # buffers of keys and values grow by doubling
SAFETY_FACTOR = 1.25  # times the estimate: what training may turn out to need


@dataclass(frozen=True)
class Shape:
    """Of a decoder."""

    num_parameters: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_key_value_heads: int
    head_dim: int
    vocabulary: int
    positions: int | None  # None: without a limit


@dataclass(frozen=True)
class Needs:
    """Bytes. `held` stays for the whole run; of `phases` only one happens at a time."""

    held: dict[str, int]
    phases: dict[str, int]
    cache: int = 0  # on a GPU, beside them: keys and values of all rows at their longest; less is slower, not wrong

    @property
    def largest_phase(self) -> str:
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def total(self) -> int:
        return sum(self.held.values()) + self.phases[self.largest_phase]


def shape_of(model_config: Any, num_parameters: int) -> Shape:
    """From a `transformers` config. Families leave out what follows from the rest."""
    text = model_config.get_text_config()
    heads = text.num_attention_heads
    return Shape(
        num_parameters=num_parameters,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocabulary=text.vocab_size,
        positions=getattr(text, "max_position_embeddings", None),
    )


def needs(
    shape: Shape, config: RunConfig, prompt_tokens: int, rollout_dtype: torch.dtype, cuda: bool
) -> Needs:
    """Of training `config`; `prompt_tokens` is the length of a long prompt."""
    weights, copy = FP32 * shape.num_parameters, rollout_dtype.itemsize * shape.num_parameters
    held = {"policy": weights, "optimizer": moment_bytes(shape, config), "rollout copy": copy}
    if config.algorithm.kl_coef > 0:
        held["reference"] = weights // 2 if _rounds(config, cuda) else weights
    rows, row = _cache(shape, config, prompt_tokens, rollout_dtype)
    logits = rows * shape.vocabulary
    sampling = (
        row + logits * CUDA_DRAW_BYTES
        if cuda
        else int(rows * row * CACHE_ROOM) + logits * DRAW_BYTES
    )
    update = weights + _scoring(
        shape, config, prompt_tokens, cuda
    )  # unlearning needs the same: gradient and scores
    return Needs(held, {"sampling": sampling, "update": update}, rows * row if cuda else 0)


def spare(shape: Shape, config: RunConfig, rollout_dtype: torch.dtype, free: int) -> int:
    """What training will leave of a GPU's `free` bytes, counted before anything is loaded: a cache may stay there."""
    prompt_tokens = (
        config.algorithm.max_new_tokens
    )  # few are longer, and micro-batches are cut to size anyway
    training = needs(shape, config, prompt_tokens, rollout_dtype, cuda=True)
    return max(
        0, free - int(SAFETY_FACTOR * (sum(training.held.values()) + training.phases["update"]))
    )


def moment_bytes(shape: Shape, config: RunConfig) -> int:
    return int(MOMENT_BYTES[config.training.optimizer] * shape.num_parameters)


def _cache(
    shape: Shape, config: RunConfig, prompt_tokens: int, dtype: torch.dtype
) -> tuple[int, int]:
    """How many rows are sampled at a time, and the bytes of one's keys and values at its longest."""
    per_stage = (
        config.training.prompts_per_step
        * config.algorithm.group_size
        // config.algorithm.num_stages
    )
    rows = min(config.rollout.max_rows, per_stage)
    length = prompt_tokens + config.algorithm.max_new_tokens
    per_token = 2 * shape.num_layers * shape.num_key_value_heads * shape.head_dim * dtype.itemsize
    return rows, length * per_token


def _scoring(shape: Shape, config: RunConfig, prompt_tokens: int, cuda: bool) -> int:
    """What one micro-batch keeps for its backward pass, and the logits that exist at one time."""
    length = prompt_tokens + config.algorithm.max_new_tokens
    in_mini_batch = config.training.prompts_per_mini_batch * config.algorithm.group_size * length
    tokens = max(length, min(config.model.micro_batch_tokens, in_mini_batch))
    rounds = _rounds(config, cuda)
    width = 2 if rounds else FP32  # of matrix products; norms and the residual stream stay fp32
    layer = 6 * FP32 * shape.hidden_size + 4 * width * (shape.hidden_size + shape.intermediate_size)
    if cuda and compiles(
        config.model.compile, shape.num_parameters
    ):  # norms and activations are computed again
        layer = 2 * FP32 * shape.hidden_size + width * (
            9 * shape.hidden_size // 2 + 3 * shape.intermediate_size
        )
    head_bytes = CUDA_HEAD_BYTES if cuda and rounds else HEAD_BYTES
    casts = 2 * shape.num_parameters if rounds else 0  # bf16 copies of the weights, for one pass
    kept = shape.num_layers * layer
    if config.model.gradient_checkpointing:
        kept = shape.num_layers * FP32 * shape.hidden_size + layer
        casts = (
            2 * shape.vocabulary * shape.hidden_size if rounds else 0
        )  # of one matrix at a time, the largest
    sampled = tokens * config.algorithm.max_new_tokens // length  # only these have logits
    return (
        tokens * kept
        + min(config.model.head_tokens, sampled) * shape.vocabulary * head_bytes
        + casts
    )


def _rounds(config: RunConfig, cuda: bool) -> bool:
    """Whether products in training are in bf16."""
    return config.model.compute_dtype == "bfloat16" or (
        cuda and config.model.compute_dtype == "auto"
    )


def smaller(
    shape: Shape,
    config: RunConfig,
    prompt_tokens: int,
    rollout_dtype: torch.dtype,
    cuda: bool,
    free: int,
) -> dict[str, Any] | None:
    """Knobs with which the run fits into `free` bytes and computes the same, only slower; None if there are none."""
    changed: dict[str, Any] = {}
    while (now := needs(shape, config, prompt_tokens, rollout_dtype, cuda)).total > free:
        change = _next_change(config, now.largest_phase)
        if change is None:
            return None
        section, knob, value = change
        changed[f"{section}.{knob}"] = value
        config = _with(config, section, knob, value)
    return changed


def rounder(
    shape: Shape,
    config: RunConfig,
    prompt_tokens: int,
    rollout_dtype: torch.dtype,
    cuda: bool,
    free: int,
) -> tuple[str, dict[str, Any]] | None:
    """The first optimizer with smaller moments, and what `smaller` says beside it, with which the run fits.

    Apart from those knobs, because rounded moments do not compute the same.
    """
    for name in sorted(MOMENT_BYTES, key=lambda name: -MOMENT_BYTES[name]):
        if MOMENT_BYTES[name] < MOMENT_BYTES[config.training.optimizer]:
            changed = _with(config, "training", "optimizer", name)
            others = smaller(shape, changed, prompt_tokens, rollout_dtype, cuda, free)
            if others is not None:
                return name, others
    return None


def _with(config: RunConfig, section: str, knob: str, value: Any) -> RunConfig:
    return dataclasses.replace(
        config, **{section: dataclasses.replace(getattr(config, section), **{knob: value})}
    )


def _next_change(config: RunConfig, phase: str) -> tuple[str, str, Any] | None:
    model, max_rows = config.model, config.rollout.max_rows
    if phase == "sampling":
        return ("rollout", "max_rows", max_rows // 2) if max_rows >= 16 else None
    if not model.gradient_checkpointing:
        return "model", "gradient_checkpointing", True
    if model.micro_batch_tokens >= 2048:
        return "model", "micro_batch_tokens", model.micro_batch_tokens // 2
    return ("model", "head_tokens", model.head_tokens // 2) if model.head_tokens >= 512 else None


def checkpoint_bytes(shape: Shape, config: RunConfig) -> int:
    """Weights and both moments for each checkpoint kept and the one being written, and the final weights."""
    weights = FP32 * shape.num_parameters
    return (weights + moment_bytes(shape, config)) * (
        config.training.keep_checkpoints + 1
    ) + weights


def gpu_share() -> float:
    """Of a card, for this run: below 1 where runs share one. It is a measure for caches, not a bound on training."""
    text = os.environ.get("EEPO_GPU_SHARE", "1")
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UserError(f"EEPO_GPU_SHARE = {text!r} must be a number above 0 and up to 1")
    return share


def card_memory(device: torch.device) -> int:
    """Bytes of a card, this run's share."""
    return int(gpu_share() * torch.cuda.mem_get_info(device)[1])


def free_memory(device: torch.device) -> int | None:
    """Bytes; of a card also what torch has reserved and does not use. None where the system does not say."""
    if device.type == "cuda":
        used = torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - used
        return max(0, min(free, card_memory(device) - used))
    table = Path("/proc/meminfo")
    if not table.exists():
        return None
    rows = dict(line.split(":", 1) for line in table.read_text().splitlines())
    return int(rows["MemAvailable"].split()[0]) * 1024


def give_back(device: torch.device) -> None:
    """Where runs share a card, and this one has more than its share: what torch holds of it and does not use."""
    if (
        device.type == "cuda"
        and gpu_share() < 1
        and torch.cuda.memory_reserved(device) > card_memory(device)
    ):
        torch.cuda.empty_cache()


def free_disk(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.0f} MiB"
