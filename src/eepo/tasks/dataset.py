"""Uses problems from files and hub data sets as a task: trains on one set, evaluates on others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from eepo.config import DatasetConfig
from eepo.tasks.benchmarks import BENCHMARKS, load_benchmark
from eepo.tasks.order import shuffled_index
from eepo.tasks.overlap import find_overlap
from eepo.tasks.problems import Columns, Problem, read_problems, short_name, split_at_mark
from eepo.tasks.templates import Example, render_all
from eepo.types import NO_COLUMNS, Demonstration, Prompt, RowColumns, UserError

IN_DISTRIBUTION = "in_distribution"  # the evaluation set of held-out training problems
EXAMPLES = "examples"  # selects the solved examples in the prompt


def make_prompts(
    problems: Sequence[Problem],
    template: str,
    tokenizer: Any,
    max_prompt_tokens: int,
    examples: Sequence[Example] = (),
) -> tuple[list[Prompt], int]:
    """Return the prompts of at most `max_prompt_tokens` tokens, and how many were longer.

    Longer prompts are left out. They are never truncated.
    """
    rendered = render_all([each.text for each in problems], template, tokenizer, examples)
    prompts = []
    for problem, (text, token_ids) in zip(problems, rendered, strict=True):
        if len(token_ids) <= max_prompt_tokens:
            prompts.append(Prompt(problem.id, text, token_ids, problem.answer, problem.columns))
    return prompts, len(problems) - len(prompts)


class Dataset:
    """Reads all sets at once, so that every mistake in the data is reported before a run starts.

    `notes` are messages for the user, about prompts left out and about evaluation problems that
    are also in the training set. `examples` are the solved problems that every prompt starts with.
    """

    def __init__(
        self,
        config: DatasetConfig,
        tokenizer: Any,
        order_seed: int = 0,
        reward_columns: RowColumns = NO_COLUMNS,
    ) -> None:
        """`order_seed` is the seed of the run. It selects the order of the training problems.

        `reward_columns` are the columns that prompts carry for the reward function.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.order_seed = order_seed
        self.notes: list[str] = []
        if not config.train:
            raise UserError("task.train is empty; give a file or a hub data set")
        self._columns = Columns(
            config.problem_column, config.answer_column, config.level_column, reward_columns
        )
        train, held_out = self._hold_out(self._read_train())
        train, self.examples = self._take_examples(train)
        self._prompts = self._prompts_within_limit(
            train, f"training set {short_name(config.train)}"
        )
        self._demonstrations = self._make_demonstrations(train)
        self._evaluation: dict[str, list[Prompt]] = {}
        if held_out:
            prompts = self._prompts_within_limit(held_out, f"evaluation set {IN_DISTRIBUTION}")
            self._evaluation[IN_DISTRIBUTION] = prompts
        self._read_evaluation(train)

    @property
    def num_train(self) -> int:
        return len(self._prompts)

    def training_prompts(self, first: int, count: int) -> list[Prompt]:
        prompts = []
        for position in range(first, first + count):
            epoch, index = shuffled_index(position, len(self._prompts), str(self.order_seed))
            prompt = self._prompts[index]
            # The id contains the epoch, so that each epoch samples different completions.
            prompts.append(dataclasses.replace(prompt, id=f"train/{epoch}/{prompt.id}"))
        return prompts

    def evaluation_sets(self) -> dict[str, list[Prompt]]:
        return self._evaluation

    def demonstrations(self, first: int, count: int) -> list[Demonstration]:
        """Return training prompts that have a solution, in order, repeated as often as needed."""
        available = self._demonstrations
        if not available:
            raise UserError(
                f"task.train = {self.config.train!r} has no solutions to learn from; add a column "
                "'solution', or end the answers with \\boxed{} or ####"
            )
        size = len(available)
        return [available[index % size] for index in range(first, first + count)]

    def _make_demonstrations(self, problems: Sequence[Problem]) -> list[Demonstration]:
        """Return the solutions. With `reason_probability`, a bare answer follows each of them."""
        solutions = {each.id: as_demonstration(each) for each in problems if each.solution}
        solved = [prompt for prompt in self._prompts if prompt.id in solutions]
        probability = self.config.reason_probability
        if not probability:
            return [Demonstration(prompt, solutions[prompt.id]) for prompt in solved]
        found = []
        for prompt in solved:
            solution, answer = solutions[prompt.id], bare_answer(prompt.answer)
            first, *_ = self.tokenizer(solution, add_special_tokens=False).input_ids
            if first == self.tokenizer(answer, add_special_tokens=False).input_ids[0]:
                raise UserError(
                    f"{prompt.id}: with task.reason_probability, the first token of the solution "
                    f"must differ from that of the bare answer, got {solution[:40]!r}"
                )
            found.append(Demonstration(prompt, solution, probability))
            found.append(Demonstration(prompt, answer, 1 - probability))
        return found

    def _read_train(self) -> list[Problem]:
        config = self.config
        unanswered: list[str] | None = [] if config.skip_unanswered else None
        train = read_problems(
            config.train,
            self._columns,
            config.train_split,
            config.data_dir,
            config.levels,
            unanswered,
        )
        if unanswered:
            self.notes.append(
                f"training set {short_name(config.train)}: {len(unanswered)} rows without an "
                f"answer left out ({_first_three(unanswered)})"
            )
        return train

    def _hold_out(self, problems: list[Problem]) -> tuple[list[Problem], list[Problem]]:
        """Split into training problems and held-out ones. All seeds of a run hold out the same.

        A training problem with the same or nearly the same text as a held-out one is left out.
        """
        number, total = self.config.num_held_out, len(problems)
        if not number:
            return problems, []
        if number >= total:
            raise UserError(
                f"task.num_held_out = {number} must be less than the {total} problems of "
                f"task.train = {self.config.train!r}"
            )
        chosen = {shuffled_index(position, total, IN_DISTRIBUTION)[1] for position in range(number)}
        held_out = [problems[index] for index in sorted(chosen)]
        train = [problem for index, problem in enumerate(problems) if index not in chosen]
        repeated = {train_id for train_id, _ in find_overlap(held_out, train)}
        if repeated:
            self.notes.append(
                f"training set {short_name(self.config.train)}: {len(repeated)} problems left out, "
                f"since held-out ones are the same ({_first_three(sorted(repeated))})"
            )
        return [problem for problem in train if problem.id not in repeated], held_out

    def _take_examples(self, problems: list[Problem]) -> tuple[list[Problem], list[Example]]:
        """Split into training problems and the examples that every prompt starts with.

        The examples show the bare answer. All seeds of a run have the same.
        """
        number, total = self.config.num_examples, len(problems)
        if not number:
            return problems, []
        if number >= total:
            raise UserError(
                f"task.num_examples = {number} must be less than the {total} training problems of "
                f"task.train = {self.config.train!r}"
            )
        chosen = [shuffled_index(position, total, EXAMPLES)[1] for position in range(number)]
        examples = [(problems[index].text, bare_answer(problems[index].answer)) for index in chosen]
        train = [problem for index, problem in enumerate(problems) if index not in chosen]
        return train, examples

    def _read_evaluation(self, train: Sequence[Problem]) -> None:
        config, sets = self.config, self._evaluation
        for source in config.evaluation:
            name = source if source in BENCHMARKS else short_name(source)
            if name in sets:
                raise UserError(f"task.evaluation names two sets {name!r}; rename one of the files")
            if source in BENCHMARKS:
                problems = load_benchmark(source, config.data_dir, self._columns.reward)
            else:
                problems = read_problems(
                    source, self._columns, config.evaluation_split, config.data_dir
                )
            sets[name] = self._prompts_within_limit(problems, f"evaluation set {name}")
            self._note_overlap(name, problems, train)

    def _prompts_within_limit(self, problems: Sequence[Problem], set_name: str) -> list[Prompt]:
        limit = self.config.max_prompt_tokens
        prompts, num_left_out = make_prompts(
            problems, self.config.template, self.tokenizer, limit, self.examples
        )
        if not prompts:
            raise UserError(
                f"{set_name}: all {num_left_out} prompts are longer than "
                f"task.max_prompt_tokens = {limit}"
            )
        if num_left_out:
            self.notes.append(
                f"{set_name}: {num_left_out} of {len(problems)} prompts left out, longer than "
                f"task.max_prompt_tokens = {limit}"
            )
        return prompts

    def _note_overlap(
        self, name: str, problems: Sequence[Problem], train: Sequence[Problem]
    ) -> None:
        pairs = find_overlap(train, problems)
        if pairs:
            ids = [evaluation_id for evaluation_id, _ in pairs]
            self.notes.append(
                f"evaluation set {name}: {len(pairs)} of {len(problems)} problems are also in the "
                f"training set, with the same or nearly the same text ({_first_three(ids)})"
            )


def bare_answer(answer: Any) -> str:
    return f"\\boxed{{{answer}}}"


def as_demonstration(problem: Problem) -> str:
    """Return the solution, with the final answer in a box, as the instruction asks for it."""
    text = problem.solution or ""
    parts = split_at_mark(text)
    solution = parts[0] if parts else text.rstrip()
    if "\\boxed" in solution:
        return solution
    return f"{solution}\nThe final answer is \\boxed{{{problem.answer}}}."


def _first_three(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
