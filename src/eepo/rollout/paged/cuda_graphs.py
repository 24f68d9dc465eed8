"""Decode buffers at fixed addresses, and the CUDA graphs that read and write them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from eepo import kernels
from eepo.kernels.row_state import Outputs, RowState
from eepo.model.lm_head import LMHead
from eepo.rollout.paged.kv_cache import PagedKVCache, int_tensor
from eepo.rollout.paged.scheduler import PAGE_SIZE, SCRATCH_PAGE, STEPS_AHEAD
from eepo.rollout.transformers import build_completions
from eepo.types import Completion, first_line

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BufferSizes:
    """The sizes of one call that its buffers must hold."""

    num_slots: int
    max_length: int  # tokens of the longest prompt plus `max_new_tokens`
    num_completions: int
    max_new_tokens: int


@dataclass
class GraphSettings:
    """Settings of CUDA graphs that outlive the buffers."""

    enabled: bool  # turned off when a capture fails
    # Sizes of decode steps that ran before, so that their kernels are loaded.
    warmed_up: set[tuple[int, ...]] = field(default_factory=set)


class DecodeBuffers:
    """Owns the tensors that decode steps read and write, and the CUDA graphs of these steps.

    A CUDA graph contains addresses, so the tensors never move. `kept` says that the buffers
    outlive a call, which makes it worthwhile to capture graphs of more sizes.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        end_tokens: Tensor,
        graphs: GraphSettings,
        sizes: BufferSizes,
        num_pages: int,
        kept: bool,
    ) -> None:
        device, num_slots = end_tokens.device, sizes.num_slots
        self.cache, self.end_tokens, self.graphs = cache, end_tokens, graphs
        self.num_slots, self.num_pages = num_slots, num_pages
        self.state = RowState.empty(num_slots, device)
        self.outputs = _new_outputs(sizes.num_completions, sizes.max_new_tokens, device)
        width = -(-(sizes.max_length + STEPS_AHEAD) // PAGE_SIZE) + 1
        self.page_tables = torch.full(
            (num_slots, width), SCRATCH_PAGE, dtype=torch.int32, device=device
        )
        self.all_slots = torch.arange(num_slots, device=device)
        self.inverse_temperature = torch.zeros(1, device=device)
        cache.allocate(num_pages, self.page_tables, self.state.positions)
        self.num_bytes = num_pages * cache.page_bytes
        self.graph_sizes = graph_sizes(num_slots, kept)
        self._graphs: dict[int, Any] = {}
        self._graph_memory: Any = None

    def fit(self, sizes: BufferSizes, num_pages: int) -> bool:
        """Return whether a call of these sizes, with at least `num_pages` pages, fits."""
        num_completions, max_new_tokens = self.outputs.tokens.shape
        max_length = (self.page_tables.shape[1] - 1) * PAGE_SIZE - STEPS_AHEAD
        return (
            self.num_pages >= num_pages
            and max_length >= sizes.max_length
            and self.num_slots >= sizes.num_slots
            and num_completions >= sizes.num_completions
            and max_new_tokens >= sizes.max_new_tokens
        )

    def reset(self, inverse_temperature: float) -> None:
        self.inverse_temperature.fill_(inverse_temperature)
        self.clear_slots(range(self.num_slots))

    def clear_slots(self, slots: Iterable[int]) -> None:
        """Mark slots as empty: they write to the scratch page and sample nothing."""
        indices = int_tensor(list(slots), self.all_slots.device)
        for tensor in (self.state.live, self.state.positions, self.page_tables):
            tensor.index_fill_(0, indices, 0)

    def graph_size(self, num_rows: int) -> int:
        """Return the smallest graph size that covers `num_rows` slots."""
        return next(size for size in self.graph_sizes if size >= num_rows)

    def step(self, num_rows: int) -> None:
        """Sample one more token for each live row of the lowest `num_rows` slots."""
        size = self.graph_size(num_rows)
        if self.graphs.enabled and size not in self._graphs:
            self._capture(size)
        if self.graphs.enabled:
            self._graphs[size].replay()
        else:
            self._run_step(size)

    def _run_step(self, size: int) -> None:
        hidden = self.cache.decode(self.state.tokens[:size], self.state.positions[:size])
        self.sample(hidden, self.all_slots[:size], self.all_slots[:size])

    def sample(self, hidden: Tensor, sources: Tensor, slots: Tensor) -> None:
        """Sample one token for each of `slots`, from the hidden state at its index in `sources`."""
        sample_tokens = kernels.select("sample_tokens", hidden.device)
        logits = LMHead.from_model(self.cache.model).logits(hidden)
        options = self.inverse_temperature, self.end_tokens
        sample_tokens(logits, sources, slots, *options, self.state, self.outputs)

    def _capture(self, size: int) -> None:
        """Capture the graph of one size, or turn off CUDA graphs if that fails.

        No row is live meanwhile, so nothing is sampled, and the step only rewrites the keys and
        values that are already there. Kernels are loaded on first use, which must not happen
        within a capture. So a plain step runs first, unless a step of these sizes ran before. If
        the capture then fails, it is tried once more after a plain step.
        """
        live = self.state.live.clone()
        self.state.live.zero_()
        sizes = size, self.num_pages, self.page_tables.shape[1], self.outputs.tokens.shape[1]
        warmed_up = self.graphs.warmed_up
        error = self._try_capture(size) if sizes in warmed_up else "not warmed up"
        if error:
            self._run_step(size)
            warmed_up.add(sizes)
            error = self._try_capture(size)
        if error:
            log.warning("sampling without CUDA graphs: %s", error)
            self.graphs.enabled = False
        self.state.live.copy_(live)

    def _try_capture(self, size: int) -> str:
        """Capture the graph of one size; return the error as one line, or ""."""
        graph = torch.cuda.CUDAGraph()
        try:
            # The default forbids that another thread waits for a copy (`StepBackup`).
            mode = "thread_local"
            with torch.cuda.graph(graph, pool=self._graph_memory, capture_error_mode=mode):
                self._run_step(size)
        except RuntimeError as error:
            return first_line(error)
        self._graphs[size], self._graph_memory = graph, self._graph_memory or graph.pool()
        return ""

    def to_completions(self, num_completions: int, tokenizer: Any) -> list[Completion]:
        """Copy the sampled tokens, and no padding, to the host."""
        out = self.outputs
        lengths = out.lengths[:num_completions].tolist()
        longest = max(lengths)
        positions = torch.arange(longest, device=out.lengths.device)
        sampled = positions < out.lengths[:num_completions, None]
        columns = [
            list(_split(matrix[:num_completions, :longest][sampled].tolist(), lengths))
            for matrix in (out.tokens, out.logprobs, out.entropies)
        ]
        return build_completions(columns, out.finished[:num_completions].tolist(), tokenizer)


def graph_sizes(num_slots: int, kept: bool) -> list[int]:
    """Return the numbers of rows for which graphs are captured.

    Sizes are closer together where rows are many, since padding rows cost more there. A capture
    costs time, too: twice as many sizes pay off only if the graphs are kept for later calls.
    """
    candidates = (8, 16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 896)
    sizes = [size for size in candidates if size < num_slots]
    sizes += [*range(1024, num_slots, 256), num_slots]
    between = [(low + high) // 16 * 8 for low, high in pairwise(sizes) if low >= 32] if kept else []
    return sorted({*sizes, *between})


def _new_outputs(num_completions: int, max_new_tokens: int, device: torch.device) -> Outputs:
    shape = num_completions, max_new_tokens
    return Outputs(
        tokens=torch.zeros(shape, dtype=torch.int32, device=device),
        logprobs=torch.zeros(shape, device=device),
        entropies=torch.zeros(shape, device=device),
        lengths=torch.zeros(num_completions, dtype=torch.int32, device=device),
        finished=torch.zeros(num_completions, dtype=torch.int32, device=device),
    )


def _split(values: list[Any], lengths: list[int]) -> Iterator[tuple[Any, ...]]:
    start = 0
    for length in lengths:
        yield tuple(values[start : start + length])
        start += length
