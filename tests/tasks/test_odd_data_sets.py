"""Checks that odd columns of hub data sets and of files are one line that names the place."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eepo.tasks.problems import read_problems
from eepo.types import UserError

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
OK = {"problem": "What is 1+1?", "answer": "2"}
File = tuple[str, bytes]  # suffix, contents


def lines(*rows: Any) -> File:
    return ".jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(answers: Any, problems: Any = ("a", "b")) -> File:
    from pyarrow import parquet

    buffer = io.BytesIO()
    columns = [
        each if isinstance(each, pa.Array) else pa.array(each) for each in (problems, answers)
    ]
    parquet.write_table(pa.Table.from_arrays(columns, names=["problem", "answer"]), buffer)
    return ".parquet", buffer.getvalue()


def bytes_as_text(*values: bytes) -> Any:
    """Declare bytes as a string column without a check: files of other programs have these."""
    array = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(array), array.buffers())


HUGE = pa.array([2**62, -(2**63)])
# Name: the file, and what the error says for a hub data set and for a file
ODD: dict[str, tuple[File, str, str]] = {
    "other columns": (lines({"q": "x", "a": 1}), "no column 'problem'", "no column 'problem'"),
    "answer missing in one row": (
        lines(OK, {"problem": "x"}),
        "row 1: answer has no final answer",
        "jsonl:2: no column 'answer'",
    ),
    "nested problem": (
        lines({"problem": {"text": "x"}, "answer": "1"}),
        "row 0: problem must be a non-empty text",
        "jsonl:1: problem must be a non-empty text",
    ),
    "nested answer": (
        lines({"problem": "x", "answer": {"value": {"a": 1}}}),
        "row 0: answer must be a text",
        "jsonl:1: answer must be a text",
    ),
    "null answer": (
        lines(OK, {"problem": "x", "answer": None}),
        "row 1: answer has no final answer, got None",
        "jsonl:2: answer has no final answer, got None",
    ),
    "boolean answer": (lines({"problem": "x", "answer": True}), "got True", "got True"),
    "rows that are texts": (
        lines("a", "b"),
        "JSON parse error",
        "jsonl:1: a row must be an object",
    ),
    "empty file": ((".jsonl", b""), "a file has no rows", "the data set is empty"),
    "not UTF-8": (
        (".jsonl", b'{"problem": "\xff", "answer": "1"}\n'),
        "can't decode byte 0xff",
        "jsonl:1: not UTF-8 at byte 13",
    ),
    "half a row": ((".jsonl", b'{"problem": "a", "ans'), "JSON parse error", "not JSON"),
    "text that is not UTF-8": (
        parquet(["1", "2"], bytes_as_text(b"a", b"\xff")),
        "can't decode byte 0xff",
        "column 'problem': not a readable parquet file",
    ),
    "time stamps": (
        parquet(HUGE.view(pa.timestamp("us"))),
        "date value out of range",
        "column 'answer': not a readable parquet file",
    ),
    "unknown time zone": (
        parquet(pa.array([0, 1]).view(pa.timestamp("us", tz="Mars/Olympus"))),
        "Mars/Olympus",
        "column 'answer': not a readable parquet file",
    ),
    "durations": (
        parquet(HUGE.view(pa.duration("s"))),
        "too large",
        "column 'answer': not a readable parquet file",
    ),
    "maps": (
        parquet(pa.array([[("k", 1)]] * 2, pa.map_(pa.string(), "int64"))),
        "map<string, int64",
        "row 0: answer must be a text",
    ),
    "bytes": (parquet([b"\xff", b"1"]), "row 0: answer must be", "row 0: answer must be"),
    "truncated": (
        (".parquet", parquet(["1", "2"])[1][:200]),
        "Parquet magic bytes not found",
        "not a readable parquet file",
    ),
    "CSV with a missing cell": (
        (".csv", b"problem,answer\na,\n"),
        "row 0: answer has no final answer",
        "a data file must be one of .jsonl, .json, .parquet, got '.csv'",
    ),
    "CSV with uneven rows": ((".csv", b"problem,answer\na\nb,1,2\n"), "Expected 2 fields", ".csv"),
    "CSV that is not UTF-8": ((".csv", b"problem,answer\n\xff,1\n"), "can't decode byte", ".csv"),
}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[File], Path]:
    """Return a function that writes a data set to owner/name, where `datasets` also finds it."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)

    def write_file(file: File) -> Path:
        path = Path("acme") / "odd" / f"train{file[0]}"
        path.parent.mkdir(parents=True)
        path.write_bytes(file[1])
        return path

    return write_file


def error_of(source: str) -> str:
    with pytest.raises(UserError) as caught:
        read_problems(source)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    return message


@pytest.mark.parametrize("name", ODD)
def test_an_odd_data_set_is_one_line(name: str, write: Callable[[File], Path]) -> None:
    file, of_hub, of_file = ODD[name]
    path = write(file)
    message = error_of("acme/odd")
    assert message.startswith("hub data set acme/odd")
    assert of_hub in message
    message = error_of(str(path))
    assert message.startswith(str(path))
    assert of_file in message


def test_answers_of_mixed_types_are_texts(write: Callable[[File], Path]) -> None:
    path = write(lines(OK, {"problem": "a", "answer": 3}, {"problem": "b", "answer": ["4", 5]}))
    for source in ("acme/odd", str(path)):
        assert [each.answer for each in read_problems(source)] == ["2", "3", "4, 5"]


def test_long_numbers_are_exact_or_refused(write: Callable[[File], Path]) -> None:
    """The `datasets` package reads them as floats, which would be another gold answer."""
    path = write(lines({"problem": "a", "answer": 2**64 + 1}))
    [problem] = read_problems(str(path))
    assert problem.answer == "18446744073709551617"
    assert "row 0: answer = 1.8446744073709552e+19 may have lost digits" in error_of("acme/odd")
