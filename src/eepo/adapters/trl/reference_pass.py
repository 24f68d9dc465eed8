"""Recognises TRL's reference pass of a PEFT model, which has no reference model of its own."""

from __future__ import annotations

from typing import Any

REFERENCE_ADAPTER = "ref"  # TRL's name for the copy of a pretrained adapter


def is_reference_pass(model: Any) -> bool:
    """Return whether TRL has turned the trained adapter off, or put its first state in its place.

    It does so around the reference pass if `beta` is not 0, and calls the trained model.
    """
    for module in model.modules():
        if hasattr(module, "disable_adapters") and hasattr(module, "active_adapters"):
            return module.disable_adapters or REFERENCE_ADAPTER in module.active_adapters
    return False
