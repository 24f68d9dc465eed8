"""Tests of running plans: whole experiments with the small policy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from eepo.experiments import runner
from eepo.experiments.experiment import Experiment
from eepo.experiments.plan import Selection
from eepo.experiments.plan_file import parse_plan, read_plan
from eepo.experiments.plan_reports import plan_tables
from eepo.experiments.processes import Job, Process
from eepo.experiments.runner import run_here
from eepo.experiments.status import status_lines
from eepo.experiments.toml_tables import dump_tables
from eepo.experiments.warm import WarmStarter
from eepo.runs.jsonl import read_records
from eepo.runs.runlog import METRICS
from eepo.trainer import Trainer
from eepo.types import UserError

from .tiny_plans import TINY, make, progress, run

pytestmark = pytest.mark.usefixtures("one_thread")

BENCHMARKS = {"samples": 2, "template": "{problem}", "max_new_tokens": 8}
NO_MODEL = "model.path=/no/such/model"


def sums(folder: Path) -> str:
    """Write a file with two problems, and return its path."""
    rows = [
        {"problem": "1 2 3 4 = 10 :", "answer": "10"},
        {"problem": "2 3 4 5 = 14 :", "answer": "14"},
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "sums.jsonl")


def make_without_sets(tmp_path: Path, has_benchmarks: bool = True) -> Experiment:
    """Return a plan whose task has no evaluation sets."""
    problems = sums(tmp_path)
    (tmp_path / "recipe.toml").write_text(
        f'[task]\nname = "dataset"\ntrain = "{problems}"\ntemplate = "{{problem}}"\n'
        '[reward]\nname = "exact"\n'
    )
    knobs = [knob for knob in TINY if not knob.startswith("task.")]
    changes: dict[str, Any] = {"recipe": str(tmp_path / "recipe.toml"), "set": knobs}
    if has_benchmarks:
        changes["benchmarks"] = BENCHMARKS | {"names": [problems]}
    return make(tmp_path / "out", {"grpo": {}}, **changes)


def recorded(out: Path, phase: str = "report") -> list[tuple[str, str, int]]:
    lines = read_records(out / f"{phase}.jsonl")
    return [(line["method"], line["value"], line["seed"]) for line in lines]


# --- in this process


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the names of the runs whose steps are trained."""
    trained: list[str] = []
    one_step = Trainer._one_step

    def count(trainer: Trainer, bar: Any) -> Any:
        trained.append(trainer.config.name)
        return one_step(trainer, bar)

    monkeypatch.setattr(Trainer, "_one_step", count)
    return trained


def test_a_plan_is_tuned_reported_and_extended_by_a_seed_and_a_method(
    tmp_path: Path, steps: list[str]
) -> None:
    rates = {"tune": "training.learning_rate", "values": ["1e-4", "3e-4"]}
    methods: dict[str, Any] = {"grpo": rates}
    phases: dict[str, Any] = {"tune": {"seeds": [9]}, "report": {"seeds": [0]}}
    settings = {"objective": ["greedy"], "keep_weights": "none", "phases": phases}

    def experiment() -> Experiment:
        tables = {"recipe": "countdown/grpo", "set": TINY, "methods": methods} | settings
        return Experiment(parse_plan(tables, "tiny.toml", Path()), tmp_path)

    run_here(experiment(), Selection(), progress()[0])
    chosen = experiment().chosen("", "grpo")
    assert steps == ["grpo 1e-4", "grpo 3e-4", f"grpo {chosen}"]
    assert recorded(tmp_path, "tune") == [("grpo", "1e-4", 9), ("grpo", "3e-4", 9)]
    assert recorded(tmp_path) == [("grpo", chosen, 0)]
    folder = tmp_path / "report" / f"grpo={chosen}" / "seed-0"
    assert (folder / METRICS).is_file()
    assert not list(tmp_path.rglob("*.safetensors")), "the plan keeps no weights"

    run_here(experiment(), Selection(), progress()[0])
    assert len(steps) == 3, "nothing is trained again"
    phases["report"]["seeds"] = [0, 1]
    methods["eepo"] = {"base": ["grpo"], "set": ["algorithm.num_stages=2"]}
    run_here(experiment(), Selection(), progress()[0])
    assert steps[3:] == ["eepo", f"grpo {chosen}", "eepo"]
    assert len(recorded(tmp_path)) == 4
    assert "| eepo | 2 |" in plan_tables(experiment(), Selection())


def test_other_settings_in_the_same_folder_are_refused(tmp_path: Path, steps: list[str]) -> None:
    run_here(make(tmp_path, {"grpo": {}}), Selection(), progress()[0])
    before = (tmp_path / "report.jsonl").read_bytes()
    other = make(tmp_path, {"grpo": {}}, set=[*TINY, "algorithm.clip_high=0.3"])
    with pytest.raises(UserError, match=r"clip_high = 0.3, but .*give the same plan, or another"):
        run_here(other, Selection(), progress()[0])
    assert (tmp_path / "report.jsonl").read_bytes() == before
    assert steps == ["grpo"]


def test_a_finished_run_without_a_line_is_recorded_without_training(
    tmp_path: Path, steps: list[str]
) -> None:
    experiment = make(tmp_path, {"grpo": {}})
    run_here(experiment, Selection(), progress()[0])
    (tmp_path / "report.jsonl").unlink()
    run_here(make(tmp_path, {"grpo": {}}), Selection(), progress()[0])
    assert recorded(tmp_path) == [("grpo", "", 0)]
    assert steps == ["grpo"]


def test_at_equal_time_other_methods_have_the_seconds_of_the_first(tmp_path: Path) -> None:
    methods = {"grpo": {}, "small": {"set": ["algorithm.group_size=2"]}}
    experiment = make(tmp_path, methods, equal="time")
    run_here(experiment, Selection(), progress()[0])
    first, other = (list(read_records(tmp_path / name / "seed-0" / METRICS)) for name in methods)
    seconds = [row["seconds/total"] for row in other]
    assert len(first) == 1
    assert sum(seconds[:-1]) < first[0]["seconds/total"] <= sum(seconds)
    with pytest.raises(UserError, match=r'--jobs 2: tiny.toml has equal = "time", which needs'):
        run(experiment, num_jobs=2)


def test_an_untrained_model_is_a_row_of_the_table(tmp_path: Path, steps: list[str]) -> None:
    experiment = make(tmp_path, {"base": {"train": False}, "grpo": {}}, seeds=[0, 1])
    run_here(experiment, Selection(), progress()[0])
    assert steps == ["grpo", "grpo"]
    assert sorted(recorded(tmp_path)) == [("base", "", 0), ("grpo", "", 0), ("grpo", "", 1)]
    assert "| base | 0." in plan_tables(experiment, Selection())


def test_runs_are_evaluated_on_benchmarks(tmp_path: Path, steps: list[str]) -> None:
    benchmarks = BENCHMARKS | {"names": [sums(tmp_path)], "sample_limit": 1}
    out = tmp_path / "out"
    run_here(make(out, {"grpo": {}}), Selection(), progress()[0])
    experiment = make(out, {"grpo": {}}, benchmarks=benchmarks)
    run_here(experiment, Selection(), progress()[0])
    assert steps == ["grpo"], "benchmarks that are added later need no training"
    (line,) = experiment.done("report")
    (row,) = [row for row in line["evaluations"] if row["num_problems"] == 2 and "majority" in row]
    assert row["num_samples"] == 2
    assert set(row["pass@k"]) == {"1", "2"}
    assert len(row["outcomes"]["greedy"]) == 2
    assert len(row["outcomes"]["correct"]) == 1, "only the first problem is sampled"
    assert row["mean"] == row["outcomes"]["correct"][0] / 2
    run = runner.Run("report", "", "grpo", "", 0)
    assert not experiment.lacks_benchmarks(run)
    changed = make(out, {"grpo": {}}, benchmarks=benchmarks | {"sample_limit": 0})
    assert changed.lacks_benchmarks(run), "other problems are sampled"
    words = runner.benchmark_command(experiment, run, experiment.plan.benchmarks)
    assert " ".join(words[:4]) == f"eepo eval {out / 'grpo' / 'seed-0'} --benchmarks"
    assert words[words.index("--samples") + 1] == "2"
    assert words[words.index("--sample-limit") + 1] == "1"


@pytest.mark.parametrize("objective", ["in_range/greedy", "sums/greedy", "greedy", "speed"])
def test_tuning_runs_are_evaluated_on_benchmarks_that_choose_values(
    tmp_path: Path, objective: str
) -> None:
    methods = {"grpo": {"tune": "training.learning_rate", "values": ["1e-4"]}}
    changes = {"benchmarks": BENCHMARKS | {"names": [sums(tmp_path)]}, "objective": [objective]}
    phases = {"tune": {"seeds": [7]}, "report": {"seeds": [0]}}
    tables = {"recipe": "countdown/grpo", "set": TINY, "methods": methods, "phases": phases}
    plan = parse_plan(tables | changes, "tiny.toml", tmp_path)
    experiment = Experiment(plan, tmp_path / "out")
    run_here(experiment, Selection(phases=("tune",)), progress()[0])
    assert experiment.chosen("", "grpo") == "1e-4"
    assert recorded(tmp_path / "out", "tune") == [("grpo", "1e-4", 7)]
    (line,) = experiment.done("tune")
    sets = {row["set"] for row in line["evaluations"]}
    assert ("sums" in sets) == (objective in ("sums/greedy", "greedy"))


def test_a_finished_run_without_evaluation_sets_is_not_trained_again(
    tmp_path: Path, steps: list[str]
) -> None:
    for _ in range(2):
        run_here(make_without_sets(tmp_path), Selection(), progress()[0])
    assert steps == ["grpo"]
    assert recorded(tmp_path / "out") == [("grpo", "", 0)]


# --- in processes


class Idle:
    """Starts jobs that end at once, without an error and without a result."""

    commands: ClassVar[list[str]] = []
    gpus: ClassVar[list[str | None]] = []
    shares: ClassVar[set[str]] = set()  # of a GPU

    def __init__(self, environment: Any) -> None:
        self.commands.clear()
        self.gpus.clear()
        self.shares.clear()

    def __call__(self, job: Job, environment: Any, inherited: Sequence[int]) -> Process:
        self.commands.append(job.command[3])
        self.gpus.append(environment.get("CUDA_VISIBLE_DEVICES"))
        self.shares.add(environment["EEPO_GPU_SHARE"])
        assert len(self.commands) < 5, "the job is started again and again"
        job.log.parent.mkdir(parents=True, exist_ok=True)
        return SimpleNamespace(pid=len(self.commands), poll=lambda: 0)  # type: ignore[return-value]


@pytest.mark.parametrize("trained", [False, True])
def test_a_job_that_ends_without_a_result_has_failed(
    trained: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if trained:
        run_here(make_without_sets(tmp_path, has_benchmarks=False), Selection(), progress()[0])
    monkeypatch.setattr(runner, "WarmStarter", Idle)
    outcome, _ = run(make_without_sets(tmp_path))
    assert Idle.commands == [["train", "eval"][trained]]
    assert "ended without an error, but is not finished" in outcome.failed["grpo seed 0"]
    assert outcome.num_done == 0


@pytest.mark.parametrize(
    ("device", "gpus", "expected", "share"),
    [
        ("cuda", ["2", "5"], ["2", "5", "2", "5"], 1 / 2),
        ("auto", ["2", "5", "6"], ["2", "5", "6", "2"], 1 / 2),  # of the GPU with two runs
        ("auto", ["2", "5", "6", "7"], ["2", "5", "6", "7"], 1),
        ("cuda", ["2"], [None] * 4, 1 / 4),  # no choice
        ("cuda:1", ["2", "5"], [None] * 4, 1 / 4),  # all runs have this GPU
        ("cpu", ["2", "5"], [None] * 4, 1 / 4),
    ],
)
def test_runs_are_spread_over_the_gpus(
    device: str,
    gpus: list[str],
    expected: list[str | None],
    share: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "EEPO_GPU_SHARE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(runner, "WarmStarter", Idle)
    monkeypatch.setattr(runner, "visible_gpus", lambda: gpus)
    knobs = [*TINY[1:], f"model.device={device}"]
    run(make(tmp_path, {"grpo": {}}, set=knobs, seeds=[0, 1, 2, 3]), num_jobs=4)
    assert Idle.gpus == expected
    assert Idle.shares == {str(float(share))}


@pytest.mark.slow
def test_runs_without_evaluation_sets_are_evaluated_on_benchmarks(tmp_path: Path) -> None:
    outcome, _ = run(make_without_sets(tmp_path))
    assert (outcome.num_done, outcome.failed) == (1, {})
    assert [path.parent.name for path in tmp_path.rglob("results.json")] == ["benchmarks"]


class Killer:
    """Starts jobs, and kills those of a seed as the kernel would if memory runs out."""

    def __init__(self, environment: Any) -> None:
        self.start = WarmStarter(environment)

    def __call__(self, job: Job, environment: Any, inherited: Sequence[int]) -> Process:
        process = self.start(job, environment, inherited)
        if "seed 0" in job.title:
            os.kill(process.pid, signal.SIGKILL)
        return process


@pytest.mark.slow
def test_failed_and_killed_runs_do_not_affect_others_and_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = {
        "grpo": {},
        "broken": {"set": [NO_MODEL]},
        "hot": {"weights": "broken", "set": ["evaluation.temperature=1.4"]},
    }
    with monkeypatch.context() as patch:
        patch.setattr(runner, "WarmStarter", Killer)
        outcome, text = run(make(tmp_path, methods, seeds=[0, 1]))
    assert recorded(tmp_path) == [("grpo", "", 1)]
    assert outcome.failed["grpo seed 0"].startswith("ended by SIGKILL")
    assert "/no/such/model" in outcome.failed["broken seed 1"]
    assert outcome.failure_lines()[-1] == (
        "3 of 6 runs failed, and 2 runs wait for them; the same command tries them again"
    )
    assert "failed: broken seed 1: eepo: " in text
    shown = list(status_lines(make(tmp_path, methods, seeds=[0, 1]), Selection()))
    assert shown[0] == "tiny.toml: 6 runs: 1 done, 0 running, 3 failed, 2 left"

    outcome, _ = run(make(tmp_path, {"grpo": {}}, seeds=[0, 1]))
    assert not outcome.failed
    assert sorted(recorded(tmp_path)) == [("grpo", "", 0), ("grpo", "", 1)]
    assert not (tmp_path / "grpo" / "seed-0" / "failed.txt").exists()


@pytest.mark.slow
def test_weights_of_another_method_are_kept_and_evaluated(tmp_path: Path) -> None:
    hot = {"tune": "evaluation.temperature", "values": [1.0, 3.0], "every_value": True}
    methods = {"hot": hot | {"weights": "grpo"}, "grpo": {}}
    knobs = [*TINY, "task.num_evaluation=4", "evaluation.num_samples=32"]
    experiment = make(tmp_path, methods, set=knobs, keep_weights="none")
    outcome, _ = run(experiment, num_jobs=2)
    assert outcome.num_done == outcome.num_runs == 3
    assert recorded(tmp_path)[0] == ("grpo", "", 0), "its weights are needed first"
    found = {(line["method"], line["value"]): line for line in experiment.done("report")}
    trained, same, hotter = (
        found[key]["evaluations"] for key in (("grpo", ""), ("hot", "1.0"), ("hot", "3.0"))
    )
    for row, other, hot_row in zip(trained, same, hotter, strict=True):
        assert other | {"step": 1, "seconds": 0} == row | {"seconds": 0}, "the same draws"
        assert hot_row["mean"] < row["mean"]
    assert [path.parent.name for path in tmp_path.rglob("*.safetensors")] == ["final"]
    training, *evaluations = plan_tables(experiment, Selection()).split("### ")[1:]
    assert "hot" not in training
    assert all("| hot 3.0 | 0." in table for table in evaluations)


@pytest.mark.slow
def test_a_stopped_plan_saves_its_runs_and_continues(tmp_path: Path) -> None:
    """Send SIGTERM during training. Then continue with one step more than was trained."""

    def words(num_steps: int) -> list[str]:
        knobs = [*TINY, f"training.num_steps={num_steps}", "training.checkpoint_every=0"]
        tables = {"recipe": "countdown/grpo", "set": knobs, "seeds": [0], "methods": {"grpo": {}}}
        (tmp_path / "plan.toml").write_text(dump_tables(tables))
        command = [sys.executable, "-m", "eepo", "plan", "run", str(tmp_path / "plan.toml")]
        return [*command, "--out", str(tmp_path / "out"), "--jobs", "1"]

    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    folder, pipe = tmp_path / "out" / "grpo" / "seed-0", subprocess.PIPE
    process = subprocess.Popen(words(3000), stdout=pipe, stderr=pipe, text=True, env=environment)
    try:
        end = time.monotonic() + 200
        while not (folder / METRICS).exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        experiment = Experiment(read_plan(tmp_path / "plan.toml"), tmp_path / "out")
        shown = list(status_lines(experiment, Selection()))
        assert any(line.startswith("running: grpo seed 0, step ") for line in shown), shown
        with pytest.raises(UserError, match="is still running there"):
            run(experiment)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=100)
    finally:
        while process.poll() is None:
            process.terminate()
            time.sleep(0.5)
    assert process.returncode == 2, errors
    assert "stopping: runs end after their current step" in output
    assert "stopped with 0 of 1 runs finished; the same command continues" in errors
    before = (folder / METRICS).read_text().splitlines(keepends=True)
    again = subprocess.run(words(len(before) + 1), capture_output=True, text=True, env=environment)
    assert again.returncode == 0, again.stderr
    after = (folder / METRICS).read_text().splitlines(keepends=True)
    assert after[: len(before)] == before
    assert len(after) == len(before) + 1
    assert [line["num_steps"] for line in read_records(tmp_path / "out" / "report.jsonl")] == [
        len(after)
    ]
