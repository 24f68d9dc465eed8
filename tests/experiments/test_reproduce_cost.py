"""Tests of the estimated cost of a reproduction, against measured steps and known sizes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from eepo import recipe
from eepo.experiments.reproduce_cost import (
    SHAPES,
    Estimate,
    downloads,
    estimate_lines,
    num_problems,
)
from eepo.experiments.reproduce_options import ReproduceOptions
from eepo.experiments.reproduce_plan import plan_reproductions
from eepo.experiments.step_time import Lengths, run_seconds, sampling_seconds, step_seconds
from eepo.model.memory import Shape

QWEN_05B = Shape(494_032_768, 24, 896, 4864, 2, 64, 151936, None)
QWEN_15B = Shape(1_543_714_304, 28, 1536, 8960, 2, 128, 151936, None)
QWEN_3B = SHAPES["Qwen/Qwen2.5-3B"]
FIXED, LONG, SHORT = Lengths(256, 256), Lengths(500, 2048), Lengths(217, 2048)
# As the measured steps: all rows at a time, activations are kept.
MEASURED = ["rollout.max_rows=1024", "model.gradient_checkpointing=false"]


@pytest.mark.parametrize(
    ("shape", "lengths", "seconds"),
    [
        (QWEN_05B, FIXED, 0.96),
        (QWEN_15B, LONG, 7.7),
        (QWEN_3B, FIXED, 1024 * 256 / 68_000),
        (QWEN_3B, SHORT, 1024 * 217 / 27_200),
    ],
)
def test_sampling_takes_as_long_as_measured(shape: Shape, lengths: Lengths, seconds: float) -> None:
    """The measurements are in docs/performance.md: 1,024 completions, prompts of 128 tokens."""
    assert sampling_seconds(shape, 1024, 1024, lengths, 128) == pytest.approx(seconds, rel=0.3)


@pytest.mark.parametrize(
    ("shape", "method", "lengths", "seconds"),
    [
        (QWEN_05B, "grpo", FIXED, 3.97),
        (QWEN_05B, "eepo", FIXED, 5.81),
        (QWEN_15B, "grpo", LONG, 21.7),
        (QWEN_15B, "eepo", LONG, 30.3),
    ],
)
def test_a_step_takes_as_long_as_measured(
    shape: Shape, method: str, lengths: Lengths, seconds: float
) -> None:
    config = recipe.load_run(f"paper/qwen2.5-3b+{method}", MEASURED)
    assert step_seconds(shape, config, lengths, 128) == pytest.approx(seconds, rel=0.3)


def test_longer_completions_more_samples_and_fewer_rows_take_longer() -> None:
    config = recipe.load_run("paper/qwen2.5-3b+grpo")
    base = run_seconds(QWEN_3B, config, 1000, 1000)
    assert run_seconds(QWEN_3B, config, 1000, 2000) > 1.5 * base
    assert run_seconds(QWEN_3B, config, 9000, 1000) > base
    few_rows = recipe.load_run("paper/qwen2.5-3b+grpo", ["rollout.max_rows=32"])
    assert run_seconds(QWEN_3B, few_rows, 1000, 1000) > base
    no_steps = recipe.load_run("paper/qwen2.5-3b+grpo", ["training.num_steps=0"])
    assert 0 < run_seconds(QWEN_3B, no_steps, 1000, 1000) < 0.2 * base


def lines(target: str, out: Path, **options: Any) -> list[str]:
    chosen: dict[str, Any] = {"methods": ()} | options
    (one,) = plan_reproductions(ReproduceOptions(target, **chosen), out)
    return list(Estimate(one).lines())


def test_a_dry_run_lists_runs_hours_memory_disk_and_downloads(tmp_path: Path) -> None:
    shown = lines("paper/table1", tmp_path / "out")
    assert shown[0] == "paper/table1: 14 runs, Qwen/Qwen2.5-3B"
    assert shown[1].startswith("  tune higher_temperature: 2 runs, ")
    assert shown[1].endswith(" h, temperature = 1.2, 1.5 (the paper's text names 1.2 and 1.5)")
    text = "\n".join(shown)
    assert "(ours: 0.28 is DAPO's value; the paper names none)" in text
    assert re.search(r"  report base: 1 run, \d+\.\d min\n", text)
    hours, memory, disk, hub = shown[-4:]
    assert "on one H200; expect " in hours
    assert "based on measured steps" in hours
    assert "fits on one 80 GB GPU" in memory
    assert disk.startswith("disk: up to 160.9 GiB: 80.5 GiB for final weights")
    assert "Qwen/Qwen2.5-3B (5.7 GiB); hkust-nlp/SimpleRL-Zoo-Data" in hub
    assert "math-ai/amc23" in hub
    assert not (tmp_path / "out").exists(), "a dry run writes nothing"


def test_a_dry_run_says_what_does_not_fit_and_what_is_extrapolated(tmp_path: Path) -> None:
    methods = ("grpo", "eepo")
    eight = lines("table3", tmp_path, methods=methods)
    assert "extrapolated from measured steps" in eight[-4]
    assert "one 141 GB GPU needs --recipe paper/qwen3-8b-base+paper/one-141gb" in eight[-3]
    small = lines("table3", tmp_path, methods=methods, recipe="paper/qwen3-8b-base+one-141gb")
    assert "fits on one 141 GB GPU" in small[-3]
    fourteen = lines("table4", tmp_path)
    assert "on one H200, if the model fitted on it; expect " in fourteen[-4]
    assert "too much for one GPU" in fourteen[-3]
    values = "\n".join(lines("hyperparameters", tmp_path))
    assert "group_size = 4, 16, 32 (the paper's text names 16; ours: 4, 32)" in values


def test_all_has_a_sum_of_runs_and_hours(tmp_path: Path) -> None:
    planned = plan_reproductions(ReproduceOptions("paper/all", methods=()), tmp_path)
    *_, last = estimate_lines(planned)
    estimates = [cost for one in planned for cost in Estimate(one).methods()]
    hours = sum(cost.seconds for cost in estimates) / 3600
    assert last == f"all: 47 runs, about {hours:,.1f} h"
    assert sum(cost.num_runs for cost in estimates) == 47


def test_finished_runs_correct_the_hours(tmp_path: Path) -> None:
    """A run that took twice its estimate doubles all hours."""
    options: dict[str, Any] = {"methods": ("grpo", "eepo"), "keep_weights": "none"}
    (one,) = plan_reproductions(ReproduceOptions("table1", **options), tmp_path)
    before = {cost.method: cost.seconds for cost in Estimate(one).methods()}
    config = one.config
    step = step_seconds(QWEN_3B, config, Lengths(1000, 4096), 150)
    line = {
        "regime": "", "method": "grpo", "value": "", "seed": 0, "evaluations": [], "metrics": [],
        "seconds": 2 * config.training.num_steps * step, "knobs": [],
    }  # fmt: skip
    (tmp_path / "report.jsonl").write_text(json.dumps(line) + "\n")
    (again,) = plan_reproductions(ReproduceOptions("table1", **options), tmp_path)
    estimate = Estimate(again)
    after = {cost.method: cost.seconds for cost in estimate.methods()}
    assert after == pytest.approx({method: 2 * seconds for method, seconds in before.items()})
    left = (after["base"] + after["eepo"]) / 3600
    shown = list(estimate.lines())
    assert shown[0].startswith("paper/table1: 3 runs, 1 done")
    assert f"{left:,.1f} h of them left, by the training time of the runs that are" in shown[-4]


def test_a_small_policy_has_no_estimated_hours(tmp_path: Path) -> None:
    options = {"recipe": "countdown/grpo", "overrides": ["model.device=cpu"]}
    shown = lines("table1", tmp_path, methods=("eepo",), **options)
    assert shown[-4] == "hours: unknown: no rate was measured for this model on a CPU"
    assert shown[-1] == "downloads: none"


def test_evaluations_count_the_problems_of_benchmarks_and_held_out_ones() -> None:
    assert num_problems(recipe.load_run("paper/qwen2.5-3b")) == 200 + 272 + 675 + 40 + 30
    local = ["model.path=/", "task.train=own.jsonl", "task.data_dir=/data"]
    assert downloads(recipe.load_run("paper/qwen2.5-3b", local)) == ["own.jsonl"]
