"""Tests of `eepo grade`: verdicts in the order of the lines, and errors that name the line."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eepo.cli import app
from eepo.types import UserError


def write(path: Path, *rows: Any) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8", errors="surrogateescape")
    return path


def grade(path: Path, *options: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["grade", str(path), *options], catch_exceptions=False)
    assert result.exit_code == 0
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_lines_keep_their_order_and_keys_and_get_a_verdict(tmp_path: Path) -> None:
    rows = [
        {"gold": "1/2", "completion": r"\boxed{0.5}", "id": 7},
        {"gold": "52_8", "completion": r"\boxed{52_9}"},
        {"gold": 42, "completion": "I do not know"},
        {"completion": r"\boxed{9^{9^{9^9}}}", "gold": "1", "note": "é\ud800"},  # not computed
        {"gold": "x", "completion": r"\boxed{\frac{\frac}}"},
    ]
    graded = grade(write(tmp_path / "in.jsonl", *rows), "--workers", "1")
    inputs = [{key: row[key] for key in row if key not in ("correct", "reason")} for row in graded]
    assert inputs == rows
    assert [(row["correct"], row["reason"]) for row in graded] == [
        (True, "same number"),
        (False, "different"),
        (False, "no answer found"),
        (False, "different"),
        (False, "unparsable"),
    ]


def test_output_file_with_more_lines_than_a_chunk(tmp_path: Path) -> None:
    path = write(
        tmp_path / "in.jsonl",
        *({"gold": str(n % 7), "completion": f"#### {n % 5}"} for n in range(1234)),
    )
    out = tmp_path / "out.jsonl"
    assert grade(path, "--out", str(out), "--reward", "exact") == []
    graded = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["correct"] for row in graded] == [n % 7 == n % 5 for n in range(1234)]


def test_reward_may_be_a_user_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "def longer(answer, completion):\n    return len(completion) > int(answer)\n"
    )
    monkeypatch.chdir(tmp_path)
    path = write(
        tmp_path / "in.jsonl", {"gold": 3, "completion": "four"}, {"gold": 3, "completion": "two"}
    )
    assert [row["correct"] for row in grade(path, "--reward", "mine:longer")] == [True, False]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "in.jsonl:2: not JSON"),
        ("[1]", "in.jsonl:2: must be an object"),
        ('{"gold": "1"}', 'in.jsonl:2: has no "completion"; its keys are gold'),
        ('{"completion": "1"}', 'in.jsonl:2: has no "gold"'),
        ('{"gold": "1", "completion": 5}', 'in.jsonl:2: "completion" must be a string, got 5'),
        (
            '{"gold": null, "completion": "5"}',
            'in.jsonl:2: "gold" must be a non-empty string or a number, got null',
        ),
        ('{"gold": " ", "completion": "5"}', 'in.jsonl:2: "gold" must be'),
        ('{"gold": NaN, "completion": "5"}', 'in.jsonl:2: "gold" must be'),
        ('{"gold": ' + "9" * 5000 + "}", "in.jsonl:2: not JSON"),
        ("[" * 100_000, "in.jsonl:2: not JSON"),
        ('{"gold": "\udcff", "completion": "5"}', "in.jsonl:2: not UTF-8"),
    ],
    ids=lambda text: text[:20],
)
def test_a_bad_line_is_named_in_the_error(line: str, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", {"gold": "1", "completion": "1"}, line + "\n")
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(app, ["grade", str(path), "--reward", "exact"], catch_exceptions=False)
    assert words in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        CliRunner().invoke(app, ["grade", str(tmp_path / "no.jsonl")], catch_exceptions=False)


def test_output_may_replace_the_input_and_an_error_keeps_the_input(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", {"gold": "1", "completion": "1"})
    grade(path, "--out", str(path), "--reward", "exact")
    assert json.loads(path.read_text())["correct"] is True
    before = write(path, {"gold": "1", "completion": "1"}, "{\n").read_text()
    with pytest.raises(UserError):
        CliRunner().invoke(
            app,
            ["grade", str(path), "--out", str(path), "--reward", "exact"],
            catch_exceptions=False,
        )
    assert path.read_text() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["in.jsonl"]


def test_output_folder_is_created(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", {"gold": "1", "completion": "1"})
    grade(path, "--out", str(tmp_path / "new" / "deep" / "out.jsonl"), "--reward", "exact")
    assert json.loads((tmp_path / "new" / "deep" / "out.jsonl").read_text())["correct"] is True


@pytest.mark.parametrize("out", ["in.jsonl/out.jsonl", "."])
def test_an_unwritable_output_is_an_error(out: str, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", {"gold": "1", "completion": "1"})
    with pytest.raises(UserError, match="cannot be written"):
        CliRunner().invoke(
            app, ["grade", str(path), "--out", str(tmp_path / out)], catch_exceptions=False
        )


def test_a_grader_that_cannot_start_is_no_error_of_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise OSError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr("eepo.rewards.isolation.subprocess.Popen", fail)
    path = write(tmp_path / "in.jsonl", {"gold": "1", "completion": "1"})
    with pytest.raises(OSError, match="no more processes"):
        CliRunner().invoke(
            app, ["grade", str(path), "--out", str(tmp_path / "out.jsonl")], catch_exceptions=False
        )
    assert [entry.name for entry in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"gold": "1", "completion": "1"}\n', encoding="utf-8-sig")
    assert grade(path, "--reward", "exact")[0]["correct"] is True
