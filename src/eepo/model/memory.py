"""Estimates the memory of a run from the shape of its model, before any weights are loaded.

Weights and optimizer moments are counted exactly. Activations are estimated for common decoders
(attention, gated feed-forward layer, norms), with an error of about 25 % (`docs/doctor.md`).
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eepo.config import RunConfig, TrainingConfig, should_compile
from eepo.model.cgroups import free_below_limits
from eepo.model.optimizers import MOMENT_BYTES
from eepo.types import UserError

FP32_BYTES = 4
BF16_BYTES = 2
# Bytes per logit of the policy, forward and backward. Fitted to measurements.
LOGIT_BYTES = 20
CUDA_LOGIT_BYTES = 6  # Triton kernels: the logit, and its gradient in bf16
# Bytes per logit of the engine: the logit, its softmax and the cumulative sums in fp64.
SAMPLING_BYTES = 32
CUDA_SAMPLING_BYTES = 6  # Triton kernels, fitted
CACHE_GROWTH = 1.5  # the KV cache on the CPU grows by doubling, so it is partly empty
HOST_COPY_SHARE = 0.5  # share of the free host memory that the copy of a step may use
CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
GPU_SHARE = "EEPO_GPU_SHARE"  # an environment variable
SAFETY_FACTOR = 1.25  # training may need this many times the estimate


@dataclass(frozen=True)
class Shape:
    """Describes a decoder."""

    num_parameters: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int | None  # None: no limit
    num_adapter_parameters: int = 0  # of LoRA; 0: all parameters are trained
    num_outside_layers: int = 0  # with LoRA: parameters of embedding, head and last norm

    @property
    def num_trained(self) -> int:
        return self.num_adapter_parameters or self.num_parameters


@dataclass(frozen=True)
class MemoryEstimate:
    """Holds numbers of bytes.

    `persistent` is allocated during the whole run. Only one of the `phases` happens at a time.
    """

    persistent: dict[str, int]
    phases: dict[str, int]
    # On a GPU, the KV cache of all rows at full length. It comes on top of `total`.
    # A smaller cache makes the run slower, not wrong.
    kv_cache: int = 0

    @property
    def persistent_total(self) -> int:
        return sum(self.persistent.values())

    @property
    def largest_phase(self) -> str:
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def total(self) -> int:
        return self.persistent_total + self.phases[self.largest_phase]


@dataclass(frozen=True)
class Budget:
    """Compares the memory that training `config` needs with the `free` bytes of a device."""

    shape: Shape
    config: RunConfig
    prompt_tokens: int  # length of a long prompt
    rollout_dtype: torch.dtype
    cuda: bool
    free: int

    def estimate(self) -> MemoryEstimate:
        persistent = {
            "policy": self._policy_bytes(),
            "optimizer": optimizer_bytes(self.shape, self.config),
            "rollout copy": self.rollout_dtype.itemsize * self._num_copied(),
        }
        # With LoRA the reference is the base, which is there already.
        if self.config.algorithm.kl_coef > 0 and not self._is_lora:
            persistent["reference"] = self._product_bytes * self.shape.num_parameters
        # Unlearning needs as much as the update: gradients and the activations of a micro-batch.
        gradients = FP32_BYTES * self.shape.num_trained
        update = gradients + self._activation_bytes()
        phases = {"sampling": self._sampling_bytes(), "update": update}
        kv_cache = self._rows * self._kv_bytes_per_row if self.cuda else 0
        return MemoryEstimate(persistent, phases, kv_cache)

    def left_by_training(self) -> int:
        """Return the bytes that stay free during the update, with a safety margin."""
        estimate = self.estimate()
        training = estimate.persistent_total + estimate.phases["update"]
        return max(0, self.free - int(SAFETY_FACTOR * training))

    def memory_saving_knobs(self) -> dict[str, Any] | None:
        """Return changes of knobs with which the run fits; None if there are none.

        These knobs make the run slower. They do not change what it computes.
        """
        budget, changes = self, dict[str, Any]()
        while (estimate := budget.estimate()).total > self.free:
            change = next_change(budget.config, estimate.largest_phase)
            if change is None:
                return None
            section, knob, value = change
            changes[f"{section}.{knob}"] = value
            budget = budget.with_knob(section, knob, value)
        return changes

    def smaller_optimizer(self) -> tuple[str, dict[str, Any]] | None:
        """Return the first optimizer with smaller moments that makes the run fit, or None.

        The second value holds the memory-saving knobs that it needs in addition. Unlike these
        knobs, an optimizer with rounded moments changes what the run computes.
        """
        for name in sorted(MOMENT_BYTES, key=lambda name: -MOMENT_BYTES[name]):
            if MOMENT_BYTES[name] < MOMENT_BYTES[self.config.training.optimizer]:
                knobs = self.with_knob("training", "optimizer", name).memory_saving_knobs()
                if knobs is not None:
                    return name, knobs
        return None

    def with_knob(self, section: str, knob: str, value: Any) -> Budget:
        changed = dataclasses.replace(getattr(self.config, section), **{knob: value})
        return dataclasses.replace(
            self, config=dataclasses.replace(self.config, **{section: changed})
        )

    @property
    def _row_tokens(self) -> int:
        return self.prompt_tokens + self.config.algorithm.max_new_tokens

    @property
    def _rows(self) -> int:
        """Return how many completions are sampled at the same time."""
        algorithm = self.config.algorithm
        group = self.config.training.prompts_per_step * algorithm.group_size
        return min(self.config.rollout.max_rows, group // algorithm.num_stages)

    @property
    def _kv_bytes_per_row(self) -> int:
        shape = self.shape
        values_per_token = 2 * shape.num_layers * shape.num_key_value_heads * shape.head_dim
        return self._row_tokens * values_per_token * self.rollout_dtype.itemsize

    @property
    def _is_lora(self) -> bool:
        return self.shape.num_adapter_parameters > 0

    def _policy_bytes(self) -> int:
        """Return the bytes of fp32 weights; with LoRA, of the base and the fp32 adapter."""
        if not self._is_lora:
            return FP32_BYTES * self.shape.num_parameters
        base = self._product_bytes * self.shape.num_parameters
        return base + FP32_BYTES * self.shape.num_adapter_parameters

    def _num_copied(self) -> int:
        """Return how many weights the engine has for itself."""
        if not self._is_lora:
            return self.shape.num_parameters
        if not self.config.rollout.merge_lora:
            return self.shape.num_adapter_parameters
        is_shared = self.rollout_dtype.itemsize == self._product_bytes
        return self.shape.num_parameters - (self.shape.num_outside_layers if is_shared else 0)

    @property
    def _product_bytes(self) -> int:
        return BF16_BYTES if self._trains_in_bf16 else FP32_BYTES

    @property
    def _trains_in_bf16(self) -> bool:
        dtype = self.config.model.compute_dtype
        return dtype == "bfloat16" or (self.cuda and dtype == "auto")

    def _sampling_bytes(self) -> int:
        logits = self._rows * self.shape.vocab_size
        if self.cuda:  # one row must fit; `kv_cache` counts all rows
            return self._kv_bytes_per_row + logits * CUDA_SAMPLING_BYTES
        kv_bytes = self._rows * self._kv_bytes_per_row
        return int(kv_bytes * CACHE_GROWTH) + logits * SAMPLING_BYTES

    def _activation_bytes(self) -> int:
        """Return what a micro-batch keeps for its backward pass, plus the logits at one time."""
        shape, model, bf16 = self.shape, self.config.model, self._trains_in_bf16
        layer = self._layer_bytes_per_token()
        if model.gradient_checkpointing:
            per_token = shape.num_layers * FP32_BYTES * shape.hidden_size + layer
            # Matrices are cast to bf16 one at a time. The LM head is the largest.
            cast_weights = 0 if self._is_lora else shape.vocab_size * shape.hidden_size
        else:
            per_token = shape.num_layers * layer
            cast_weights = shape.num_trained  # a base in bf16 is not cast
        logit_bytes = CUDA_LOGIT_BYTES if self.cuda and bf16 else LOGIT_BYTES
        tokens = self._micro_batch_tokens()
        # Only completion tokens have logits.
        completion_tokens = tokens * self.config.algorithm.max_new_tokens // self._row_tokens
        logits = min(model.head_tokens, completion_tokens) * shape.vocab_size
        casts = BF16_BYTES * cast_weights if bf16 else 0
        return tokens * per_token + logits * logit_bytes + casts

    def _micro_batch_tokens(self) -> int:
        rows = self.config.training.prompts_per_mini_batch * self.config.algorithm.group_size
        limit = min(self.config.model.micro_batch_tokens, rows * self._row_tokens)
        return max(self._row_tokens, limit)  # a row is never split

    def _layer_bytes_per_token(self) -> int:
        hidden, intermediate = self.shape.hidden_size, self.shape.intermediate_size
        # The dtype of matrix products. Norms and the residual stream stay in fp32.
        product_bytes = self._product_bytes
        if self.cuda and should_compile(self.config.model.compile, self.shape.num_parameters):
            # A compiled layer recomputes norms and activations in the backward pass.
            values = 9 * hidden // 2 + 3 * intermediate
            return 2 * FP32_BYTES * hidden + product_bytes * values
        return 6 * FP32_BYTES * hidden + 4 * product_bytes * (hidden + intermediate)


def shape_of(model_config: Any, num_parameters: int) -> Shape:
    """Read the shape from a `transformers` config.

    Some model families omit values that follow from other ones.
    """
    text = model_config.get_text_config()
    heads = text.num_attention_heads
    return Shape(
        num_parameters=num_parameters,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab_size=text.vocab_size,
        max_positions=getattr(text, "max_position_embeddings", None),
    )


def cache_bytes(shape: Shape, config: RunConfig, rollout_dtype: torch.dtype, free: int) -> int:
    """Return how much of a GPU's `free` memory the KV cache may keep while the policy is trained.

    Call it before anything is loaded.
    """
    # Few prompts are longer than the completions, and long rows get smaller micro-batches anyway.
    prompt_tokens = config.algorithm.max_new_tokens
    return Budget(
        shape, config, prompt_tokens, rollout_dtype, cuda=True, free=free
    ).left_by_training()


def optimizer_bytes(shape: Shape, config: RunConfig) -> int:
    return int(MOMENT_BYTES[config.training.optimizer] * shape.num_trained)


def host_copy_bytes(num_trained: int, optimizer: str) -> int:
    """Return the host memory of the copy with which a failed step is undone."""
    return int((FP32_BYTES + MOMENT_BYTES[optimizer]) * num_trained)


def host_copy_fits(size: int, free: int | None) -> bool:
    """Return whether the copy is made. None: the free host memory is not known."""
    return free is None or size <= HOST_COPY_SHARE * free


def most_checkpoints(training: TrainingConfig) -> int:
    """Return how many checkpoints are on the disk at a time: those that are kept, and the next."""
    every = training.checkpoint_every
    num_written = math.ceil(training.num_steps / every) if every else 1
    return min(training.keep_checkpoints + 1, max(1, num_written))


def checkpoint_bytes(shape: Shape, config: RunConfig, num_checkpoints: int) -> int:
    """Return the disk space of checkpoints and of the final weights."""
    num_weights = shape.num_parameters + shape.num_adapter_parameters
    return saved_bytes(shape.num_trained, num_weights, config.training.optimizer, num_checkpoints)


def saved_bytes(num_trained: int, num_weights: int, optimizer: str, num_checkpoints: int) -> int:
    """Return the disk space of checkpoints, and of all weights at the end."""
    one = host_copy_bytes(num_trained, optimizer)  # a checkpoint has the same tensors
    return one * num_checkpoints + FP32_BYTES * num_weights


def next_change(config: RunConfig, phase: str) -> tuple[str, str, Any] | None:
    """Return the next knob that makes `phase` smaller, as (section, knob, value).

    `phase` is "sampling" or "update". The change makes the run slower, and may be made when a run
    is resumed. None: no such knob is left.
    """
    model, rollout = config.model, config.rollout
    if phase == "sampling" and rollout.max_rows >= 2:
        return "rollout", "max_rows", rollout.max_rows // 2
    if phase == "update":
        if not model.gradient_checkpointing:
            return "model", "gradient_checkpointing", True
        if model.micro_batch_tokens >= 2048:
            return "model", "micro_batch_tokens", model.micro_batch_tokens // 2
        if model.head_tokens >= 512:
            return "model", "head_tokens", model.head_tokens // 2
    has_copy = model.lora_rank and rollout.merge_lora and rollout.engine == "builtin"
    return ("rollout", "merge_lora", False) if has_copy else None


def gpu_share() -> float:
    """Return the share of a GPU that this run may use; below 1 if several runs share the GPU.

    It sizes the caches. It does not limit training.
    """
    text = os.environ.get(GPU_SHARE, "1")
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UserError(f"{GPU_SHARE} = {text!r} must be a number above 0 and up to 1")
    return share


def gpu_memory(device: torch.device) -> int:
    """Return this run's share of the GPU's memory in bytes."""
    return int(gpu_share() * torch.cuda.mem_get_info(device)[1])


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of a device; None if the operating system does not report them.

    On a GPU, memory that torch has reserved but does not use counts as free. In host memory, the
    limits of control groups count, such as that of a container.
    """
    if device.type == "cuda":
        used = torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - used
        return max(0, min(free, gpu_memory(device) - used))
    table = Path("/proc/meminfo")
    if not table.exists():
        return None
    rows = dict(line.split(":", 1) for line in table.read_text().splitlines())
    free = int(rows["MemAvailable"].split()[0]) * 1024
    below_limits = free_below_limits(CGROUP, OWN_CGROUPS)
    return free if below_limits is None else min(free, below_limits)


def release_shared_memory(device: torch.device) -> None:
    """Free torch's unused memory if runs share this GPU and this run holds more than its share."""
    if device.type != "cuda" or gpu_share() == 1:
        return
    if torch.cuda.memory_reserved(device) > gpu_memory(device):
        torch.cuda.empty_cache()


def free_disk(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def format_bytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.0f} MiB"
