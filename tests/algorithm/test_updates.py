"""The optimizer step: clipping, and errors for gradients that are not finite."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from eepo.algorithm.updates import optimizer_step
from eepo.types import UserError


def policy_with_gradient(gradient: list[float]) -> SimpleNamespace:
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model.weight.grad = torch.tensor([gradient])
    return SimpleNamespace(model=model)


@pytest.mark.parametrize(("max_grad_norm", "expected"), [(10.0, [-3.0, -4.0]), (1.0, [-0.6, -0.8])])
def test_the_gradient_is_clipped_applied_and_cleared(
    max_grad_norm: float, expected: list[float]
) -> None:
    policy = policy_with_gradient([3.0, 4.0])
    optimizer = torch.optim.SGD(policy.model.parameters(), lr=1.0)
    assert optimizer_step(policy, optimizer, max_grad_norm) == pytest.approx(5.0)  # before clipping
    assert policy.model.weight[0].tolist() == pytest.approx(expected, rel=1e-5)
    assert policy.model.weight.grad is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_an_error_and_leaves_the_weights(value: float) -> None:
    policy = policy_with_gradient([value, 1.0])
    optimizer = torch.optim.SGD(policy.model.parameters(), lr=1.0)
    with pytest.raises(UserError, match=rf"the gradient norm is {value}; start a new run"):
        optimizer_step(policy, optimizer, 1.0)
    assert policy.model.weight[0].tolist() == [0.0, 0.0]
