"""Turns rows of a file or a hub data set into problems with answers.

Every mistake in the data raises a `UserError` that names the row. Nothing is repaired silently: a
wrong gold answer is a wrong reward.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eepo.rewards.boxed import last_boxed
from eepo.tasks.files import SUFFIXES, Columns, check_columns, find_file, find_reader, short_name
from eepo.types import UserError

__all__ = [
    "SUFFIXES",
    "Columns",
    "Problem",
    "read_problems",
    "short_name",
    "split_at_mark",
]

# For error messages: `repr` cannot show a list of a thousand levels.
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother = 3, 60, 60


@dataclass(frozen=True)
class Problem:
    """A problem with its final answer and, if the data set has it, a worked solution."""

    id: str
    text: str
    answer: str
    level: int | None = None
    solution: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)  # those that the reward receives


class MissingAnswer(UserError):
    """A row has an empty gold answer."""


def read_problems(
    source: str,
    columns: Columns = Columns(),  # noqa: B008  (frozen)
    split: str = "train",
    data_dir: str = "",
    levels: Sequence[int] = (),
    unanswered: list[str] | None = None,
) -> list[Problem]:
    """Read the problems of a file or of a hub data set's `split`.

    A file is looked for in `data_dir`, then in the working directory. `levels` keeps only problems
    of these levels. A row without an answer is an error, unless the list `unanswered` is given:
    then the row is skipped and its location is appended.
    """
    reader = find_reader(source, columns, split, data_dir)
    problems: list[Problem] = []
    location_by_id: dict[str, str] = {}
    for index, (where, row) in enumerate(reader()):
        try:
            problem = _problem(row, where, columns, f"{short_name(source)}/{index}")
        except MissingAnswer:
            if unanswered is None:
                raise
            unanswered.append(where)
            continue
        if problem.id in location_by_id:
            raise UserError(
                f"{where}: id {_short(problem.id)} is already used at "
                f"{location_by_id[problem.id]}; ids must be unique"
            )
        location_by_id[problem.id] = where
        problems.append(problem)
    where = str(find_file(source, data_dir) or source)
    if not problems:
        raise UserError(f"{where}: the data set is empty")
    return _with_levels(problems, levels, where, columns.level) if levels else problems


def _problem(row: dict[str, Any], where: str, columns: Columns, default_id: str) -> Problem:
    check_columns(list(row), columns, where)
    text = row[columns.problem]
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: {columns.problem} must be a non-empty text, got {_short(text)}")
    cell = _cell_text(row.get(columns.answer), f"{where}: {columns.answer}")
    final_answer = _answer_of_solution(cell)
    answer = _without_dollars(cell) if final_answer is None else final_answer
    has_unclosed_box = final_answer is None and "\\boxed" in cell
    if columns.reward.gold and (not answer or has_unclosed_box):
        raise MissingAnswer(
            f"{where}: {columns.answer} has no final answer, got {_short(row[columns.answer])}"
        )
    solution = row.get("solution") if final_answer is None else cell
    for value in (text, cell, solution, row.get("id")):
        _check_characters(value, where)
    return Problem(
        id=_id(row.get("id"), default_id),
        text=text,
        answer=answer,
        level=_level(row.get(columns.level)),
        solution=solution if isinstance(solution, str) and solution.strip() else None,
        columns=_as_json({name: row[name] for name in row if columns.reward.has(name)}),
    )


def _as_json(row: dict[str, Any]) -> dict[str, Any]:
    """Convert values as JSON stores them: a date becomes a text, because JSON has no dates."""
    return json.loads(json.dumps(row, default=str)) if row else row


def _cell_text(value: Any, where: str) -> str:
    """Convert the cell of an answer column to text.

    A list of several answers is joined with commas: OlympiadBench on the hub has such lists.
    """
    if isinstance(value, list) and not any(isinstance(item, list) for item in value):
        return ", ".join(_without_dollars(_cell_text(item, where)) for item in value)
    if value is None:
        return ""
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise UserError(f"{where} must be a text, a number or a list of them, got {_short(value)}")
    return value.strip()


def _answer_of_solution(text: str) -> str | None:
    r"""Return the final answer of a worked solution: the last \boxed{}, or the text after ####.

    Return None if the text is not a solution but an answer alone.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return _without_dollars(boxed.strip())
    parts = split_at_mark(text)
    if parts is None:
        return None
    answer = parts[1]
    has_thousands_separators = re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", answer)
    return answer.replace(",", "") if has_thousands_separators else answer


def split_at_mark(text: str) -> tuple[str, str] | None:
    """Split a solution in GSM8K's form at the last ####, into the solution and the final answer.

    Return None if there is no mark, or if more than one line follows it.
    """
    solution, mark, answer = text.rpartition("####")
    answer = answer.strip()
    return (solution.rstrip(), answer) if mark and "\n" not in answer else None


def _without_dollars(text: str) -> str:
    """Remove math delimiters: $x$ and $$x$$ become x. `$5` and `$5$ or $6$` are kept."""
    inner = re.fullmatch(r"(\${1,2})((?:[^$\\]|\\.)+)\1", text.strip(), re.DOTALL)
    return inner[2].strip() if inner else text.strip()


def _id(value: Any, default: str) -> str:
    """Return the id of a row. A number is prefixed with the set's name, to be unique across sets.

    `default` is the set's name and the index of the row.
    """
    row_id = value.strip() if isinstance(value, str) else str(value) if type(value) is int else ""
    if not row_id:
        return default
    set_name = default.rpartition("/")[0]
    return f"{set_name}/{row_id}" if row_id.isdigit() else row_id


def _level(value: Any) -> int | None:
    """Read 5, 5.0, "5" and "Level 5" as 5; return None for other values ("Level ?" in MATH)."""
    text = str(value).strip().lower() if isinstance(value, str | int | float) else ""
    number = re.fullmatch(r"(?:level\s*)?(\d{1,3})(?:\.0)?", text)
    return int(number[1]) if number else None


def _with_levels(
    problems: list[Problem], levels: Sequence[int], where: str, column: str
) -> list[Problem]:
    kept = [problem for problem in problems if problem.level in levels]
    if not kept:
        present = sorted({problem.level for problem in problems if problem.level is not None})
        names = ", ".join(map(str, present)) if present else f"none in column {column!r}"
        raise UserError(
            f"{where}: no problem of task.levels = {list(levels)}; levels in the data: {names}"
        )
    return kept


def _check_characters(text: Any, where: str) -> None:
    """Refuse characters that tokenizers do not accept: NUL and lone surrogates."""
    if not isinstance(text, str):
        return
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(f"{where}: a NUL character or a lone surrogate in {_short(text)}")


def _short(value: Any) -> str:
    shown = _REPR.repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
