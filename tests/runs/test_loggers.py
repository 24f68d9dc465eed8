"""Loggers receive every number with its step. They survive a resume, and cannot end a run."""

from __future__ import annotations

import io
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eepo import recipe
from eepo.assemble import build_trainer
from eepo.config import LoggingConfig, RunConfig
from eepo.runs import loggers
from eepo.runs.jsonl import read_records
from eepo.runs.loggers import (
    FailSafeLogger,
    NoLogger,
    build_logger,
    check_logger,
    evaluation_scalars,
    metric_scalars,
    run_id,
    run_name,
)
from eepo.runs.progress import Progress
from eepo.runs.runlog import EVALUATIONS, METRICS
from eepo.types import UserError


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


pytestmark = pytest.mark.usefixtures("one_thread")


def screen() -> Progress:
    return Progress(Console(file=io.StringIO(), width=300))


def tiny(to: str, num_steps: int = 2) -> RunConfig:
    tables = {
        "task": {"num_evaluation": 1},
        "algorithm": {"group_size": 4, "max_new_tokens": 8, "kl_coef": 0.0},
        "training": {
            "num_steps": num_steps,
            "prompts_per_step": 2,
            "prompts_per_mini_batch": 2,
            "checkpoint_every": 1,
        },
        "evaluation": {"num_samples": 2, "every": 1, "quick_problems": 1, "quick_samples": 2},
        "logging": {"to": to, "project": "tests"},
    }
    return recipe.parse(RunConfig, tables, "test")


def run(config: RunConfig, out: Path, resume: bool = False) -> None:
    build_trainer(config, out, resume, screen()).run()


def recorded_values(folder: Path) -> dict[str, dict[int, float]]:
    """Return name → step → value, read from the run's files."""
    values: dict[str, dict[int, float]] = {}
    for row in read_records(folder / METRICS):
        for name, value in row.items():
            if name != "step":
                values.setdefault(name, {})[row["step"]] = value
    for row in read_records(folder / EVALUATIONS):
        for k, value in row["pass@k"].items():
            values.setdefault(f"{row['kind']}/{row['set']}/pass@k/{k}", {})[row["step"]] = value
        values.setdefault(f"{row['kind']}/{row['set']}/greedy", {})[row["step"]] = row["greedy"]
    return values


def test_scalars_are_the_numeric_values_of_a_row() -> None:
    assert metric_scalars({"step": 3, "reward": 0.5, "seconds/total": 2}) == {
        "reward": 0.5,
        "seconds/total": 2.0,
    }
    row = {
        "step": 3,
        "kind": "full",
        "set": "amc",
        "greedy": 0.25,
        "pass@k": {"1": 0.5, "2": 0.75},
        "num_problems": 4,
        "problems": [{"id": "x", "correct": 1}],
    }
    assert evaluation_scalars(row) == {
        "full/amc/greedy": 0.25,
        "full/amc/pass@k/1": 0.5,
        "full/amc/pass@k/2": 0.75,
        "full/amc/num_problems": 4.0,
    }


def test_the_default_logger_needs_no_package_and_writes_nothing(tmp_path: Path) -> None:
    check_logger(LoggingConfig())
    assert isinstance(build_logger(LoggingConfig(), tmp_path, 0, {}, screen()), NoLogger)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_a_one_line_error_before_the_run_starts(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loggers.PACKAGES, to, "no_such_package_anywhere")
    with pytest.raises(UserError) as caught:
        build_trainer(tiny(to), tmp_path / "run", False, screen())
    line = str(caught.value)
    assert f'logging.to = "{to}"' in line
    assert f'pip install "eepo[{to}]"' in line
    assert len(line.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_folder_with_the_name_of_a_package_is_not_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "records_of_a_logger").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(loggers.PACKAGES, "wandb", "records_of_a_logger")
    with pytest.raises(UserError, match="not installed"):
        check_logger(LoggingConfig(to="wandb"))


def test_runs_of_a_comparison_are_named_by_method_and_seed() -> None:
    assert run_name(Path("runs/mine")) == "mine"
    assert run_name(Path("runs/grpo/seed-1")) == "grpo-seed-1"


def test_an_unknown_logger_is_an_error_with_the_allowed_names() -> None:
    with pytest.raises(UserError, match="tensorboard"):
        tiny("mlflow")


class BrokenLogger:
    def __init__(self) -> None:
        self.calls = 0

    def log(self, step: int, scalars: dict[str, float]) -> None:
        self.calls += 1
        raise RuntimeError("no\nnetwork")

    def close(self) -> None:
        self.calls += 1
        raise OSError("gone")


def test_a_failing_logger_is_reported_once_and_disabled() -> None:
    broken, progress = BrokenLogger(), screen()
    logger = FailSafeLogger(broken, "wandb", progress)
    for step in range(3):
        logger.log(step, {"reward": 1.0})
    logger.close()
    assert broken.calls == 1
    (line,) = progress.console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "wandb" in line
    assert "RuntimeError: no network" in line


def test_a_logger_that_fails_to_close_is_reported() -> None:
    progress = screen()
    FailSafeLogger(BrokenLogger(), "trackio", progress).close()
    assert "OSError: gone" in progress.console.file.getvalue()  # type: ignore[attr-defined]


def test_ctrl_c_inside_a_logger_is_not_swallowed() -> None:
    class InterruptedLogger(NoLogger):
        def log(self, step: int, scalars: dict[str, float]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FailSafeLogger(InterruptedLogger(), "wandb", screen()).log(1, {})


def test_a_run_continues_if_its_logger_fails(tmp_path: Path) -> None:
    trainer = build_trainer(tiny("none"), tmp_path / "run", False, screen())
    trainer.logger = FailSafeLogger(BrokenLogger(), "wandb", trainer.progress)
    trainer.run()
    assert len(list(read_records(tmp_path / "run" / METRICS))) == 2


def test_a_run_id_is_unique_and_stays_the_same(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first = run_id(tmp_path / "a")
    assert run_id(tmp_path / "a") == first != run_id(tmp_path / "b")


@needs("tensorboard")
def test_tensorboard_has_every_value_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tiny("tensorboard", 2), tmp_path)
    killed = build_logger(LoggingConfig(to="tensorboard"), tmp_path, 2, {}, screen())
    killed.log(3, {"reward": -77.0})  # this step was killed before its checkpoint
    killed.close()
    run(tiny("tensorboard", 4), tmp_path, resume=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    recorded = recorded_values(tmp_path)
    names = {"reward", "stage2/entropy", "quick/in_range/greedy", "full/in_range/pass@k/2"}
    assert names <= recorded.keys()
    assert recorded["reward"].keys() == {1, 2, 3, 4}
    for name, values in recorded.items():
        logged = [(event.step, event.value) for event in events.Scalars(name)]
        steps = sorted(values)
        assert [step for step, _ in logged] == steps, name
        expected = pytest.approx([values[step] for step in steps])
        assert [value for _, value in logged] == expected, name


@needs("tensorboard")
def test_a_logger_that_cannot_be_opened_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(UserError, match=r'logging.to = "tensorboard" cannot be opened') as caught:
        build_logger(LoggingConfig(to="tensorboard"), tmp_path, 0, {}, screen())
    assert len(str(caught.value).splitlines()) == 1


@needs("tensorboard")
def test_if_the_logger_cannot_be_opened_the_run_folder_stays_free(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(UserError, match="cannot be opened"):
        run(tiny("tensorboard"), tmp_path)
    (tmp_path / "tensorboard").unlink()
    run(tiny("tensorboard", 1), tmp_path, resume=False)
    assert len(list(read_records(tmp_path / METRICS))) == 1


@needs("wandb")
def test_wandb_offline_keeps_one_run_across_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    out = tmp_path / "some-run"
    run(tiny("wandb", 1), out)
    run(tiny("wandb", 2), out, resume=True)
    written = list((out / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(written) == 2
    assert {path.stem for path in written} == {f"run-{run_id(out)}"}
    assert any(b"stage2/entropy" in path.read_bytes() for path in written)


@needs("trackio")
def test_trackio_has_every_value_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trackio import sqlite_storage, utils
    from trackio.sqlite_storage import SQLiteStorage

    for module in (utils, sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    out = tmp_path / "some-run"
    run(tiny("trackio", 1), out)
    run(tiny("trackio", 2), out, resume=True)
    (name,) = SQLiteStorage.get_runs("tests")
    assert name.startswith("some-run-")
    logged: list[dict[str, Any]] = SQLiteStorage.get_logs("tests", name)
    rewards = {row["step"]: row["reward"] for row in logged if "reward" in row}
    assert rewards == pytest.approx(recorded_values(out)["reward"])
    assert json.dumps(logged).count("full/in_range/greedy") == 2
