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
QUIET_SECONDS = 30.0  # without a terminal: after these, a line says which phase a slow step is in


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
        self._note = ""  # of the last step
        self._last_line = float("-inf")
        self._quiet_since = time.monotonic()
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
        self._note = printable(note)
        self._live.update(self._task, completed=self.done, note=escape(self._note))
        self._quiet_since = time.monotonic()
        if self._quiet_since - self._last_line > LINE_SECONDS or self.done >= self.total:
            self._last_line = self._quiet_since
            self._print_line(self._note)

    def show_phase(self, name: str) -> None:
        """Say what the current step does, so that a slow step does not look like a hang."""
        note = f"{self._note} ({printable(name)})".strip()
        self._live.update(self._task, note=escape(note))
        if time.monotonic() - self._quiet_since > QUIET_SECONDS:
            self._quiet_since = time.monotonic()
            self._print_line(note)

    def _print_line(self, note: str) -> None:
        """Print the state to a log file. A terminal shows the bar."""
        if not self.console.is_terminal:
            line = f"{self.title}: {self.done}/{self.total} {note}".rstrip()
            self.console.print(escape(line), highlight=False)
