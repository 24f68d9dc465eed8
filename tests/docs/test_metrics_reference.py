"""docs/metrics.md names every metric that a run writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

METRICS = Path(__file__).parents[2] / "docs" / "metrics.md"
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
    patterns = []
    for row in re.findall(r"^\| (`.+?) \|", text, re.MULTILINE):
        names = re.findall(r"`([^`]+)`", row)
        folder = names[0].partition("/")[0]
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
