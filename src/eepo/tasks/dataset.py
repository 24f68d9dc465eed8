"""Problems from files and hub data sets as a task: train on one set, evaluate on others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from eepo.config import DatasetConfig
from eepo.tasks.benchmarks import BENCHMARKS, load_benchmark
from eepo.tasks.order import place
from eepo.tasks.overlap import overlap
from eepo.tasks.problems import Columns, Problem, read_problems, split_at_mark, stem
from eepo.tasks.templates import render
from eepo.types import Prompt, UserError


def make_prompts(
    problems: Sequence[Problem], template: str, tokenizer: Any, max_prompt_tokens: int
) -> tuple[list[Prompt], int]:
    """Prompts of at most `max_prompt_tokens`, and how many problems were left out as longer. None is ever cut."""
    prompts = []
    for problem in problems:
        text, token_ids = render(problem.text, template, tokenizer)
        if len(token_ids) <= max_prompt_tokens:
            prompts.append(
                Prompt(id=problem.id, text=text, token_ids=token_ids, answer=problem.answer)
            )
    return prompts, len(problems) - len(prompts)


class Dataset:
    """All is read at once, so that every mistake in the data shows before a run begins.

    `notes` are lines the user should read: prompts left out, evaluation problems that are also trained on.
    """

    def __init__(self, config: DatasetConfig, tokenizer: Any, order_seed: int = 0) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.order_seed = order_seed
        self.notes: list[str] = []
        if not config.train:
            raise UserError("task.train is empty; give a file or a hub data set")
        columns = Columns(config.problem_column, config.answer_column, config.level_column)
        unanswered: list[str] | None = [] if config.skip_unanswered else None
        train = read_problems(
            config.train, columns, config.train_split, config.data_dir, config.levels, unanswered
        )
        if unanswered:
            few = ", ".join(unanswered[:3]) + (", ..." if len(unanswered) > 3 else "")
            self.notes.append(
                f"training set {stem(config.train)}: {len(unanswered)} rows without an answer left out ({few})"
            )
        self._prompts = self._fitting(train, f"training set {stem(config.train)}")
        solutions = {problem.id: as_demonstration(problem) for problem in train if problem.solution}
        self._demonstrations = [
            (prompt, solutions[prompt.id]) for prompt in self._prompts if prompt.id in solutions
        ]
        self._evaluation = self._read_evaluation(columns, train)

    @property
    def num_train(self) -> int:
        return len(self._prompts)

    def training_prompts(self, first: int, count: int) -> list[Prompt]:
        prompts = []
        for position in range(first, first + count):
            epoch, index = place(position, len(self._prompts), str(self.order_seed))
            prompt = self._prompts[index]
            prompts.append(
                dataclasses.replace(prompt, id=f"train/{epoch}/{prompt.id}")
            )  # fresh draws in each epoch
        return prompts

    def evaluation_sets(self) -> dict[str, list[Prompt]]:
        return self._evaluation

    def demonstrations(self, first: int, count: int) -> list[tuple[Prompt, str]]:
        """Training prompts that have a solution, in order, again and again."""
        pairs = self._demonstrations
        if not pairs:
            raise UserError(
                f"task.train = {self.config.train!r} has no solutions to learn from; they stand in a column "
                "'solution', or in the answer column as texts that end in \\boxed{} or ####"
            )
        return [pairs[index % len(pairs)] for index in range(first, first + count)]

    def _read_evaluation(
        self, columns: Columns, train: Sequence[Problem]
    ) -> dict[str, list[Prompt]]:
        sets: dict[str, list[Prompt]] = {}
        for source in self.config.evaluation:
            name = source if source in BENCHMARKS else stem(source)
            if name in sets:
                raise UserError(f"task.evaluation names two sets {name!r}; rename one of the files")
            if source in BENCHMARKS:
                problems = load_benchmark(source, self.config.data_dir)
            else:
                problems = read_problems(
                    source, columns, self.config.evaluation_split, self.config.data_dir
                )
            sets[name] = self._fitting(problems, f"evaluation set {name}")
            self._note_overlap(name, problems, train)
        return sets

    def _fitting(self, problems: Sequence[Problem], what: str) -> list[Prompt]:
        limit = self.config.max_prompt_tokens
        prompts, num_left_out = make_prompts(problems, self.config.template, self.tokenizer, limit)
        if not prompts:
            raise UserError(
                f"{what}: all {num_left_out} prompts are longer than task.max_prompt_tokens = {limit}"
            )
        if num_left_out:
            self.notes.append(
                f"{what}: {num_left_out} of {len(problems)} prompts left out, longer than "
                f"task.max_prompt_tokens = {limit}"
            )
        return prompts

    def _note_overlap(
        self, name: str, problems: Sequence[Problem], train: Sequence[Problem]
    ) -> None:
        pairs = overlap(train, problems)
        if pairs:
            few = ", ".join(own for own, _ in pairs[:3]) + (", ..." if len(pairs) > 3 else "")
            self.notes.append(
                f"evaluation set {name}: {len(pairs)} of {len(problems)} problems also stand in the training set, "
                f"in the same words or nearly ({few})"
            )


def as_demonstration(problem: Problem) -> str:
    """The solution in the form that the instruction asks for: with the final answer in a box."""
    text = problem.solution or ""
    marked = split_at_mark(text)
    solution = marked[0] if marked else text.rstrip()
    return (
        solution
        if "\\boxed" in solution
        else f"{solution}\nThe final answer is \\boxed{{{problem.answer}}}."
    )
