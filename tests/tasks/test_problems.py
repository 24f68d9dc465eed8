"""Checks that all formats give the same problems and that errors name the row."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from eepo.tasks.problems import Columns, Problem, read_problems, short_name
from eepo.types import UserError

ROWS: list[dict[str, Any]] = [
    {"id": "a", "problem": "What is $1+1$?", "answer": "2", "level": 3},
    {"id": "b", "problem": "What is $2+3$?", "answer": "5", "level": "Level 5"},
]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read_single(folder: Path, **row: Any) -> Problem:
    (problem,) = read_problems(
        write_lines(folder / "one.jsonl", [{"problem": "Say it.", "answer": "1"} | row])
    )
    return problem


def error_of(source: str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        read_problems(source, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- formats


def test_every_format_gives_the_same_problems(tmp_path: Path) -> None:
    rows = [row | {"level": 4} for row in ROWS]
    expected = [Problem(row["id"], row["problem"], row["answer"], level=4) for row in rows]
    assert read_problems(write_lines(tmp_path / "p.jsonl", rows)) == expected
    (tmp_path / "p.json").write_text(json.dumps(rows))
    assert read_problems(str(tmp_path / "p.json")) == expected
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    table = sys.modules["pyarrow"].Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "p.parquet")
    assert read_problems(str(tmp_path / "p.parquet")) == expected


def test_byte_order_mark_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lines = [json.dumps(row).encode() for row in ROWS]
    path.write_bytes(b"\xef\xbb\xbf" + b"\n\n".join(lines) + b"\n\n")
    assert [problem.id for problem in read_problems(str(path))] == ["a", "b"]


def test_column_names_can_be_set(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", [{"question": "Why?", "gold": "because", "grade": 2}])
    (problem,) = read_problems(path, Columns("question", "gold", "grade"))
    assert (problem.text, problem.answer, problem.level) == ("Why?", "because", 2)


def test_files_are_looked_for_in_data_dir_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "p.jsonl", ROWS[:1])
    write_lines(tmp_path / "data" / "p.jsonl", ROWS[1:])
    assert [problem.id for problem in read_problems("p.jsonl", data_dir="data")] == ["b"]
    assert [problem.id for problem in read_problems("p.jsonl", data_dir="")] == ["a"]
    (tmp_path / "data" / "p.jsonl").unlink()
    assert [problem.id for problem in read_problems("p.jsonl", data_dir="data")] == ["a"]


# ---- answers


@pytest.mark.parametrize(
    ("cell", "answer"),
    [
        ("  42 ", "42"),
        (42, "42"),
        (3.0, "3"),
        (0.25, "0.25"),
        (1e300, "1e+300"),
        ("$x^2$", "x^2"),
        ("$$x^2$$", "x^2"),
        ("$18", "$18"),
        ("$5$ or $6$", "$5$ or $6$"),
        (r"$\$5$", r"\$5"),
        (["$2$", "3"], "2, 3"),
        ([7], "7"),
    ],
)
def test_answer_cells_without_a_solution(cell: Any, answer: str, tmp_path: Path) -> None:
    problem = read_single(tmp_path, answer=cell)
    assert (problem.answer, problem.solution) == (answer, None)


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"So it is $\boxed{12}$.", "12"),
        (r"First \boxed{1}, then \boxed{\frac{1}{\sqrt{2}}}. Done.", r"\frac{1}{\sqrt{2}}"),
        (r"The set \boxed{\left\{ x : x > 2 \right.} it is", r"\left\{ x : x > 2 \right."),
        (r"\boxed{$7$}", "7"),
        (r"Thus $\boxed 9$.", "9"),
        (r"Thus $\fbox{9}$.", "9"),
        (r"A \boxed{3} and then the broken \boxed{4", "3"),
        ("He has 2 * 3 = <<2*3=6>>6 apples.\n#### 6", "6"),
        ("Many.\n#### 1,234,567", "1234567"),
        ("A pair.\n#### 1,2", "1,2"),
    ],
)
def test_final_answer_is_extracted_from_a_solution(
    solution: str, answer: str, tmp_path: Path
) -> None:
    problem = read_single(tmp_path, answer=solution)
    assert (problem.answer, problem.solution) == (answer, solution)


def test_solution_column_is_read(tmp_path: Path) -> None:
    problem = read_single(tmp_path, answer="4", solution="Two and two.")
    assert (problem.answer, problem.solution) == ("4", "Two and two.")


@pytest.mark.parametrize(
    "cell", ["", "  ", None, [], "$ $", r"So \boxed{}.", r"So \boxed{4", "Hm.\n####", [""]]
)
def test_empty_answers_are_refused(cell: Any, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", [*ROWS, {"problem": "Say it.", "answer": cell}])
    message = error_of(path)
    assert message.startswith(f"{path}:3: ")
    assert "answer" in message


@pytest.mark.parametrize("cell", [True, {"value": 3}, float("nan"), float("inf"), [[None], {}]])
def test_answers_of_other_types_are_refused(cell: Any, tmp_path: Path) -> None:
    assert "p.jsonl:1: answer must be a text, a number" in error_of(
        write_lines(tmp_path / "p.jsonl", [{"problem": "Say it.", "answer": cell}])
    )


# ---- levels and ids


def test_levels_are_read_in_all_spellings_and_filter(tmp_path: Path) -> None:
    spellings = [3, "3", "Level 3", 3.0, "level 5", "Level ?", None, True]
    rows = [{"problem": "Say it.", "answer": "1", "level": level} for level in spellings]
    path = write_lines(tmp_path / "p.jsonl", rows)
    assert [problem.level for problem in read_problems(path)] == [3, 3, 3, 3, 5, None, None, None]
    assert [problem.level for problem in read_problems(path, levels=(5, 4))] == [5]
    message = error_of(path, levels=(1, 2))
    assert "task.levels = [1, 2]" in message
    assert "3, 5" in message
    bare = write_lines(tmp_path / "bare.jsonl", [{"problem": "Say it.", "answer": "1"}])
    assert "none in column 'level'" in error_of(bare, levels=(1,))


def test_missing_and_numeric_ids_are_prefixed_with_the_set_name(tmp_path: Path) -> None:
    row_ids = ("own/1", 7, "8", None, "", [1])
    rows = [{"problem": "Say it.", "answer": "1", "id": row_id} for row_id in row_ids]
    ids = [problem.id for problem in read_problems(write_lines(tmp_path / "set.jsonl", rows))]
    assert ids == ["own/1", "set/7", "set/8", "set/3", "set/4", "set/5"]


def test_duplicate_ids_are_refused_with_both_locations(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", [*ROWS, ROWS[0]])
    assert error_of(path) == f"{path}:3: id 'a' is already used at {path}:1; ids must be unique"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("data/maths.jsonl", "maths"),
        ("maths.parquet", "maths"),
        ("acme/maths", "maths"),
        ("acme/maths.v2", "maths.v2"),
        ("acme/maths:hard", "maths"),
        ("acme/maths:hard/train.parquet", "maths"),
    ],
)
def test_short_names_of_sources(source: str, name: str) -> None:
    assert short_name(source) == name


# ---- mistakes in files


@pytest.mark.parametrize(
    ("third_line", "expected"),
    [
        (b'{"problem": "x", "answer": ', "not JSON at character"),
        (b'{"problem": "x", "answer": "\xff"}', "not UTF-8 at byte 28"),
        (b'{"problem": "x\x00", "answer": "1"}', "not JSON at character 14"),
        (b'{"problem": "x\\u0000", "answer": "1"}', "a NUL character or a lone surrogate"),
        (b'{"problem": "x", "answer": "\\ud800"}', "a NUL character or a lone surrogate"),
        (
            b'{"problem": "x", "answer": "1", "solution": "\\udc00"}',
            "a NUL character or a lone surrogate",
        ),
        (b'["x", "1"]', "a row must be an object with columns, got a list"),
        (b"17", "got a number"),
        (b"[" * 100_000, "not JSON"),
        (b'{"problem": "x", "answer": ' + b"1" * 5000 + b"}", "not JSON that can be read"),
        (
            b'{"text": "x", "answer": "1"}',
            "no column 'problem' (task.problem_column); columns: text, answer",
        ),
        (
            b'{"problem": "x", "gold": "1"}',
            "no column 'answer' (task.answer_column); columns: problem, gold",
        ),
        (b"{}", "columns: none"),
        (b'{"problem": " ", "answer": "1"}', "problem must be a non-empty text"),
        (b'{"problem": null, "answer": "1"}', "problem must be a non-empty text, got None"),
    ],
)
def test_errors_name_file_and_line(third_line: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lines = [*(json.dumps(row).encode() for row in ROWS), third_line]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    message = error_of(str(path))
    assert message.startswith(f"{path}:3: ")
    assert expected in message
    assert len(message) < 300 + len(str(path))


def test_too_long_lines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eepo.runs.jsonl.MAX_LINE_BYTES", 100)
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"problem": "x" * 200, "answer": "1"}))
    assert error_of(str(path)) == f"{path}:1: the line is longer than 100 bytes"


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_empty_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    assert error_of(str(path)) == f"{path}: the data set is empty"


def test_errors_about_a_whole_file_name_its_folder(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("")
    with pytest.raises(UserError) as caught:
        read_problems("p.jsonl", data_dir=str(tmp_path))
    assert str(caught.value) == f"{tmp_path / 'p.jsonl'}: the data set is empty"
    (tmp_path / "p.jsonl").write_text(json.dumps({"problem": "1 + 1", "answer": "2", "level": 1}))
    with pytest.raises(UserError) as caught:
        read_problems("p.jsonl", data_dir=str(tmp_path), levels=[5])
    assert str(caught.value).startswith(f"{tmp_path / 'p.jsonl'}: no problem of task.levels = [5]")


def test_json_files_must_be_a_list_of_objects(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"rows": ROWS}))
    message = f"{path}: a .json file must be one list of objects, got an object"
    assert error_of(str(path)) == message
    path.write_text(json.dumps([*ROWS, "x"]))
    message = f"{path}: row 2: a row must be an object with columns, got a string"
    assert error_of(str(path)) == message
    path.write_text("[]")
    assert error_of(str(path)) == f"{path}: the data set is empty"


def test_unreadable_parquet_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    path = tmp_path / "p.parquet"
    path.write_bytes(b"PAR1 and then nothing of the kind")
    assert "not a readable parquet file" in error_of(str(path))
    table = sys.modules["pyarrow"].Table.from_pylist([{"question": "x", "answer": "1"}])
    parquet.write_table(table, path)
    message = "no column 'problem' (task.problem_column); columns: question, answer"
    assert message in error_of(str(path))
    broken = bytearray(path.read_bytes())
    broken[4:40] = b"\xff" * 36  # the data pages, not the footer
    path.write_bytes(broken)
    assert "not a readable parquet file" in error_of(str(path), columns=Columns("question"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert 'pip install "eepo[data]"' in error_of(str(path))


def bytes_as_text(pyarrow: Any, values: list[bytes]) -> Any:
    """Return a string column with any bytes, as programs that do not check write it."""
    array = pyarrow.array(values, pyarrow.binary())
    return pyarrow.Array.from_buffers(pyarrow.string(), len(array), array.buffers())


ODD_COLUMNS = {
    "invalid UTF-8": lambda pa: bytes_as_text(pa, [b"5", b"\xff"]),
    "dates after the year 9999": lambda pa: pa.array([0, 2**62]).view(pa.timestamp("ms")),
    "dates of an unknown time zone": lambda pa: pa.array([0, 1]).view(
        pa.timestamp("us", tz="Mars/Olympus")
    ),
    "durations of more than 10^9 days": lambda pa: pa.array([0, 2**62]).view(pa.duration("s")),
    "nested lists": lambda pa: pa.array([[["1"]], [["2"]]]),
    "two columns of one name": lambda pa: pa.array(["1", "2"]),
}


@pytest.mark.parametrize("kind", ODD_COLUMNS)
def test_odd_columns_of_parquet_files_are_refused(kind: str, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    names = ["problem", "answer", "answer" if kind == "two columns of one name" else "id"]
    columns = [pa.array(["1+1?", "2+2?"]), ODD_COLUMNS[kind](pa), pa.array(["a", "b"])]
    parquet.write_table(pa.Table.from_arrays(columns, names=names), tmp_path / "p.parquet")
    message = error_of(str(tmp_path / "p.parquet"))
    assert str(tmp_path / "p.parquet") in message
    assert "answer" in message


def nested(levels: int) -> list[Any]:
    value: list[Any] = ["1"]
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("levels", [1, 300, 900])
@pytest.mark.parametrize("column", ["problem", "answer"])
def test_nested_lists_are_refused(column: str, levels: int, tmp_path: Path) -> None:
    row = {"problem": "1+1?", "answer": "2"} | {column: nested(levels)}
    message = error_of(write_lines(tmp_path / "p.jsonl", [row]))
    assert f"{column} must be" in message
    assert len(message) < 300


def test_nested_lists_in_other_columns_are_ignored(tmp_path: Path) -> None:
    deep = nested(900)
    problem = read_single(tmp_path, level=deep, id=deep, solution=deep, other=deep)
    assert (problem.id, problem.level, problem.solution) == ("one/0", None, None)


@pytest.mark.parametrize("column", ["id", "problem", "answer", "solution"])
@pytest.mark.parametrize("character", ["\ud800", "\0"])
def test_lone_surrogates_and_nul_are_refused(column: str, character: str, tmp_path: Path) -> None:
    """They cannot be written to records, or break tokenizers."""
    row = {"problem": "1+1?", "answer": "2"} | {column: f"a{character}"}
    assert "lone surrogate" in error_of(write_lines(tmp_path / "p.jsonl", [row]))


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + ".jsonl", "/".join(["x" * 200] * 30)])
def test_names_that_no_file_can_have_are_refused(name: str, tmp_path: Path) -> None:
    for data_dir in ("", str(tmp_path), "x" * 300):
        message = error_of(name, data_dir=data_dir)
        assert "no such file" in message or "is neither a" in message


def test_a_folder_is_no_data_file(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").mkdir()
    assert "no such file" in error_of(str(tmp_path / "p.jsonl"))


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that cannot be read")
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_a_file_that_cannot_be_read_is_refused(suffix: str, tmp_path: Path) -> None:
    """/proc/self/mem can be opened, but address 0 cannot be read, even by root."""
    path = tmp_path / f"p{suffix}"
    path.symlink_to("/proc/self/mem")
    assert str(path) in error_of(str(path))


def test_sources_that_are_neither_file_nor_hub_name_are_refused(tmp_path: Path) -> None:
    message = error_of("nowhere/p.jsonl", data_dir=str(tmp_path))
    assert "no such file" in message
    assert str(tmp_path / "nowhere" / "p.jsonl") in message
    assert "'maths' is neither" in error_of("maths")
    (tmp_path / "p.csv").write_text("problem,answer\n")
    assert "must be one of .jsonl, .json, .parquet, got '.csv'" in error_of(str(tmp_path / "p.csv"))


# ---- the hub: load_dataset also reads a local folder owner/name


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "acme" / "sums"
    (folder / "hard").mkdir(parents=True)
    write_lines(folder / "train.jsonl", [{"question": "1+1?", "final_answer": ["2"], "id": 7}])
    write_lines(
        folder / "test.jsonl", [{"question": "2+2?", "final_answer": ["4", "four"], "id": 0}]
    )
    write_lines(
        folder / "hard" / "train.jsonl", [{"question": "9+9?", "final_answer": ["18"], "id": 1}]
    )
    return folder


def test_hub_data_sets_are_read_by_split_and_by_file(hub: Path) -> None:
    columns = Columns("question", "final_answer")
    assert read_problems("acme/sums:train.jsonl", columns) == [Problem("sums/7", "1+1?", "2")]
    assert read_problems("acme/sums", columns, split="test") == [
        Problem("sums/0", "2+2?", "4, four")
    ]
    assert read_problems("acme/sums:hard/train.jsonl", columns, split="test") == [
        Problem("sums/1", "9+9?", "18")
    ]


def test_hub_errors_are_one_line(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error_of("acme/sums", split="test") == (
        "hub data set acme/sums: no column 'problem' (task.problem_column); "
        "columns: question, final_answer, id"
    )
    assert "hub data set acme/sums, split 'dev': " in error_of("acme/sums", split="dev")
    assert "hub data set acme/sums:easy, split 'train': " in error_of("acme/sums:easy")
    assert "hub data set acme/nothing, split 'train': " in error_of("acme/nothing")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert 'pip install "eepo[data]"' in error_of("acme/sums")
