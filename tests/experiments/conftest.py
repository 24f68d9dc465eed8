"""A small plan and its lines, for the tests of plans: the fixture `plans`."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eepo.experiments.experiment import Experiment
from eepo.experiments.plan import Plan
from eepo.experiments.plan_file import parse_plan

PLAN: dict[str, Any] = {
    "objective": ["in_range/greedy", "in_range/pass@8"],
    "set": ["training.num_steps=2", "training.prompts_per_mini_batch=32"],
    "keep_weights": "none",
    "phases": {"tune": {"seeds": [100, 101]}, "report": {"seeds": [0, 1, 2]}},
    "regimes": {
        "dense": {"recipe": "countdown/grpo"},
        "finite": {"recipe": "countdown/grpo", "set": ["task.seed=1"]},
    },
    "methods": {
        "grpo": {"tune": "training.learning_rate", "values": ["1e-5", "1e-4"]},
        "wide": {
            "base": ["grpo"], "tune": "algorithm.group_size", "values": [16, 32],
            "shares": {"training.prompts_per_step": 1024}, "regimes": ["dense"],
        },
        "eepo": {"base": ["grpo"], "set": ["algorithm.num_stages=2"]},
    },
}  # fmt: skip


def tables(**changes: Any) -> dict[str, Any]:
    """Return the tables of the plan. A change such as methods__grpo__set replaces one key."""
    changed = copy.deepcopy(PLAN)
    for path, value in changes.items():
        *parents, key = path.split("__")
        table = changed
        for parent in parents:
            table = table.setdefault(parent, {})
        table[key] = value
    return changed


def parse(**changes: Any) -> Plan:
    return parse_plan(tables(**changes), "plan.toml", Path())


def line(
    method: str,
    value: str,
    seed: int,
    greedy: float,
    regime: str = "dense",
    mean: float = 0.0,
    inherited: str = "1e-5",
) -> dict[str, Any]:
    knobs = [f"training.learning_rate={value if method == 'grpo' else inherited}"]
    if method == "eepo":
        knobs += ["algorithm.num_stages=2"]
    if method == "wide":
        knobs += [f"algorithm.group_size={value}"]
        knobs += [f"training.prompts_per_step={1024 // int(value)}"]
    curve = {str(k): min(1.0, greedy + 0.1 * k / 32) for k in (1, 2, 4, 8, 16, 32)}
    row = {"step": 2, "kind": "full", "set": "in_range", "num_problems": 4, "num_samples": 32}
    row |= {"greedy": greedy, "mean": mean or greedy / 2, "pass@k": curve, "distinct": 10 * greedy}
    metrics = [
        {"step": step, "stage1/entropy": 0.5 / step, "stage1/reward": greedy} for step in (1, 2)
    ]
    run = {"regime": regime, "method": method, "value": value, "seed": seed, "seconds": 1.0}
    return run | {"evaluations": [row], "metrics": metrics, "knobs": knobs}


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))


def tuned(out: Path, **changes: Any) -> Experiment:
    """Return an experiment whose tuning chose 1e-5 for grpo and 32 for wide, in regime dense."""
    lines = [line("grpo", "1e-5", seed, greedy) for seed, greedy in ((100, 0.5), (101, 0.6))]
    lines += [line("grpo", "1e-4", seed, greedy) for seed, greedy in ((100, 0.7), (101, 0.3))]
    lines += [line("wide", "16", 100, 0.1), line("wide", "32", 100, 0.2)]
    write(out / "tune.jsonl", lines)
    return Experiment(parse(**changes), out)


@pytest.fixture
def plans() -> SimpleNamespace:
    """Give the functions of this file: test modules cannot import each other."""
    return SimpleNamespace(tables=tables, parse=parse, line=line, write=write, tuned=tuned)
