"""Triton kernels, each with a plain torch version that tests compare it to.

The plain version also runs where Triton cannot.
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

MODULES = {"sample_tokens": "sampling", "paged_attention": "paged_attention"}


@cache
def triton_unavailable_reason() -> str:
    """Return why Triton cannot compile on this machine, or ""."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
        return "Triton finds no C compiler (gcc, clang or the one that CC names)"
    return ""


def unavailable_reason() -> str:
    """Return why our kernels cannot run on a GPU here, or "". `EEPO_KERNELS=0` turns them off."""
    if os.environ.get("EEPO_KERNELS") == "0":
        return "EEPO_KERNELS is 0"
    return triton_unavailable_reason()


def available(device: torch.device) -> bool:
    """Tell whether our kernels can run on tensors of `device`.

    Triton's interpreter (`TRITON_INTERPRET=1`) runs them on any device, without a compiler.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        installed = importlib.util.find_spec("triton") is not None
        return installed and os.environ.get("EEPO_KERNELS") != "0"
    return device.type == "cuda" and not unavailable_reason()


def select(name: str, device: torch.device) -> Callable[..., Any]:
    """Return the kernel of this name if it can run on `device`, else its plain version."""
    module = f"eepo.kernels.{MODULES[name]}" if available(device) else "eepo.kernels.reference"
    return getattr(importlib.import_module(module), name)
