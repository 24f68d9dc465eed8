"""The scheduler: each page has one owner, each row finishes once, and few pages only cost time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eepo.rollout.paged.scheduler import (
    PAGE_SIZE,
    SCRATCH_PAGE,
    Prefix,
    Row,
    Scheduler,
    pages_needed,
)

NUM_STEPS = 4
MAX_ROUNDS = 5_000
MAX_TOKENS = 4 * PAGE_SIZE

lengths = st.one_of(
    st.integers(1, 3 * PAGE_SIZE),
    st.sampled_from([PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 2 * PAGE_SIZE]),
)
prompt_lengths = st.lists(lengths, min_size=1, max_size=5)
limits = st.lists(st.integers(1, 4 * PAGE_SIZE), min_size=1, max_size=7)


def rows_of(prompts: list[int], num_samples: int, limits: list[int]) -> list[Row]:
    """Rows for prompts of these lengths. The limits are used in turn."""
    prefixes = [Prefix(index, length, num_samples) for index, length in enumerate(prompts)]
    prefix_of_row = [prefix for prefix in prefixes for _ in range(num_samples)]
    return [
        Row(prefix, index, limits[index % len(limits)])
        for index, prefix in enumerate(prefix_of_row)
    ]


def check_invariants(scheduler: Scheduler, num_pages: int) -> None:
    """Every page but the scratch page has exactly one owner, and every slot at most one row."""
    running, unused = scheduler.running, scheduler.unused_prefixes
    assert all(p.num_running == 0 and p.num_unfinished > 0 and p.pages for p in unused)
    prefixes = {id(p): p for p in [*(row.prefix for row in running), *unused]}.values()
    owned = [page for owner in [*running, *prefixes] for page in owner.pages]
    pages = [page for page in range(num_pages) if page != SCRATCH_PAGE]
    assert sorted([*owned, *scheduler.free_pages]) == pages
    slots = [*scheduler.free_slots, *(row.slot for row in running)]
    assert sorted(slots) == list(range(len(scheduler.slots)))
    for row in running:
        assert scheduler.slots[row.slot] is row
    for prefix in prefixes:
        assert prefix.num_running == sum(row.prefix is prefix for row in running)
        assert len(prefix.pages) == -(-prefix.length // PAGE_SIZE)
    assert all(row.slot < 0 and not row.pages for row in scheduler.waiting)


@dataclass
class Host:
    """Stands in for the engine.

    Each round samples `NUM_STEPS` tokens per running row. Finished rows are seen one round late.
    """

    scheduler: Scheduler
    num_pages: int
    compacts: bool = False
    num_sampled: Counter[int] = field(default_factory=Counter)  # since the row's last start
    finished: list[int] = field(default_factory=list)
    num_rounds: int = 0
    num_prefilled: int = 0

    def run(self) -> None:
        seen_before: list[Row] = []
        while not self.scheduler.done:
            self.num_rounds += 1
            assert self.num_rounds < MAX_ROUNDS, "the scheduler makes no progress"
            self.admit()
            self.reserve_pages()
            running = self.scheduler.running
            for row in running:
                self.num_sampled[row.output_index] += NUM_STEPS
            seen = [r for r in running if self.num_sampled[r.output_index] >= r.max_new_tokens]
            self.remove_finished(seen_before)
            seen_before = seen

    def admit(self) -> None:
        while True:
            prefixes = self.scheduler.schedule_prefill(NUM_STEPS, MAX_TOKENS)
            check_invariants(self.scheduler, self.num_pages)
            assert len(prefixes) <= 1 or sum(p.length for p in prefixes) <= MAX_TOKENS
            self.num_prefilled += len(prefixes)
            rows = self.scheduler.admit(NUM_STEPS)
            check_invariants(self.scheduler, self.num_pages)
            for row in rows:
                self.num_sampled[row.output_index] = 1
                assert row.capacity >= min(row.prefix.length + NUM_STEPS, row.max_length)
            if not rows:
                return

    def reserve_pages(self) -> None:
        before = {row.output_index: list(row.pages) for row in self.scheduler.running}
        added, freed = self.scheduler.reserve_pages(NUM_STEPS)
        check_invariants(self.scheduler, self.num_pages)
        assert len(set(freed)) == len(freed)
        assert not {slot for slot, _, _ in added} & set(freed)
        new_pages: dict[int, list[int]] = {}
        for slot, index, page in added:
            row = self.scheduler.slots[slot]
            assert row is not None
            assert row.pages[index - row.prefix.num_full_pages] == page
            new_pages.setdefault(row.output_index, []).append(page)
        for row in self.scheduler.running:
            output = row.output_index
            assert row.pages == before[output] + new_pages.get(output, [])
            next_length = row.prefix.length + self.num_sampled[output] - 1 + NUM_STEPS
            assert row.capacity >= min(next_length, row.max_length)

    def remove_finished(self, rows: list[Row]) -> None:
        for row in rows:
            if row.slot >= 0:
                self.finished.append(row.output_index)
                self.scheduler.finish(row)
        if self.compacts:
            compact_and_check(self.scheduler)
        check_invariants(self.scheduler, self.num_pages)


def admit_all(scheduler: Scheduler) -> list[Row]:
    """Prefill and admit until no more rows fit; return the admitted rows."""
    rows: list[Row] = []
    while True:
        scheduler.schedule_prefill(NUM_STEPS, MAX_TOKENS)
        admitted = scheduler.admit(NUM_STEPS)
        rows += admitted
        if not admitted:
            return rows


def compact_and_check(scheduler: Scheduler) -> None:
    before = list(scheduler.slots)
    previous_slots = scheduler.compact()
    moved = [scheduler.slots[new] for new in range(len(previous_slots))]
    assert moved == [before[old] for old in previous_slots]
    assert scheduler.decode_width() == scheduler.num_running == len(previous_slots)
    # Rows only move down, so they can be moved in order.
    assert all(new <= old for new, old in enumerate(previous_slots))


def run_all(
    prompts: list[int],
    num_samples: int,
    limits: list[int],
    num_slots: int,
    num_pages: int,
    compacts: bool = False,
) -> Host:
    rows = rows_of(prompts, num_samples, limits)
    host = Host(Scheduler(rows, num_slots, num_pages), num_pages, compacts)
    host.run()
    assert sorted(host.finished) == [row.output_index for row in rows]
    return host


def test_a_prompt_is_prefilled_once_if_there_are_enough_pages() -> None:
    """Even if its samples run one after another."""
    enough, _ = pages_needed([10, 70, 30], 5, 20, 2)
    host = run_all([10, 70, 30], 5, [20, 3, 9], 2, enough)
    assert host.num_prefilled == 3


@given(prompt_lengths, st.integers(1, 4), limits, st.integers(1, 9), st.booleans())
def test_no_row_restarts_if_there_are_enough_pages(
    prompts: list[int], num_samples: int, limits: list[int], num_slots: int, compacts: bool
) -> None:
    enough, _ = pages_needed(prompts, num_samples, max(limits), num_slots)
    host = run_all(prompts, num_samples, limits, num_slots, enough, compacts)
    assert host.scheduler.num_restarts == 0


@given(
    prompt_lengths, st.integers(1, 4), limits, st.integers(1, 9), st.integers(0, 12), st.booleans()
)
def test_every_row_finishes_once_even_if_pages_are_few(
    prompts: list[int],
    num_samples: int,
    limits: list[int],
    num_slots: int,
    num_extra_pages: int,
    compacts: bool,
) -> None:
    _, minimum = pages_needed(prompts, num_samples, max(limits), num_slots)
    run_all(prompts, num_samples, limits, num_slots, minimum + num_extra_pages, compacts)


@pytest.mark.parametrize("prompt", [1, 63, 64, 65])
@pytest.mark.parametrize("num_rows", [3, 8])
def test_rows_of_equal_length_do_not_restart_each_other_forever(prompt: int, num_rows: int) -> None:
    """They need new pages in the same rounds, so the oldest row must never restart."""
    num_restarts = 0
    _, minimum = pages_needed([prompt], num_rows, 640, num_rows)
    for num_pages in range(minimum, minimum + 4):
        host = run_all([prompt], num_rows, [640], num_rows, num_pages)
        # No slower than one row after another.
        assert host.num_rounds < num_rows * (640 // NUM_STEPS + 4)
        num_restarts += host.scheduler.num_restarts
    assert num_restarts > 0


def test_the_youngest_row_restarts_and_is_the_next_to_be_admitted() -> None:
    rows = rows_of([10], 4, [200])
    scheduler = Scheduler(rows, 3, 1 + 1 + 6)
    assert admit_all(scheduler) == rows[:3]
    rows[0].length, rows[1].length, rows[2].length = 100, 62, 60
    freed: list[int] = []
    for _ in range(30):
        freed += scheduler.reserve_pages(NUM_STEPS)[1]
        if freed:
            break
    assert freed == [2]
    assert list(scheduler.waiting) == [rows[2], rows[3]]
    assert scheduler.num_restarts == 1


def test_a_single_row_that_does_not_fit_is_an_error() -> None:
    [row] = rows_of([10], 1, [3 * PAGE_SIZE])
    scheduler = Scheduler([row], 1, 4)
    assert admit_all(scheduler) == [row]
    with pytest.raises(MemoryError, match="a single completion does not fit"):
        scheduler.reserve_pages(3 * PAGE_SIZE)


def test_samples_share_only_the_full_pages_of_their_prompt() -> None:
    rows = rows_of([2 * PAGE_SIZE + 5], 3, [10])
    scheduler = Scheduler(rows, 3, 40)
    admit_all(scheduler)
    assert rows[0].prefix is rows[2].prefix
    assert len(rows[0].prefix.pages) == 3  # two full pages, and the partial page that rows copy
    assert [len(row.pages) for row in rows] == [1, 1, 1]
    assert len({page for row in rows for page in row.pages}) == 3


def test_pages_of_a_prompt_are_freed_with_its_last_row() -> None:
    rows = rows_of([PAGE_SIZE, 5], 2, [10])
    scheduler = Scheduler(rows, 4, 40)
    admit_all(scheduler)
    scheduler.finish(rows[0])
    assert rows[0].prefix.pages
    scheduler.finish(rows[1])
    assert not rows[0].prefix.pages
    assert rows[2].prefix.pages
    check_invariants(scheduler, 40)


def test_a_prompt_of_exactly_one_page_has_no_partial_page() -> None:
    [row] = rows_of([PAGE_SIZE], 1, [1])
    scheduler = Scheduler([row], 1, 10)
    admit_all(scheduler)
    assert row.prefix.num_full_pages == len(row.prefix.pages) == len(row.pages) == 1
    assert row.capacity == 2 * PAGE_SIZE


def test_a_row_that_restarts_while_reserving_gives_back_all_its_pages() -> None:
    """Pages that it got in the same round are not reported as added."""
    rows = rows_of([10], 2, [6 * PAGE_SIZE])
    scheduler = Scheduler(rows, 2, 1 + 1 + 8)
    assert admit_all(scheduler) == rows
    # Each row needs four more pages, and six are free.
    added, freed = scheduler.reserve_pages(4 * PAGE_SIZE)
    assert freed == [1]
    assert {slot for slot, _, _ in added} == {0}
    assert list(scheduler.waiting) == [rows[1]]
    assert len(rows[0].pages) == 5
    check_invariants(scheduler, 10)


def test_unused_prompts_are_freed_before_a_row_restarts() -> None:
    """One row runs, and the prompts of the others are prefilled. The last prompt is freed first."""
    rows = rows_of([10, 10, 10], 1, [6 * PAGE_SIZE])
    scheduler = Scheduler(rows, 1, 1 + 3 + 4)
    assert admit_all(scheduler) == rows[:1]
    assert scheduler.unused_prefixes == [rows[1].prefix, rows[2].prefix]
    # The row needs four more pages, and three are free.
    _, freed = scheduler.reserve_pages(4 * PAGE_SIZE)
    assert freed == []
    assert scheduler.unused_prefixes == [rows[1].prefix]
    assert not rows[2].prefix.pages
    check_invariants(scheduler, 8)
