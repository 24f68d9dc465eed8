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


def fitting_end(text: str, width: float, size: float) -> str:
    """For a figure to write as it stands, on one line of `width` points; of a longer text its end."""
    text = drawable(" ".join(text.split())) or "(empty)"
    kept = text
    while text_width(kept, size) > width:
        text = text[1:]
        kept = f"…{text.lstrip()}"
    return kept.replace("$", r"\$")


def text_width(text: str, size: float) -> float:
    """In points, at a font of `size` points."""
    return size * sum(map(_advance, text))


def drawable(text: str) -> str:
    """Characters that the font lacks, control characters among them, become a mark."""
    return "".join(sign if _has_glyph(sign) else "\ufffd" for sign in text)


@cache
def _advance(sign: str) -> float:
    """Of a sign, in ems."""
    font = get_font(findfont(FONT))
    font.set_size(100, 72)
    return float(font.load_char(ord(sign)).linearHoriAdvance / 65536 / 100)


@cache
def _has_glyph(sign: str) -> bool:
    return sign.isprintable() and get_font(findfont(FONT)).get_char_index(ord(sign)) != 0
