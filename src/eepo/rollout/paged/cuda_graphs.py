"""What decode steps on a GPU read and write, at fixed addresses, and the CUDA graphs that know these."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eepo import kernels
from eepo.kernels.row_state import Outputs, RowState
from eepo.model.lm_head import Head
from eepo.rollout.paged.kv_cache import send_numbers
from eepo.rollout.paged.scheduler import AHEAD, PAGE, SCRATCH
from eepo.types import Completion

if TYPE_CHECKING:
    from eepo.rollout.paged.engine import PagedEngine

log = logging.getLogger(__name__)


class Buffers:
    """All that decode steps read and write, at fixed addresses, and the graphs that know these."""

    def __init__(
        self,
        engine: PagedEngine,
        num_pages: int,
        num_slots: int,
        longest: int,
        num_lines: int,
        max_new_tokens: int,
    ) -> None:
        self.engine, self.num_slots, self.num_pages = engine, num_slots, num_pages
        device = engine.device
        self.state = RowState.of(num_slots, device)
        self.outputs = Outputs(
            tokens=torch.zeros(num_lines, max_new_tokens, dtype=torch.int32, device=device),
            logprobs=torch.zeros(num_lines, max_new_tokens, device=device),
            entropies=torch.zeros(num_lines, max_new_tokens, device=device),
            lengths=torch.zeros(num_lines, dtype=torch.int32, device=device),
            finished=torch.zeros(num_lines, dtype=torch.int32, device=device),
        )
        width = -(-(longest + AHEAD) // PAGE) + 1
        self.tables = torch.full((num_slots, width), SCRATCH, dtype=torch.int32, device=device)
        self.every = torch.arange(num_slots, device=device)
        self.inverse_temperature = torch.zeros(1, device=device)
        engine.cache.make(num_pages, self.tables, self.state.positions)
        self.num_bytes = num_pages * engine.cache.page_bytes
        self.sizes = _sizes(num_slots, self.num_bytes <= engine.keep_bytes)
        self._graphs: dict[int, Any] = {}
        self._memory: Any = None

    def hold(self, num_slots: int, longest: int, num_lines: int, max_new_tokens: int) -> bool:
        """Whether a call of these sizes finds room; pages are another matter."""
        lines, tokens = self.outputs.tokens.shape
        wide = self.tables.shape[1] * PAGE >= longest + AHEAD + PAGE
        return (
            wide and self.num_slots >= num_slots and lines >= num_lines and tokens >= max_new_tokens
        )

    def reset(self, inverse_temperature: float) -> None:
        self.inverse_temperature.fill_(inverse_temperature)
        self.clear(range(self.num_slots))

    def clear(self, slots: Iterable[int]) -> None:
        """Slots without a row write to the scratch page, and draw nothing."""
        index = send_numbers(list(slots), self.every.device)
        for one in (self.state.live, self.state.positions, self.tables):
            one.index_fill_(0, index, 0)

    def step(self, num_rows: int) -> None:
        """One token more for the live ones of the lowest slots, in a graph of the next larger size."""
        size = next(size for size in self.sizes if size >= num_rows)
        if self.engine.graphs and size not in self._graphs:
            self._capture(size)
        if self.engine.graphs:
            self._graphs[size].replay()
        else:
            self._step(size)

    def _step(self, size: int) -> None:
        hidden = self.engine.cache.decode(self.state.tokens[:size], self.state.positions[:size])
        self.draw(hidden, self.every[:size], self.every[:size])

    def draw(self, hidden: Tensor, sources: Tensor, slots: Tensor) -> None:
        draw = kernels.chosen("sample_tokens", hidden.device)
        logits = Head.of(self.engine.model).logits(hidden)
        draw(
            logits,
            sources,
            slots,
            self.inverse_temperature,
            self.engine.ends,
            self.state,
            self.outputs,
        )

    def _capture(self, size: int) -> None:
        """With no row live: nothing is drawn, and keys and values that a step writes are those that are there.

        Kernels are loaded when sizes are first asked for, which must not be within a capture: a step comes first,
        unless one of these sizes ran before; and then, too, if the capture fails.
        """
        live = self.state.live.clone()
        self.state.live.zero_()
        sizes = size, self.num_pages, self.tables.shape[1], self.outputs.tokens.shape[1]
        problem = self._captured(size) if sizes in self.engine.warm else "not tried"
        if problem:
            self._step(size)
            self.engine.warm.add(sizes)
            problem = self._captured(size)
        if problem:
            log.warning("sampling without CUDA graphs: %s", problem)
            self.engine.graphs = False
        self.state.live.copy_(live)

    def _captured(self, size: int) -> str:
        """Why not, in a line; nothing if it was."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._memory):
                self._step(size)
        except RuntimeError as error:
            return (str(error).strip() or type(error).__name__).splitlines()[0]
        self._graphs[size], self._memory = graph, self._memory or graph.pool()
        return ""

    def completions(self, num_lines: int, tokenizer: Any) -> list[Completion]:
        """Only tokens that exist leave the card, in three pieces."""
        out = self.outputs
        lengths = out.lengths[:num_lines].tolist()
        exist = (
            torch.arange(max(lengths), device=out.lengths.device) < out.lengths[:num_lines, None]
        )
        columns = [
            list(_cut(matrix[:num_lines, : max(lengths)][exist].tolist(), lengths))
            for matrix in (out.tokens, out.logprobs, out.entropies)
        ]
        texts = tokenizer.batch_decode([list(ids) for ids in columns[0]], skip_special_tokens=True)
        finished = out.finished[:num_lines].tolist()
        return [
            Completion(
                token_ids=tokens,
                logprobs=logprobs,
                text=text,
                finished=bool(done),
                entropies=entropies,
            )
            for tokens, logprobs, entropies, text, done in zip(
                *columns, texts, finished, strict=True
            )
        ]


def _sizes(num_slots: int, kept: bool) -> list[int]:
    """Of the graphs: finer where rows are many, as that is where padding rows would cost.

    To capture one costs, too. Twice as many pay where they stay for later calls.
    """
    sizes = [
        size for size in (8, 16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 896) if size < num_slots
    ]
    sizes += [*range(1024, num_slots, 256), num_slots]
    between = [(low + high) // 16 * 8 for low, high in pairwise(sizes) if low >= 32] if kept else []
    return sorted({*sizes, *between})


def _cut(values: list[Any], lengths: list[int]) -> Iterator[tuple[Any, ...]]:
    start = 0
    for length in lengths:
        yield tuple(values[start : start + length])
        start += length
