"""AdamW over fp32 weights, with moments in fp32 (torch's own AdamW), in bf16 or in 8 bits.

A moment is a slow average. With β2 = 0.999 one step changes it by a thousandth, which is less than
half the distance between two bf16 numbers: rounding to nearest would never change it. Both compact
formats therefore round stochastically, up or down with the probabilities that keep the mean exact.
The random bits are a hash of (seed, step, tensor, index). There is no generator state, so a resumed
run draws the same bits.

With Triton an update is one kernel. Otherwise it runs slice by slice, so that no temporary is as
large as the model. Not supported: gradients in bf16, and steps inside the backward pass (clipping
needs the norm of the whole gradient first). docs/performance.md explains why.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from eepo import kernels
from eepo.types import UserError

BETA_1, BETA_2, EPS = 0.9, 0.999, 1e-8  # torch's defaults
BLOCK = 256  # 8-bit numbers that share a scale
SLICE = 2**22  # weights per update without a kernel; temporaries have this size
FIRST_LEVELS, SECOND_LEVELS = 127, 255  # of 8-bit codes: signed, unsigned
# Both moments together, per weight
MOMENT_BYTES = {"adamw": 8.0, "adamw_bf16": 4.0, "adamw_8bit": 2 + 2 * 4 / BLOCK}
# Entries of a weight's state besides its step, in the order that updates expect
BF16_STATE = ("exp_avg", "exp_avg_sq")
EIGHT_BIT_STATE = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
UINT32_MASK = 0xFFFFFFFF

State = dict[str, Tensor]


def build_optimizer(
    name: str, weights: Iterable[nn.Parameter], learning_rate: float, weight_decay: float, seed: int
) -> torch.optim.Optimizer:
    weights = list(weights)
    if name == "adamw":
        fused = weights[0].device.type == "cuda"
        return torch.optim.AdamW(weights, lr=learning_rate, weight_decay=weight_decay, fused=fused)
    eight_bit = name == "adamw_8bit"
    return CompactAdamW(weights, learning_rate, weight_decay, eight_bit=eight_bit, seed=seed)


def clipped_step(
    weights: Iterable[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    max_grad_norm: float,
    advice: str,
) -> float:
    """Clip the gradient, update the weights, clear the gradient, and return its norm.

    A gradient that is not finite would destroy the weights and every later checkpoint, so it is an
    error, which ends with `advice`.
    """
    norm = float(nn.utils.clip_grad_norm_(weights, max_grad_norm))
    if not math.isfinite(norm):
        raise UserError(f"the gradient norm is {norm}; {advice}")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


class StepScalars(NamedTuple):
    """Scalars of one step, as tensors on the weights' device."""

    rates: Tensor  # [3]: bias-corrected learning rate, second-moment correction, lr · weight decay
    random_key: Tensor  # [2] int32: hash of (seed, step)


class CompactAdamW(torch.optim.Optimizer):
    """AdamW whose moments take 4 bytes per weight, or 2 with `eight_bit`. Weights are fp32."""

    def __init__(
        self,
        weights: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float,
        eight_bit: bool,
        seed: int = 0,
    ) -> None:
        super().__init__(weights, {"lr": lr, "weight_decay": weight_decay})
        self.seed = seed
        self._state_names = EIGHT_BIT_STATE if eight_bit else BF16_STATE
        self._new_moments: Callable[[Tensor], State] = _new_8bit if eight_bit else _new_bf16
        self._plain_update: Callable[..., None] = _update_8bit if eight_bit else _update_bf16

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient. Closures are not supported."""
        if closure is not None:
            raise ValueError("CompactAdamW.step takes no closure")
        tensor_index = 0
        for group in self.param_groups:
            scalars: dict[int, StepScalars] = {}  # by step, nearly always the same for all weights
            for weight in group["params"]:
                if weight.grad is not None and weight.numel():
                    state = self._advanced_state(weight)
                    step = int(state["step"])
                    if step not in scalars:
                        scalars[step] = _step_scalars(group, step, self.seed, weight.device)
                    self._update(weight, state, scalars[step], tensor_index)
                tensor_index += 1

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a saved state; torch's method would cast moments to the weights' dtype."""
        super().load_state_dict(state_dict | {"state": {}})
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for index, state in state_dict["state"].items():
            device = weights[index].device
            self.state[weights[index]] = {
                key: tensor.to("cpu" if key == "step" else device, copy=True)
                for key, tensor in state.items()
            }

    def _advanced_state(self, weight: nn.Parameter) -> State:
        state: State = self.state[weight]
        if not state:
            state |= {"step": torch.zeros((), dtype=torch.int64)} | self._new_moments(weight)
        state["step"] += 1
        return state

    def _update(
        self, weight: nn.Parameter, state: State, scalars: StepScalars, tensor_index: int
    ) -> None:
        assert weight.grad is not None
        moments = [state[name] for name in self._state_names]
        tensors = [t.view(-1) for t in (weight, weight.grad.contiguous(), *moments)]
        if kernels.available(weight.device):
            self._kernel()(*tensors, *scalars, tensor_index)
            return
        num_weights = weight.numel()
        for start in range(0, num_weights, SLICE):
            flat_weight, gradient, *rest = (_slice(t, start, num_weights) for t in tensors)
            self._plain_update(flat_weight, gradient, rest, scalars, tensor_index, start)

    def _kernel(self) -> Callable[..., None]:
        from eepo.kernels import adamw

        if self._state_names is BF16_STATE:
            return partial(adamw.update_bf16, betas=(BETA_1, BETA_2), eps=EPS)
        levels = (FIRST_LEVELS, SECOND_LEVELS)
        return partial(adamw.update_8bit, betas=(BETA_1, BETA_2), eps=EPS, levels=levels)


def _step_scalars(group: dict[str, Any], step: int, seed: int, device: torch.device) -> StepScalars:
    lr, weight_decay = group["lr"], group["weight_decay"]
    rates = torch.tensor([lr / (1 - BETA_1**step), (1 - BETA_2**step) ** -0.5, lr * weight_decay])
    digest = hashlib.blake2b(f"{seed}\0{step}".encode(), digest_size=8).digest()
    random_key = torch.frombuffer(bytearray(digest), dtype=torch.int32)
    return StepScalars(rates.to(device), random_key.to(device))


def _slice(tensor: Tensor, start: int, num_weights: int) -> Tensor:
    """Return the part for weights `start` to `start + SLICE`; scales have one entry per block."""
    weights_per_entry = 1 if len(tensor) >= num_weights else BLOCK
    return tensor[start // weights_per_entry : (start + SLICE) // weights_per_entry]


# --- update of one tensor or slice ----------------------------------------------------------------


def _step_weight(weight: Tensor, first: Tensor, second: Tensor, rates: Tensor) -> None:
    """Apply step and decay in one subtraction.

    As a factor, 1 - lr · decay would have no effect: at RL's learning rates it is 1 in fp32.
    """
    rate, correction, decay = rates.unbind()
    weight.sub_(rate * first / (second.sqrt() * correction + EPS) + decay * weight)


def _averaged(first: Tensor, second: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    new_first = first + (1 - BETA_1) * (gradient - first)
    return new_first, second + (1 - BETA_2) * (gradient * gradient - second)


def _new_bf16(weight: Tensor) -> State:
    zeros = torch.zeros(weight.numel(), dtype=torch.bfloat16, device=weight.device)
    return {"exp_avg": zeros, "exp_avg_sq": zeros.clone()}


def _update_bf16(
    weight: Tensor,  # [N]
    gradient: Tensor,  # [N]
    moments: Sequence[Tensor],  # first and second: bf16 [N]
    scalars: StepScalars,
    tensor_index: int,
    start: int,  # of the slice
) -> None:
    first, second = moments
    new_first, new_second = _averaged(first.float(), second.float(), gradient)
    _step_weight(weight, new_first, new_second, scalars.rates)
    bits = _random_bits(weight, scalars.random_key, tensor_index, start)
    first.copy_(round_to_bf16(new_first, bits & 0xFFFF))
    second.copy_(round_to_bf16(new_second, bits >> 16 & 0xFFFF))


def _new_8bit(weight: Tensor) -> State:
    num_blocks = -(-weight.numel() // BLOCK)  # the last block may be longer than the weight
    codes, scales = torch.zeros(num_blocks * BLOCK, dtype=torch.int8), torch.zeros(num_blocks)
    tensors = (codes, scales, codes.byte(), scales.clone())
    return dict(zip(EIGHT_BIT_STATE, (t.to(weight.device) for t in tensors), strict=True))


def _update_8bit(
    weight: Tensor,  # [N]
    gradient: Tensor,  # [N]
    # first int8 [blocks * BLOCK], its scale [blocks], second uint8 [blocks * BLOCK], its scale
    moments: Sequence[Tensor],
    scalars: StepScalars,
    tensor_index: int,
    start: int,  # of the slice
) -> None:
    first, first_scale, second, second_scale = moments
    length = weight.shape[0]
    if padding := first.shape[0] - length:
        gradient = functional.pad(gradient, (0, padding))
    old_first = from_codes(first, first_scale, FIRST_LEVELS)
    old_second = from_codes(second, second_scale, SECOND_LEVELS)
    new_first, new_second = _averaged(old_first, old_second, gradient)
    _step_weight(weight, new_first[:length], new_second[:length], scalars.rates)
    bits = _random_bits(first, scalars.random_key, tensor_index, start)
    codes, scales = to_codes(new_first, bits & 0xFFFF, FIRST_LEVELS)
    first.copy_(codes * new_first.sign())
    first_scale.copy_(scales)
    codes, scales = to_codes(new_second, bits >> 16 & 0xFFFF, SECOND_LEVELS)
    # A positive second moment stays positive: with code 0, EPS alone would divide the next step.
    second.copy_(codes.maximum((new_second > 0).float()))
    second_scale.copy_(scales)


# --- compact number formats -----------------------------------------------------------------------


def round_to_bf16(values: Tensor, random_bits: Tensor) -> Tensor:
    """Round stochastically, with 16 random bits per value.

    bf16 is the upper half of fp32's bits. The random bits are added to the lower half, which is
    then cut off: a carry rounds up.
    """
    bits = values.view(torch.int32) + random_bits.to(torch.int32)
    return (bits & -0x10000).view(torch.float32).to(torch.bfloat16)


def to_codes(values: Tensor, random_bits: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Encode |values| [blocks * BLOCK] as integers 0..levels and one scale per block [blocks].

    A block's scale is its largest value, and code c stands for (c / levels)⁴ of it. Near the scale
    the codes are a few percent apart. The smallest is 2e-10 of the scale (levels = 255) or 4e-9
    (127), so small values next to a large one are coarse but not lost. Rounding is stochastic, with
    16 random bits per value.
    """
    sizes = values.abs().view(-1, BLOCK)
    scales = sizes.amax(1)
    shares = sizes / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    lower = (shares.sqrt().sqrt() * levels).floor().clamp(max=levels - 1)
    low, high = _fourth_power(lower / levels), _fourth_power((lower + 1) / levels)
    threshold = (random_bits.view(-1, BLOCK).float() + 0.5) / 2**16
    return (lower + (shares - low > threshold * (high - low)).float()).view(-1), scales


def from_codes(codes: Tensor, scales: Tensor, levels: int) -> Tensor:
    roots = codes.view(-1, BLOCK).float() / levels
    return (_fourth_power(roots) * roots.sign() * scales.unsqueeze(1)).view(-1)


def _fourth_power(value: Tensor) -> Tensor:
    square = value * value
    return square * square


def _random_bits(like: Tensor, random_key: Tensor, tensor_index: int, start: int) -> Tensor:
    """Return 32 random bits per entry [N]: a hash of the key, the tensor and the entry's index."""
    indices = torch.arange(like.shape[0], device=like.device) + start
    first, second = (random_key.long() & UINT32_MASK).unbind()
    return _mix(_mix(indices ^ first) ^ second ^ tensor_index)


def _mix(value: Tensor) -> Tensor:
    """Hash 32-bit words, held in int64 because torch lacks arithmetic on unsigned ones."""
    value = (value ^ value >> 16) * 0x7FEB352D & UINT32_MASK
    value = (value ^ value >> 15) * (0x846CA68B - 2**32) & UINT32_MASK
    return value ^ value >> 16
