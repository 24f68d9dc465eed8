"""A miniature of the soak, so that the script works when it is needed."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eepo.types import UserError

SOAK = Path(__file__).parent
WEIGHTS = "final/model.safetensors"
NAMES = ("cases", "commands", "comparison", "damage", "graders", "inputs", "long_run", "scenarios")

pytest.importorskip("pyarrow", reason="the data files need the extra: pip install 'eepo[data]'")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the soak reads /proc")

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(SOAK)
    soak, table, *modules = map(importlib.import_module, ("soak", "table", *NAMES))
cases, commands, comparison, damage, graders, inputs, long_run, scenarios = modules


# --- inputs


@pytest.mark.parametrize("kind", ["recipes", "--set", "data files", "hostile answers"])
def test_a_dozen_inputs_of_each_kind_cause_no_failure(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "NUM_CASES", 12)
    monkeypatch.setattr(graders, "ANSWERS_PER_TRY", 12)
    findings = soak.KINDS[kind].run(scenarios.Workspace(tmp_path), random.Random(1))
    assert findings.tried == 12
    assert findings.failures == []


def test_a_hostile_reward_ends_as_its_list_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SOAK)
    assert graders.wrong_outcome("exits_with_3") == ""
    expected = graders.HOSTILE_REWARDS["raises_an_error"]
    monkeypatch.setitem(graders.HOSTILE_REWARDS, "exits_with_3", expected)
    assert "no error, but" in graders.wrong_outcome("exits_with_3")


def test_a_right_answer_counts_as_a_wrong_accept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graders, "hostile_answers", lambda seed, number: [("5", "\\boxed{5}")])
    findings = graders.try_hostile_answers(scenarios.Workspace(tmp_path), random.Random(1))
    assert [column for column, _ in findings.failures] == ["wrong accepts"]


def test_tracebacks_crashes_and_hangs_are_counted_and_the_other_cases_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cases, "CASE_SECONDS", 0.5)
    checks: dict[str, Callable[[], Any]] = {
        "fine": lambda: None,
        "user error": lambda: _raise(UserError("one line")),
        "bug": lambda: {}["key"],
        "crash": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "hang": lambda: time.sleep(60),
        "fine again": lambda: None,
    }
    findings = cases.check_cases(lambda name: checks[name](), list(checks))
    assert findings.tried == 6
    assert [column for column, _ in findings.failures] == ["tracebacks", "tracebacks", "hangs"]
    assert [text.split(":")[0] for _, text in findings.failures] == ["'bug'", "'crash'", "'hang'"]


def _raise(error: Exception) -> None:
    raise error


# --- comparison


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Return two folders of the same run, with other times."""
    for name in ("a", "b"):
        (tmp_path / name / "final").mkdir(parents=True)
        weights = {"weight": torch.arange(6.0)}
        save_file(weights, tmp_path / name / "final" / "model.safetensors")
        rows = [{"step": step, "reward": 0.5, "seconds/total": ord(name)} for step in (1, 2)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    return tmp_path / "a", tmp_path / "b"


def test_runs_that_differ_in_their_times_are_equal(folders: tuple[Path, Path]) -> None:
    assert comparison.differences(*folders) == []


def change_a_weight(folder: Path) -> None:
    weights = torch.arange(6.0)
    weights[3] = weights[3].nextafter(torch.tensor(9.0))
    save_file({"weight": weights}, folder / "final" / "model.safetensors")


def lose_a_row(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().splitlines()[0] + "\n")


def change_a_value(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"reward": 0.5', '"reward": 0.25', 1))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (change_a_weight, "final/model.safetensors: weight differs"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b""), f"{WEIGHTS}: cannot be read"),
        (lose_a_row, "metrics.jsonl: 1 rows, not 2"),
        (change_a_value, "metrics.jsonl: row 1 differs"),
        (lambda folder: (folder / "metrics.jsonl").unlink(), "metrics.jsonl is missing"),
        (lambda folder: (folder / ".step-1.7").write_text("x"), ".step-1.7 is left over"),
        (lambda folder: (folder / "metrics.jsonl").write_text("{"), "metrics.jsonl: cannot be"),
    ],
)
def test_every_difference_is_found(
    change: Callable[[Path], object], line: str, folders: tuple[Path, Path]
) -> None:
    change(folders[1])
    [found] = comparison.differences(*folders)
    assert found.startswith(line)


# --- damage


@pytest.mark.parametrize("way", damage.WAYS)
def test_damage_changes_the_file(way: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    damage.damage(path, way, random.Random(0))
    assert not path.exists() or path.read_bytes() != b"0123456789"


def test_only_a_damaged_record_may_cost_rows(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    announced = commands.Outcome(0, "metrics.jsonl is damaged: 1 unreadable lines", "")
    silent = commands.Outcome(0, "weights: final", "")
    lost = ["metrics.jsonl: 5 rows, not 6"]
    assert damage._may_differ("metrics.jsonl", lost, announced, tmp_path)
    assert not damage._may_differ("metrics.jsonl", lost, silent, tmp_path)
    other = [*lost, "final/model.safetensors: weight differs"]
    assert not damage._may_differ("metrics.jsonl", other, announced, tmp_path)
    model = "checkpoints/step-000002/model.safetensors"
    assert not damage._may_differ(model, [f"{model}: weight differs"], announced, tmp_path)


# --- processes


def test_a_command_can_be_killed_with_its_children(tmp_path: Path) -> None:
    script = "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    process = commands.start_python(["-c", script], tmp_path)
    deadline = time.monotonic() + 30
    while not (children := commands.descendants(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    outcome = process.wait(lambda: True)
    assert outcome.code == -signal.SIGKILL
    assert children
    while any(map(_is_alive, children)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(_is_alive, children))


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # it has ended, and nobody has asked for its exit code


def test_a_command_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "HANG_SECONDS", 0.2)
    outcome = commands.start_python(["-c", "import time; time.sleep(60)"], tmp_path).wait()
    assert outcome.hung


@pytest.mark.parametrize(
    ("code", "errors", "expected"),
    [
        (2, "eepo: --out is a file\n", True),
        (0, "eepo: --out is a file\n", False),
        (2, "eepo: one\neepo: two\n", False),
        (1, "Traceback (most recent call last):\n  ...\nKeyError: 1\n", False),
    ],
)
def test_one_line_errors_are_recognised(code: int, errors: str, expected: bool) -> None:
    outcome = commands.Outcome(code, "", errors)
    assert outcome.is_one_line_error == expected
    assert outcome.has_traceback == ("Traceback" in errors)


# --- long run


def measurements(leak: float = 0.0, files: float = 0.0) -> list[Any]:
    return [
        long_run.Measurement(step, 400 + leak * step, 12, 20 + int(files * step))
        for step in range(0, 2001, 20)
    ]


def test_a_flat_series_has_no_growth_and_a_leak_is_found() -> None:
    assert long_run.growth(measurements(), 12) == []
    [line] = long_run.growth(measurements(leak=0.01), 12)
    assert "MB of memory" in line
    [line] = long_run.growth(measurements(files=0.01), 12)
    assert "files" in line
    assert long_run.growth(measurements()[:20], 12) == ["only 380 steps were measured"]


# --- table and exit code


@pytest.mark.parametrize("column", [None, *table.COLUMNS])
def test_the_exit_code_is_1_if_any_column_is_not_0(
    column: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(workspace: Any, rng: random.Random) -> Any:
        findings = table.Findings(tried=3)
        if column:
            findings.add(column, f"number {rng.randrange(1000)}")
        return findings

    monkeypatch.setitem(soak.KINDS, "kills", soak.Kind(run, 1, 1))
    options = ["--only", "kills", "--tries", "6", "--seed", "7", "--folder", str(tmp_path)]
    assert soak.main(options) == (1 if column else 0)
    output = capsys.readouterr().out
    assert "seed 7" in output
    assert "| kills | 6 |" in output
    assert soak.main(options) == (1 if column else 0)
    assert capsys.readouterr().out.splitlines()[-4:] == output.splitlines()[-4:] or not column


@pytest.mark.slow
def test_two_killed_processes_and_two_damaged_files(tmp_path: Path) -> None:
    """The seed selects short scenarios: both kinds train the smallest policy."""
    script = [sys.executable, str(SOAK / "soak.py"), "--folder", str(tmp_path / "w")]
    options = ["--only", "kills,damage", "--tries", "2", "--seed", "10"]
    result = subprocess.run([*script, *options], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line.split("|")[1:3] for line in result.stdout.splitlines() if line.startswith("| ")]
    counts = {name.strip(): tried.strip() for name, tried in rows}
    assert int(counts["kills"]) >= 2
    assert counts["damage"] == "2"
    shutil.rmtree(tmp_path / "w")
