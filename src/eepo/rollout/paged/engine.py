"""The paged engine: decodes in CUDA graphs over a paged KV cache, and replaces rows as they end.

The host only queues work and schedules rows (`scheduler.py`). Sampled tokens stay on the GPU until
a call ends. The host looks for finished rows one chunk of steps late, so the GPU never waits for
it. Each prompt is prefilled once, packed with others, and its samples share its pages.

The sampled tokens are those of `TransformersEngine`, up to rounding. That engine is the reference,
and it takes over where this one is not supported (`builtin.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from eepo import kernels
from eepo.model import memory
from eepo.model.attention import ATTENTION_NAME, attention_mismatch
from eepo.rollout.paged.cuda_graphs import BufferSizes, DecodeBuffers, GraphSettings
from eepo.rollout.paged.kv_cache import PagedKVCache, Prefill, int_tensor
from eepo.rollout.paged.scheduler import (
    PAGE_SIZE,
    SCRATCH_PAGE,
    STEPS_AHEAD,
    Prefix,
    Row,
    Scheduler,
    pages_needed,
)
from eepo.rollout.randomness import row_key
from eepo.rollout.transformers import TransformersEngine
from eepo.types import Completion, Prompt, Sampling, first_line

log = logging.getLogger(__name__)

PREFILL_TOKENS = 16384  # in one pass
MAX_OUTPUT_TOKENS = 1 << 26  # in one pass; output buffers take 12 bytes per token
KEPT_SHARE = 0.1  # default `keep_bytes`, as a share of the GPU's memory
MEMORY_SHARE = 0.9  # the largest share of free memory that the KV cache takes
PAGE_MARGIN = 1.3  # pages allocated per slot, relative to the highest average use so far


class PagedEngine(TransformersEngine):
    """Samples with a paged KV cache and CUDA graphs. Owns `model`: pass a copy that is not trained.

    `release_memory` keeps a KV cache of at most `keep_bytes`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        max_rows: int = 1024,
        stop: str = "",
        keep_bytes: int | None = None,
    ) -> None:
        super().__init__(model, tokenizer, max_rows, stop)
        if keep_bytes is None:
            keep_bytes = int(KEPT_SHARE * _gpu_bytes(self.device))
        self.keep_bytes = keep_bytes
        self.continuous_rows = self.max_rows  # finished rows are replaced by waiting ones
        # `generate` calls it with the number of completions that have ended since the last time.
        self.on_finished: Callable[[int], None] = lambda number: None
        self.cache = PagedKVCache(model)
        self.end_tokens = _padded_to_power_of_two(self.end_tokens)
        self.graphs = GraphSettings(enabled=self.device.type == "cuda")
        self._buffers: DecodeBuffers | None = None
        self._short_of_memory = False  # the pages for all rows at full length did not fit
        # The most pages per slot that calls have needed so far. 0: unknown, or it was too few.
        self._pages_per_slot = 0.0

    def unsupported_reason(self) -> str:
        """Return why this engine cannot run the model, or "".

        Compares hidden states from the paged cache with those of the model's own attention.
        """
        if self.device.type == "cuda" and (reason := kernels.unavailable_reason()):
            return reason
        ids = torch.arange(1, 2 * PAGE_SIZE // 3, device=self.device).unsqueeze(0)
        ids %= self.model.config.vocab_size

        def last_two() -> Tensor:
            output = self.model.base_model(input_ids=ids, use_cache=False)
            return output.last_hidden_state[0, -2:]

        with torch.inference_mode():
            default_attention = self.model.config._attn_implementation
            expected = last_two()
            try:
                paged = self.cache.last_two_hidden_states(ids)
                reason = attention_mismatch(self.model, paged, expected, last_two)
            except (NotImplementedError, TypeError, RuntimeError, AttributeError) as error:
                reason = first_line(error)
        self.model.config._attn_implementation = default_attention if reason else ATTENTION_NAME
        return reason

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[list[Completion]]:
        groups: list[list[Completion]] = []
        per_pass = max(1, MAX_OUTPUT_TOKENS // (num_samples * sampling.max_new_tokens))
        for start in range(0, len(prompts), per_pass):
            groups += self._generate(prompts[start : start + per_pass], num_samples, sampling)
        return groups

    def release_memory(self) -> None:
        """Free the buffers if their KV cache is larger than `keep_bytes`.

        A small cache stays, with its CUDA graphs: capturing them takes longer than a short call.
        """
        if self._buffers is not None and self._buffers.num_bytes > self.keep_bytes:
            self._free_buffers()

    def completion_limit(self, prompt: Prompt, sample: int, sampling: Sampling) -> int:
        """Return the most tokens of one completion. Benchmarks override it to force lengths."""
        return sampling.max_new_tokens

    def _generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[list[Completion]]:
        prefixes = [
            Prefix(index, len(prompt.token_ids), num_samples)
            for index, prompt in enumerate(prompts)
        ]
        samples = [(prefix, sample) for prefix in prefixes for sample in range(num_samples)]
        rows, keys = [], []
        for output_index, (prefix, sample) in enumerate(samples):
            prompt = prompts[prefix.index]
            limit = self.completion_limit(prompt, sample, sampling)
            rows.append(Row(prefix, output_index, limit))
            keys.append(row_key(sampling, prompt, sampling.first_sample + sample))
        lengths = [prefix.length for prefix in prefixes]
        buffers = self._buffers_for(lengths, num_samples, sampling.max_new_tokens)
        buffers.reset(1 / sampling.temperature if sampling.temperature > 0 else 0.0)
        scheduler = Scheduler(rows, buffers.num_slots, buffers.num_pages)
        row_keys = torch.tensor(keys, device=self.device)
        _GenerateCall(self.cache, buffers, scheduler, prompts, row_keys, self.on_finished).run()
        self._record_page_use(scheduler, min(self.max_rows, len(rows)))
        completions = buffers.to_completions(len(rows), self.tokenizer)
        return [
            completions[start : start + num_samples] for start in range(0, len(rows), num_samples)
        ]

    def _record_page_use(self, scheduler: Scheduler, num_slots: int) -> None:
        """Remember how many pages the call needed, to size the next cache."""
        if scheduler.num_restarts or scheduler.ran_short:
            self._pages_per_slot = 0.0
        else:
            self._pages_per_slot = max(self._pages_per_slot, scheduler.peak_pages / num_slots)
        if scheduler.num_restarts:
            log.warning(
                "%d completions restarted: the KV cache is short of memory", scheduler.num_restarts
            )

    def _buffers_for(
        self, prompt_lengths: list[int], num_samples: int, max_new_tokens: int
    ) -> DecodeBuffers:
        """Return the buffers of the last call if they are large enough, or else new ones.

        The first call allocates pages for all rows at full length. These are seldom used, so later
        calls allocate what earlier ones needed, plus a margin.
        """
        num_rows = len(prompt_lengths) * num_samples
        num_slots = min(self.max_rows, -(-num_rows // 8) * 8)
        target, minimum = pages_needed(prompt_lengths, num_samples, max_new_tokens, num_slots)
        if self._pages_per_slot:
            used = int(PAGE_MARGIN * self._pages_per_slot * num_slots)
            target = min(target, max(minimum, used))
        max_length = max(prompt_lengths) + max_new_tokens
        sizes = BufferSizes(num_slots, max_length, num_rows, max_new_tokens)
        enough = minimum if self._short_of_memory else target
        if self._buffers is not None and self._buffers.fit(sizes, enough):
            return self._buffers
        self._free_buffers()
        self._buffers = self._allocate(sizes, target, minimum)
        num_pages = self._buffers.num_pages
        if num_pages < target and not self._short_of_memory:
            log.warning(
                "the KV cache holds %.0f %% of %d completions at full length",
                100 * num_pages / target,
                num_slots,
            )
        self._short_of_memory = num_pages < target
        return self._buffers

    def _allocate(self, sizes: BufferSizes, target: int, minimum: int) -> DecodeBuffers:
        """Allocate buffers with `target` pages, or with as many as fit into memory."""
        affordable = int(_free_bytes(self.device) * MEMORY_SHARE) // self.cache.page_bytes
        num_pages = max(minimum, min(target, affordable))
        while True:
            kept = num_pages * self.cache.page_bytes <= self.keep_bytes
            try:
                return DecodeBuffers(
                    self.cache, self.end_tokens, self.graphs, sizes, num_pages, kept
                )
            except torch.cuda.OutOfMemoryError:
                if num_pages == minimum:  # not even one completion fits; the caller names the knob
                    raise
                num_pages = max(minimum, num_pages // 2)

    def _free_buffers(self) -> None:
        self._buffers = None
        self.cache.free()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass
class _GenerateCall:
    """Runs all rows of one call through the slots."""

    cache: PagedKVCache
    buffers: DecodeBuffers
    scheduler: Scheduler
    prompts: Sequence[Prompt]
    row_keys: Tensor  # [N]
    on_finished: Callable[[int], None]
    # The hidden state of each prefilled prompt's last token, [H], by prompt index.
    last_hidden: dict[int, Tensor] = field(default_factory=dict)

    def run(self) -> None:
        previous: LiveRowsSnapshot | None = None
        while not self.scheduler.done:
            self._admit()
            self._reserve_pages()
            self.scheduler.record_peak()
            num_rows = self.scheduler.decode_width()
            for _ in range(STEPS_AHEAD):
                self.buffers.step(num_rows)
            snapshot = LiveRowsSnapshot(self.buffers.state.live, self.scheduler.running)
            # The GPU works on the queued steps while the host handles the previous snapshot.
            if previous is not None:
                self._remove_finished(previous)
            previous = snapshot

    def _admit(self) -> None:
        """Prefill prompts and start rows until no more fit."""
        while True:
            prefixes = self.scheduler.schedule_prefill(STEPS_AHEAD, PREFILL_TOKENS)
            if prefixes:
                indices = [prefix.index for prefix in prefixes]
                hidden = self._prefill(prefixes)
                self.last_hidden |= dict(zip(indices, hidden.unbind(), strict=True))
            rows = self.scheduler.admit(STEPS_AHEAD)
            if not rows:
                return
            self._start(rows)

    def _prefill(self, prefixes: list[Prefix]) -> Tensor:  # [P, H]
        ids: list[Sequence[int]] = [self.prompts[prefix.index].token_ids for prefix in prefixes]
        page_tables = [prefix.pages for prefix in prefixes]
        self.cache.prefill = Prefill.of_prompts(ids, page_tables, self.row_keys.device)
        try:
            return self.cache.prefill.run(self.cache.model)
        finally:
            self.cache.prefill = None

    def _start(self, rows: list[Row]) -> None:
        """Set up rows in their slots and sample their first tokens."""
        indices = list(dict.fromkeys(row.prefix.index for row in rows))
        hidden = torch.stack([self.last_hidden[index] for index in indices])
        self._copy_partial_pages(rows)
        self._write_state(rows)
        source = {index: i for i, index in enumerate(indices)}
        pairs = int_tensor([[source[row.prefix.index], row.slot] for row in rows], hidden.device)
        self.buffers.sample(hidden, *pairs.t().contiguous())

    def _copy_partial_pages(self, rows: list[Row]) -> None:
        """Copy the last, partly filled page of a prompt for each row: rows write into it."""
        copies = [
            (row.prefix.pages[-1], row.pages[0]) for row in rows if row.prefix.length % PAGE_SIZE
        ]
        pages = self.cache.pages
        if copies and pages is not None:
            source, target = int_tensor(copies, pages.device).t()
            pages[:, :, target] = pages[:, :, source]

    def _write_state(self, rows: list[Row]) -> None:
        state, page_tables = self.buffers.state, self.buffers.page_tables
        numbers = [
            [row.slot, row.prefix.length - 1, row.max_new_tokens, row.output_index] for row in rows
        ]
        columns = int_tensor(numbers, self.row_keys.device).t().contiguous()
        slots, positions, limits, outputs = columns
        state.positions[slots], state.limits[slots] = positions, limits
        state.outputs[slots], state.keys[slots] = outputs, self.row_keys[outputs]
        state.live.index_fill_(0, slots, 1)
        state.num_sampled.index_fill_(0, slots, 0)
        tables = [[*row.prefix.pages[: row.prefix.num_full_pages], *row.pages] for row in rows]
        width = max(map(len, tables))
        padded = [[*table, *([SCRATCH_PAGE] * (width - len(table)))] for table in tables]
        page_tables[slots, :width] = int_tensor(padded, page_tables.device).int()

    def _reserve_pages(self) -> None:
        added, freed = self.scheduler.reserve_pages(STEPS_AHEAD)
        if freed:
            self.buffers.clear_slots(freed)
        if added:
            slots, indices, pages = int_tensor(added, self.row_keys.device).t()
            self.buffers.page_tables[slots, indices] = pages.int()

    def _remove_finished(self, snapshot: LiveRowsSnapshot) -> None:
        finished = snapshot.finished_rows()
        if finished:
            self.buffers.clear_slots([self.scheduler.finish(row) for row in finished])
            self.on_finished(len(finished))
        if self.scheduler.waiting:
            return
        size = self.buffers.graph_size(self.scheduler.decode_width())
        if self.buffers.graph_size(self.scheduler.num_running) < size:
            self._compact()

    def _compact(self) -> None:
        """Move rows to the lowest slots. Their pages stay; only state and page tables move."""
        previous_slots = int_tensor(self.scheduler.compact(), self.row_keys.device)
        num_rows, state = len(previous_slots), self.buffers.state
        for tensor in (*(getattr(state, f.name) for f in fields(state)), self.buffers.page_tables):
            tensor[:num_rows] = tensor[previous_slots]
        self.buffers.clear_slots(range(num_rows, self.buffers.num_slots))


class LiveRowsSnapshot:
    """Copies which rows are live at this point of the GPU's queue, without blocking the host."""

    def __init__(self, live: Tensor, rows: list[Row]) -> None:
        self.rows = [(row, row.slot) for row in rows]
        host_copy = torch.empty(live.shape, dtype=live.dtype, pin_memory=live.is_cuda)
        self.live = host_copy.copy_(live, non_blocking=True)
        self.copied = torch.cuda.Event() if live.is_cuda else None
        if self.copied is not None:
            self.copied.record()

    def finished_rows(self) -> list[Row]:
        """Wait for the copy; return rows that were in a slot but not live.

        A row that has restarted since then has left its slot, and is not finished.
        """
        if self.copied is not None:
            self.copied.synchronize()
        live = self.live.tolist()
        return [row for row, slot in self.rows if not live[slot] and row.slot >= 0]


def _padded_to_power_of_two(end_tokens: Tensor) -> Tensor:
    """Append -1, which is no token: the sampling kernel needs a power of two."""
    size = 1 << (len(end_tokens) - 1).bit_length()
    return torch.nn.functional.pad(end_tokens, (0, size - len(end_tokens)), value=-1)


def _free_bytes(device: torch.device) -> int:
    return (memory.free_memory(device) or 0) if device.type == "cuda" else 1 << 30


def _gpu_bytes(device: torch.device) -> int:
    return memory.gpu_memory(device) if device.type == "cuda" else 1 << 34
