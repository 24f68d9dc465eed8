"""Makes plans whose runs take a second on a CPU, and runs them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from eepo.experiments import runner
from eepo.experiments.experiment import Experiment
from eepo.experiments.plan import Selection
from eepo.experiments.plan_file import parse_plan
from eepo.experiments.runner import Outcome, run_in_processes

TINY = [
    "model.device=cpu",
    "training.num_steps=1",
    "training.prompts_per_step=2",
    "training.prompts_per_mini_batch=2",
    "algorithm.group_size=4",
    "algorithm.max_new_tokens=12",
    "algorithm.kl_coef=0.0",
    "task.num_evaluation=2",
    "evaluation.num_samples=2",
    "evaluation.every=0",
    "evaluation.start=false",
]


def make(out: Path, methods: dict[str, Any], **changes: Any) -> Experiment:
    tables = {"recipe": "countdown/grpo", "set": TINY, "seeds": [0], "methods": methods}
    return Experiment(parse_plan(tables | changes, "tiny.toml", Path()), out)


def progress() -> tuple[runner.Progress, io.StringIO]:
    text = io.StringIO()
    return runner.Progress(Console(file=text, width=300)), text


def run(experiment: Experiment, num_jobs: int = 1) -> tuple[Outcome, str]:
    shown, text = progress()
    return run_in_processes(experiment, Selection(), num_jobs, shown), text.getvalue()
