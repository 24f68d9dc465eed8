"""Generates data files, most of them wrong. The same seed gives the same bytes."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow
from pyarrow import parquet

SEPARATORS = (b"\n", b"\n", b"\n", b"\r\n", b"\n\n", b" ", b"", b"\x00", b"\xe2\x80\xa8")
TEXTS = (
    *("", " ", "What is 1+1?", "\\boxed{2}", "\\boxed{", "#### 5", "####", "$5$", "$", "θ 数学 🦜"),
    *("\ud800", "\udfff x", "\x00", "\x1b[31m", "a\nb", "x" * 300, "x" * 50_000, "\\boxed{" * 500),
    *("{problem}", "%s", "<pad>", "\u202e", "1,000", "Level 5", "Level ?", "\ufeff", "NaN"),
)
NUMBERS = (0, 1, -1, 5.0, 0.1, 1e300, float("inf"), float("nan"), 2**63, 2**64, 10**400)


def fuzzed_files(seed: int, number: int) -> Iterator[tuple[str, bytes]]:
    """Yield (suffix, contents) of data files. About a sixth of them are valid."""
    rng = random.Random(f"files/{seed}")
    makers: list[Callable[[random.Random], tuple[str, bytes]]] = [_jsonl, _json, _parquet]
    for _ in range(number):
        suffix, data = rng.choice(makers)(rng)
        yield suffix, _mutated(data, rng) if rng.random() < 0.35 else data


def _jsonl(rng: random.Random) -> tuple[str, bytes]:
    separator = rng.choice(SEPARATORS)
    lines = [_encoded(_row(rng, index), rng) for index in range(rng.choice((0, 1, 2, 10)))]
    start = rng.choice((b"", b"", b"", b"\xef\xbb\xbf", b"[", b"\xff\xfe"))
    return ".jsonl", start + separator.join(lines) + rng.choice((separator, b""))


def _json(rng: random.Random) -> tuple[str, bytes]:
    rows: Any = [_row(rng, index) for index in range(rng.choice((0, 1, 2, 10)))]
    if rng.random() < 0.2:
        rows = rng.choice((rows[0] if rows else {}, {"data": rows}, [rows], *NUMBERS[:3], "text"))
    return ".json", _encoded(rows, rng)


def _row(rng: random.Random, index: int) -> Any:
    """Return a row whose cells are sometimes missing or of a wrong type."""
    row: dict[str, Any] = {"problem": f"What is {index} + 1?", "answer": str(index + 1)}
    for column in ("problem", "answer", "id", "level", "solution", "other", "\ud800", ""):
        if rng.random() < 0.12:
            row[column] = _cell(rng)
    if rng.random() < 0.05:
        row.pop(rng.choice(("problem", "answer")))
    return row if rng.random() < 0.97 else rng.choice((None, [], "text", 5, True))


def _cell(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(TEXTS)
    if kind < 0.7:
        return rng.choice(NUMBERS)
    if kind < 0.8:
        return rng.choice((None, True, {}, [], {"value": 3}, [None], ["1", 2, "$3$"]))
    return _nested(rng)


def _nested(rng: random.Random) -> Any:
    value: Any = rng.choice(("1", 2, None))
    for _ in range(rng.choice((1, 2, 50, 500, 900))):
        value = rng.choice(([value], {"a": value})) if rng.random() < 0.1 else [value]
    return value


def _encoded(value: Any, rng: random.Random) -> bytes:
    """Write JSON: as ASCII, in UTF-8 or in another encoding, or with what `json` cannot write."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    kind = rng.random()
    if kind < 0.03:
        text = text.replace("1", "9" * 5000, 1)
    elif kind < 0.06:
        text = text.replace('"', "[" * 3000, 1)
    encoding = "utf-16" if rng.random() < 0.02 else "utf-8"
    return text.encode(encoding, errors="surrogatepass")


def _parquet(rng: random.Random) -> tuple[str, bytes]:
    num_rows = rng.choice((0, 1, 3, 3, 3, 1100))
    columns = {
        "problem": pyarrow.array([f"What is {index} + 1?" for index in range(num_rows)]),
        "answer": pyarrow.array([str(index + 1) for index in range(num_rows)]),
    }
    for name in ("problem", "answer", "id", "level", "solution"):
        if rng.random() < 0.3:
            columns[name] = _column(rng, num_rows)
    if rng.random() < 0.1:
        del columns[rng.choice(("problem", "answer"))]
    names = list(columns)
    if rng.random() < 0.05:
        names[-1] = names[0]
    table = pyarrow.Table.from_arrays(list(columns.values()), names=names)
    buffer = io.BytesIO()
    compression = rng.choice(("none", "snappy", "gzip", "zstd"))
    parquet.write_table(table, buffer, compression=compression)
    return ".parquet", buffer.getvalue()


def _column(rng: random.Random, num_rows: int) -> pyarrow.Array:
    """Return a column of any type, with bytes that are no text and dates that Python lacks."""
    integers = [rng.choice((0, 1, -1, 2**62, -(2**63))) for _ in range(num_rows)]
    as_integers = pyarrow.array(integers, pyarrow.int64())
    zones = ("UTC", "Mars/Olympus", "+99:99", "Europe/Berlin")
    makers: list[Callable[[], pyarrow.Array]] = [
        lambda: as_integers,
        lambda: _bytes_as_text([rng.choice((b"5", b"\xff", b"\x00", b"")) for _ in integers]),
        lambda: as_integers.view(pyarrow.timestamp(rng.choice(("ms", "us", "ns")))),
        lambda: as_integers.view(pyarrow.timestamp("us", tz=rng.choice(zones))),
        lambda: as_integers.view(pyarrow.duration("s")),
        lambda: (
            pyarrow.array([rng.choice((0, 2**31 - 1, -(2**31))) for _ in integers])
            .cast(pyarrow.int32())
            .view(pyarrow.date32())
        ),
        lambda: pyarrow.array([[["1"]]] * num_rows),
        lambda: pyarrow.array([["1", None]] * num_rows),
        lambda: pyarrow.array([{"a": {"b": 1}}] * num_rows),
        lambda: pyarrow.array(["5"] * num_rows, pyarrow.string()).dictionary_encode(),
        lambda: pyarrow.array([rng.choice((0.5, float("nan"), 1e300)) for _ in integers]),
        lambda: pyarrow.array([b"\xff"] * num_rows, pyarrow.binary()),
        lambda: pyarrow.array([[("k", 1)]] * num_rows, pyarrow.map_(pyarrow.string(), "int64")),
        lambda: pyarrow.nulls(num_rows),
        lambda: pyarrow.array([True] * num_rows),
        lambda: pyarrow.array([rng.choice(TEXTS[:10]) for _ in integers]),
    ]
    return rng.choice(makers)()


def _bytes_as_text(values: list[bytes]) -> pyarrow.Array:
    """Declare bytes as a string column without a check: files of other programs have these."""
    array = pyarrow.array(values, pyarrow.binary())
    return pyarrow.Array.from_buffers(pyarrow.string(), len(array), array.buffers())


def _mutated(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 20))):
        start = rng.randrange(len(changed) + 1)
        change = rng.randrange(4)
        if change == 0 and changed:
            changed[start % len(changed)] = rng.randrange(256)
        elif change == 1:
            del changed[start : start + rng.choice((1, 10, 1000))]
        elif change == 2:
            changed[start:start] = rng.randbytes(rng.choice((1, 4, 50)))
        else:
            changed[start : start + 20] = bytes(20)
    return bytes(changed)
