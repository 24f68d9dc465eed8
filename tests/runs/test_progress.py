"""Tests that text from the user is shown as it is, but never controls the terminal."""

from __future__ import annotations

import io
import time

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


def test_a_slow_step_says_in_a_log_which_phase_it_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    progress, stream = shown(terminal=False)
    with progress.bar("train", total=3) as bar:
        for seconds, name in ((1, "stage1"), (31, "unlearn"), (1, "stage2"), (31, "update")):
            clock[0] += seconds
            bar.show_phase(name)
        bar.advance(note="reward .5")
        clock[0] += 31
        bar.show_phase("stage1")
    assert stream.getvalue().splitlines() == [
        "train: 0/3 (unlearn)",
        "train: 0/3 (update)",
        "train: 1/3 reward .5",
        "train: 1/3 reward .5 (stage1)",
    ]


def test_a_terminal_shows_the_phase_beside_the_last_note() -> None:
    progress, stream = shown(terminal=True)
    with progress.bar("train", total=2) as bar:
        bar.advance(note="reward .5")
        bar.show_phase("unlearn")
    assert "reward .5 (unlearn)" in stream.getvalue()
