"""Recognises TRL's reference pass of a PEFT model, which has no reference model of its own."""

from __future__ import annotations

import importlib.util
from typing import Any

REFERENCE_ADAPTER = "ref"  # TRL's name for the copy of a pretrained adapter


def is_reference_pass(model: Any) -> bool:
    """Return whether TRL has turned the trained adapter off, or put its first state in its place.

    It does so around the reference pass if `beta` is not 0, and calls the trained model.
    """
    if importlib.util.find_spec("peft") is None:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    # Not by attributes: plain models of `transformers` have methods with the same names.
    layers = (module for module in model.modules() if isinstance(module, BaseTunerLayer))
    layer = next(layers, None)
    if layer is None:
        return False
    return bool(layer.disable_adapters) or REFERENCE_ADAPTER in layer.active_adapters
