"""The built-in engine: `PagedEngine` on a GPU, `TransformersEngine` elsewhere."""

from __future__ import annotations

import logging
from typing import Any

from eepo.model.compilation import should_compile_layers
from eepo.rollout.fused_linear import compile_fused
from eepo.rollout.paged.engine import PagedEngine
from eepo.rollout.transformers import TransformersEngine

log = logging.getLogger(__name__)

PAGED_ROWS = 1024  # defaults of `max_rows`
UNPAGED_ROWS = 128  # each row has a KV cache of the full length


def builtin_engine(
    model: Any,
    tokenizer: Any,
    max_rows: int = 0,
    stop: str = "",
    compiled: str = "auto",
    keep_bytes: int | None = None,
) -> TransformersEngine:
    """Build the built-in engine on `model`, which must be a copy that is not trained.

    With `max_rows = 0`, the engine has its default. On a GPU, up to `keep_bytes` of KV cache stay
    allocated between calls. If the paged engine does not support the model, a warning gives the
    reason and `TransformersEngine` takes its place.
    """
    if model.device.type != "cuda":
        return TransformersEngine(model, tokenizer, max_rows or UNPAGED_ROWS, stop)
    engine = PagedEngine(model, tokenizer, max_rows or PAGED_ROWS, stop, keep_bytes)
    reason = engine.unsupported_reason()
    if reason:
        log.warning("sampling is slower, without paged KV cache and CUDA graphs: %s", reason)
        return TransformersEngine(model, tokenizer, max_rows or UNPAGED_ROWS, stop)
    if should_compile_layers(model, compiled):
        compile_fused(model)
    return engine
