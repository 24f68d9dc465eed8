"""The embedded engine on a GPU: decode steps in CUDA graphs over a paged cache, rows replaced as they end.

The host only queues work and keeps the books of `slots.py`; what was drawn stays on the card until a call ends. It
looks for ended rows one chunk of steps late, so that the card never waits for it. Each prompt is prefilled once,
packed with others, and its samples share its pages. Draws are those of `TransformersEngine` up to rounding: that one
is the reference, and runs where this one cannot (`embedded.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from eepo import kernels
from eepo.model import memory
from eepo.model.attention import NAME, strays
from eepo.rollout.paged.cuda_graphs import Buffers
from eepo.rollout.paged.kv_cache import PagedCache, Prefill, send_numbers
from eepo.rollout.paged.scheduler import AHEAD, PAGE, SCRATCH, Prefix, Row, Slots, pages_needed
from eepo.rollout.randomness import row_key
from eepo.rollout.transformers import TransformersEngine
from eepo.types import Completion, Prompt, Sampling, UserError

log = logging.getLogger(__name__)

PREFILL_TOKENS = 16384  # at a time
KEEP_SHARE = 0.1  # of the card, if nobody says otherwise: the largest cache that stays, with its graphs, in a rest
SPARE = 1.3  # times the pages that a slot has held on average, at most, in the calls so far: what the next ones get
MEMORY_SHARE = 0.9  # of what is free: what a cache may take
MAX_OUTPUTS = 1 << 26  # tokens drawn in one go: 12 bytes each


class PagedEngine(TransformersEngine):
    """Owns `model`: give it a copy that nobody trains. While it rests it keeps a cache of at most `keep_bytes`."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        max_rows: int = 1024,
        stop: str = "",
        keep_bytes: int | None = None,
    ) -> None:
        super().__init__(model, tokenizer, max_rows, stop)
        self.graphs = self.device.type == "cuda"
        self.keep_bytes = (
            int(KEEP_SHARE * _card_bytes(self.device)) if keep_bytes is None else keep_bytes
        )
        self.cache = PagedCache(model)
        self.ends = _power_of_two(self._eos.tolist(), self.device)
        self._buffers: Buffers | None = None
        self.warm: set[tuple[int, ...]] = set()  # sizes whose kernels are loaded
        self._short = False  # of memory for all pages that might be wanted
        self._per_slot = (
            0.0  # pages at most, in the calls so far; 0: not known, or it was not enough
        )

    def unusable(self) -> str:
        """Why, in a few words; nothing if the paged model says what the family's own attention says."""
        if self.device.type == "cuda" and (missing := kernels.missing()):
            return missing
        ids = (
            torch.arange(1, 2 * PAGE // 3, device=self.device).unsqueeze(0)
            % self.model.config.vocab_size
        )
        with torch.inference_mode():
            usual = self.model.config._attn_implementation

            def last_two() -> Tensor:
                return self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[
                    0, -2:
                ]

            expected = last_two()
            try:
                reason = strays(self.model, self.cache.try_out(ids), expected, last_two)
            except (NotImplementedError, TypeError, RuntimeError, AttributeError) as error:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        self.model.config._attn_implementation = usual if reason else NAME
        return reason

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[list[Completion]]:
        groups: list[list[Completion]] = []
        per_call = max(1, MAX_OUTPUTS // (num_samples * sampling.max_new_tokens))
        for start in range(0, len(prompts), per_call):
            groups += self._generate(prompts[start : start + per_call], num_samples, sampling)
        return groups

    def release_memory(self) -> None:
        """A small cache stays, with its graphs, which take longer to capture than a short call takes."""
        if self._buffers is not None and self._buffers.num_bytes > self.keep_bytes:
            self._forget_buffers()

    def limit(self, prompt: Prompt, sample: int, sampling: Sampling) -> int:
        """Most tokens of one completion. Benchmarks put lengths of their own here."""
        return sampling.max_new_tokens

    def _generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[list[Completion]]:
        prefixes = [
            Prefix(place, len(prompt.token_ids), num_samples)
            for place, prompt in enumerate(prompts)
        ]
        rows = [
            Row(
                prefix,
                prefix.place * num_samples + sample,
                self.limit(prompts[prefix.place], sample, sampling),
            )
            for prefix in prefixes
            for sample in range(num_samples)
        ]
        keys = [
            row_key(sampling, prompt, sampling.first_sample + s)
            for prompt in prompts
            for s in range(num_samples)
        ]
        buffers = self._room_for(
            [prefix.length for prefix in prefixes], num_samples, sampling.max_new_tokens
        )
        buffers.reset(1 / sampling.temperature if sampling.temperature > 0 else 0.0)
        slots = Slots(rows, buffers.num_slots, buffers.num_pages)
        _Run(self, buffers, slots, prompts, torch.tensor(keys, device=self.device)).finish()
        used = slots.most_pages / min(self.max_rows, len(rows))
        self._per_slot = 0.0 if slots.num_restarts or slots.waited else max(self._per_slot, used)
        if slots.num_restarts:
            log.warning(
                "%d completions began again: the cache is short of memory", slots.num_restarts
            )
        completions = buffers.completions(len(rows), self.tokenizer)
        return [
            completions[start : start + num_samples] for start in range(0, len(rows), num_samples)
        ]

    def _room_for(
        self, prompt_lengths: list[int], num_samples: int, max_new_tokens: int
    ) -> Buffers:
        """What the last call left, if it is large enough; else a larger one, as far as memory goes.

        Room for all rows at their longest is seldom used: from the second call on, what calls have held is the measure.
        """
        num_rows = len(prompt_lengths) * num_samples
        num_slots = min(self.max_rows, -(-num_rows // 8) * 8)
        wanted, least = pages_needed(prompt_lengths, num_samples, max_new_tokens, num_slots)
        if self._per_slot:
            wanted = min(wanted, max(least, int(SPARE * self._per_slot * num_slots)))
        longest = max(prompt_lengths) + max_new_tokens
        sizes = num_slots, longest, num_rows, max_new_tokens
        enough = least if self._short else wanted
        if (
            self._buffers is not None
            and self._buffers.hold(*sizes)
            and self._buffers.num_pages >= enough
        ):
            return self._buffers
        self._forget_buffers()
        pages = max(
            least,
            min(wanted, int(_free_bytes(self.device) * MEMORY_SHARE) // self.cache.page_bytes),
        )
        while self._buffers is None:
            try:
                self._buffers = Buffers(self, pages, *sizes)
            except torch.cuda.OutOfMemoryError as error:
                if pages == least:
                    raise UserError(
                        f"not one completion of max_new_tokens = {max_new_tokens} fits into the GPU's free memory; "
                        "give fewer, or make room (eepo doctor says which knobs do)"
                    ) from error
                pages = max(least, pages // 2)
        if pages < wanted and not self._short:
            log.warning(
                "the cache has room for %.0f %% of %d rows at their longest",
                100 * pages / wanted,
                num_slots,
            )
        self._short = pages < wanted
        return self._buffers

    def _forget_buffers(self) -> None:
        self._buffers = None
        self.cache.pool = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass
class _Run:
    """One call: rows in, rows out, until none is left."""

    engine: PagedEngine
    buffers: Buffers
    slots: Slots
    prompts: Sequence[Prompt]
    keys: Tensor  # [lines]
    hidden: dict[int, Tensor] = field(
        default_factory=dict
    )  # of prepared prompts, by place: [H] of their last tokens

    def finish(self) -> None:
        last: _Sight | None = None
        while not self.slots.done:
            self.admit()
            self.reserve()
            self.slots.count_pages()
            num_rows = self.slots.highest()
            for _ in range(AHEAD):
                self.buffers.step(num_rows)
            sight = _Sight(self.buffers.state.live, self.slots.running)
            if last is not None:
                self.harvest(last)  # while the card works
            last = sight

    def admit(self) -> None:
        """Prefill what comes next, hand rows their pages, and draw their first tokens; until no more can enter."""
        while True:
            prefixes = self.slots.prepare(AHEAD, PREFILL_TOKENS)
            if prefixes:
                places = [prefix.place for prefix in prefixes]
                self.hidden |= dict(zip(places, self._prefill(prefixes).unbind(), strict=True))
            rows = self.slots.admit(AHEAD)
            if not rows:
                return
            self._begin(rows)

    def _begin(self, rows: list[Row]) -> None:
        prefixes = list({id(row.prefix): row.prefix for row in rows}.values())
        hidden = torch.stack([self.hidden[prefix.place] for prefix in prefixes])
        self._copy_tails(rows)
        self._enter(rows)
        order = {id(prefix): place for place, prefix in enumerate(prefixes)}
        pairs = send_numbers([[order[id(row.prefix)], row.slot] for row in rows], hidden.device)
        self.buffers.draw(hidden, *pairs.t().contiguous())

    def _prefill(self, prefixes: list[Prefix]) -> Tensor:  # [P, H]
        ids: list[Sequence[int]] = [self.prompts[prefix.place].token_ids for prefix in prefixes]
        cache = self.engine.cache
        cache.prefill = Prefill.of(ids, [prefix.pages for prefix in prefixes], self.keys.device)
        try:
            return cache.prefill.run(self.engine.model)
        finally:
            cache.prefill = None

    def _copy_tails(self, rows: list[Row]) -> None:
        """Rows write after their prompt, so each has its last, unfilled page for itself."""
        tails = [(row.prefix.pages[-1], row.pages[0]) for row in rows if row.prefix.length % PAGE]
        pool = self.engine.cache.pool
        if tails and pool is not None:
            pairs = send_numbers(tails, pool.device)
            pool[:, :, pairs[:, 1]] = pool[:, :, pairs[:, 0]]

    def _enter(self, rows: list[Row]) -> None:
        state, tables = self.buffers.state, self.buffers.tables
        numbers = [[row.slot, row.prefix.length - 1, row.limit, row.line] for row in rows]
        slots, positions, limits, lines = send_numbers(numbers, self.keys.device).t().contiguous()
        state.positions[slots], state.limits[slots], state.outputs[slots] = positions, limits, lines
        state.keys[slots] = self.keys[lines]
        state.live.index_fill_(0, slots, 1)
        state.num_drawn.index_fill_(0, slots, 0)
        own = [[*row.prefix.pages[: row.prefix.num_full], *row.pages] for row in rows]
        width = max(map(len, own))
        filled = [[*pages, *([SCRATCH] * (width - len(pages)))] for pages in own]
        tables[slots, :width] = send_numbers(filled, tables.device).int()

    def reserve(self) -> None:
        added, freed = self.slots.reserve(AHEAD)
        if freed:
            self.buffers.clear(freed)
        if added:
            slot, index, page = send_numbers(added, self.keys.device).t()
            self.buffers.tables[slot, index] = page.int()

    def harvest(self, sight: _Sight) -> None:
        ended = sight.ended()
        if ended:
            self.buffers.clear([self.slots.end(row) for row in ended])
        sizes = self.buffers.sizes
        fits = next(size for size in sizes if size >= self.slots.num_live)
        if not self.slots.waiting and fits < next(
            size for size in sizes if size >= self.slots.highest()
        ):
            self._compact()

    def _compact(self) -> None:
        """The pages stay where they are: only the rows' numbers move."""
        moves = send_numbers(self.slots.compact(), self.keys.device)
        for one in (
            *(getattr(self.buffers.state, part.name) for part in fields(self.buffers.state)),
            self.buffers.tables,
        ):
            one[: len(moves)] = one[moves]
        self.buffers.clear(range(len(moves), self.buffers.num_slots))


class _Sight:
    """Which rows live at this point of the card's queue; known to the host once the card has come there."""

    def __init__(self, live: Tensor, rows: list[Row]) -> None:
        self.rows = [(row, row.slot) for row in rows]
        self.live = torch.empty(live.shape, dtype=live.dtype, pin_memory=live.is_cuda).copy_(
            live, non_blocking=True
        )
        self.there = torch.cuda.Event() if live.is_cuda else None
        if self.there is not None:
            self.there.record()

    def ended(self) -> list[Row]:
        """Those that still sit in the slot where they were seen, dead. One that began again has left it."""
        if self.there is not None:
            self.there.synchronize()
        live = self.live.tolist()
        return [row for row, slot in self.rows if not live[slot] and row.slot >= 0]


def _power_of_two(ends: list[int], device: torch.device) -> Tensor:
    size = 1 << (len(ends) - 1).bit_length()
    return torch.tensor([*ends, *([-1] * (size - len(ends)))], device=device)


def _free_bytes(device: torch.device) -> int:
    return (memory.free_memory(device) or 0) if device.type == "cuda" else 1 << 30


def _card_bytes(device: torch.device) -> int:
    return memory.card_memory(device) if device.type == "cuda" else 1 << 34
