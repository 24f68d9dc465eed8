"""The first line of an error, for messages of one line."""

from __future__ import annotations

import pytest

from eepo.types import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("wrong"), "wrong"),
        (ValueError("\n wrong \n  in many\nlines"), "wrong "),
        (RuntimeError(), "RuntimeError"),
        (OSError(" \n"), "OSError"),
    ],
)
def test_the_first_line_of_an_error_is_never_empty(error: Exception, line: str) -> None:
    assert first_line(error) == line
