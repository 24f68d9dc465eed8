"""Warm starts of a plan, and the tables and figures that `eepo plan run` writes at its end."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eepo.cli import app
from eepo.experiments.plan_file import parse_plan
from eepo.experiments.toml_tables import dump_tables
from eepo.types import UserError

TINY_START = {
    "recipe": "shortcut/warmup_p",
    "set": ["supervised.num_steps=2", "supervised.batch_size=4", "task.num_evaluation=2"],
}
TINY_RUN = [
    *("training.num_steps=1", "training.prompts_per_step=2", "training.prompts_per_mini_batch=2"),
    *("task.num_evaluation=2", "evaluation.num_samples=2", "evaluation.every=0"),
]


def plan_tables(start: Path, **changes: Any) -> dict[str, Any]:
    return {
        "set": TINY_RUN,
        "seeds": [0],
        "starts": {str(start): TINY_START, str(start.with_name("unused")): TINY_START},
        "regimes": {
            "started": {"recipe": "shortcut/grpo", "set": [f"model.path={start}/final"]},
            "shipped": {"recipe": "shortcut/grpo"},
        },
        "methods": {"grpo": {}, "eepo": {"set": ["algorithm.num_stages=2"]}},
        "figures": [{"figure": "exploration", "regimes": ["started"]}],
    } | changes


@pytest.mark.usefixtures("one_thread")
def test_plan_run_trains_missing_starts_and_writes_tables_and_figures(tmp_path: Path) -> None:
    plan, start, out = tmp_path / "plan.toml", tmp_path / "start", tmp_path / "out"
    plan.write_text(dump_tables(plan_tables(start)))
    command = ["plan", "run", str(plan), "--out", str(out), "--jobs", "1"]

    shipped = CliRunner().invoke(app, [*command, "--regime", "shipped"])
    assert shipped.exit_code == 0, shipped.output
    assert not start.exists()  # no selected regime needs it
    assert "### shipped" in (out / "tables.md").read_text()

    started = CliRunner().invoke(app, command)
    assert started.exit_code == 0, started.output
    assert "warm start: shortcut/warmup_p" in started.output
    assert "### started" in (out / "tables.md").read_text()
    assert (out / "figures" / "plan_started_exploration.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "unused").exists()

    weights = start / "final" / "model.safetensors"
    trained = weights.stat().st_mtime_ns
    again = CliRunner().invoke(app, command)
    assert "warm start" not in again.output
    assert weights.stat().st_mtime_ns == trained

    shutil.rmtree(start)
    finished = CliRunner().invoke(app, command)
    assert finished.exit_code == 0, finished.output
    assert not start.exists()  # all runs that need it are finished


@pytest.mark.usefixtures("one_thread")
def test_starts_of_other_phases_are_not_trained(tmp_path: Path) -> None:
    plan, start, out = tmp_path / "plan.toml", tmp_path / "start", tmp_path / "out"
    phases = {
        "small": {"seeds": [0], "regimes": ["shipped"]},
        "large": {"seeds": [0], "regimes": ["started"]},
    }
    tables = plan_tables(start, phases=phases, figures=[])
    del tables["seeds"]
    plan.write_text(dump_tables(tables))
    command = ["plan", "run", str(plan), "--out", str(out), "--jobs", "1", "--phase", "small"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "### shipped" in (out / "tables.md").read_text()
    assert not start.exists()


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ({"set": []}, "recipe"),
        ({"recipe": "countdown/grpo"}, "countdown/grpo"),
        ({"recipe": "countdown/warmup", "set": ["supervised.num_step=3"]}, "num_steps"),
        ({"recipe": "countdown/warmup", "steps": 3}, "allowed: recipe, set"),
    ],
)
def test_a_start_is_checked_when_the_plan_is_read(
    start: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tables = plan_tables(tmp_path, starts={"weak": start})
    with pytest.raises(UserError, match="weak") as caught:
        parse_plan(tables, "plan.toml", Path())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
