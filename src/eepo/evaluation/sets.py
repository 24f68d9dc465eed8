"""Benchmarks as a model sees them: problems in a template, with what leaves a trace in the results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eepo import recipe
from eepo.config import check_template
from eepo.tasks.benchmarks import BENCHMARKS, load_benchmark
from eepo.tasks.dataset import make_prompts
from eepo.tasks.problems import SUFFIXES, Problem, read_problems, stem
from eepo.types import Prompt, UserError


@dataclass(frozen=True)
class PromptSet:
    name: str
    title: str
    prompts: list[Prompt]
    num_left_out: int = 0  # problems whose prompt is too long

    def settings(self) -> dict[str, Any]:
        """Enough to know another set of problems by, and to estimate without the problems at hand."""
        told = json.dumps([[prompt.id, prompt.text, prompt.answer] for prompt in self.prompts])
        return {
            "title": self.title,
            "num_problems": len(self.prompts),
            "num_left_out": self.num_left_out,
            "digest": hashlib.sha256(told.encode()).hexdigest()[:16],
        }


def load_sets(sources: Sequence[str], data_dir: str, limit: int) -> dict[str, list[Problem]]:
    """The first `limit` problems (0: all) of benchmarks by name, or of the user's own files."""
    problems: dict[str, list[Problem]] = {}
    for source in sources:
        own_file = source not in BENCHMARKS and Path(source).suffix in SUFFIXES
        name = stem(source) if own_file else source
        if name in problems:
            raise UserError(f"--benchmarks names {name} twice")
        found = (
            read_problems(source, data_dir=data_dir)
            if own_file
            else load_benchmark(source, data_dir)
        )
        problems[name] = found[: limit or None]
    if not problems:
        raise UserError(
            f"--benchmarks is empty; name some of {', '.join(BENCHMARKS)}, or files of problems"
        )
    return problems


def prompt_sets(
    problems: dict[str, list[Problem]], template: str, tokenizer: Any, max_prompt_tokens: int
) -> list[PromptSet]:
    sets = []
    for name, own in problems.items():
        prompts, num_left_out = make_prompts(own, template, tokenizer, max_prompt_tokens)
        if not prompts:
            raise UserError(
                f"{name}: all {num_left_out} prompts are over --max-prompt-tokens {max_prompt_tokens}"
            )
        title = BENCHMARKS[name].title if name in BENCHMARKS else name
        sets.append(PromptSet(name, title, prompts, num_left_out))
    return sets


def run_tables(model: str) -> dict[str, Any]:
    """The recipe of the run that `model` is, or is a checkpoint of: a policy is asked as it was trained to be asked."""
    folder = Path(model).expanduser()
    for place in (folder, folder.parent, folder.parent.parent):
        if folder.is_dir() and (place / "recipe.toml").is_file():
            return recipe.read_toml(place / "recipe.toml")
    return {}


def pick_template(chosen: str | None, tables: dict[str, Any]) -> str:
    """The user's, else that of the run if it was trained on a data set, else "boxed"."""
    task = tables.get("task", {})
    own = task.get("template", "boxed") if task.get("name") == "dataset" else "boxed"
    template = own if chosen is None else chosen
    if check_template(template):
        raise UserError(
            f'--template must be "boxed", "chat" or a text with {{problem}}, got {template!r}'
        )
    return str(template)
