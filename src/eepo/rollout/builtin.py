"""Which of the two engines in this process samples: the fast one where it can, the one that runs everywhere else."""

from __future__ import annotations

import logging
from typing import Any

from eepo.model.compilation import wants_compiling
from eepo.rollout.fused_linear import compile_packed
from eepo.rollout.paged.engine import PagedEngine
from eepo.rollout.transformers import TransformersEngine

log = logging.getLogger(__name__)


def embedded_engine(
    model: Any,
    tokenizer: Any,
    max_rows: int = 1024,
    stop: str = "",
    compiled: str = "auto",
    keep_bytes: int | None = None,
) -> TransformersEngine:
    """Owns `model`: give it a copy that nobody trains. On a GPU it keeps `keep_bytes` of cache while it rests."""
    if model.device.type != "cuda":
        return TransformersEngine(model, tokenizer, max_rows, stop)
    engine = PagedEngine(model, tokenizer, max_rows, stop, keep_bytes)
    problem = engine.unusable()
    if problem:
        log.warning("sampling without pages and CUDA graphs, which is slower: %s", problem)
        return TransformersEngine(model, tokenizer, max_rows, stop)
    if wants_compiling(model, compiled):
        compile_packed(model)
    return engine
