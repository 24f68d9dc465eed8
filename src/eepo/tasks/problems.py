"""Problems with answers, from a file or a hub data set. Every mistake in the data is one line that says where it is.

Nothing is mended in silence: a row without an answer stops the run, because a wrong gold answer is a wrong reward.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eepo.rewards.boxed import last_boxed
from eepo.tasks.files import SUFFIXES, Columns, check_columns, find_file, find_reader, stem
from eepo.types import UserError

__all__ = [
    "SUFFIXES",
    "Columns",
    "Problem",
    "marked_answer",
    "read_problems",
    "split_at_mark",
    "stem",
]


@dataclass(frozen=True)
class Problem:
    """`answer` is the final answer alone. `solution`, where there is one, is a text that leads to it."""

    id: str
    text: str
    answer: str
    level: int | None = None
    solution: str | None = None


class NoAnswer(UserError):
    """A row whose gold answer is empty."""


def read_problems(
    source: str,
    columns: Columns = Columns(),  # noqa: B008  (frozen)
    split: str = "train",
    data_dir: str = "",
    levels: Sequence[int] = (),
    unanswered: list[str] | None = None,
) -> list[Problem]:
    """From a file, looked for in `data_dir` and then here, or a hub data set's `split`; only `levels`, if any.

    A row without an answer is an error, unless a list is given that takes its place.
    """
    reader = find_reader(source, columns, split, data_dir)
    problems: list[Problem] = []
    seen: dict[str, str] = {}  # id → where
    for index, (where, row) in enumerate(reader()):
        try:
            problem = _problem(row, where, columns, source, index)
        except NoAnswer:
            if unanswered is None:
                raise
            unanswered.append(where)
            continue
        if problem.id in seen:
            raise UserError(
                f"{where}: id {_short(problem.id)} is also that of {seen[problem.id]}; ids must be unique"
            )
        seen[problem.id] = where
        problems.append(problem)
    where = str(find_file(source, data_dir) or source)
    if not problems:
        raise UserError(f"{where}: the data set is empty")
    return _of_levels(problems, levels, where, columns.level) if levels else problems


def _problem(row: dict[str, Any], where: str, columns: Columns, source: str, index: int) -> Problem:
    check_columns(list(row), columns, where)
    text = row[columns.problem]
    if not isinstance(text, str) or not text.strip():
        raise UserError(
            f"{where}: {columns.problem} must be a text that is not empty, got {_short(text)}"
        )
    cell = _cell(row[columns.answer], f"{where}: {columns.answer}")
    marked = marked_answer(cell)
    answer = _without_dollars(cell) if marked is None else marked
    if not answer or (marked is None and "\\boxed" in cell):  # a box that never closes
        raise NoAnswer(
            f"{where}: {columns.answer} holds no answer, got {_short(row[columns.answer])}"
        )
    solution = row.get("solution") if marked is None else cell
    for value in (text, cell, solution):
        _check_text(value, where)
    return Problem(
        id=_id(row.get("id"), source, index),
        text=text,
        answer=answer,
        level=_level(row.get(columns.level)),
        solution=solution if isinstance(solution, str) and solution.strip() else None,
    )


def _cell(value: Any, where: str) -> str:
    """An answer column's cell as text: lists of several answers are joined, as OlympiadBench on the hub needs it."""
    if isinstance(value, list):
        return ", ".join(_without_dollars(_cell(item, where)) for item in value)
    if value is None:
        return ""
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise UserError(f"{where} must be a text, a number or a list of them, got {_short(value)}")
    return value.strip()


def marked_answer(text: str) -> str | None:
    """Where the text is a whole solution: what its last box, or its last line after ####, holds."""
    boxed = last_boxed(text)
    if boxed is not None:
        return _without_dollars(boxed.strip())
    parts = split_at_mark(text)
    if parts is None:
        return None
    number = parts[1]
    return (
        number.replace(",", "") if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", number) else number
    )


def split_at_mark(text: str) -> tuple[str, str] | None:
    """GSM8K's form: what stands before the last ####, and the final answer behind it, to the end of the text."""
    before, mark, behind = text.rpartition("####")
    return (before.rstrip(), behind.strip()) if mark and "\n" not in behind.strip() else None


def _without_dollars(text: str) -> str:
    r"""$x$ and $$x$$ are x; $5 is five dollars, and $5$ or $6$ is left as it is."""
    inner = re.fullmatch(r"(\${1,2})((?:[^$\\]|\\.)+)\1", text.strip(), re.DOTALL)
    return inner[2].strip() if inner else text.strip()


def _id(value: Any, source: str, index: int) -> str:
    """The row's own, made unlike other sets' where it is only a number; else its place."""
    own = value.strip() if isinstance(value, str) else str(value) if type(value) is int else ""
    if not own:
        return f"{stem(source)}/{index}"
    return f"{stem(source)}/{own}" if own.isdigit() else own


def _level(value: Any) -> int | None:
    """5, 5.0, "5" and "Level 5" are 5; anything else ("Level ?" in MATH) is no level."""
    number = re.fullmatch(r"(?:level\s*)?(\d{1,3})(?:\.0)?", str(value).strip().lower())
    return int(number[1]) if number else None


def _of_levels(
    problems: list[Problem], levels: Sequence[int], source: str, column: str
) -> list[Problem]:
    kept = [problem for problem in problems if problem.level in levels]
    if not kept:
        there = sorted({problem.level for problem in problems if problem.level is not None})
        found = ", ".join(map(str, there)) if there else f"none in column {column!r}"
        raise UserError(
            f"{source}: no problem of task.levels = {list(levels)}; levels there are: {found}"
        )
    return kept


def _check_text(text: Any, where: str) -> None:
    """What no tokenizer takes: half a UTF-16 pair, which JSON can spell, and NUL."""
    if isinstance(text, str) and (
        "\0" in text or any("\ud800" <= sign <= "\udfff" for sign in text)
    ):
        raise UserError(f"{where}: a NUL or half a character (a lone surrogate) in {_short(text)}")


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
