"""The paged engine's books: no page has two owners or none, every row ends once, and shortage only costs time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eepo.rollout.paged.scheduler import PAGE, SCRATCH, Prefix, Row, Slots, pages_needed

AHEAD = 4
MAX_ROUNDS = 5_000
MAX_TOKENS = 4 * PAGE

lengths = st.one_of(st.integers(1, 3 * PAGE), st.sampled_from([PAGE - 1, PAGE, PAGE + 1, 2 * PAGE]))
prompt_lengths = st.lists(lengths, min_size=1, max_size=5)
limits = st.lists(st.integers(1, 4 * PAGE), min_size=1, max_size=7)


def rows_of(prompts: list[int], num_samples: int, limits: list[int]) -> list[Row]:
    prefixes = [Prefix(place, length, num_samples) for place, length in enumerate(prompts)]
    owners = [prefix for prefix in prefixes for _ in range(num_samples)]
    return [Row(prefix, line, limits[line % len(limits)]) for line, prefix in enumerate(owners)]


def check_books(slots: Slots, num_pages: int) -> None:
    """Every page but the scratch page has exactly one owner, and every slot one row or none."""
    running = slots.running
    assert all(
        prefix.num_live == 0 and prefix.num_left > 0 and prefix.pages for prefix in slots.idle
    )
    prefixes = {
        id(prefix): prefix for prefix in [*(row.prefix for row in running), *slots.idle]
    }.values()
    owned = [page for holder in [*running, *prefixes] for page in holder.pages]
    assert sorted([*owned, *slots.free_pages]) == [
        page for page in range(num_pages) if page != SCRATCH
    ]
    assert sorted([*slots.free_slots, *(row.slot for row in running)]) == list(
        range(len(slots.rows))
    )
    for row in running:
        assert slots.rows[row.slot] is row
    for prefix in prefixes:
        assert prefix.num_live == sum(row.prefix is prefix for row in running)
        assert len(prefix.pages) == -(-prefix.length // PAGE)
    assert all(row.slot < 0 and not row.pages for row in slots.waiting)


@dataclass
class Host:
    """Plays the engine: `AHEAD` tokens a round for each row that runs, ended rows seen a round late."""

    slots: Slots
    num_pages: int
    compacts: bool = False
    drawn: Counter[int] = field(default_factory=Counter)  # by line, since it last began
    ended: list[int] = field(default_factory=list)
    num_rounds: int = 0
    num_prepared: int = 0

    def finish(self) -> None:
        last: list[Row] = []
        while not self.slots.done:
            self.num_rounds += 1
            assert self.num_rounds < MAX_ROUNDS, "it goes round in circles"
            self.admit()
            self.reserve()
            for row in self.slots.running:
                self.drawn[row.line] += AHEAD
            seen = [row for row in self.slots.running if self.drawn[row.line] >= row.limit]
            self.harvest(last)
            last = seen

    def admit(self) -> None:
        while True:
            prepared = self.slots.prepare(AHEAD, MAX_TOKENS)
            check_books(self.slots, self.num_pages)
            assert len(prepared) <= 1 or sum(prefix.length for prefix in prepared) <= MAX_TOKENS
            self.num_prepared += len(prepared)
            rows = self.slots.admit(AHEAD)
            check_books(self.slots, self.num_pages)
            for row in rows:
                self.drawn[row.line] = 1
                assert row.room >= min(row.prefix.length + AHEAD, row.longest)
            if not rows:
                return

    def reserve(self) -> None:
        before = {row.line: list(row.pages) for row in self.slots.running}
        added, freed = self.slots.reserve(AHEAD)
        check_books(self.slots, self.num_pages)
        assert len(set(freed)) == len(freed)
        assert not {slot for slot, _, _ in added} & set(freed)
        told: dict[int, list[int]] = {}
        for slot, index, page in added:
            row = self.slots.rows[slot]
            assert row is not None
            assert row.pages[index - row.prefix.num_full] == page
            told.setdefault(row.line, []).append(page)
        for row in self.slots.running:
            assert row.pages == before[row.line] + told.get(row.line, [])
            assert row.room >= min(
                row.prefix.length + self.drawn[row.line] - 1 + AHEAD, row.longest
            )

    def harvest(self, rows: list[Row]) -> None:
        for row in rows:
            if row.slot >= 0:
                self.ended.append(row.line)
                self.slots.end(row)
        if self.compacts:
            compact_and_check(self.slots)
        check_books(self.slots, self.num_pages)


def entered(slots: Slots) -> list[Row]:
    """One round's rows."""
    rows: list[Row] = []
    while True:
        slots.prepare(AHEAD, MAX_TOKENS)
        new = slots.admit(AHEAD)
        rows += new
        if not new:
            return rows


def test_a_prompt_is_prepared_once_where_pages_last() -> None:
    """Even if its samples come one after another."""
    wanted, _ = pages_needed([10, 70, 30], 5, 20, 2)
    host = finish([10, 70, 30], 5, [20, 3, 9], 2, wanted)
    assert host.num_prepared == 3


def compact_and_check(slots: Slots) -> None:
    before = list(slots.rows)
    moves = slots.compact()
    assert [slots.rows[new] for new in range(len(moves))] == [before[old] for old in moves]
    assert slots.highest() == slots.num_live == len(moves)
    assert all(new <= old for new, old in enumerate(moves))  # so that they can be moved in order


def finish(
    prompts: list[int],
    num_samples: int,
    limits: list[int],
    num_slots: int,
    num_pages: int,
    compacts: bool = False,
) -> Host:
    rows = rows_of(prompts, num_samples, limits)
    host = Host(Slots(rows, num_slots, num_pages), num_pages, compacts)
    host.finish()
    assert sorted(host.ended) == [row.line for row in rows]
    return host


@given(prompt_lengths, st.integers(1, 4), limits, st.integers(1, 9), st.booleans())
def test_with_all_pages_that_may_be_wanted_no_row_ever_begins_again(
    prompts: list[int], num_samples: int, limits: list[int], num_slots: int, compacts: bool
) -> None:
    wanted, _ = pages_needed(prompts, num_samples, max(limits), num_slots)
    host = finish(prompts, num_samples, limits, num_slots, wanted, compacts)
    assert host.slots.num_restarts == 0


@given(
    prompt_lengths, st.integers(1, 4), limits, st.integers(1, 9), st.integers(0, 12), st.booleans()
)
def test_short_of_pages_every_row_still_ends_once(
    prompts: list[int],
    num_samples: int,
    limits: list[int],
    num_slots: int,
    more: int,
    compacts: bool,
) -> None:
    _, least = pages_needed(prompts, num_samples, max(limits), num_slots)
    finish(prompts, num_samples, limits, num_slots, least + more, compacts)


@pytest.mark.parametrize("prompt", [1, 63, 64, 65])
@pytest.mark.parametrize("num_rows", [3, 8])
def test_rows_in_step_do_not_restart_each_other_forever(prompt: int, num_rows: int) -> None:
    """They want their pages in the same rounds: the one that has most must never give way."""
    num_restarts = 0
    _, least = pages_needed([prompt], num_rows, 640, num_rows)
    for num_pages in range(least, least + 4):
        host = finish([prompt], num_rows, [640], num_rows, num_pages)
        assert host.num_rounds < num_rows * (640 // AHEAD + 4)  # no slower than one after another
        num_restarts += host.slots.num_restarts
    assert num_restarts > 0


def test_the_youngest_wait_again_and_come_first_after_that() -> None:
    rows = rows_of([10], 4, [200])
    slots = Slots(rows, 3, 1 + 1 + 6)
    assert entered(slots) == rows[:3]
    rows[0].length, rows[1].length, rows[2].length = 100, 62, 60
    freed: list[int] = []
    for _ in range(30):
        freed += slots.reserve(AHEAD)[1]
        if freed:
            break
    assert freed == [2]
    assert list(slots.waiting) == [rows[2], rows[3]]
    assert slots.num_restarts == 1


def test_one_row_that_cannot_fit_says_so() -> None:
    [row] = rows_of([10], 1, [3 * PAGE])
    slots = Slots([row], 1, 4)
    assert entered(slots) == [row]
    with pytest.raises(MemoryError, match="one completion alone"):
        slots.reserve(3 * PAGE)


def test_samples_share_the_full_pages_of_their_prompt_and_nothing_else() -> None:
    rows = rows_of([2 * PAGE + 5], 3, [10])
    slots = Slots(rows, 3, 40)
    entered(slots)
    assert rows[0].prefix is rows[2].prefix
    assert len(rows[0].prefix.pages) == 3  # two full ones, and the tail that each row copies
    assert [len(row.pages) for row in rows] == [1, 1, 1]
    assert len({page for row in rows for page in row.pages}) == 3


def test_a_prompt_gives_its_pages_back_with_its_last_row() -> None:
    rows = rows_of([PAGE, 5], 2, [10])
    slots = Slots(rows, 4, 40)
    entered(slots)
    slots.end(rows[0])
    assert rows[0].prefix.pages
    slots.end(rows[1])
    assert not rows[0].prefix.pages
    assert rows[2].prefix.pages
    check_books(slots, 40)


def test_a_prompt_of_exactly_one_page_needs_no_tail() -> None:
    [row] = rows_of([PAGE], 1, [1])
    slots = Slots([row], 1, 10)
    entered(slots)
    assert row.prefix.num_full == len(row.prefix.pages) == len(row.pages) == 1
    assert row.room == 2 * PAGE


def test_a_row_that_gives_way_half_served_takes_no_page_along() -> None:
    """Nobody is told of pages that it took and gave back in the same round."""
    rows = rows_of([10], 2, [6 * PAGE])
    slots = Slots(rows, 2, 1 + 1 + 8)
    assert entered(slots) == rows
    added, freed = slots.reserve(4 * PAGE)  # four more for each, and six are there
    assert freed == [1]
    assert {slot for slot, _, _ in added} == {0}
    assert list(slots.waiting) == [rows[1]]
    assert len(rows[0].pages) == 5
    check_books(slots, 10)


def test_prompts_that_nobody_uses_give_way_before_rows_do() -> None:
    """One row runs and the prompts of the others lie ready: what it wants, it takes from the last of these."""
    rows = rows_of([10, 10, 10], 1, [6 * PAGE])
    slots = Slots(rows, 1, 1 + 3 + 4)
    assert entered(slots) == rows[:1]
    assert slots.idle == [rows[1].prefix, rows[2].prefix]
    _, freed = slots.reserve(4 * PAGE)  # four more, and three are free
    assert freed == []
    assert slots.idle == [rows[1].prefix]
    assert not rows[2].prefix.pages
    check_books(slots, 8)
