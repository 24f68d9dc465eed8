"""Shows progress: a live bar on a terminal, a line every few seconds in a log file.

Texts may contain names from the user. Characters that would change the terminal are escaped.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

from eepo.types import printable

LINE_SECONDS = 5.0  # between two lines without a terminal


class Progress:
    """Prints lines and bars: `with progress.bar("grpo", 60) as bar: bar.advance()`."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()

    def bar(self, title: str, total: int, done: int = 0) -> Bar:
        return Bar(self.console, title, total, done)

    def print(self, text: str) -> None:
        # Do not wrap: a path must stay in one piece to be copied.
        self.console.print(escape(printable(text)), highlight=False, soft_wrap=True)


class Bar:
    """Counts from `done` to `total`."""

    def __init__(self, console: Console, title: str, total: int, done: int) -> None:
        self.console, self.total, self.done = console, total, done
        self.title = printable(title)
        self._last_line = 0.0
        self._live = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._live.add_task(escape(self.title), total=total, completed=done, note="")

    def __enter__(self) -> Bar:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def advance(self, number: int = 1, note: str = "") -> None:
        self.done += number
        note = printable(note)
        self._live.update(self._task, completed=self.done, note=escape(note))
        now = time.monotonic()
        due = now - self._last_line > LINE_SECONDS or self.done >= self.total
        if due and not self.console.is_terminal:
            self._last_line = now
            line = f"{self.title}: {self.done}/{self.total} {note}".rstrip()
            self.console.print(escape(line), highlight=False)
