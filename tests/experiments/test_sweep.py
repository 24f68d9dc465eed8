"""Tests of sweeps: early errors, runs in processes, failures, stops and continuation."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eepo import recipe
from eepo.experiments.plan import Selection
from eepo.experiments.runner import default_jobs, job_environment, make_schedule, num_cores
from eepo.experiments.sweep import Sweep, check_set, parse_grid, plan_sweep, run_sweep
from eepo.runs.jsonl import read_records
from eepo.runs.progress import Progress
from eepo.runs.runlog import METRICS
from eepo.types import UserError

from .tiny_plans import TINY

# The second path is a mistake that only the run itself can detect.
PATHS = "model.path=builtin:countdown,/no/such/model"


def planned(out: Path, *grids: str, num_seeds: int = 1, overrides: Sequence[str] = TINY) -> Sweep:
    return plan_sweep("countdown/grpo", overrides, grids, num_seeds, out)


def names(sweep: Sweep) -> list[str]:
    """Return the folders of all points."""
    return list(dict.fromkeys(sweep.experiment.folder(run).parent.name for run in sweep.runs))


def num_jobs(sweep: Sweep) -> int:
    sweep.draft.write()
    return default_jobs(sweep.experiment, sweep.runs)


def finished(sweep: Sweep) -> list[bool]:
    sweep.draft.write()
    done = make_schedule(sweep.experiment, Selection()).done
    return [run in done for run in sweep.runs]


def command(out: Path, *grids: str, overrides: Sequence[str] = TINY, seeds: int = 1) -> list[str]:
    words = [sys.executable, "-m", "eepo", "sweep", "countdown/grpo"]
    words += [word for grid in grids for word in ("--grid", grid)]
    words += [word for override in overrides for word in ("--set", override)]
    return [*words, "--seeds", str(seeds), "--out", str(out)]


def single_thread_environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def silent_progress() -> Progress:
    return Progress(Console(file=io.StringIO()))


def end_with_its_runs(process: subprocess.Popen[str]) -> None:
    """Stop the sweep twice. If it were killed, its runs would go on."""
    while process.poll() is None:
        process.terminate()
        time.sleep(0.5)


def call(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, capture_output=True, text=True, timeout=240, env=single_thread_environment()
    )


# --- grids and points ---


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("algorithm.gate=token,step", ("token", "step")),
        ("algorithm.unlearn_lr=1e-4, 3e-4,auto", ("1e-4", "3e-4", "auto")),
        ('task.template="{target}, {numbers}","x"', ('"{target}, {numbers}"', '"x"')),
        ("rollout.stop='a,b'", ('"a,b"',)),
    ],
)
def test_values_are_numbers_words_or_quoted_texts(text: str, values: tuple[str, ...]) -> None:
    assert parse_grid(text).values == values


@pytest.mark.parametrize(
    ("grid", "fragment"),
    [
        ("algorithm.gate", "section.knob=value"),
        ("gate=token", "section.knob=value"),
        ("name=a,b", "section.knob=value"),
        ("algorithm.gate=token,", "a value is empty"),
        ("task.levels=[1,2],[3]", "lists and tables cannot"),
        ('rollout.stop="a",["b"]', "lists and tables cannot"),
        ('rollout.stop="a",b', "in quotes"),
        ("training.seed=1,2", "--seeds"),
        ("algorithm.gate=token,tokn", '"tokn" must be one of'),
        ("algorithm.temprature=1", "unknown key algorithm.temprature"),
        ("algorithm.temperature=nan", "algorithm.temperature = NaN"),
        ("algorithm.temperature=1,1.0", "twice"),
    ],
)
def test_a_wrong_grid_is_a_one_line_error_and_nothing_is_written(
    grid: str, fragment: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"^--grid") as error:
        planned(tmp_path / "out", grid)
    assert fragment in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_knobs_are_checked_together(tmp_path: Path) -> None:
    """A group of 6 can be split into 3 stages, but not into 4."""
    grids = ("algorithm.num_stages=3,4", "algorithm.group_size=6")
    with pytest.raises(
        UserError, match=r"--grid algorithm.group_size=6 --grid algorithm.num_stages=4: .*got 6"
    ):
        planned(tmp_path, *grids)
    assert len(planned(tmp_path, "algorithm.num_stages=2,3", grids[1]).runs) == 2
    with pytest.raises(UserError, match=r"algorithm.gate is given twice"):
        planned(tmp_path, "algorithm.gate=token", "algorithm.gate=step")


def test_points_are_the_product_of_values_and_runs_are_ordered_by_seed(tmp_path: Path) -> None:
    grids = ("algorithm.temperature=1,1.2", "algorithm.gate=token,step")
    sweep = planned(tmp_path, *grids, num_seeds=2)
    folders = [sweep.experiment.folder(run).relative_to(tmp_path) for run in sweep.runs]
    points = [
        f"algorithm.gate={gate},algorithm.temperature={t}"
        for gate in ("token", "step")
        for t in ("1.0", "1.2")
    ]
    assert folders == [Path(point) / f"seed-{seed}" for seed in (0, 1) for point in points]


def test_the_order_of_grids_does_not_change_the_points(tmp_path: Path) -> None:
    grids = ("algorithm.temperature=1", "algorithm.gate=step")
    assert names(planned(tmp_path, *grids)) == names(planned(tmp_path, *grids[::-1]))


def test_any_value_has_a_unique_and_safe_folder_name(tmp_path: Path) -> None:
    """Values with separators or dots, very long ones, and pairs that are equal once cleaned."""
    values = ("../../up", "a/b", "a:b", "x" * 300, "x" * 299 + "y", "..")
    sweep = planned(tmp_path, f"model.path={','.join(values)}")
    assert len(names(sweep)) == len(values)
    for name in names(sweep):
        assert len(name) <= 120
        assert (tmp_path / name).resolve().parent == tmp_path.resolve()


def test_the_recipe_of_a_point_reads_back_as_that_point(tmp_path: Path) -> None:
    sweep = planned(
        tmp_path, "algorithm.unlearn_lr=1e-4,auto", r"model.path='a ü\b','1'", "model.device=cpu"
    )
    sweep.draft.write()
    assert len(sweep.runs) == 4
    for run in sweep.runs:
        file = tmp_path / "recipes" / f"{sweep.experiment.folder(run).parent.name}.toml"
        assert recipe.load_run(file, ["training.seed=0"]) == sweep.experiment.config(run)


def test_an_unknown_evaluation_set_is_an_error(tmp_path: Path) -> None:
    sweep = planned(tmp_path, "algorithm.temperature=1.0")
    for name in ("", "in_range", "out_of_range"):
        check_set(sweep, name)
    with pytest.raises(UserError, match="--on range must be one of in_range, out_of_range"):
        check_set(sweep, "range")


def test_runs_share_the_cores_and_a_gpu_has_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert num_jobs(planned(tmp_path, "model.device=cpu")) == max(1, num_cores() // 2)
    assert num_jobs(planned(tmp_path, "model.device=cpu,cuda:0")) == 1
    assert job_environment(1)["OMP_NUM_THREADS"] == str(num_cores())
    assert job_environment(4 * num_cores())["OMP_NUM_THREADS"] == "1"
    assert job_environment(4 * num_cores())["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert job_environment(1)["OMP_NUM_THREADS"] == "7"


# --- whole sweeps ---


@pytest.fixture(scope="module")
def swept(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    out = tmp_path_factory.mktemp("swept") / "out"
    return out, call(command(out, PATHS))


def good_and_bad(out: Path) -> tuple[Path, Path]:
    (good,), (bad,) = out.glob("model.path=builtin*/seed-0"), out.glob("model.path=_no*/seed-0")
    return good, bad


@pytest.mark.slow
def test_a_failed_run_is_reported_with_its_reason_and_others_finish(
    swept: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    out, ran = swept
    good, bad = good_and_bad(out)
    assert ran.returncode == 1, ran.stderr
    assert len(list(read_records(good / METRICS))) == 1
    assert (good / "final" / "config.json").is_file()
    assert not (bad / METRICS).exists()
    last = (bad / "log.txt").read_text().strip().splitlines()[-1]
    assert f"{bad.parent.name} seed 0: {last}" in ran.stdout
    assert "/no/such/model" in last
    assert "1 of 2 runs failed; the same command tries them again" in ran.stdout


@pytest.mark.slow
def test_a_sweep_writes_tables_and_a_figure(
    swept: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    out, _ = swept
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (out / "sweep.jsonl").read_text().splitlines()
    ]
    assert {row["knobs"]["model.path"]: row["seeds"] for row in rows} == {
        "builtin:countdown": [0],
        "/no/such/model": [],
    }
    assert "No finished run: path=/no/such/model." in (out / "sweep.md").read_text()
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (out / "sweep.svg").read_bytes()


@pytest.mark.slow
def test_finished_runs_are_not_started_again(
    swept: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    out, _ = swept
    good, bad = good_and_bad(out)
    before = {path: path.stat().st_mtime_ns for path in good.rglob("*") if path.is_file()}
    tried = (bad / "log.txt").stat().st_mtime_ns
    assert list(run_sweep(planned(out, PATHS), 1, silent_progress()).failed) == [
        f"{bad.parent.name} seed 0"
    ]
    assert {path: path.stat().st_mtime_ns for path in good.rglob("*") if path.is_file()} == before
    assert (bad / "log.txt").stat().st_mtime_ns > tried, "the failed run is tried again"


@pytest.mark.slow
def test_other_values_more_seeds_or_more_steps_add_runs(
    swept: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    out, _ = swept
    more = planned(out, "model.path=builtin:countdown,other", num_seeds=2)
    assert finished(more) == [True, False, False, False]
    longer = planned(out, PATHS, overrides=(*TINY, "training.num_steps=2"))
    assert not any(finished(longer))


@pytest.mark.slow
def test_the_folder_of_another_sweep_or_of_a_run_is_refused(
    swept: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    out, _ = swept
    with pytest.raises(UserError, match=r"clip_high = 0.3, but .* --set again, or another --out$"):
        planned(out, PATHS, overrides=(*TINY, "algorithm.clip_high=0.3"))
    with pytest.raises(UserError, match="holds a run; give another folder"):
        planned(good_and_bad(out)[0], PATHS)


@pytest.mark.slow
def test_a_stopped_sweep_saves_its_runs_and_continues(tmp_path: Path) -> None:
    """Send SIGTERM during training. Then continue with one step more than was trained."""
    out, grid = tmp_path / "out", "algorithm.temperature=1.0"
    folder = out / grid / "seed-0"
    endless = (*TINY, "training.num_steps=3000", "training.checkpoint_every=0")
    pipe = subprocess.PIPE
    words = command(out, grid, overrides=endless)
    process = subprocess.Popen(
        words, stdout=pipe, stderr=pipe, text=True, env=single_thread_environment()
    )
    try:
        end = time.monotonic() + 200
        while not (folder / METRICS).exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        with pytest.raises(UserError, match="is still running there"):
            run_sweep(planned(out, grid, overrides=endless), 1, silent_progress())
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    finally:
        end_with_its_runs(process)
    assert process.returncode == 2, errors
    assert "stopping: runs end after their current step" in output
    assert "stopped with 0 of 1 runs finished; the same command continues" in errors
    steps = (folder / METRICS).read_text().splitlines(keepends=True)
    (saved,) = (folder / "checkpoints").iterdir()
    assert int(saved.name.removeprefix("step-")) == len(steps)
    ran = call(command(out, grid, overrides=(*TINY, f"training.num_steps={len(steps) + 1}")))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    after = (folder / METRICS).read_text().splitlines(keepends=True)
    assert after[: len(steps)] == steps
    assert len(after) == len(steps) + 1
