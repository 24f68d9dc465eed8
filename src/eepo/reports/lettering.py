"""Text in figures, a user's or a model's: it is no formula, fits its place, and every sign of it has a glyph."""

from __future__ import annotations

from functools import cache

from matplotlib.font_manager import findfont, get_font

FONT = "DejaVu Sans"  # comes with matplotlib: figures look the same everywhere
LONGEST_NAME = 28  # characters; a longer one would leave no room for the panel it names


def name_text(name: str) -> str:
    return plain_text(name, LONGEST_NAME)


def plain_text(text: str, longest: int) -> str:
    """For a figure to write as it stands."""
    return shortened(text, longest).replace("$", r"\$")


def shortened(text: str, longest: int) -> str:
    """On one line; of a long text its beginning and its end, where the answer stands."""
    text = drawable(" ".join(text.split())) or "(empty)"
    if len(text) <= longest:
        return text
    tail = longest // 2
    return f"{text[: longest - tail - 1]}…{text[-tail:]}"


def drawable(text: str) -> str:
    """Characters that the font lacks, control characters among them, become a mark."""
    return "".join(sign if _has_glyph(sign) else "\ufffd" for sign in text)


@cache
def _has_glyph(sign: str) -> bool:
    return sign.isprintable() and get_font(findfont(FONT)).get_char_index(ord(sign)) != 0
