"""Which completion sits in which slot, and which pages of the cache it holds: the host's side of the paged engine.

Nothing here touches a device, so that it can be read, and tested, as what it is: book-keeping.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

PAGE = 64  # tokens
AHEAD = 4  # decode steps queued at a time
SCRATCH = 0  # the page that slots without a row write to


@dataclass(eq=False)
class Prefix:
    """A prompt's cached keys and values, shared by its rows, until the last of them has ended.

    While none of them is in a slot they may be dropped for others that are, and be computed again later.
    """

    place: int  # of the prompt, in the call
    length: int  # tokens
    num_left: int = 1  # rows that have not ended
    num_live: int = 0  # rows in slots
    pages: list[int] = field(default_factory=list)  # none: to be prepared

    @property
    def num_full(self) -> int:
        """Pages that no completion token can fall into: rows read them where they lie."""
        return self.length // PAGE


@dataclass(eq=False)
class Row:
    """One completion."""

    prefix: Prefix
    line: int  # of the outputs
    limit: int  # most tokens it may have
    slot: int = -1  # -1: waits
    length: int = 0  # tokens cached at most by now: exact while it lives
    pages: list[int] = field(default_factory=list)  # its own, after the full ones of its prefix

    @property
    def room(self) -> int:
        """Tokens that its pages, and those it shares, hold."""
        return (self.prefix.num_full + len(self.pages)) * PAGE

    @property
    def longest(self) -> int:
        return self.prefix.length + self.limit


class Slots:
    """`num_slots` rows at a time over `num_pages` pages. Where pages run out, the youngest rows wait again.

    A row that waits again begins again: its random numbers are its own, so it ends up the same.
    """

    def __init__(self, rows: Iterable[Row], num_slots: int, num_pages: int) -> None:
        self.waiting = deque(rows)
        self.rows: list[Row | None] = [None] * num_slots
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.free_pages = list(range(num_pages - 1, SCRATCH, -1))
        self.idle: list[
            Prefix
        ] = []  # prepared, and no row of theirs in a slot; what is needed last, last
        self.num_restarts = 0
        self.num_pages, self.most_pages = num_pages, 0  # there are; ever wanted at a time
        self.waited = False  # did a row find a free slot, and no pages?

    @property
    def running(self) -> list[Row]:
        return [row for row in self.rows if row is not None]

    @property
    def num_live(self) -> int:
        return len(self.rows) - len(self.free_slots)

    @property
    def done(self) -> bool:
        return not self.waiting and self.num_live == 0

    def prepare(self, ahead: int, max_tokens: int) -> list[Prefix]:
        """Prompts to compute now, with pages: the one that the next row waits for, and others while there is room.

        Many at a time, as a pass over one short prompt takes as long as one over a hundred.
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
            spare = self.num_live + self._own(row, ahead) * (len(self.free_slots) if chosen else 1)
            if not self._make_room(
                _num_pages(prefix.length) + spare, keep=() if chosen else (prefix,), drop=not chosen
            ):
                self.waited |= not chosen
                break
            prefix.pages = self._take(_num_pages(prefix.length))
            chosen.append(prefix)
            num_tokens += prefix.length
        self.idle += chosen
        return chosen

    def admit(self, ahead: int) -> list[Row]:
        """Rows whose prompts are prepared and that enter now, with pages for `ahead` tokens."""
        entered: list[Row] = []
        while self.waiting and self.free_slots and self.waiting[0].prefix.pages:
            row = self.waiting[0]
            own = self._own(row, ahead)
            if not self._make_room(
                own + self.num_live, keep=(row.prefix,)
            ):  # each live row may soon want one more
                self.waited = True
                break
            self.waiting.popleft()
            if row.prefix.num_live == 0:
                self.idle.remove(row.prefix)
            row.prefix.num_live += 1
            row.pages, row.length = self._take(own), row.prefix.length
            row.slot = self.free_slots.pop()
            self.rows[row.slot] = row
            entered.append(row)
        return entered

    def reserve(self, ahead: int) -> tuple[list[tuple[int, int, int]], list[int]]:
        """Pages for `ahead` more tokens of every row: (slot, index, page) of new ones, and slots that were freed."""
        added: list[tuple[int, int, int]] = []
        freed: list[int] = []
        order = sorted(self.running, key=lambda row: -row.length)  # the oldest first
        for row in order:
            if row.slot < 0:  # made to wait by one before it
                continue
            row.length = min(row.length + ahead, row.longest)
            while row.room < row.length:
                if not self._make_room(1):
                    freed.append(self._restart_youngest(order))  # which may be this one
                    continue
                added.append((row.slot, row.prefix.num_full + len(row.pages), self.free_pages[-1]))
                row.pages.append(self.free_pages.pop())
        return [one for one in added if one[0] not in freed], freed

    def end(self, row: Row) -> int:
        """`row` is complete; returns the slot that it leaves."""
        row.prefix.num_left -= 1
        return self._leave(row)

    def compact(self) -> list[int]:
        """Move live rows to the lowest slots; returns, for each of these, the slot that its row comes from."""
        running = self.running
        moves = [row.slot for row in running]
        self.rows = [*running, *([None] * (len(self.rows) - len(running)))]
        for slot, row in enumerate(running):
            row.slot = slot
        self.free_slots = list(range(len(self.rows) - 1, len(running) - 1, -1))
        return moves

    def count_pages(self) -> None:
        """What is held, and the one page for each live row that must be free for others to enter."""
        self.most_pages = max(
            self.most_pages, self.num_pages - len(self.free_pages) + self.num_live
        )

    def highest(self) -> int:
        """One more than the highest slot in use."""
        return max((row.slot + 1 for row in self.running), default=0)

    def _restart_youngest(self, order: list[Row]) -> int:
        """The last of `order` that runs; returns its slot. Never an older one: two could restart each other forever."""
        if self.num_live == 1:
            raise MemoryError("one completion alone does not fit the cache")
        row = next(row for row in reversed(order) if row.slot >= 0)
        self.waiting.appendleft(row)
        self.num_restarts += 1
        return self._leave(row)

    def _leave(self, row: Row) -> int:
        slot, row.slot = row.slot, -1
        self.rows[slot] = None
        self.free_slots.append(slot)
        self.free_pages += row.pages
        row.pages, row.length = [], 0
        row.prefix.num_live -= 1
        if row.prefix.num_live == 0 and row.prefix.num_left > 0:
            self.idle.insert(0, row.prefix)
        elif row.prefix.num_live == 0:
            self._drop(row.prefix)
        return slot

    def _own(self, row: Row, ahead: int) -> int:
        """Pages of its own that a row enters with."""
        return _num_pages(min(row.prefix.length + ahead, row.longest)) - row.prefix.num_full

    def _make_room(self, count: int, keep: Sequence[Prefix] = (), drop: bool = True) -> bool:
        """Whether `count` pages are free, if need be by dropping idle prompts."""
        while drop and len(self.free_pages) < count:
            prefix = next((one for one in reversed(self.idle) if one not in keep), None)
            if prefix is None:
                break
            self.idle.remove(prefix)
            self._drop(prefix)
        return len(self.free_pages) >= count

    def _drop(self, prefix: Prefix) -> None:
        self.free_pages += prefix.pages
        prefix.pages = []

    def _take(self, count: int) -> list[int]:
        return [self.free_pages.pop() for _ in range(count)]


def _num_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE)


def pages_needed(
    prompt_lengths: Sequence[int], num_samples: int, max_new_tokens: int, num_slots: int
) -> tuple[int, int]:
    """Pages with which nobody ever waits for one, and the fewest with which the longest row alone still ends."""
    longest = max(prompt_lengths)
    own = _num_pages(longest % PAGE + max_new_tokens) + 1
    prompts = min(len(prompt_lengths), num_slots)
    shared = sum(sorted(map(_num_pages, prompt_lengths), reverse=True)[:prompts])
    rows = min(num_slots, len(prompt_lengths) * num_samples)
    return 1 + shared + rows * (own + 1), 1 + _num_pages(longest) + own + 1
