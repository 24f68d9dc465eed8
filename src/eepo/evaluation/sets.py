"""Loads benchmarks and turns their problems into prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eepo.evaluation.results import set_title
from eepo.protocols import Task
from eepo.tasks.benchmarks import BENCHMARKS, load_benchmark
from eepo.tasks.dataset import make_prompts
from eepo.tasks.problems import SUFFIXES, Columns, Problem, read_problems, short_name
from eepo.tasks.templates import Example
from eepo.types import NO_COLUMNS, Prompt, RowColumns, UserError


@dataclass(frozen=True)
class PromptSet:
    name: str
    title: str
    prompts: list[Prompt]
    num_left_out: int = 0  # problems whose prompt is too long

    def settings(self) -> dict[str, Any]:
        """Describe the set. The digest tells it apart from sets with other problems or prompts."""
        content = json.dumps([[prompt.id, prompt.text, prompt.answer] for prompt in self.prompts])
        return {
            "title": self.title,
            "num_problems": len(self.prompts),
            "num_left_out": self.num_left_out,
            "digest": hashlib.sha256(content.encode()).hexdigest()[:16],
        }


def load_problems(
    sources: Sequence[str],
    data_dir: str,
    limit: int,
    reward_columns: RowColumns = NO_COLUMNS,
) -> dict[str, list[Problem]]:
    """Load the first `limit` problems (0: all) of each source.

    A source is the name of a benchmark, or a problem file of the user. `reward_columns` are the
    columns that the reward function receives.
    """
    sets: dict[str, list[Problem]] = {}
    for source in sources:
        is_file = source not in BENCHMARKS and Path(source).suffix in SUFFIXES
        name = short_name(source) if is_file else source
        if name in sets:
            raise UserError(f"--benchmarks names {name} twice")
        if is_file:
            problems = read_problems(source, Columns(reward=reward_columns), data_dir=data_dir)
        else:
            problems = load_benchmark(source, data_dir, reward_columns)
        sets[name] = problems[: limit or None]
    if not sets:
        raise UserError(
            f"--benchmarks is empty; give names ({', '.join(BENCHMARKS)}) or problem files"
        )
    return sets


def make_prompt_sets(
    sets: dict[str, list[Problem]],
    template: str,
    tokenizer: Any,
    max_prompt_tokens: int,
    examples: Sequence[Example] = (),
) -> list[PromptSet]:
    prompt_sets = []
    for name, problems in sets.items():
        prompts, num_left_out = make_prompts(
            problems, template, tokenizer, max_prompt_tokens, examples
        )
        if not prompts:
            raise UserError(
                f"{name}: all {num_left_out} prompts are longer than "
                f"--max-prompt-tokens {max_prompt_tokens}"
            )
        prompt_sets.append(PromptSet(name, set_title(name), prompts, num_left_out))
    return prompt_sets


def task_sets(task: Task, limit: int) -> list[PromptSet]:
    """Return the first `limit` prompts (0: all) of each evaluation set of a task."""
    return [
        PromptSet(name, set_title(name), prompts[: limit or None])
        for name, prompts in task.evaluation_sets().items()
    ]
