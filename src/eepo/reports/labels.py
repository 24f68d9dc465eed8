"""Prepares names and model output for matplotlib.

A label is never read as a formula, fits its space, and contains only characters that the font has.
"""

from __future__ import annotations

from functools import cache

from matplotlib.font_manager import findfont, get_font

FONT = "DejaVu Sans"  # comes with matplotlib: figures look the same everywhere
MAX_NAME_CHARACTERS = 28  # a longer name would leave no space for the panel


def name_label(name: str) -> str:
    """Return the label for the name of a method, a set or a knob."""
    return text_label(name, MAX_NAME_CHARACTERS)


def text_label(text: str, max_characters: int) -> str:
    """Shorten a text and escape it for matplotlib."""
    return _escape_formulas(shorten_middle(text, max_characters))


def shorten_middle(text: str, max_characters: int) -> str:
    """Put a text on one line. Keep its beginning and its end, which holds the answer."""
    text = _on_one_line(text)
    if len(text) <= max_characters:
        return text
    num_last = max_characters // 2
    return f"{text[: max_characters - num_last - 1]}…{text[-num_last:]}"


def fitting_end(text: str, width: float, font_size: float) -> str:
    """Return a label of at most `width` points on one line. Keep the end of a longer text."""
    text = _on_one_line(text)
    shown = text
    while text_width(shown, font_size) > width:
        text = text[1:]
        shown = f"…{text.lstrip()}"
    return _escape_formulas(shown)


def text_width(text: str, font_size: float) -> float:
    """Return the width in points; `font_size` is in points."""
    return font_size * sum(map(_character_width, text))


def replace_missing_glyphs(text: str) -> str:
    """Replace characters that the font lacks, control characters among them, by U+FFFD."""
    return "".join(character if _has_glyph(character) else "\ufffd" for character in text)


def _on_one_line(text: str) -> str:
    return replace_missing_glyphs(" ".join(text.split())) or "(empty)"


def _escape_formulas(text: str) -> str:
    return text.replace("$", r"\$")


@cache
def _character_width(character: str) -> float:
    """Return the advance width in ems."""
    font = get_font(findfont(FONT))
    font.set_size(100, 72)
    return float(font.load_char(ord(character)).linearHoriAdvance / 65536 / 100)


@cache
def _has_glyph(character: str) -> bool:
    return character.isprintable() and get_font(findfont(FONT)).get_char_index(ord(character)) != 0
