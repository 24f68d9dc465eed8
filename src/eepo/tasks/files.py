"""Rows of a file or a hub data set, each with the place where it stands, so that an error can name it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eepo.types import UserError

SUFFIXES = (".jsonl", ".json", ".parquet")
MAX_LINE_BYTES = 16 * 2**20  # of a .jsonl file: a longer line is no problem, but a broken file
HUB_NAME = re.compile(
    r"([\w.-]+/[\w.-]+)(?::(.+))?"
)  # owner/name, then :config or :file of the repository

Row = tuple[str, dict[str, Any]]  # where it stands, for error lines; what stands there


@dataclass(frozen=True)
class Columns:
    """What the columns are called. The level is looked for only where it is there."""

    problem: str = "problem"
    answer: str = "answer"
    level: str = "level"

    def read(self) -> tuple[str, ...]:
        """All that is ever looked at; what else a data set holds (pictures, say) is not even loaded."""
        return self.problem, self.answer, self.level, "id", "solution"


def stem(source: str) -> str:
    """A short name: maths for data/maths.jsonl, for acme/maths and for acme/maths:hard."""
    hub = (
        None
        if Path(source).suffix in SUFFIXES and ":" not in source
        else HUB_NAME.fullmatch(source)
    )
    return hub[1].split("/")[1] if hub else Path(source).stem


def column_names(file: Path) -> list[str]:
    """Of a file; of its first row, where rows have their own."""
    if file.suffix == ".parquet":
        return list(_parquet(file).schema_arrow.names)
    first = next(_READERS[file.suffix](file, Columns()), None)
    return list(first[1]) if first else []


def find_file(source: str, data_dir: str) -> Path | None:
    """In `data_dir`, else here."""
    return next((place for place in _places(source, data_dir) if place.is_file()), None)


def _places(source: str, data_dir: str) -> list[Path]:
    return list(dict.fromkeys((Path(data_dir) / source, Path(source))))


def find_reader(
    source: str, columns: Columns, split: str, data_dir: str
) -> Callable[[], Iterator[Row]]:
    """What reads the rows of `source`: it may be a file or a name, and a wrong one must not sound like the other."""
    file = find_file(source, data_dir)
    hub = HUB_NAME.fullmatch(source)
    if file is not None:
        if file.suffix not in _READERS:
            raise UserError(
                f"{source}: problems are read from {', '.join(SUFFIXES)} files, got {file.suffix!r}"
            )
        return lambda: _READERS[file.suffix](file, columns)
    if hub and (hub[2] or Path(source).suffix not in SUFFIXES):
        return lambda: _hub_rows(hub[1], hub[2] or "", split, columns)
    if Path(source).suffix in SUFFIXES:
        raise UserError(
            f"{source}: no such file; looked for {' and '.join(map(str, _places(source, data_dir)))}"
        )
    raise UserError(
        f"{source!r} is neither a {', '.join(SUFFIXES)} file nor a hub data set (owner/name or owner/name:config)"
    )


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
        check_columns(names, columns, str(file))
        index = 0
        for batch in table.iter_batches(
            1024, columns=[name for name in names if name in columns.read()]
        ):
            for row in batch.to_pylist():
                yield f"{file}: row {index}", row
                index += 1
    except (ArrowException, OSError) as error:
        raise UserError(f"{file}: not a readable parquet file ({first_line(error)})") from None


def _parquet(file: Path) -> Any:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(
            f'{file}: reading parquet needs pyarrow: pip install "eepo[data]"'
        ) from None
    try:
        return ParquetFile(file)
    except (ArrowException, OSError) as error:
        raise UserError(f"{file}: not a readable parquet file ({first_line(error)})") from None


def _hub_rows(name: str, part: str, split: str, columns: Columns) -> Iterator[Row]:
    """`part`: a config of the data set, or one of its files."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            f'{name}: hub data sets need the datasets package: pip install "eepo[data]"'
        ) from None
    is_file = Path(part).suffix in SUFFIXES
    wanted: dict[str, Any] = {"data_files": {split: part}} if is_file else {"name": part or None}
    source = f"{name}:{part}" if part else name
    try:
        rows = datasets.load_dataset(name, split=split, **wanted)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"hub data set {source}, split {split!r}: {first_line(error)}") from None
    check_columns(list(rows.column_names), columns, f"hub data set {source}")
    for index, row in enumerate(
        rows.select_columns([n for n in rows.column_names if n in columns.read()])
    ):
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
    except (
        ValueError,
        RecursionError,
    ) as error:  # a number of 5,000 digits, a list a thousand deep
        raise UserError(f"{where}: not JSON that can be read: {first_line(error)}") from None


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be an object with columns, got {_kind(row)}")
    return row


def check_columns(names: Sequence[str], columns: Columns, where: str) -> None:
    for key, column in (
        ("task.problem_column", columns.problem),
        ("task.answer_column", columns.answer),
    ):
        if column not in names:
            there = ", ".join(map(str, names)) or "none"
            raise UserError(f"{where}: no column {column!r} ({key}); there are {there}")


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _kind(value: Any) -> str:
    kinds = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "true or false",
        type(None): "null",
    }
    return kinds.get(type(value), "a number")
