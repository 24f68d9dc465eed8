"""Tests of the command line: help, errors, and whole commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from eepo import __version__, cli, recipe
from eepo.experiments.runner import Outcome
from eepo.experiments.sweep import Sweep
from eepo.runs.jsonl import read_records
from eepo.runs.progress import Progress
from eepo.runs.runlog import EVALUATIONS, METRICS

TINY = (
    "training.num_steps=1",
    "training.prompts_per_step=2",
    "training.prompts_per_mini_batch=2",
    "algorithm.group_size=4",
    "algorithm.max_new_tokens=12",
    "task.num_evaluation=2",
    "evaluation.num_samples=2",
    "evaluation.every=0",
)
COMMANDS = {
    "demo": ["--out", "--seeds", "--set"],
    "warmup": ["RECIPE", "--out", "--set", "--resume", "--force"],
    "train": ["RECIPE", "--out", "--set", "--resume", "--force"],
    "compare": ["RECIPES", "--out", "--seeds", "--set", "--equal-time"],
    "sweep": [
        *("RECIPE", "--grid", "--out", "--seeds", "--set"),
        *("--jobs", "--measure", "--on", "--line"),
    ],
    "hyper": ["SWEEPS", "--out", "--measure", "--on", "--line"],
    "report": ["RUNS", "--out"],
    "grade": ["FILE", "--out", "--reward", "--workers"],
    "eval": [
        *("MODEL", "--benchmarks", "--data-dir", "--out", "--samples", "--temperature", "--seed"),
        *("--max-new-tokens", "--max-prompt-tokens", "--limit", "--template", "--reward"),
        *("--max-rows", "--device", "--revision", "--trust-remote-code", "--stop", "--dtype"),
    ],
    "table": ["FOLDER", "--out", "--measure", "--on"],
    "doctor": ["RECIPE", "--set", "--samples", "--device"],
    "watch": ["RUNS", "--port", "--interval"],
}


pytestmark = pytest.mark.usefixtures("one_thread")


def settings(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


@pytest.fixture
def eepo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Return a function that runs the `eepo` command in this process."""

    def call(*arguments: object) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["eepo", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            code: object = 0
        except SystemExit as end:
            code = end.code or 0
        printed = capsys.readouterr()
        return SimpleNamespace(code=code, out=printed.out, err=printed.err)

    return call


# --- help ---


def help_of(*arguments: str) -> str:
    result = CliRunner().invoke(
        cli.app, [*arguments, "--help"], env={"COLUMNS": "200", "TERM": "dumb"}
    )
    assert result.exit_code == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", result.output)


def test_help_lists_every_command() -> None:
    text = help_of()
    assert all(re.search(rf"\b{command}\b", text) for command in COMMANDS)


@pytest.mark.parametrize(("command", "arguments"), COMMANDS.items(), ids=COMMANDS)
def test_help_of_a_command_lists_its_arguments(command: str, arguments: list[str]) -> None:
    text = help_of(command)
    assert [argument for argument in arguments if argument.lower() not in text.lower()] == []


@pytest.mark.parametrize("command", ["train", "eval"])
def test_help_does_not_import_torch(command: str) -> None:
    code = (
        f"import sys; sys.argv = ['eepo', '{command}', '--help']\n"
        "from eepo.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('TORCH' if 'torch' in sys.modules else 'QUICK')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.splitlines()[-1] == "QUICK"


def test_version_is_that_of_the_package(eepo) -> None:
    result = eepo("--version")
    assert (result.code, result.out) == (0, f"eepo {__version__}\n")
    assert "RLVR trainer" in help_of(), "the option must not replace the description of eepo"


# --- user errors ---


def recipe_with_unknown_knob(folder: Path) -> list[object]:
    (folder / "bad.toml").write_text("[training]\nsead = 1\n")
    return ["train", folder / "bad.toml", "--out", folder / "run"]


def folder_with_a_run(folder: Path) -> list[object]:
    (folder / "run").mkdir()
    (folder / "run" / "recipe.toml").write_text(recipe.dump(recipe.load_run("countdown/eepo")))
    return ["train", "countdown/eepo", "--out", folder / "run"]


def changed_knob(folder: Path) -> list[object]:
    return [*folder_with_a_run(folder), "--resume", *settings("training.seed=9")]


def file_as_folder(folder: Path) -> list[object]:
    (folder / "run").write_text("a file")
    return ["train", "countdown/eepo", "--out", folder / "run"]


def below_a_file(folder: Path) -> list[object]:
    (folder / "file").write_text("a file")
    return ["train", "countdown/eepo", "--out", folder / "file" / "run"]


def empty_run(folder: Path) -> list[object]:
    (folder / "run").mkdir()
    return ["report", folder / "run", "--out", folder / "report.html"]


def train(folder: Path, *overrides: str) -> list[object]:
    return ["train", "countdown/eepo", "--out", folder / "run", *settings(*overrides)]


USER_ERRORS = {
    "unknown recipe": (
        lambda f: ["train", "countdown/nothing", "--out", f / "run"],
        ["countdown/nothing"],
    ),
    "unknown warmup recipe": (lambda f: ["warmup", f / "no.toml", "--out", f / "run"], ["no.toml"]),
    "empty recipe name": (lambda f: ["train", "", "--out", f / "run"], ["recipe"]),
    "run recipe for a warm start": (
        lambda f: ["warmup", "countdown/eepo", "--out", f / "run"],
        ["eepo train"],
    ),
    "unknown knob in a recipe": (recipe_with_unknown_knob, ["bad.toml", "training.sead", "seed"]),
    "unknown knob": (lambda f: train(f, "training.sead=1"), ["training.sead", "seed"]),
    "no value": (lambda f: train(f, "training.seed"), ["training.seed", "section.key=value"]),
    "odd group": (
        lambda f: train(f, "algorithm.group_size=7"),
        ["algorithm.group_size", "7", "even"],
    ),
    "wrong word": (
        lambda f: train(f, "algorithm.unlearn_lr=fast"),
        ["algorithm.unlearn_lr", "fast", "auto"],
    ),
    "unknown model": (
        lambda f: train(f, "model.path=builtin:chess"),
        ["model.path", "builtin:chess"],
    ),
    "missing model": (
        lambda f: train(f, "model.path=./no/model"),
        ["model.path", "./no/model", "eepo warmup"],
    ),
    "unusable device": (
        lambda f: train(f, "model.device=abacus"),
        ["model.device", "abacus", "cpu"],
    ),
    "impossible problems": (
        lambda f: train(f, "task.num_numbers=2", "task.max_number=2", "task.min_target=50", *TINY),
        ["task", "50..60"],
    ),
    "unknown field in the template": (
        lambda f: train(f, "task.template={numbers} {goal}", *TINY),
        ["task.template", "goal"],
    ),
    "folder in use": (folder_with_a_run, ["--resume"]),
    "folder below a file": (below_a_file, ["--out"]),
    "file as a folder": (file_as_folder, ["--out"]),
    "other knob on resume": (changed_knob, ["training.seed", "9"]),
    "same recipe twice": (
        lambda f: ["compare", "countdown/eepo", "countdown/eepo", "--out", f / "out"],
        ["eepo", "name"],
    ),
    "unknown recipe to compare": (
        lambda f: ["compare", "countdown/eepo", "countdown/nothing", "--out", f / "out"],
        ["countdown/nothing"],
    ),
    "no such run": (lambda f: ["report", f / "nowhere", "--out", f / "report.html"], ["nowhere"]),
    "folder without a run": (empty_run, ["run", "recipe.toml"]),
    "bad knob for the demo": (
        lambda f: ["demo", "--out", f / "out", *settings("training.sead=1")],
        ["training.sead"],
    ),
}


@pytest.mark.parametrize(("arguments", "fragments"), USER_ERRORS.values(), ids=USER_ERRORS)
def test_a_user_error_is_one_line_on_stderr_and_exit_code_2(
    arguments, fragments: list[str], tmp_path: Path, eepo
) -> None:
    result = eepo(*arguments(tmp_path))
    assert result.code == 2
    assert result.err.startswith("eepo: ")
    assert len(result.err.splitlines()) == 1, result.err
    assert "Traceback" not in result.out
    for fragment in fragments:
        assert fragment in result.err


@pytest.mark.slow
def test_a_user_error_is_one_line_in_a_separate_process(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "eepo", *map(str, train(tmp_path, "model.path=builtin:chess"))],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith("eepo: model.path")
    assert len(ran.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments", [["train"], ["train", "countdown/eepo"], ["dance"], ["demo", "--seeds", "0"]]
)
def test_wrong_usage_has_exit_code_2_and_no_traceback(arguments: list[str], eepo) -> None:
    result = eepo(*arguments)
    assert result.code == 2
    assert "Traceback" not in result.out + result.err


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only user errors become one line."""

    def bug(*args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("eepo.assemble.build_trainer", bug)
    monkeypatch.setattr(sys, "argv", ["eepo", *map(str, train(tmp_path))])
    with pytest.raises(ZeroDivisionError):
        cli.main()


# --- whole commands ---


def test_train_then_resume_then_report(
    tmp_path: Path, eepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    result = eepo("train", "countdown/eepo", "--out", run, *settings(*TINY))
    assert result.code == 0, result.err
    assert "weights:" in result.out
    assert len(list(read_records(run / METRICS))) == 1
    more = [*TINY, "training.num_steps=2"]
    assert eepo("train", "countdown/eepo", "--out", run, "--resume", *settings(*more)).code == 0
    assert [row["step"] for row in read_records(run / METRICS)] == [1, 2]
    monkeypatch.chdir(tmp_path)
    result = eepo("report", run)
    assert result.code == 0, result.err
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<html" in page
    assert "eepo" in page


def test_resume_without_a_run_prints_that_it_starts_at_step_1(tmp_path: Path, eepo) -> None:
    """Scripts may always give --resume. The line helps if --out is misspelt."""
    run, overrides = tmp_path / "run", settings(*TINY)
    words = ("train", "countdown/eepo", "--out", run, "--resume", *overrides)
    first, again = eepo(*words), eepo(*words)
    assert (first.code, again.code) == (0, 0), first.err + again.err
    assert f"no run in {run} yet: starts at step 1" in first.out.replace("\n", " ")
    assert "starts at step 1" not in again.out


def test_warmup_writes_weights(tmp_path: Path, eepo) -> None:
    tiny = (
        "supervised.num_steps=2",
        "supervised.batch_size=4",
        "scratch.hidden_size=16",
        "scratch.num_layers=1",
    )
    evaluation = ("task.num_evaluation=1", "evaluation.num_samples=2")
    result = eepo(
        "warmup", "countdown/warmup", "--out", tmp_path / "run", *settings(*tiny, *evaluation)
    )
    assert result.code == 0, result.err
    assert "in_range" in result.out
    assert "weights:" in result.out
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()


def test_a_sweep_without_full_evaluations_says_why_it_has_no_table(
    tmp_path: Path, eepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_only(sweep: Sweep, num_jobs: int, progress: Progress) -> Outcome:
        sweep.draft.write()
        return Outcome(2)

    monkeypatch.setattr("eepo.experiments.sweep.run_sweep", write_only)
    grid = ("--grid", "training.learning_rate=1e-3,1e-4", "--seeds", 1)
    result = eepo("sweep", "countdown/grpo", *grid, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    assert "no run has a full evaluation, so there is no table" in result.out


@pytest.mark.slow
def test_compare_prints_a_table_and_writes_a_report(tmp_path: Path, eepo) -> None:
    # The path is longer than a line of 80 characters.
    out = tmp_path / ("a folder with a very long name " * 3).strip() / "out"
    names = ["countdown/grpo", "countdown/eepo"]
    result = eepo("compare", *names, "--out", out, "--seeds", 2, *settings(*TINY))
    assert result.code == 0, result.err
    folders = [out / name / f"seed-{seed}" for name in ("grpo", "eepo") for seed in (0, 1)]
    assert all((folder / "final" / "config.json").is_file() for folder in folders)
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "grpo" in page
    assert "eepo" in page
    assert "grpo" in result.out
    assert "eepo" in result.out
    # The path must stay on one line, so that it can be copied.
    assert str(out / "report.html") in result.out.splitlines()[-1]

    for given in (folders, [out]):
        again = eepo("report", *given, "--out", tmp_path / "new" / "again.html")
        assert again.code == 0, again.err
        assert (tmp_path / "new" / "again.html").read_text(encoding="utf-8") == page


@pytest.mark.slow
def test_demo_prints_a_table_and_the_path_of_its_report(tmp_path: Path, eepo) -> None:
    overrides = settings(
        "training.num_steps=2", "task.num_evaluation=8", "evaluation.num_samples=4"
    )
    result = eepo("demo", "--out", tmp_path / "demo", *overrides)
    assert result.code == 0, result.err
    assert (tmp_path / "demo" / "report.html").is_file()
    assert str(tmp_path / "demo" / "report.html") in result.out
    table = result.out.partition("evaluate")[2]
    assert "grpo" in table
    assert "eepo" in table
    assert "pass@4" in table
    for name in ("grpo", "eepo"):
        evaluations = list(read_records(tmp_path / "demo" / name / "seed-0" / EVALUATIONS))
        assert {row["num_problems"] for row in evaluations if row["kind"] == "full"} == {8}


@pytest.mark.slow
def test_a_finished_demo_can_be_run_again(tmp_path: Path, eepo) -> None:
    overrides = settings(*TINY)
    assert eepo("demo", "--out", tmp_path / "demo", *overrides).code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "demo").rglob("*.jsonl")}
    assert len(before) == 7  # three in each of the two runs, and the lines of the plan
    result = eepo("demo", "--out", tmp_path / "demo", *overrides)
    assert result.code == 0, result.err
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.slow
def test_a_stopped_comparison_advises_to_repeat_the_command(tmp_path: Path) -> None:
    """`compare` and `demo` have no --resume: the same command continues."""
    words = [sys.executable, "-m", "eepo", "demo", "--out", str(tmp_path / "demo")]
    process = subprocess.Popen(
        [*words, *settings(*TINY[1:])],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    metrics = tmp_path / "demo" / "grpo" / "seed-0" / METRICS
    try:
        for _ in range(1200):
            if process.poll() is not None or metrics.exists():
                break
            try:
                process.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                continue
        assert metrics.exists()
        process.terminate()
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 2
    assert len(errors.splitlines()) == 1
    assert "stopped after step" in errors
    assert "with 0 of 2 runs finished; the same command continues" in errors
    assert "--resume" not in errors
