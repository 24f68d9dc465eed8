"""Progress that is always visible: a live bar on a terminal, a line now and then where output is a file."""

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

QUIET_SECONDS = 5.0  # between two lines, when there is no terminal


class Progress:
    """`with progress.bar("grpo", 60) as bar: bar.advance(note="reward 0.5")`"""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()

    def bar(self, title: str, total: int, done: int = 0) -> Bar:
        return Bar(self.console, title, total, done)

    def say(self, text: str) -> None:
        self.console.print(
            escape(text), highlight=False, soft_wrap=True
        )  # a path stays whole, to be copied


class Bar:
    def __init__(self, console: Console, title: str, total: int, done: int) -> None:
        self.console, self.title, self.total, self.done = console, title, total, done
        self._said = 0.0
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
        self._task = self._live.add_task(escape(title), total=total, completed=done, note="")

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
        self._live.update(self._task, completed=self.done, note=note)
        now = time.monotonic()
        if not self.console.is_terminal and (
            now - self._said > QUIET_SECONDS or self.done >= self.total
        ):
            self._said = now
            self.console.print(
                escape(f"{self.title}: {self.done}/{self.total} {note}".rstrip()), highlight=False
            )
