"""Train eepo's small countdown policy with TRL, on the CPU and without a hub.

    python examples/trl_grpo.py [FOLDER [STEPS]]
    python examples/trl_eepo.py [FOLDER [STEPS]]

The two scripts differ in three lines: the import, the config class and the trainer class.
"""

import sys

from datasets import Dataset
from transformers import AutoTokenizer

from eepo.config import CountdownConfig
from eepo.model.loading import resolve
from eepo.rewards.countdown import CountdownReward
from eepo.tasks.countdown import Countdown
from eepo.types import Prompt

# isort: split
from trl import GRPOConfig, GRPOTrainer

folder, steps = (*sys.argv[1:], *("runs/trl", "20")[len(sys.argv) - 1 :])
model = resolve("builtin:countdown")  # a local folder; a hub name works too
tokenizer = AutoTokenizer.from_pretrained(model)
problems = Countdown(CountdownConfig(), tokenizer).training_prompts(0, 1000)
rows = [{"prompt": problem.text, "answer": problem.answer} for problem in problems]
dataset = Dataset.from_list(rows)


def countdown(
    prompts: list[str], completions: list[str], answer: list[dict], **_: object
) -> list[float]:
    """Return 1 if the expression uses each number once and equals the target, else 0."""
    problems = [Prompt("", text, (), value) for text, value in zip(prompts, answer, strict=True)]
    return [verdict.reward for verdict in CountdownReward().grade(problems, completions)]


args = GRPOConfig(
    output_dir=folder,
    max_steps=int(steps),
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
trainer = GRPOTrainer(
    model=model,
    reward_funcs=countdown,
    args=args,
    train_dataset=dataset,
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model()
