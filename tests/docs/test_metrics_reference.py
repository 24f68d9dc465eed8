"""The docs name every metric that a run writes, in our trainer (and no others), TRL and verl."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from eepo.cli import app
from eepo.runs.metric_meanings import EVALUATION_METRICS, STEP_METRICS
from eepo.runs.runlog import EVALUATIONS, METRICS

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "tests" / "reports" / "foreign_logs"  # of real runs
TINY = [
    *("training.num_steps=2", "training.prompts_per_step=4", "training.prompts_per_mini_batch=2"),
    *("task.num_evaluation=2", "evaluation.num_samples=2", "evaluation.quick_samples=2"),
]
RUNS = {
    "grpo": ["algorithm.kl_coef=1e-3"],
    "eepo": ["algorithm.num_stages=2", "algorithm.gate=always", "algorithm.unlearn_lr=auto"],
    "methods": ["algorithm.dynamic_sampling=1", "algorithm.entropy_target=0.5"],
}

pytestmark = pytest.mark.usefixtures("one_thread")


def patterns_of(text: str) -> list[re.Pattern[str]]:
    """Return a pattern for each name in the first column of the tables of a text.

    A name such as `/length` follows a name with the same folder, as `eepo/stageN/reward` does.
    """
    patterns = []
    for row in re.findall(r"^\| (`.+?) \|", text, re.MULTILINE):
        names = re.findall(r"`([^`]+)`", row)
        folder = names[0].rpartition("/")[0]
        full = [folder + name if name.startswith("/") else name for name in names]
        patterns += [_pattern(name) for name in full]
    return patterns


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace("stageN", r"stage\d+").replace("NAME", ".+"))


STEP_NAMES = {name for each in STEP_METRICS for names in each.metrics for name in names}
EVALUATION_NAMES = {name for names in EVALUATION_METRICS.metrics for name in names}
# The text before the table names these.
OF_EVERY_EVALUATION = {"step", "kind", "set", "num_problems", "num_samples", "seconds"}
ON_A_GPU = {"memory/peak", "memory/held"}


def unknown(names: set[str], documented: set[str]) -> list[str]:
    patterns = [_pattern(name) for name in documented]
    return sorted(n for n in names if not any(pattern.fullmatch(n) for pattern in patterns))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Train one run of each kind. Return their rows of metrics and of evaluations."""
    found: dict[str, list[dict[str, Any]]] = {METRICS: [], EVALUATIONS: []}
    for kind, knobs in RUNS.items():
        out = tmp_path_factory.mktemp(kind) / "run"
        sets = [part for knob in TINY + knobs for part in ("--set", knob)]
        ended = CliRunner().invoke(app, ["train", "shortcut/grpo", "--out", str(out), *sets])
        assert ended.exit_code == 0, ended.output
        for name, all_rows in found.items():
            all_rows += map(json.loads, (out / name).open(encoding="utf-8"))
        names = set[str]().union(*map(json.loads, (out / METRICS).open(encoding="utf-8")))
        assert ("unlearn/kl" in names) == (kind == "eepo")
        assert ("dropped_groups" in names) == (kind == "methods")
    return found


@pytest.mark.slow
def test_the_metrics_of_runs_are_documented_and_no_others(
    rows: dict[str, list[dict[str, Any]]],
) -> None:
    names = set[str]().union(*rows[METRICS])
    assert {"reward", "stage1/entropy", "mismatch_kl", "seconds/total", "unlearn/kl"} <= names
    assert unknown(names, STEP_NAMES) == []
    stale = {name for name in STEP_NAMES if not any(map(_pattern(name).fullmatch, names))}
    assert stale == (set() if torch.cuda.is_available() else ON_A_GPU)


@pytest.mark.slow
def test_the_lines_of_evaluations_are_documented_and_have_no_other_names(
    rows: dict[str, list[dict[str, Any]]],
) -> None:
    assert all(set(row) >= EVALUATION_NAMES - {"pass@k", "problems"} for row in rows[EVALUATIONS])
    names = set[str]().union(*rows[EVALUATIONS])
    assert names == EVALUATION_NAMES | OF_EVERY_EVALUATION
    for name in OF_EVERY_EVALUATION:
        assert f"`{name}`" in EVALUATION_METRICS.before


def test_a_metric_that_is_not_documented_is_found() -> None:
    names = {"stage2/label/compute", "seconds/stage1", "stage3/clip_share", "stage1/surprise"}
    assert unknown(names, STEP_NAMES) == ["stage1/surprise"]


def test_every_metric_of_the_trl_adapter_is_documented() -> None:
    log = json.loads((LOGS / "trl_eepo/trainer_state.json").read_text(encoding="utf-8"))
    names = {name for row in log["log_history"] for name in row if name.startswith("eepo/")}
    source = (ROOT / "src/eepo/adapters/trl/trainer.py").read_text(encoding="utf-8")
    recorded = re.findall(r'_record\(f?"([^"{]+)"', source)
    assert len(recorded) > 6
    names |= {f"eepo/{name}" for name in recorded}
    patterns = patterns_of((ROOT / "docs/trl.md").read_text(encoding="utf-8"))
    assert [name for name in names if not any(p.fullmatch(name) for p in patterns)] == []


def test_every_metric_of_the_verl_adapter_is_documented() -> None:
    lines = (LOGS / "verl_eepo.jsonl").read_text(encoding="utf-8").splitlines()
    names = {name for line in lines for name in json.loads(line)["data"] if "eepo" in name}
    source = (ROOT / "src/eepo/adapters/verl/trainer.py").read_text(encoding="utf-8")
    names |= set(re.findall(r'"(eepo/[a-z_/]+)"', source))
    assert len(names) > 20
    patterns = patterns_of((ROOT / "docs/verl.md").read_text(encoding="utf-8"))
    assert [name for name in names if not any(p.fullmatch(name) for p in patterns)] == []
