r"""Reads the elements of a matrix from its LaTeX environment."""

from __future__ import annotations

import re

from eepo.rewards.latex import ROW_END

_MATRIX = re.compile(
    r"\\begin\{(?:[pbB]|small)?(?:matrix|array)\}(?:\{[lcr|]+\})?(.*)\\end\{\w+\}", re.DOTALL
)


def matrix_rows(text: str) -> list[list[str]] | None:
    """Return the elements of a matrix row by row; None if the text is not a matrix."""
    match = _MATRIX.fullmatch(text.strip())
    if match is None:
        return None
    rows = match[1].strip(" ⏎").split(ROW_END.strip())
    return [[cell.strip() for cell in row.split("&")] for row in rows]


def as_vector(rows: list[list[str]]) -> list[str] | None:
    """Return the cells of a single row or a single column; None for other matrices."""
    if len(rows) == 1:
        return rows[0]
    return [row[0] for row in rows] if rows and all(len(row) == 1 for row in rows) else None
