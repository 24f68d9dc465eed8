"""Trains a policy with the TRL adapter: trl_run.py POLICY OUT PROGRESS_FILE NUM_STEPS."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

from eepo.adapters.trl import EEPOConfig, EEPOTrainer
from eepo.config import CountdownConfig
from eepo.tasks.countdown import Countdown

policy, out, progress, num_steps = sys.argv[1:]


class WriteStep(TrainerCallback):  # type: ignore[misc]
    """Writes the number of finished steps to a file."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        temporary = Path(f"{progress}.new")
        temporary.write_text(str(state.global_step))
        os.replace(temporary, progress)


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return rewards that differ within a group, also for an untrained policy."""
    return [float(sum(map(ord, text)) % 5) for text in completions]


tokenizer = AutoTokenizer.from_pretrained(policy)
problems = Countdown(CountdownConfig(num_evaluation=1), tokenizer).training_prompts(0, 64)
trainer = EEPOTrainer(
    model=policy,
    reward_funcs=reward,
    args=EEPOConfig(
        output_dir=out,
        max_steps=int(num_steps),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=4,
        gate="always",
        learning_rate=1e-4,
        logging_steps=50,
        save_steps=100,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=Dataset.from_list([{"prompt": problem.text} for problem in problems]),
    processing_class=tokenizer,
    callbacks=[WriteStep()],
)
trainer.train()
