"""Compares seconds per step of EEPO and GRPO in TRL, with eepo's small countdown policy on the CPU.

    python benchmarks/trl_cost.py [STEPS [ROUNDS]]

The two run alternately, so that other load on the machine slows both. The first step of each run is
left out.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from eepo.adapters.trl import EEPOConfig, EEPOTrainer
from eepo.config import CountdownConfig
from eepo.model.loading import resolve
from eepo.rewards.countdown import CountdownReward
from eepo.tasks.countdown import Countdown
from eepo.types import Prompt

METHODS: dict[str, tuple[Any, Any]] = {
    "grpo": (GRPOConfig, GRPOTrainer),
    "eepo": (EEPOConfig, EEPOTrainer),
}
MODEL = resolve("builtin:countdown")


def countdown(prompts: list[str], completions: list[str], answer: list[dict], **_: Any) -> Any:
    problems = [Prompt("", text, (), value) for text, value in zip(prompts, answer, strict=True)]
    return [verdict.reward for verdict in CountdownReward().grade(problems, completions)]


def train(method: str, folder: str, steps: int) -> Any:
    """Train, and return the trainer."""
    config_class, trainer_class = METHODS[method]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    problems = Countdown(CountdownConfig(), tokenizer).training_prompts(0, 1000)
    rows = [{"prompt": problem.text, "answer": problem.answer} for problem in problems]
    args = config_class(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=2,
        num_generations=8,
        max_completion_length=24,
        learning_rate=1e-4,
        beta=1e-4,
        entropy_coef=1e-5,
        use_bias_correction_kl=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    data = Dataset.from_list(rows)
    trainer = trainer_class(MODEL, countdown, args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return trainer


def step_seconds(method: str, steps: int) -> list[float]:
    """Train, and return the seconds of all steps but the first."""
    with tempfile.TemporaryDirectory() as folder:
        log = train(method, folder, steps).state.log_history
    return [entry["step_time"] for entry in log if "step_time" in entry][1:]


def main(steps: int = 11, rounds: int = 3) -> None:
    medians: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(rounds):
        for method, values in medians.items():
            values.append(statistics.median(step_seconds(method, steps)))
    for method, values in medians.items():
        listed = ", ".join(f"{value:.3f}" for value in values)
        print(f"{method}: median seconds per step in each round: {listed}")
    pairs = zip(medians["eepo"], medians["grpo"], strict=True)
    ratios = sorted(eepo / grpo for eepo, grpo in pairs)
    print(f"EEPO / GRPO: {statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
