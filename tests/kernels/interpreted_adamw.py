"""AdamW's kernels equal their plain versions, in Triton's interpreter.

`test_interpreter.py` runs this file.
"""

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

LENGTHS = [1, 7, 256, 257, 1024, 1500]  # less and more than a tile, with partial blocks


def weights_and_moments(
    eight_bit: bool, lengths: list[int], kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    """Return the results of some steps with gradients of very different sizes."""
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


def step_scalars(step: int, seed: int) -> optimizers.StepScalars:
    group = {"lr": 1e-3, "weight_decay": 0.0}
    return optimizers._step_scalars(group, step, seed, torch.device("cpu"))


@pytest.mark.parametrize("eight_bit", [False, True])
def test_steps_equal_those_of_the_plain_version(
    eight_bit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = weights_and_moments(eight_bit, LENGTHS, True, monkeypatch)
    plain = weights_and_moments(eight_bit, LENGTHS, False, monkeypatch)
    for got, expected in zip(ours, plain, strict=True):
        assert got.dtype == expected.dtype
        assert got.isfinite().all()
        is_code = got.dtype in (torch.int8, torch.uint8)
        got, expected = got.float(), expected.float()
        # A value between two numbers may be rounded the other way.
        assert torch.isclose(got, expected, rtol=1e-5, atol=1e-7).float().mean() > 0.99
        tolerance = 1 if is_code else 0.01 * expected.abs().max().clamp(min=1e-9)
        assert (got - expected).abs().max() <= tolerance


def test_the_kernel_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    kernel: Callable[..., None] = adamw.update_bf16

    def counting(*args: Tensor, **options: float) -> None:
        called.append(1)
        kernel(*args, **options)

    monkeypatch.setattr(adamw, "update_bf16", counting)
    weights_and_moments(False, [3, 4], True, monkeypatch)
    assert len(called) == 8  # two tensors, four steps
    weights_and_moments(False, [3, 4], False, monkeypatch)
    assert len(called) == 8


def test_random_bits_equal_those_of_the_plain_version() -> None:
    """The moments are halfway between two bf16 numbers, so the bits decide how each is rounded."""
    count = 3000
    halfway = torch.tensor(0x3F808000, dtype=torch.int32).view(torch.float32)
    scalars = step_scalars(step=5, seed=7)
    plain = [torch.zeros(count), torch.full((count,), float(halfway) / (1 - BETA_1))]
    states = []
    for update in ("kernel", "plain"):
        weight, gradient = (tensor.clone() for tensor in plain)
        first, second = (torch.zeros(count, dtype=torch.bfloat16) for _ in range(2))
        if update == "kernel":
            options = {"betas": (BETA_1, BETA_2), "eps": EPS}
            adamw.update_bf16(weight, gradient, first, second, *scalars, 4, **options)
        else:
            optimizers._update_bf16(weight, gradient, (first, second), scalars, 4, 0)
        states.append((first, second))
    assert 0.4 < (states[0][0] > 1.001).float().mean() < 0.6
    for got, expected in zip(*states, strict=True):
        assert torch.equal(got, expected)


def test_a_second_moment_never_becomes_zero() -> None:
    """It gets the smallest code next to a large gradient in its block."""
    weight, gradient = torch.zeros(BLOCK), torch.full((BLOCK,), 1e-9)
    gradient[0] = 1.0
    state = optimizers._new_8bit(weight)
    moments = [state[name] for name in optimizers.EIGHT_BIT_STATE]
    options = {"betas": (BETA_1, BETA_2), "eps": EPS, "levels": (FIRST_LEVELS, SECOND_LEVELS)}
    scalars = step_scalars(step=1, seed=0)
    adamw.update_8bit(weight, gradient, *moments, *scalars, 0, **options)
    assert state["exp_avg_sq"].min() == 1
    assert state["exp_avg_sq"].max() == SECOND_LEVELS
