"""Problems with answers, from a file or a hub data set. Every mistake in the data is one line that says where it is.

Nothing is mended in silence: a row without an answer stops the run, because a wrong gold answer is a wrong reward.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eepo.types import UserError

SUFFIXES = (".jsonl", ".json", ".parquet")
MAX_LINE_BYTES = 16 * 2**20  # of a .jsonl file: a longer line is no problem, but a broken file
HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::(.+))?")  # owner/name, then :config or :file of the repository

Row = tuple[str, dict[str, Any]]  # where it stands, for error lines; what stands there


@dataclass(frozen=True)
class Problem:
    """`answer` is the final answer alone. `solution`, where there is one, is a text that leads to it."""

    id: str
    text: str
    answer: str
    level: int | None = None
    solution: str | None = None


@dataclass(frozen=True)
class Columns:
    """What the columns are called. The level is looked for only where it is there."""

    problem: str = "problem"
    answer: str = "answer"
    level: str = "level"

    def read(self) -> tuple[str, ...]:
        """All that is ever looked at; what else a data set holds (pictures, say) is not even loaded."""
        return self.problem, self.answer, self.level, "id", "solution"


def read_problems(
    source: str,
    columns: Columns = Columns(),  # noqa: B008  (frozen)
    split: str = "train",
    data_dir: str = "",
    levels: Sequence[int] = (),
) -> list[Problem]:
    """From a file, looked for in `data_dir` and then here, or a hub data set's `split`; only `levels`, if any."""
    reader = find_reader(source, columns, split, data_dir)
    problems: list[Problem] = []
    seen: dict[str, str] = {}  # id → where
    for index, (where, row) in enumerate(reader()):
        problem = _problem(row, where, columns, source, index)
        if problem.id in seen:
            raise UserError(f"{where}: id {_short(problem.id)} is also that of {seen[problem.id]}; ids must be unique")
        seen[problem.id] = where
        problems.append(problem)
    if not problems:
        raise UserError(f"{source}: the data set is empty")
    return _of_levels(problems, levels, source, columns.level) if levels else problems


def stem(source: str) -> str:
    """A short name: maths for data/maths.jsonl, for acme/maths and for acme/maths:hard."""
    hub = None if Path(source).suffix in SUFFIXES and ":" not in source else HUB_NAME.fullmatch(source)
    return hub[1].split("/")[1] if hub else Path(source).stem


def column_names(file: Path) -> list[str]:
    """Of a file; of its first row, where rows have their own."""
    if file.suffix == ".parquet":
        return list(_parquet(file).schema_arrow.names)
    first = next(_READERS[file.suffix](file, Columns()), None)
    return list(first[1]) if first else []


def find_reader(source: str, columns: Columns, split: str, data_dir: str) -> Callable[[], Iterator[Row]]:
    """What reads the rows of `source`: it may be a file or a name, and a wrong one must not sound like the other."""
    places = list(dict.fromkeys((Path(data_dir) / source, Path(source))))
    file = next((place for place in places if place.is_file()), None)
    hub = HUB_NAME.fullmatch(source)
    if file is not None:
        if file.suffix not in _READERS:
            raise UserError(f"{source}: problems are read from {', '.join(SUFFIXES)} files, got {file.suffix!r}")
        return lambda: _READERS[file.suffix](file, columns)
    if hub and (hub[2] or Path(source).suffix not in SUFFIXES):
        return lambda: _hub_rows(hub[1], hub[2] or "", split, columns)
    if Path(source).suffix in SUFFIXES:
        raise UserError(f"{source}: no such file; looked for {' and '.join(map(str, places))}")
    raise UserError(
        f"{source!r} is neither a {', '.join(SUFFIXES)} file nor a hub data set (owner/name or owner/name:config)"
    )


# ---- where rows come from


def _jsonl_rows(file: Path, columns: Columns) -> Iterator[Row]:
    with _opened(file) as lines:
        number = 0
        while line := lines.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{file}:{number}"
            if len(line) > MAX_LINE_BYTES:
                raise UserError(f"{where}: the line is longer than {MAX_LINE_BYTES} bytes")
            if line.strip():
                yield where, _object(_parsed(line, where), where)


def _json_rows(file: Path, columns: Columns) -> Iterator[Row]:
    with _opened(file) as whole:
        rows = _parsed(whole.read(), str(file))
    if not isinstance(rows, list):
        raise UserError(f"{file}: a .json file must hold one list of objects, got {_kind(rows)}")
    for index, row in enumerate(rows):
        where = f"{file}: row {index}"
        yield where, _object(row, where)


def _parquet_rows(file: Path, columns: Columns) -> Iterator[Row]:
    table = _parquet(file)
    from pyarrow import ArrowException

    try:
        names = table.schema_arrow.names
        _check_columns(names, columns, str(file))
        index = 0
        for batch in table.iter_batches(1024, columns=[name for name in names if name in columns.read()]):
            for row in batch.to_pylist():
                yield f"{file}: row {index}", row
                index += 1
    except (ArrowException, OSError) as error:
        raise UserError(f"{file}: not a readable parquet file ({_first_line(error)})") from None


def _parquet(file: Path) -> Any:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(f'{file}: reading parquet needs pyarrow: pip install "eepo[data]"') from None
    try:
        return ParquetFile(file)
    except (ArrowException, OSError) as error:
        raise UserError(f"{file}: not a readable parquet file ({_first_line(error)})") from None


def _hub_rows(name: str, part: str, split: str, columns: Columns) -> Iterator[Row]:
    """`part`: a config of the data set, or one of its files."""
    try:
        import datasets
    except ImportError:
        raise UserError(f'{name}: hub data sets need the datasets package: pip install "eepo[data]"') from None
    is_file = Path(part).suffix in SUFFIXES
    wanted: dict[str, Any] = {"data_files": {split: part}} if is_file else {"name": part or None}
    source = f"{name}:{part}" if part else name
    try:
        rows = datasets.load_dataset(name, split=split, **wanted)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"hub data set {source}, split {split!r}: {_first_line(error)}") from None
    _check_columns(list(rows.column_names), columns, f"hub data set {source}")
    for index, row in enumerate(rows.select_columns([n for n in rows.column_names if n in columns.read()])):
        yield f"hub data set {source}: row {index}", dict(row)


_READERS: dict[str, Callable[[Path, Columns], Iterator[Row]]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
}


def _opened(file: Path) -> Any:
    try:
        return file.open("rb")
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None


def _parsed(raw: bytes, where: str) -> Any:
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON at character {error.pos}: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, a list a thousand deep
        raise UserError(f"{where}: not JSON that can be read: {_first_line(error)}") from None


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be an object with columns, got {_kind(row)}")
    return row


def _check_columns(names: Sequence[str], columns: Columns, where: str) -> None:
    for key, column in (("task.problem_column", columns.problem), ("task.answer_column", columns.answer)):
        if column not in names:
            there = ", ".join(map(str, names)) or "none"
            raise UserError(f"{where}: no column {column!r} ({key}); there are {there}")


# ---- from a row to a problem


def _problem(row: dict[str, Any], where: str, columns: Columns, source: str, index: int) -> Problem:
    _check_columns(list(row), columns, where)
    text = row[columns.problem]
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: {columns.problem} must be a text that is not empty, got {_short(text)}")
    cell = _cell(row[columns.answer], f"{where}: {columns.answer}")
    marked = marked_answer(cell)
    answer = _without_dollars(cell) if marked is None else marked
    if not answer:
        raise UserError(f"{where}: {columns.answer} holds no answer, got {_short(row[columns.answer])}")
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
    boxed = _last_boxed(text)
    if boxed is not None:
        return _without_dollars(boxed)
    parts = split_at_mark(text)
    if parts is None:
        return None
    number = parts[1]
    return number.replace(",", "") if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", number) else number


def split_at_mark(text: str) -> tuple[str, str] | None:
    """GSM8K's form: what stands before the last ####, and the final answer behind it, to the end of the text."""
    before, mark, behind = text.rpartition("####")
    return (before.rstrip(), behind.strip()) if mark and "\n" not in behind.strip() else None


def _last_boxed(text: str) -> str | None:
    r"""Content of the last closed \boxed{...}, with the braces inside it; TeX also allows \boxed 7."""
    found = None
    for start in re.finditer(r"\\(?:boxed|fbox)(?:\s*(\{)|\s+([^\s{$.,]+))", text):
        content = start[2] if start[2] else _braced(text, start.end())
        found = found if content is None else content.strip()
    return found


def _braced(text: str, start: int) -> str | None:
    """From after an opening brace to the one that closes it."""
    depth = 1
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)  # \{ and \} are signs on the page
        if depth == 0:
            return text[start : brace.start()]
    return None


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


def _of_levels(problems: list[Problem], levels: Sequence[int], source: str, column: str) -> list[Problem]:
    kept = [problem for problem in problems if problem.level in levels]
    if not kept:
        there = sorted({problem.level for problem in problems if problem.level is not None})
        found = ", ".join(map(str, there)) if there else f"none in column {column!r}"
        raise UserError(f"{source}: no problem of task.levels = {list(levels)}; levels there are: {found}")
    return kept


def _check_text(text: Any, where: str) -> None:
    """What no tokenizer takes: half a UTF-16 pair, which JSON can spell, and NUL."""
    if isinstance(text, str) and ("\0" in text or any("\ud800" <= sign <= "\udfff" for sign in text)):
        raise UserError(f"{where}: a NUL or half a character (a lone surrogate) in {_short(text)}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
