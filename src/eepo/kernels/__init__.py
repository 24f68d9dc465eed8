"""Triton kernels, each with the same function in plain torch beside it: the reference of its tests, and what runs
where there is no Triton.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch


def available(device: torch.device) -> bool:
    """Whether kernels can run on tensors of `device`. `EEPO_KERNELS=0` says no, to compare or to find a fault."""
    if os.environ.get("EEPO_KERNELS") == "0" or importlib.util.find_spec("triton") is None:
        return False
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def chosen(name: str, device: torch.device) -> Callable[..., Any]:
    """The kernel of this name where it can run, or its plain form."""
    module = f"eepo.kernels.{name}" if available(device) else "eepo.kernels.reference"
    return getattr(importlib.import_module(module), name)
