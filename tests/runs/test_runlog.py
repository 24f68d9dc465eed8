"""Records of a run: complete lines survive a kill, and a resume drops the lines after its step."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

import eepo
from eepo.runs import runlog
from eepo.runs.jsonl import read_records
from eepo.runs.runlog import ALARMS, COMPLETIONS, EVALUATIONS, METRICS, RunLog


def test_rows_read_back_in_order_and_exactly(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "text": 'θ′ "a"\n\u2028b\\'},
        {"step": 2, "x": 0.1 + 0.2, "y": [1, None, {"k": math.pi}]},
    ]
    log = RunLog(tmp_path / "deep" / "run")
    log.append(METRICS, rows[0])
    log.append(METRICS, rows[1])
    assert list(read_records(log.folder / METRICS)) == rows


def test_line_breaks_in_values_do_not_split_a_row(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.append(METRICS, {"step": 1, "text": "a\nb\u2028c\x85d\re"}, {"step": 2})
    assert len((tmp_path / METRICS).read_text(encoding="utf-8").splitlines()) == 2


def test_rows_are_on_disk_after_append(tmp_path: Path) -> None:
    RunLog(tmp_path).append(METRICS, {"step": 1})
    assert (tmp_path / METRICS).read_bytes() == b'{"step": 1}\n'


@pytest.mark.parametrize("unfinished", ['{"step": 2, "rew', '{"step": 2}', "{", "nul"])
def test_an_unfinished_last_line_is_skipped(unfinished: str, tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text('{"step": 1}\n' + unfinished)
    assert list(read_records(tmp_path / METRICS)) == [{"step": 1}]


@pytest.mark.parametrize("unfinished", ['{"step": 2, "rew', '{"step": 2}'])
def test_a_rewind_drops_an_unfinished_line_before_the_next_row(
    unfinished: str, tmp_path: Path
) -> None:
    (tmp_path / METRICS).write_text('{"step": 1}\n' + unfinished)
    log = RunLog(tmp_path)
    log.rewind(5)
    log.append(METRICS, {"step": 2, "reward": 0.5})
    assert list(read_records(tmp_path / METRICS)) == [{"step": 1}, {"step": 2, "reward": 0.5}]


def test_a_rewind_drops_later_steps_from_all_records_and_keeps_earlier_bytes(
    tmp_path: Path,
) -> None:
    log, names = RunLog(tmp_path), (METRICS, EVALUATIONS, COMPLETIONS, ALARMS)
    for name in names:
        log.append(name, {"step": 0, "x": 1 / 3, "text": "θ"}, {"step": 2, "nan": math.nan})
    before = {name: (tmp_path / name).read_bytes() for name in names}
    for name in before:
        log.append(name, {"step": 3}, {"step": 10})
    log.rewind(2)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_a_rewind_creates_no_files(tmp_path: Path) -> None:
    RunLog(tmp_path).rewind(0)
    assert list(tmp_path.iterdir()) == []


def test_a_rewind_without_later_steps_does_not_write(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.append(METRICS, {"step": 1})
    os.utime(tmp_path / METRICS, (1, 1))
    log.rewind(1)
    assert (tmp_path / METRICS).stat().st_mtime == 1


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recipe.toml"
    runlog.write_atomically(path, "old")

    def fail(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        runlog.write_atomically(path, "new")
    assert path.read_text() == "old"


def test_an_atomic_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    runlog.write_atomically(tmp_path / "a.txt", "one θ")
    runlog.write_atomically(tmp_path / "a.txt", "two θ")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "two θ"


def test_the_environment_has_versions_device_and_command(tmp_path: Path) -> None:
    RunLog(tmp_path).write_environment("cpu, 3 threads")
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["eepo"] == eepo.__version__
    assert environment["device"] == "cpu, 3 threads"
    keys = {"commit", "python", "platform", "num_cores", "packages", "command"}
    assert keys <= environment.keys()
    assert {"torch", "transformers", "safetensors", "numpy"} <= environment["packages"].keys()
    assert all(environment["packages"].values())


def test_without_git_the_commit_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert runlog.environment("cpu")["commit"] is None


def test_a_rewind_counts_the_rows_that_it_keeps(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.append(METRICS, {"step": 1}, {"step": 2}, {"step": 3})
    assert log.num_rows == {METRICS: 3, EVALUATIONS: 0, COMPLETIONS: 0, ALARMS: 0}
    resumed = RunLog(tmp_path)
    assert resumed.rewind(2, {METRICS: 2}) == []
    assert resumed.num_rows[METRICS] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [METRICS]


def test_a_rewind_reports_missing_rows_and_does_not_copy_an_unchanged_file(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.append(METRICS, {"step": 1})
    [line] = log.rewind(3, {METRICS: 3})
    assert f"{tmp_path / METRICS} is damaged: it has 1 of 3 rows up to step 3" in line
    assert [path.name for path in tmp_path.iterdir()] == [METRICS]


def test_a_rewind_keeps_a_copy_of_a_damaged_file(tmp_path: Path) -> None:
    damaged = b'{"step": 1}\n{"step": \0\0}\n{"step": 3}\n{"step": 4}\n'
    (tmp_path / METRICS).write_bytes(damaged)
    [line] = RunLog(tmp_path).rewind(3, {METRICS: 3})
    assert "line 2 cannot be read: not JSON" in line
    assert "it has 2 of 3 rows up to step 3; it is kept as metrics.jsonl.bak-1" in line
    assert (tmp_path / METRICS).read_bytes() == b'{"step": 1}\n{"step": 3}\n'
    assert (tmp_path / f"{METRICS}.bak-1").read_bytes() == damaged


def test_with_copies_a_rewind_copies_only_files_that_change(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.append(METRICS, {"step": 1}, {"step": 2})
    log.append(COMPLETIONS, {"step": 1})
    assert log.rewind(1, keep_copies=True) == [
        "the rows after step 1 are dropped; copies: metrics.jsonl.bak-1"
    ]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [COMPLETIONS, METRICS, f"{METRICS}.bak-1"]


def test_a_killed_rewind_loses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RunLog(tmp_path)
    log.append(METRICS, {"step": 1}, {"step": 2})
    before = (tmp_path / METRICS).read_bytes()

    def kill(*args: object) -> None:
        raise KeyboardInterrupt

    for name in ("replace", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, kill)
            with pytest.raises(KeyboardInterrupt):
                log.rewind(1, keep_copies=True)
        assert (tmp_path / METRICS).read_bytes() == before
    log.rewind(1, keep_copies=True)
    assert all(path.read_bytes() == before for path in tmp_path.glob("*.bak-*"))
    assert not list(tmp_path.glob(".*"))
