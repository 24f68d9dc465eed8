"""AdamW's kernels equal their plain forms, in Triton's interpreter. `test_interpreter.py` starts this file."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eepo.model import optimizers
from eepo.model.optimizers import (
    BETA_1,
    BETA_2,
    BLOCK,
    EPS,
    FIRST_LEVELS,
    SECOND_LEVELS,
    CompactAdamW,
)

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 is not set", allow_module_level=True)

from eepo.kernels import adamw

LENGTHS = [1, 7, 256, 257, 1024, 1500]  # in one tile, over it, and not a whole number of blocks


def walked(
    eight_bit: bool, lengths: list[int], kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    """Weights and moments after some steps whose gradients differ in size from one to the next."""
    monkeypatch.setenv("EEPO_KERNELS", str(int(kernel)))
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(length)) for length in lengths]
    optimizer = CompactAdamW(weights, 1e-3, 0.01, eight_bit=eight_bit, seed=3)
    for size in (1.0, 0.0, 1e-3, 1e-6):
        for weight in weights:
            weight.grad = size * torch.randn(len(weight)) ** 3
        optimizer.step()
    moments = [state[key] for state in optimizer.state.values() for key in state if key != "step"]
    return [*(weight.detach() for weight in weights), *moments]


@pytest.mark.parametrize("eight_bit", [False, True])
def test_steps_are_the_plain_ones(eight_bit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = walked(eight_bit, LENGTHS, True, monkeypatch)
    plain = walked(eight_bit, LENGTHS, False, monkeypatch)
    for one, other in zip(ours, plain, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.isfinite(), torch.ones_like(one, dtype=torch.bool))
        same = torch.isclose(one.float(), other.float(), rtol=1e-5, atol=1e-7)
        assert (
            same.float().mean() > 0.99
        )  # a number on the border of two may be rounded the other way
        steps = (
            1
            if one.dtype in (torch.int8, torch.uint8)
            else 0.01 * other.float().abs().max().clamp(min=1e-9)
        )
        assert (one.float() - other.float()).abs().max() <= steps


def test_the_kernel_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    kernel: Callable[..., None] = adamw.update_bf16

    def counting(*given: Tensor, **options: float) -> None:
        called.append(1)
        kernel(*given, **options)

    monkeypatch.setattr(adamw, "update_bf16", counting)
    walked(False, [3, 4], True, monkeypatch)
    assert len(called) == 8  # two tensors, four steps
    walked(False, [3, 4], False, monkeypatch)
    assert len(called) == 8


def test_draws_are_the_plain_ones_to_the_bit() -> None:
    """With moments halfway between two numbers of bf16, what is stored tells each draw's side of the half."""
    count = 3000
    halfway = torch.tensor(0x3F808000, dtype=torch.int32).view(torch.float32)
    rates, key = optimizers._numbers(1e-3, 0.0, 5, 7, torch.device("cpu"))
    plain = [torch.zeros(count), torch.full((count,), float(halfway) / (1 - BETA_1))]
    states = []
    for update in ("kernel", "plain"):
        weight, gradient = (tensor.clone() for tensor in plain)
        first, second = (torch.zeros(count, dtype=torch.bfloat16) for _ in range(2))
        if update == "kernel":
            adamw.update_bf16(
                weight, gradient, first, second, rates, key, 4, betas=(BETA_1, BETA_2), eps=EPS
            )
        else:
            optimizers._update_bf16(weight, gradient, first, second, rates, key, 4, 0)
        states.append((first, second))
    assert 0.4 < (states[0][0] > 1.001).float().mean() < 0.6
    for ours, other in zip(*states, strict=True):
        assert torch.equal(ours, other)


def test_a_second_moment_never_becomes_zero() -> None:
    """Beside one large gradient in its block, the smallest code stays."""
    weight, gradient = torch.zeros(BLOCK), torch.full((BLOCK,), 1e-9)
    gradient[0] = 1.0
    state = optimizers._new_8bit(weight)
    rates, key = optimizers._numbers(1e-3, 0.0, 1, 0, torch.device("cpu"))
    tensors = [state[name] for name in optimizers.EIGHT_BIT]
    levels = (FIRST_LEVELS, SECOND_LEVELS)
    adamw.update_8bit(
        weight, gradient, *tensors, rates, key, 0, betas=(BETA_1, BETA_2), eps=EPS, levels=levels
    )
    assert state["exp_avg_sq"].min() == 1
    assert state["exp_avg_sq"].max() == SECOND_LEVELS
