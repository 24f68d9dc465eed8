"""Reads rows of data files and hub data sets, each with its location for error messages."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eepo.runs.jsonl import parse_json, read_rows
from eepo.types import NO_COLUMNS, RowColumns, UserError, first_line

SUFFIXES = (".jsonl", ".json", ".parquet")
# owner/name, optionally followed by :config or by :file of the repository
HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::(.+))?")

Row = tuple[str, dict[str, Any]]  # location for error messages, columns


@dataclass(frozen=True)
class Columns:
    """Names the columns of a data set. The level column is optional.

    `reward` selects the columns that a user's reward function receives.
    """

    problem: str = "problem"
    answer: str = "answer"
    level: str = "level"
    reward: RowColumns = NO_COLUMNS

    def used(self, names: Sequence[str]) -> list[str]:
        """Return the columns that are used. Other columns, such as images, are not loaded."""
        used = (self.problem, self.answer, self.level, "id", "solution")
        return [name for name in names if name in used or self.reward.has(name)]


def short_name(source: str) -> str:
    """Return `maths` for data/maths.jsonl, for acme/maths and for acme/maths:hard."""
    is_file = Path(source).suffix in SUFFIXES and ":" not in source
    hub = None if is_file else HUB_NAME.fullmatch(source)
    return hub[1].split("/")[1] if hub else Path(source).stem


def column_names(file: Path) -> list[str]:
    """Return the columns of a Parquet file, or of the first row of a JSON file."""
    if file.suffix == ".parquet":
        return _parquet_columns(_open_parquet(file), file)
    first_row = next(_READERS[file.suffix](file, Columns()), None)
    return list(first_row[1]) if first_row else []


def find_file(source: str, data_dir: str) -> Path | None:
    """Look for the file in `data_dir`, then in the working directory."""
    # Unlike Path.is_file, os.path.isfile is false for names that are too long.
    return next((path for path in _paths(source, data_dir) if os.path.isfile(path)), None)


def _paths(source: str, data_dir: str) -> list[Path]:
    return list(dict.fromkeys((Path(data_dir) / source, Path(source))))


def find_reader(
    source: str, columns: Columns, split: str, data_dir: str
) -> Callable[[], Iterator[Row]]:
    """Return a function that reads the rows of `source`, a file or a hub data set.

    The error for a wrong source says whether a file or a hub name was expected.
    """
    file = find_file(source, data_dir)
    hub = HUB_NAME.fullmatch(source)
    suffixes = ", ".join(SUFFIXES)
    if file is not None:
        if file.suffix not in _READERS:
            raise UserError(f"{source}: a data file must be one of {suffixes}, got {file.suffix!r}")
        return lambda: _READERS[file.suffix](file, columns)
    if hub and (hub[2] or Path(source).suffix not in SUFFIXES):
        return lambda: _hub_rows(hub[1], hub[2] or "", split, columns)
    if Path(source).suffix in SUFFIXES:
        paths = " and ".join(map(str, _paths(source, data_dir)))
        raise UserError(f"{source}: no such file; looked for {paths}")
    raise UserError(
        f"{source!r} is neither a {suffixes} file nor a hub data set "
        "(owner/name or owner/name:config)"
    )


def _jsonl_rows(file: Path, columns: Columns) -> Iterator[Row]:
    for where, row in read_rows(file):
        yield where, _check_object(row, where)


def _json_rows(file: Path, columns: Columns) -> Iterator[Row]:
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    rows = parse_json(raw, str(file))
    if not isinstance(rows, list):
        raise UserError(f"{file}: a .json file must be one list of objects, got {_kind(rows)}")
    for index, row in enumerate(rows):
        where = f"{file}: row {index}"
        yield where, _check_object(row, where)


def _parquet_rows(file: Path, columns: Columns) -> Iterator[Row]:
    table = _open_parquet(file)
    names = _parquet_columns(table, file)
    check_columns(names, columns, str(file))
    used = columns.used(names)
    index = 0
    with _parquet_errors(str(file)):
        for batch in table.iter_batches(1024, columns=used):
            where = f"{file}: rows {index} to {index + batch.num_rows - 1}"
            cells = [_cells(batch.column(name), f"{where}, column {name!r}") for name in used]
            for values in zip(*cells, strict=True):
                yield f"{file}: row {index}", dict(zip(used, values, strict=True))
                index += 1


def _cells(column: Any, where: str) -> list[Any]:
    with _parquet_errors(where):
        return list(column.to_pylist())


def _parquet_columns(table: Any, file: Path) -> list[str]:
    with _parquet_errors(str(file)):
        names = list(table.schema_arrow.names)
    if len(set(names)) < len(names):
        raise UserError(f"{file}: two columns have the same name; columns: {', '.join(names)}")
    return names


def _open_parquet(file: Path) -> Any:
    try:
        import pyarrow  # noqa: F401
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(
            f'{file}: reading parquet needs pyarrow: pip install "eepo[data]"'
        ) from None
    with _parquet_errors(str(file)):
        return ParquetFile(file)


@contextmanager
def _parquet_errors(where: str) -> Iterator[None]:
    """Turn pyarrow's errors about the contents of a file into a UserError.

    Besides its own errors, it raises the errors of Python for texts that are not UTF-8, for dates
    that Python cannot represent, and for unknown time zones.
    """
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, ValueError, OverflowError, LookupError) as error:
        raise UserError(f"{where}: not a readable parquet file ({first_line(error)})") from None


def _hub_rows(name: str, part: str, split: str, columns: Columns) -> Iterator[Row]:
    """Read a hub data set. `part` is empty, a config, or a file of the data set."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            f'{name}: hub data sets need the datasets package: pip install "eepo[data]"'
        ) from None
    is_file = Path(part).suffix in SUFFIXES
    options: dict[str, Any] = {"data_files": {split: part}} if is_file else {"name": part or None}
    source = f"hub data set {name}:{part}" if part else f"hub data set {name}"
    with _hub_errors(f"{source}, split {split!r}"):
        rows = datasets.load_dataset(name, split=split, **options)
    check_columns(list(rows.column_names), columns, source)
    used = columns.used(rows.column_names)
    with _hub_errors(f"{source}, split {split!r}"):
        for index, row in enumerate(rows.select_columns(used)):
            where = f"{source}: row {index}"
            _check_exact(row.get(columns.answer), f"{where}: {columns.answer}")
            yield where, dict(row)


@contextmanager
def _hub_errors(where: str) -> Iterator[None]:
    """Turn the errors of `datasets` about a name or about contents into a UserError.

    Rows are decoded while they are read, with the errors that `_parquet_errors` describes. An empty
    JSON file raises StopIteration.
    """
    from datasets.exceptions import DatasetsError

    try:
        yield
    except StopIteration:
        raise UserError(f"{where}: a file has no rows") from None
    except (OSError, ValueError, RuntimeError, OverflowError, LookupError, DatasetsError) as error:
        reason = error.__cause__ or error  # else it is only that an error occurred
        raise UserError(f"{where}: {first_line(reason)}") from None


def _check_exact(value: Any, where: str) -> None:
    """Refuse a number with lost digits: `datasets` reads JSON integers above 64 bits as floats."""
    if isinstance(value, float) and value.is_integer() and abs(value) >= 2**53:
        raise UserError(f"{where} = {value!r} may have lost digits; store long numbers as text")


_READERS: dict[str, Callable[[Path, Columns], Iterator[Row]]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
}


def check_columns(names: Sequence[str], columns: Columns, where: str) -> None:
    """Raise a UserError if the problem or the answer column is missing, or one for the reward."""
    needed = {columns.problem: "task.problem_column"}
    if columns.reward.gold:
        needed[columns.answer] = "task.answer_column"
    for name in columns.reward.required:
        needed.setdefault(name, "a parameter of the reward function")
    for column, purpose in needed.items():
        if column not in names:
            present = ", ".join(map(str, names)) or "none"
            raise UserError(f"{where}: no column {column!r} ({purpose}); columns: {present}")
    for name in columns.reward.ambiguous:
        if name in names:
            raise UserError(
                f"{where}: the reward function has two parameters, and {name!r} is also a column; "
                f"use (completion, {name}) for the column, or (gold, completion)"
            )


def _check_object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be an object with columns, got {_kind(row)}")
    return row


def _kind(value: Any) -> str:
    """Return what JSON calls the type of a value."""
    kinds = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    return kinds.get(type(value), "a number")
