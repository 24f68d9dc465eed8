"""Measures CPU seconds per step of the small countdown policy: GRPO, and EEPO in several settings.

    python benchmarks/small_step.py

Methods take turns, step by step, on one thread. Processor time is measured, because a busy machine
changes it little. The table has medians, and ratios to GRPO.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import shapes
import torch

from eepo import recipe
from eepo.algorithm.metrics import StepMetrics
from eepo.assemble import build_trainer
from eepo.runs.progress import Progress
from eepo.types import Sampling

METHODS = {
    "GRPO": ["algorithm.num_stages=1"],
    "EEPO, every token": ["algorithm.num_stages=2", "algorithm.gate=always"],
    "EEPO, every token, a quarter of the completions": [
        "algorithm.num_stages=2", "algorithm.gate=always", "algorithm.unlearn_max_completions=32",
    ],
    "EEPO, token gate": ["algorithm.num_stages=2"],
    "EEPO, every token, auto": [
        "algorithm.num_stages=2",
        "algorithm.gate=always",
        "algorithm.unlearn_lr=auto",
    ],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=32, help="in a step")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [
        f"training.prompts_per_step={args.prompts}",
        f"training.prompts_per_mini_batch={args.prompts // 2}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainers = {}
        for name, knobs in METHODS.items():
            config = recipe.load_run("countdown/grpo", [*knobs, *sizes, "model.device=cpu"])
            trainers[name] = build_trainer(
                config, Path(folder) / str(len(trainers)), False, Progress()
            )
        seconds: dict[str, list[float]] = {name: [] for name in METHODS}
        for turn in range(args.repeats + 1):
            for name, trainer in trainers.items():
                prompts = trainer.task.training_prompts(turn * args.prompts, args.prompts)
                started = time.process_time()
                trainer.algorithm.step(
                    prompts, Sampling(1.0, 20, stream=str(turn)), StepMetrics(torch.device("cpu"))
                )
                if turn:  # the first one warms up
                    seconds[name].append(time.process_time() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rows = [
        [name, f"{median:.2f}", f"{median / medians['GRPO']:.2f}"]
        for name, median in medians.items()
    ]
    print(shapes.table(["", "CPU seconds a step", "to GRPO"], rows))


if __name__ == "__main__":
    main()
