"""Tests of `eepo reproduce` with the small countdown policy: runs, results, stops and errors."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eepo.experiments import reproduce
from eepo.experiments.experiment import Experiment
from eepo.experiments.plan import Selection
from eepo.experiments.plan_file import read_plan
from eepo.experiments.plan_reports import plan_tables
from eepo.experiments.reproduce_cost import Estimate
from eepo.experiments.reproduce_options import ReproduceOptions
from eepo.experiments.reproduce_plan import Reproduction, plan_reproductions
from eepo.experiments.reproduce_results import hyper_panels
from eepo.experiments.runner import Outcome, run_here
from eepo.experiments.status import status_lines
from eepo.runs.jsonl import read_records
from eepo.runs.progress import Progress
from eepo.types import UserError

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = [
    "model.device=cpu",
    "training.num_steps=2",
    "training.prompts_per_step=2",
    "training.prompts_per_mini_batch=2",
    "training.learning_rate=1e-3",
    "algorithm.group_size=4",
    "algorithm.max_new_tokens=8",
    "algorithm.gate_threshold=5",
    "task.num_evaluation=2",
    "evaluation.every=1",
    "evaluation.quick_problems=0",
    "evaluation.quick_samples=1",
]
FIGURES = ["figure2.png", "figure4.png", "figure5.png", "figure6.png", "figure7.png", "figure8.png"]


def plan(out: Path, *changes: str, **options: Any) -> Reproduction:
    chosen: dict[str, Any] = {"methods": ("grpo", "more_rollouts", "eepo"), "samples": 4} | options
    knobs = [knob for knob in TINY if not knob.startswith("algorithm.group_size")]
    given = ReproduceOptions(
        "paper/table1", recipe="countdown/grpo", overrides=[*knobs, *changes], **chosen
    )
    (reproduction,) = plan_reproductions(given, out)
    return reproduction


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Reproduction], list[Outcome]]:
    """Return a function that runs a reproduction in this process: it imports torch only once."""

    def in_this_process(
        experiment: Experiment, selection: Selection, jobs: int, progress: Progress, title: str
    ) -> Outcome:
        return run_here(experiment, selection, progress)

    monkeypatch.setattr(reproduce, "run_in_processes", in_this_process)
    progress = Progress(Console(file=io.StringIO(), width=300))
    return lambda reproduction: reproduce.reproduce([reproduction], 1, progress)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def test_a_table_is_trained_and_written_and_later_mistakes_lose_nothing(
    tmp_path: Path, run: Any, file_size_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    out = tmp_path / "out"
    (outcome,) = run(plan(out, methods=("grpo",)))
    assert (outcome.num_done, outcome.num_runs) == (2, 2)
    page = (out / "reproduction.md").read_text()
    assert "- 2 runs: 2 done, 0 running, 0 failed, 0 left" in page
    assert "eepo reproduce paper/table1 --recipe countdown/grpo --methods grpo" in page
    table = (out / "tables" / "table1.md").read_text()
    assert table.startswith("| Method | in range | out of range | Average | Relative gain, % |")
    assert "| countdown | " in table
    assert "| - Higher Temp. | – | – | – | – |" in table, "not run"
    assert "26.1 | +24.3 |" in (out / "tables" / "table1_in_the_paper.md").read_text()
    drawn = sorted(path.name for path in (out / "figures").iterdir())
    assert drawn == ["figure2.png", "figure6.png", "figure7.png", "figure8.png"]

    (command,) = reproduce.left_commands(plan(out, methods=("grpo", "eepo")))
    assert command.startswith("eepo train countdown/grpo+paper/eepo --out ")
    assert "--set training.seed=0" in command
    before = contents(out)
    with pytest.raises(UserError, match="give the same options again, or another --out") as error:
        run(plan(out, "training.learning_rate=1e-5", methods=("grpo",)))
    assert "learning_rate" in str(error.value)
    with pytest.raises(UserError, match="give the same options again"):
        reproduce.left_commands(plan(out, "training.learning_rate=1e-5", methods=("grpo",)))
    with file_size_limit(100), pytest.raises(UserError, match=r"cannot be written \(File too"):
        run(plan(out))
    assert contents(out) == before


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, run: Any) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"--out .*file/out: cannot be written \(Not a directory\)"):
        run(plan(tmp_path / "file" / "out"))
    assert (tmp_path / "file").read_text() == "mine"


def test_results_of_an_empty_folder_are_one_line(tmp_path: Path) -> None:
    progress = Progress(Console(file=io.StringIO()))
    with pytest.raises(UserError, match=r"has no finished run of paper/table1"):
        reproduce.report(plan(tmp_path / "out"), progress)
    assert not (tmp_path / "out").exists()


def test_a_model_that_does_not_exist_is_found_before_the_first_run(
    tmp_path: Path, run: Any
) -> None:
    with pytest.raises(UserError, match="no/such"):
        run(plan(tmp_path / "out", model="/no/such/model"))
    assert not (tmp_path / "out").exists()


def test_if_all_runs_fail_the_failures_are_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = Outcome(4, failed={"report/base seed 0": "ended by SIGKILL"})
    monkeypatch.setattr(reproduce, "run_in_processes", lambda *_: failed)
    progress = Progress(Console(file=io.StringIO()))
    assert reproduce.reproduce([plan(tmp_path / "out")], 1, progress) == [failed]
    assert not (tmp_path / "out" / "reproduction.md").exists()


def words(out: Path) -> list[str]:
    command = [sys.executable, "-m", "eepo", "reproduce", "paper/table1", "--out", str(out)]
    command += ["--recipe", "countdown/grpo", "--methods", "grpo,more_entropy,eepo"]
    command += ["--jobs", "1", "--samples", "4"]
    return [*command, *(word for knob in TINY for word in ("--set", knob))]


@pytest.mark.slow
def test_a_stopped_reproduction_continues_tunes_and_writes_everything(tmp_path: Path) -> None:
    """Send SIGTERM after the first run. The same command does the rest."""
    out = tmp_path / "out"
    settings: dict[str, Any] = {"env": os.environ | {"OMP_NUM_THREADS": "1"}, "text": True}
    pipe = subprocess.PIPE
    process = subprocess.Popen(words(out), stdout=pipe, stderr=pipe, **settings)
    try:
        end = time.monotonic() + 200
        while not (out / "tune.jsonl").exists() and process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=100)
    finally:
        while process.poll() is None:
            process.terminate()
            time.sleep(0.5)
    assert process.returncode == 2, errors
    assert "of 6 runs finished; the same command continues" in errors
    before = (out / "tune.jsonl").read_bytes()

    again = subprocess.run(words(out), capture_output=True, **settings)
    assert again.returncode == 0, again.stderr
    assert (out / "tune.jsonl").read_bytes().startswith(before), "nothing is trained twice"
    tuned = [(line["method"], line["value"]) for line in read_records(out / "tune.jsonl")]
    assert sorted(tuned) == [("more_entropy", "1e-3"), ("more_entropy", "1e-4")]
    reported = {line["method"]: line for line in read_records(out / "report.jsonl")}
    assert set(reported) == {"base", "grpo", "more_entropy", "eepo"}
    assert not list((out / "tune").rglob("*.safetensors")), "weights of tuning are not kept"
    assert len(list((out / "report").rglob("model.safetensors"))) == 4
    assert reported["base"]["num_steps"] == 0
    assert reported["eepo"]["num_steps"] == 2

    page = (out / "reproduction.md").read_text()
    assert "- 6 runs: 6 done, 0 running, 0 failed, 0 left" in page
    chosen = reported["more_entropy"]["value"]
    assert f"| more_entropy | algorithm.entropy_coef = {chosen} |" in page
    assert "| EEPO | " in (out / "tables" / "table1.md").read_text()
    assert sorted(path.name for path in (out / "figures").iterdir()) == FIGURES
    for name in FIGURES:
        assert (out / "figures" / name).read_bytes().startswith(b"\x89PNG")
        assert f"(figures/{name})" in page

    options = ReproduceOptions(
        "paper/table1", recipe="countdown/grpo", methods=("grpo", "more_entropy", "eepo"),
        samples=4, overrides=TINY,
    )  # fmt: skip
    (planned,) = plan_reproductions(options, out)
    (panel,) = hyper_panels(planned, planned.experiment())
    assert set(panel.scores) == {"1e-4", "1e-3"}
    assert panel.default == "1e-05"
    first, *_ = Estimate(planned).lines()
    assert first == "paper/table1: 6 runs, 6 done, builtin:countdown"


@pytest.mark.slow
def test_methods_are_added_to_finished_ones_and_the_same_command_changes_nothing(
    tmp_path: Path, run: Any
) -> None:
    out = tmp_path / "out"
    run(plan(out, methods=("grpo",)))
    run(plan(out, methods=("grpo", "more_rollouts")))
    lines = [(line["method"], line["seed"]) for line in read_records(out / "report.jsonl")]
    assert lines == [("base", 0), ("grpo", 0), ("more_rollouts", 0)]
    assert (out / "figures" / "figure5.png").is_file()
    before = contents(out)
    run(plan(out, methods=("grpo", "more_rollouts")))
    assert contents(out) == before
    experiment = Experiment(read_plan(out / "plan.toml"), out)
    (shown, *_) = status_lines(experiment, Selection())
    assert shown.endswith("3 runs: 3 done, 0 running, 0 failed, 0 left")
    assert "| more_rollouts |" in plan_tables(experiment, Selection())


@pytest.mark.slow
def test_the_papers_recipe_writes_its_numbers_next_to_ours(tmp_path: Path, run: Any) -> None:
    """Use files of problems that the small policy can read, under the names of the benchmarks."""
    data = tmp_path / "data"
    data.mkdir()
    names = ("math_lvl3to5_train", "minerva_math", "olympiadbench", "amc23", "aime24")
    for first, name in enumerate(names):
        rows = [
            {"problem": f"{number} 2 3 4 = {number + 9} :", "answer": str(number + 9)}
            for number in range(1 + 8 * first, 9 + 8 * first)
        ]
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ReproduceOptions(
        "paper/table1", model="builtin:countdown", methods=("grpo", "eepo"), samples=4,
        data_dir=str(data),
        overrides=[
            *(knob for knob in TINY if not knob.startswith("task.")), "task.num_held_out=2",
            "task.template={problem}", "model.gradient_checkpointing=false",
        ],
    )  # fmt: skip
    (reproduction,) = plan_reproductions(given, tmp_path / "out")
    run(reproduction)
    table = (tmp_path / "out" / "tables" / "table1.md").read_text()
    heading, _, base, grpo, *_ = table.splitlines()
    assert heading == (
        "| Method | Minerva Math | OlympiadBench | AMC 23 | AIME 24 | Average | Relative gain, % |"
    )
    assert re.match(r"\| countdown \| [\d.]+ \(11\.8\)", base), base
    assert re.search(r"\(30\.3\).*\(3\.3\).*\(21\.0\)", grpo), grpo
    assert re.search(r"\(26\.1\).* \| .*\(\+24\.3\) \|", table)
    rows = read_records(tmp_path / "out" / "report" / "grpo" / "seed-0" / "evaluations.jsonl")
    assert "in_distribution" in {row["set"] for row in rows}, "Figure 2 needs it"
    assert not (tmp_path / "out" / "tables" / "table1_in_the_paper.md").exists()
