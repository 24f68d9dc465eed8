"""The run's records: whole lines survive a kill, later lines go on resume, files are never half written."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

import eepo
from eepo.runs import runlog
from eepo.runs.jsonl import read_records
from eepo.runs.runlog import COMPLETIONS, EVALUATIONS, METRICS, RunLog


def test_rows_read_back_in_order_and_exactly(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "text": 'θ′ "a"\n\u2028b\\'},
        {"step": 2, "x": 0.1 + 0.2, "y": [1, None, {"k": math.pi}]},
    ]
    log = RunLog(tmp_path / "deep" / "run")
    log.append(METRICS, rows[0])
    log.append(METRICS, rows[1])
    assert list(read_records(log.folder / METRICS)) == rows


def test_each_row_is_one_line(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.append(METRICS, {"step": 1, "text": "a\nb\u2028c\x85d\re"}, {"step": 2})
    assert len((tmp_path / METRICS).read_text(encoding="utf-8").splitlines()) == 2


def test_rows_are_on_disk_as_soon_as_they_are_appended(tmp_path: Path) -> None:
    RunLog(tmp_path).append(METRICS, {"step": 1})
    assert (tmp_path / METRICS).read_bytes() == b'{"step": 1}\n'


@pytest.mark.parametrize("torn", ['{"step": 2, "rew', '{"step": 2}', "{", "nul"])
def test_a_torn_last_line_is_left_out(torn: str, tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text('{"step": 1}\n' + torn)
    assert list(read_records(tmp_path / METRICS)) == [{"step": 1}]


@pytest.mark.parametrize("torn", ['{"step": 2, "rew', '{"step": 2}'])
def test_after_a_rewind_the_next_row_does_not_join_a_torn_line(torn: str, tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text('{"step": 1}\n' + torn)
    log = RunLog(tmp_path)
    log.rewind(5)
    log.append(METRICS, {"step": 2, "reward": 0.5})
    assert list(read_records(tmp_path / METRICS)) == [{"step": 1}, {"step": 2, "reward": 0.5}]


def test_a_rewind_drops_later_steps_from_all_three_files_and_keeps_the_bytes_before(
    tmp_path: Path,
) -> None:
    log = RunLog(tmp_path)
    for name in (METRICS, EVALUATIONS, COMPLETIONS):
        log.append(name, {"step": 0, "x": 1 / 3, "text": "θ"}, {"step": 2, "nan": math.nan})
    before = {name: (tmp_path / name).read_bytes() for name in (METRICS, EVALUATIONS, COMPLETIONS)}
    for name in before:
        log.append(name, {"step": 3}, {"step": 10})
    log.rewind(2)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_a_rewind_creates_no_files(tmp_path: Path) -> None:
    RunLog(tmp_path).rewind(0)
    assert list(tmp_path.iterdir()) == []


def test_a_rewind_with_nothing_to_drop_leaves_the_files_alone(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.append(METRICS, {"step": 1})
    os.utime(tmp_path / METRICS, (1, 1))
    log.rewind(1)
    assert (tmp_path / METRICS).stat().st_mtime == 1


def test_a_write_that_fails_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "recipe.toml"
    runlog.write_whole(path, "old")

    def fail(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        runlog.write_whole(path, "new")
    assert path.read_text() == "old"


def test_write_whole_leaves_only_the_file(tmp_path: Path) -> None:
    runlog.write_whole(tmp_path / "a.txt", "one θ")
    runlog.write_whole(tmp_path / "a.txt", "two θ")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "two θ"


def test_the_environment_says_what_is_needed_to_get_the_same_numbers(tmp_path: Path) -> None:
    RunLog(tmp_path).write_environment("cpu, 3 threads")
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["eepo"] == eepo.__version__
    assert environment["device"] == "cpu, 3 threads"
    assert {
        "commit",
        "python",
        "platform",
        "num_cores",
        "packages",
        "command",
    } <= environment.keys()
    assert {"torch", "transformers", "safetensors", "numpy"} <= environment["packages"].keys()
    assert all(environment["packages"].values())


def test_the_environment_does_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert runlog.environment("cpu")["commit"] is None
