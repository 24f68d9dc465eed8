"""Tests that text from the user is shown as it is, but never controls the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from eepo.runs.progress import Progress

NAMES = ["\x1b[2J\x1b[31mred", "a\rb", "bell\a", "two\nlines", "\x9b31m", "\u202etxt", "\udcff"]


def shown(terminal: bool) -> tuple[Progress, io.StringIO]:
    stream = io.StringIO()
    return Progress(Console(file=stream, force_terminal=terminal, width=120)), stream


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_printed_line_escapes_control_characters(name: str) -> None:
    progress, stream = shown(terminal=False)
    progress.print(f"weights: {name}")
    assert stream.getvalue() == f"weights: {name.encode('unicode_escape').decode()}\n"


def test_other_text_is_printed_unchanged() -> None:
    progress, stream = shown(terminal=False)
    progress.print("θ′ ← θ [red]数学[/red] 🦜")
    assert stream.getvalue() == "θ′ ← θ [red]数学[/red] 🦜\n"


@pytest.mark.parametrize("name", NAMES, ids=ascii)
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "log file"])
def test_a_bar_escapes_control_characters_of_its_title_and_note(name: str, terminal: bool) -> None:
    progress, stream = shown(terminal)
    with progress.bar(name, total=1) as bar:
        bar.advance(note=name)
    assert name not in stream.getvalue()
    assert name.encode("unicode_escape").decode() in stream.getvalue()


def test_a_note_with_markup_is_shown_as_it_is() -> None:
    progress, stream = shown(terminal=True)
    with progress.bar("[bold]title", total=1) as bar:
        bar.advance(note="[/nothing]")
    assert "[bold]title" in stream.getvalue()
    assert "[/nothing]" in stream.getvalue()
