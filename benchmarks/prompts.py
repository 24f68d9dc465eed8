"""Measure under several prompts how often a model reasons, and the accuracy of guess and reasoning.

    python benchmarks/prompts.py --model MODEL --train gsm8k_train.jsonl --data-dir data
    python benchmarks/prompts.py --model MODEL --prompts only --examples 0,1,2,4

The prompts ask ever more strictly for the bare answer. Solved examples in front of the problem show
bare answers (`task.num_examples`), which makes reasoning rarer without a change of the weights. A
completion reasons if it calculates, or writes 15 words or more, before its final answer
(`eepo.rewards.guess_or_reason`).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eepo.config import DatasetConfig, ModelConfig, RewardConfig
from eepo.model import loading
from eepo.protocols import Reward, RolloutEngine
from eepo.rewards import build_grader
from eepo.rewards.guess_or_reason import CALCULATE, GUESS, REASON
from eepo.rollout.builtin import builtin_engine
from eepo.tasks.dataset import Dataset
from eepo.types import Completion, Sampling, Verdict

PROMPTS = {
    "steps": "chat",
    "boxed": "chat:{problem}\n\nGive the answer in \\boxed{}.",
    "only": "chat:{problem}\n\nReply with only the final answer in \\boxed{}.",
    "strict": "chat:{problem}\n\nReply with only the final answer in \\boxed{}. "
    "Write nothing else: no words, no steps, no calculation.",
}


@dataclass(frozen=True)
class Cell:
    """Counts the completions of one prompt."""

    prompt: str
    num_examples: int
    num_completions: int
    num_reason: int
    num_reason_correct: int
    num_guess: int  # also by a calculation in the box; the rest has no answer
    num_guess_correct: int
    mean_tokens: float
    truncated_share: float
    seconds: float

    def line(self) -> str:
        share = self.num_reason / self.num_completions
        error = 1.96 * math.sqrt(share * (1 - share) / self.num_completions)
        return (
            f"| {self.prompt} | {self.num_examples} | {share:.4f} ± {error:.4f} "
            f"| {_share(self.num_reason_correct, self.num_reason)} "
            f"| {_share(self.num_guess_correct, self.num_guess)} | {self.mean_tokens:.0f} "
            f"| {self.truncated_share:.2f} | {self.seconds:.0f} |"
        )


def _share(count: int, total: int) -> str:
    return f"{count / total:.3f} (of {total})" if total else "none"


def measure(
    name: str,
    config: DatasetConfig,
    options: argparse.Namespace,
    models: tuple[Any, RolloutEngine, Reward],
) -> Cell:
    """Sample completions for the first training problems of a seed, and count them."""
    tokenizer, engine, reward = models
    prompts = Dataset(config, tokenizer, options.seed).training_prompts(0, options.problems)
    sampling = Sampling(options.temperature, options.max_new_tokens, options.seed, "prompts")
    start = time.perf_counter()
    groups = engine.generate(prompts, options.samples, sampling)
    seconds = time.perf_counter() - start
    owners = [prompt for prompt, group in zip(prompts, groups, strict=True) for _ in group]
    completions = [completion for group in groups for completion in group]
    verdicts = reward.grade(owners, [completion.text for completion in completions])
    if options.show:
        for completion, verdict in list(zip(completions, verdicts, strict=True))[: options.show]:
            print(f"[{verdict.label}, {verdict.reward:g}] {completion.text[:300]!r}")
    return count(name, config.num_examples, completions, verdicts, seconds)


def count(
    name: str,
    num_examples: int,
    completions: Sequence[Completion],
    verdicts: Sequence[Verdict],
    seconds: float,
) -> Cell:
    labels = [(verdict.label, verdict.correct) for verdict in verdicts]
    guesses = [correct for label, correct in labels if label in (GUESS, CALCULATE)]
    return Cell(
        prompt=name,
        num_examples=num_examples,
        num_completions=len(labels),
        num_reason=sum(label == REASON for label, _ in labels),
        num_reason_correct=labels.count((REASON, True)),
        num_guess=len(guesses),
        num_guess_correct=sum(guesses),
        mean_tokens=sum(len(c.token_ids) for c in completions) / len(completions),
        truncated_share=sum(not c.finished for c in completions) / len(completions),
        seconds=seconds,
    )


def main(options: argparse.Namespace) -> None:
    where = ModelConfig(path=options.model, device=options.device)
    device = loading.pick_device(where.device)
    tokenizer = loading.load_tokenizer(where)
    model = loading.load_model(where, device, loading.pick_dtype("auto", device))
    engine = builtin_engine(model, tokenizer, options.max_rows)
    reward = build_grader(RewardConfig(name="guess_or_reason"))
    print("| prompt | examples | reason | accuracy of reasoning | accuracy of guesses | tokens "
          "| truncated | seconds |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    for name in options.prompts.split(","):
        for num_examples in map(int, options.examples.split(",")):
            config = DatasetConfig(
                train=options.train,
                data_dir=options.data_dir,
                problem_column=options.problem_column,
                template=PROMPTS[name],
                num_examples=num_examples,
                max_prompt_tokens=options.max_prompt_tokens,
            )
            cell = measure(name, config, options, (tokenizer, engine, reward))
            print(cell.line(), flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(vars(cell)) + "\n")


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--model", required=True, help="as model.path in a recipe")
    arguments.add_argument("--train", default="gsm8k_train.jsonl", help="as task.train")
    arguments.add_argument("--data-dir", default="", help="as task.data_dir")
    arguments.add_argument("--problem-column", default="problem", help="as task.problem_column")
    arguments.add_argument("--prompts", default=",".join(PROMPTS), help=", ".join(PROMPTS))
    arguments.add_argument("--examples", default="0", help="numbers of examples: 0,2,8")
    arguments.add_argument("--problems", type=int, default=128)
    arguments.add_argument("--samples", type=int, default=8, help="completions per problem")
    arguments.add_argument("--temperature", type=float, default=1.0)
    arguments.add_argument("--max-new-tokens", type=int, default=512)
    arguments.add_argument("--max-prompt-tokens", type=int, default=4096)
    arguments.add_argument("--max-rows", type=int, default=1024)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--device", default="auto")
    arguments.add_argument("--show", type=int, default=0, help="print so many completions")
    arguments.add_argument("--out", type=Path, help="append the counts to this JSON Lines file")
    return arguments


if __name__ == "__main__":
    main(parser().parse_args())
