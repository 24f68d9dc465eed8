"""Decides which completion runs in which slot, and which pages of the KV cache it holds.

This module touches no device: it is plain bookkeeping on the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

PAGE_SIZE = 64  # tokens
STEPS_AHEAD = 4  # decode steps that the host queues at a time
SCRATCH_PAGE = 0  # empty slots write to this page


@dataclass(eq=False)
class Prefix:
    """A prompt and the pages of its keys and values, shared by its rows.

    The pages are freed when the last row has finished. While no row of the prompt is in a slot,
    they may also be freed for other rows, and the prompt is prefilled again later.
    """

    index: int  # of the prompt in this call
    length: int  # tokens
    num_unfinished: int = 1  # rows that have not finished
    num_running: int = 0  # rows in slots
    pages: list[int] = field(default_factory=list)  # empty: not prefilled

    @property
    def num_full_pages(self) -> int:
        """Pages without space for completion tokens. All rows read these pages in place."""
        return self.length // PAGE_SIZE


@dataclass(eq=False)
class Row:
    """One completion, waiting or in a slot."""

    prefix: Prefix
    output_index: int  # row of `Outputs` that it writes to
    max_new_tokens: int
    slot: int = -1  # -1: waiting
    length: int = 0  # upper bound of the cached tokens; exact while the row runs
    pages: list[int] = field(default_factory=list)  # private, after the prefix's full pages

    @property
    def capacity(self) -> int:
        """Tokens that fit into its private pages and the full pages of its prefix."""
        return (self.prefix.num_full_pages + len(self.pages)) * PAGE_SIZE

    @property
    def max_length(self) -> int:
        return self.prefix.length + self.max_new_tokens


class Scheduler:
    """Runs rows in `num_slots` slots over `num_pages` pages.

    When pages run out, the youngest row restarts: it leaves its slot and waits again. Its random
    numbers depend on the row alone, so it samples the same tokens again.
    """

    def __init__(self, rows: Iterable[Row], num_slots: int, num_pages: int) -> None:
        self.waiting = deque(rows)
        self.slots: list[Row | None] = [None] * num_slots
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.free_pages = list(range(num_pages - 1, SCRATCH_PAGE, -1))
        # Prefilled prefixes without a running row, in the order in which they will be needed.
        self.unused_prefixes: list[Prefix] = []
        self.num_pages = num_pages
        self.num_restarts = 0
        self.peak_pages = 0  # the most pages needed at a time
        self.ran_short = False  # a row found a free slot but not enough pages

    @property
    def running(self) -> list[Row]:
        return [row for row in self.slots if row is not None]

    @property
    def num_running(self) -> int:
        return len(self.slots) - len(self.free_slots)

    @property
    def done(self) -> bool:
        return not self.waiting and self.num_running == 0

    def schedule_prefill(self, num_steps: int, max_tokens: int) -> list[Prefix]:
        """Choose prompts to prefill now, and allocate their pages.

        These are the prompt of the next waiting row, and more prompts while slots and pages last.
        A prefill of one short prompt takes as long as one of a hundred, so it takes many at once.
        """
        chosen: list[Prefix] = []
        num_tokens = 0
        if not self.waiting or not self.free_slots or self.waiting[0].prefix.pages:
            return chosen
        for row in self.waiting:
            prefix = row.prefix
            if prefix.pages:
                continue
            if chosen and num_tokens + prefix.length > max_tokens:
                break
            num_new_rows = len(self.free_slots) if chosen else 1
            spare = self.num_running + self._num_private_pages(row, num_steps) * num_new_rows
            num_needed = _num_pages(prefix.length) + spare
            # Only the first prompt may free the pages of unused prefixes.
            if not (self._has_pages(num_needed) if chosen else self._free_up(num_needed, prefix)):
                self.ran_short |= not chosen
                break
            prefix.pages = self._allocate(_num_pages(prefix.length))
            chosen.append(prefix)
            num_tokens += prefix.length
        self.unused_prefixes += chosen
        return chosen

    def admit(self, num_steps: int) -> list[Row]:
        """Move waiting rows whose prompts are prefilled into slots, with pages for `num_steps`."""
        admitted: list[Row] = []
        while self.waiting and self.free_slots and self.waiting[0].prefix.pages:
            row = self.waiting[0]
            num_private = self._num_private_pages(row, num_steps)
            # Each running row may soon need one more page.
            if not self._free_up(num_private + self.num_running, row.prefix):
                self.ran_short = True
                break
            self.waiting.popleft()
            if row.prefix.num_running == 0:
                self.unused_prefixes.remove(row.prefix)
            row.prefix.num_running += 1
            row.pages, row.length = self._allocate(num_private), row.prefix.length
            row.slot = self.free_slots.pop()
            self.slots[row.slot] = row
            admitted.append(row)
        return admitted

    def reserve_pages(self, num_steps: int) -> tuple[list[tuple[int, int, int]], list[int]]:
        """Allocate pages for `num_steps` more tokens of every running row.

        Returns the new pages as (slot, index in the row's page table, page), and the slots of
        rows that had to restart.
        """
        added: list[tuple[int, int, int]] = []
        freed: list[int] = []
        oldest_first = sorted(self.running, key=lambda row: -row.length)
        for row in oldest_first:
            if row.slot < 0:  # an older row made it restart
                continue
            row.length = min(row.length + num_steps, row.max_length)
            while row.capacity < row.length:
                if not self._free_up(1):
                    freed.append(self._restart_youngest(oldest_first))  # may be `row` itself
                    continue
                [page] = self._allocate(1)
                added.append((row.slot, row.prefix.num_full_pages + len(row.pages), page))
                row.pages.append(page)
        return [entry for entry in added if entry[0] not in freed], freed

    def finish(self, row: Row) -> int:
        """Remove a finished row and return the slot it leaves."""
        row.prefix.num_unfinished -= 1
        return self._remove_from_slot(row)

    def compact(self) -> list[int]:
        """Move running rows to the lowest slots; return the previous slot of each of them."""
        running = self.running
        previous_slots = [row.slot for row in running]
        self.slots = [*running, *([None] * (len(self.slots) - len(running)))]
        for slot, row in enumerate(running):
            row.slot = slot
        self.free_slots = list(range(len(self.slots) - 1, len(running) - 1, -1))
        return previous_slots

    def record_peak(self) -> None:
        """Update `peak_pages`: pages in use, plus one free page per running row for `admit`."""
        num_used = self.num_pages - len(self.free_pages)
        self.peak_pages = max(self.peak_pages, num_used + self.num_running)

    def decode_width(self) -> int:
        """Return how many of the lowest slots a decode step has to cover."""
        return max((row.slot + 1 for row in self.running), default=0)

    def _restart_youngest(self, oldest_first: list[Row]) -> int:
        """Restart the youngest running row and return its slot.

        An older row is never restarted: two rows could restart each other forever.
        """
        if self.num_running == 1:
            raise MemoryError("a single completion does not fit into the KV cache")
        row = next(row for row in reversed(oldest_first) if row.slot >= 0)
        self.waiting.appendleft(row)
        self.num_restarts += 1
        return self._remove_from_slot(row)

    def _remove_from_slot(self, row: Row) -> int:
        slot, row.slot = row.slot, -1
        self.slots[slot] = None
        self.free_slots.append(slot)
        self.free_pages += row.pages
        row.pages, row.length = [], 0
        row.prefix.num_running -= 1
        if row.prefix.num_running == 0 and row.prefix.num_unfinished > 0:
            self.unused_prefixes.insert(0, row.prefix)
        elif row.prefix.num_running == 0:
            self._free_prefix_pages(row.prefix)
        return slot

    def _num_private_pages(self, row: Row, num_steps: int) -> int:
        """Return how many private pages a row needs when it enters a slot."""
        length = min(row.prefix.length + num_steps, row.max_length)
        return _num_pages(length) - row.prefix.num_full_pages

    def _has_pages(self, count: int) -> bool:
        return len(self.free_pages) >= count

    def _free_up(self, count: int, keep: Prefix | None = None) -> bool:
        """Free unused prefixes other than `keep` until `count` pages are free, if possible."""
        while not self._has_pages(count):
            prefix = next((p for p in reversed(self.unused_prefixes) if p is not keep), None)
            if prefix is None:
                return False
            self.unused_prefixes.remove(prefix)
            self._free_prefix_pages(prefix)
        return True

    def _free_prefix_pages(self, prefix: Prefix) -> None:
        self.free_pages += prefix.pages
        prefix.pages = []

    def _allocate(self, count: int) -> list[int]:
        return [self.free_pages.pop() for _ in range(count)]


def _num_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)


def pages_needed(
    prompt_lengths: Sequence[int], num_samples: int, max_new_tokens: int, num_slots: int
) -> tuple[int, int]:
    """Return the number of pages with which no row ever waits for pages, and the minimum.

    With the minimum, the longest row can still finish when it runs alone.
    """
    longest = max(prompt_lengths)
    private = _num_pages(longest % PAGE_SIZE + max_new_tokens) + 1
    num_prompts = min(len(prompt_lengths), num_slots)
    shared = sum(sorted(map(_num_pages, prompt_lengths), reverse=True)[:num_prompts])
    num_rows = min(num_slots, len(prompt_lengths) * num_samples)
    return 1 + shared + num_rows * (private + 1), 1 + _num_pages(longest) + private + 1
