"""Triton kernels, each with the same function in plain torch beside it: the reference of its tests, and what runs
where there is no Triton.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def lacking() -> str:
    """What Triton lacks to run on a GPU, in a few words."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
        return "Triton finds no C compiler (gcc, clang, or what CC names)"
    return ""


def missing() -> str:
    """What keeps our kernels from running there. `EEPO_KERNELS=0` does, to compare or to find a fault."""
    return "EEPO_KERNELS is 0" if os.environ.get("EEPO_KERNELS") == "0" else lacking()


def available(device: torch.device) -> bool:
    """Whether kernels can run on tensors of `device`; anywhere, if Triton interprets, which needs no compiler."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return (
            os.environ.get("EEPO_KERNELS") != "0" and importlib.util.find_spec("triton") is not None
        )
    return device.type == "cuda" and not missing()


MODULES = {"sample_tokens": "sampling", "paged_attention": "paged_attention"}


def chosen(name: str, device: torch.device) -> Callable[..., Any]:
    """The kernel of this name where it can run, or its plain form."""
    module = f"eepo.kernels.{MODULES[name]}" if available(device) else "eepo.kernels.reference"
    return getattr(importlib.import_module(module), name)
