"""Applies an accumulated gradient to θ."""

from __future__ import annotations

import math

import torch

from eepo.model.policy import Policy
from eepo.types import UserError


def optimizer_step(policy: Policy, optimizer: torch.optim.Optimizer, max_grad_norm: float) -> float:
    """Clip the gradient, update θ, clear the gradient, and return its norm.

    A gradient that is not finite would destroy θ and every later checkpoint, so it is an error.
    """
    norm = float(torch.nn.utils.clip_grad_norm_(policy.model.parameters(), max_grad_norm))
    if not math.isfinite(norm):
        raise UserError(
            f"the gradient norm is {norm}; start a new run with a lower unlearn_lr or "
            "learning_rate, for example from a checkpoint of this run (model.path = its folder)"
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
