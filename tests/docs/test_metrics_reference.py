"""The docs name every metric that a run writes, in our trainer, in TRL and in verl."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
METRICS = ROOT / "docs" / "metrics.md"
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


def documented(section: str) -> list[re.Pattern[str]]:
    """Return a pattern for each name in the first column of the tables below a heading."""
    text = METRICS.read_text(encoding="utf-8").split(f"## `{section}`")[1].split("\n## ")[0]
    return patterns_of(text)


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


def unknown(names: set[str], section: str) -> list[str]:
    patterns = documented(section)
    return sorted(n for n in names if not any(pattern.fullmatch(n) for pattern in patterns))


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_every_metric_of_a_run_is_documented(
    kind: str, run_eepo: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    sets = [part for knob in TINY + RUNS[kind] for part in ("--set", knob)]
    ended = run_eepo("train", "shortcut/grpo", "--out", tmp_path / "run", *sets)
    assert ended.code == 0, ended.err
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open(encoding="utf-8")]
    names = set().union(*rows)
    assert {"reward", "stage1/entropy", "mismatch_kl", "seconds/total"} <= names
    assert ("unlearn/kl" in names) == (kind == "eepo")
    assert ("dropped_groups" in names) == (kind == "methods")
    assert unknown(names, "metrics.jsonl") == []


def test_a_metric_that_is_not_documented_is_found() -> None:
    names = {"stage2/label/compute", "seconds/stage1", "stage3/clip_share", "stage1/surprise"}
    assert unknown(names, "metrics.jsonl") == ["stage1/surprise"]


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
