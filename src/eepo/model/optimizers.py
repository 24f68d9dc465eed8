"""AdamW over fp32 weights, with its two moments in fp32 (torch's own), in bf16, or in 8 bits a number.

A moment is a slow average: with β2 = 0.999 a step changes it by a thousandth, less than half of bf16's distance
between numbers, so that rounding to the nearest would keep it where it is for ever. Both small formats therefore round
at random, up or down with the chances that keep the mean exact. These draws are a hash of (seed, step, tensor, place):
no generator exists, so a resumed run draws the same.

With Triton an update is one kernel; otherwise it goes slice by slice, so that nothing as large as the model is ever
copied. Not here: gradients in bf16, and steps inside the backward pass (clipping needs the norm of the whole gradient
first). docs/performance.md says why.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from eepo import kernels

BETA_1, BETA_2, EPS = 0.9, 0.999, 1e-8  # torch's
BLOCK = 256  # numbers that share a scale in 8 bits
SLICE = 2**22  # weights in one update where it is no kernel: its temporaries are this large
FIRST_LEVELS, SECOND_LEVELS = 127, 255  # of a share of the block's largest: signed, unsigned
MOMENT_BYTES = {
    "adamw": 8.0,
    "adamw_bf16": 4.0,
    "adamw_8bit": 2 + 2 * 4 / BLOCK,
}  # a weight, both moments
BF16 = (
    "exp_avg",
    "exp_avg_sq",
)  # what the state of a weight holds beside its step, in the order of an update
EIGHT_BIT = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")

WORD = 0xFFFFFFFF  # the lowest 32 bits

State = dict[str, Tensor]


def build_optimizer(
    name: str, weights: Iterable[nn.Parameter], learning_rate: float, weight_decay: float, seed: int
) -> torch.optim.Optimizer:
    weights = list(weights)
    if name == "adamw":
        fused = weights[0].device.type == "cuda"
        return torch.optim.AdamW(weights, lr=learning_rate, weight_decay=weight_decay, fused=fused)
    return CompactAdamW(
        weights, learning_rate, weight_decay, eight_bit=name == "adamw_8bit", seed=seed
    )


class CompactAdamW(torch.optim.Optimizer):
    """AdamW whose moments take 4 bytes a weight, or 2 (`eight_bit`). Weights and gradients are fp32."""

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
        self._moments = EIGHT_BIT if eight_bit else BF16
        self._new_moments: Callable[[Tensor], State] = _new_8bit if eight_bit else _new_bf16
        self._plain_update: Callable[..., None] = _update_8bit if eight_bit else _update_bf16

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Every weight that has a gradient. A closure is not taken: nothing here asks for the loss again."""
        if closure is not None:
            raise ValueError("CompactAdamW.step takes no closure")
        index = 0
        for group in self.param_groups:
            todo = []
            for weight in group["params"]:
                if weight.grad is not None and weight.numel():
                    todo.append((index, weight, self._advance(weight)))
                index += 1
            self._move(todo, group["lr"], group["weight_decay"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As saved: torch's own would cast every moment to the type of its weight."""
        super().load_state_dict(state_dict | {"state": {}})
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for index, state in state_dict["state"].items():
            device = weights[index].device
            self.state[weights[index]] = {
                key: tensor.to("cpu" if key == "step" else device, copy=True)
                for key, tensor in state.items()
            }

    def _advance(self, weight: nn.Parameter) -> State:
        state: State = self.state[weight]
        if not state:
            state |= {"step": torch.zeros((), dtype=torch.int64)} | self._new_moments(weight)
        state["step"] += 1
        return state

    def _move(
        self, todo: list[tuple[int, nn.Parameter, State]], lr: float, weight_decay: float
    ) -> None:
        numbers: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # by step: nearly always the same for all weights
        for index, weight, state in todo:
            step = int(state["step"])
            if step not in numbers:
                numbers[step] = _numbers(lr, weight_decay, step, self.seed, weight.device)
            assert weight.grad is not None
            flat = [weight, weight.grad.contiguous(), *(state[name] for name in self._moments)]
            self._update([tensor.view(-1) for tensor in flat], *numbers[step], index)

    def _update(self, tensors: list[Tensor], rates: Tensor, key: Tensor, index: int) -> None:
        if kernels.available(rates.device):
            return self._kernel()(*tensors, rates, key, index)
        for start in range(0, len(tensors[0]), SLICE):
            parts = [_part(tensor, start, len(tensors[0])) for tensor in tensors]
            self._plain_update(*parts, rates, key, index, start)

    def _kernel(self) -> Callable[..., None]:
        from eepo.kernels import adamw

        if self._moments is BF16:
            return partial(adamw.update_bf16, betas=(BETA_1, BETA_2), eps=EPS)
        return partial(
            adamw.update_8bit, betas=(BETA_1, BETA_2), eps=EPS, levels=(FIRST_LEVELS, SECOND_LEVELS)
        )


def _numbers(
    lr: float, weight_decay: float, step: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """What changes from step to step, as tensors [3] and [2] on the device."""
    rates = torch.tensor([lr / (1 - BETA_1**step), (1 - BETA_2**step) ** -0.5, lr * weight_decay])
    digest = hashlib.blake2b(f"{seed}\0{step}".encode(), digest_size=8).digest()
    key = torch.frombuffer(bytearray(digest), dtype=torch.int32)
    return rates.to(device), key.to(device)


def _part(tensor: Tensor, start: int, num_weights: int) -> Tensor:
    """What belongs to a slice: of as many numbers as there are weights (or up to a whole block), or of scales."""
    per_number = 1 if len(tensor) >= num_weights else BLOCK
    return tensor[start // per_number : (start + SLICE) // per_number]


# --- the update of one tensor, or of a slice --------------------------------------------------------------------------


def _step_weight(weight: Tensor, first: Tensor, second: Tensor, rates: Tensor) -> None:
    """Decay is added to the step before both are rounded: 1 - lr · decay alone is 1 in fp32 at RL's learning rates."""
    rate, correction, decay = rates.unbind()
    weight.sub_(rate * first / (second.sqrt() * correction + EPS) + decay * weight)


def _averaged(first: Tensor, second: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return first + (1 - BETA_1) * (gradient - first), second + (1 - BETA_2) * (
        gradient * gradient - second
    )


def _new_bf16(weight: Tensor) -> State:
    zeros = torch.zeros(weight.numel(), dtype=torch.bfloat16, device=weight.device)
    return {"exp_avg": zeros, "exp_avg_sq": zeros.clone()}


def _update_bf16(
    weight: Tensor,  # [N]
    gradient: Tensor,  # [N]
    first: Tensor,  # bf16 [N]
    second: Tensor,  # bf16 [N]
    rates: Tensor,
    key: Tensor,
    index: int,  # of the tensor
    start: int,  # of the slice
) -> None:
    new_first, new_second = _averaged(first.float(), second.float(), gradient)
    _step_weight(weight, new_first, new_second, rates)
    draws = _draws(weight, key, index, start)
    first.copy_(round_to_bf16(new_first, draws & 0xFFFF))
    second.copy_(round_to_bf16(new_second, draws >> 16 & 0xFFFF))


def _new_8bit(weight: Tensor) -> State:
    blocks = -(-weight.numel() // BLOCK)  # the last may reach beyond the weight
    codes, scales = torch.zeros(blocks * BLOCK, dtype=torch.int8), torch.zeros(blocks)
    state = {
        "exp_avg": codes,
        "exp_avg_scale": scales,
        "exp_avg_sq": codes.byte(),
        "exp_avg_sq_scale": scales.clone(),
    }
    return {name: tensor.to(weight.device) for name, tensor in state.items()}


def _update_8bit(
    weight: Tensor,  # [N]
    gradient: Tensor,  # [N]
    first: Tensor,  # int8 [blocks * BLOCK]
    first_scale: Tensor,  # [blocks]
    second: Tensor,  # uint8 [blocks * BLOCK]
    second_scale: Tensor,  # [blocks]
    rates: Tensor,
    key: Tensor,
    index: int,  # of the tensor
    start: int,  # of the slice
) -> None:
    length = weight.shape[0]
    if missing := first.shape[0] - length:
        gradient = functional.pad(gradient, (0, missing))
    old_first = from_codes(first, first_scale, FIRST_LEVELS)
    old_second = from_codes(second, second_scale, SECOND_LEVELS)
    new_first, new_second = _averaged(old_first, old_second, gradient)
    _step_weight(weight, new_first[:length], new_second[:length], rates)
    draws = _draws(first, key, index, start)
    codes, scales = to_codes(new_first, draws & 0xFFFF, FIRST_LEVELS)
    first.copy_(codes * new_first.sign())
    first_scale.copy_(scales)
    codes, scales = to_codes(new_second, draws >> 16 & 0xFFFF, SECOND_LEVELS)
    second.copy_(
        codes.maximum((new_second > 0).float())
    )  # 0 would make the next step 1 / EPS times too large
    second_scale.copy_(scales)


# --- small numbers ----------------------------------------------------------------------------------------------------


def round_to_bf16(values: Tensor, draws: Tensor) -> Tensor:
    """Up or down at random: bf16 is the upper half of fp32's bits, and what a draw adds below carries or does not."""
    return (
        ((values.view(torch.int32) + draws.to(torch.int32)) & -0x10000)
        .view(torch.float32)
        .to(torch.bfloat16)
    )


def to_codes(values: Tensor, draws: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """[blocks * BLOCK] -> whole numbers 0..levels of |values|, and scales [blocks]; up or down at random.

    Code c stands for (c / levels)⁴ of the block's largest: steps of a few per cent near it, and down to 2e-10 of it
    (levels = 255) or 4e-9 (127), so that a small number beside a large one is coarse, but not gone.
    """
    sizes = values.abs().view(-1, BLOCK)
    scales = sizes.amax(1)
    shares = sizes / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    below = (shares.sqrt().sqrt() * levels).floor().clamp(max=levels - 1)
    low, high = _fourth_power(below / levels), _fourth_power((below + 1) / levels)
    chance = (draws.view(-1, BLOCK).float() + 0.5) / 2**16
    return (below + (shares - low > chance * (high - low)).float()).view(-1), scales


def from_codes(codes: Tensor, scales: Tensor, levels: int) -> Tensor:
    roots = codes.view(-1, BLOCK).float() / levels
    return (_fourth_power(roots) * roots.sign() * scales.unsqueeze(1)).view(-1)


def _fourth_power(value: Tensor) -> Tensor:
    square = value * value
    return square * square


def _draws(like: Tensor, key: Tensor, index: int, start: int) -> Tensor:
    """[N], 32 random bits each: a hash of the key of (seed, step), the tensor's index and the place in it."""
    places = torch.arange(like.shape[0], device=like.device) + start
    first, second = (key.long() & WORD).unbind()
    return _mixed(_mixed(places ^ first) ^ second ^ index)


def _mixed(value: Tensor) -> Tensor:
    """A 32-bit mixer. torch has no unsigned words, so they are held in int64."""
    value = (value ^ value >> 16) * 0x7FEB352D & WORD
    value = (value ^ value >> 15) * (0x846CA68B - 2**32) & WORD
    return value ^ value >> 16
