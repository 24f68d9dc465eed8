"""Checks the data set task: prompts by position, no truncation, and notes for the user."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eepo.assemble import build_trainer
from eepo.config import DatasetConfig, ModelConfig, RewardConfig, RunConfig
from eepo.runs.progress import Progress
from eepo.tasks import build_task
from eepo.tasks.dataset import Dataset, as_demonstration, make_prompts
from eepo.tasks.problems import Problem
from eepo.types import UserError


@pytest.fixture
def config(tmp_path: Path) -> DatasetConfig:
    """Write ten training problems of growing length and two evaluation sets.

    One evaluation set shares a problem with the training set.
    """
    train = [
        {"id": f"t{i}", "problem": f"What is {i} + {'1' * i}?", "answer": str(i), "level": i}
        for i in range(1, 11)
    ]
    held = [
        {"problem": "What is 70 - 1?", "answer": "69"},
        {"problem": "What is $3+111$", "answer": "3"},
    ]
    for name, rows in (("train", train), ("held", held), ("amc23", held[:1])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetConfig(
        train="train.jsonl",
        evaluation=("amc23", "held.jsonl"),
        data_dir=str(tmp_path),
        template="{problem}",
    )


@pytest.fixture
def plain(byte_tokenizer: Callable[..., Any]) -> Any:
    return byte_tokenizer(bos=False)


def test_training_prompts_are_a_pure_function_of_position(
    config: DatasetConfig, plain: Any
) -> None:
    task = build_task(config, plain, 3)
    assert isinstance(task, Dataset)
    whole = task.training_prompts(0, 25)
    for position in reversed(range(25)):
        assert Dataset(config, plain, 3).training_prompts(position, 1) == [whole[position]]
    assert task.training_prompts(8, 5) == whole[8:13]


def test_each_epoch_has_every_problem_once_in_a_different_order(
    config: DatasetConfig, plain: Any
) -> None:
    prompts = Dataset(config, plain).training_prompts(0, 30)
    texts = [[prompt.text for prompt in prompts[start : start + 10]] for start in (0, 10, 20)]
    assert set(texts[0]) == set(texts[1]) == set(texts[2])
    assert len(set(texts[0])) == 10
    assert texts[0] != texts[1] != texts[2] != texts[0]
    assert len({prompt.id for prompt in prompts}) == 30  # ids seed the sampling
    other = [prompt.text for prompt in Dataset(config, plain, 1).training_prompts(0, 10)]
    assert other != texts[0]
    assert set(other) == set(texts[0])


def test_prompts_have_the_answer_of_their_problem(config: DatasetConfig, plain: Any) -> None:
    for prompt in Dataset(config, plain).training_prompts(0, 10):
        number = prompt.text.split()[2]
        assert prompt.answer == number
        assert prompt.id == f"train/0/t{number}"
        assert plain.decode(prompt.token_ids) == prompt.text


def test_evaluation_sets_are_benchmarks_or_files(config: DatasetConfig, plain: Any) -> None:
    sets = Dataset(config, plain).evaluation_sets()
    assert {name: [prompt.id for prompt in prompts] for name, prompts in sets.items()} == {
        "amc23": ["amc23/0"],
        "held": ["held/0", "held/1"],
    }
    with pytest.raises(UserError, match=r"task\.evaluation names two sets 'held'"):
        Dataset(replace(config, evaluation=("held.jsonl", "held.jsonl")), plain)


def test_levels_filter_training_only(config: DatasetConfig, plain: Any) -> None:
    task = Dataset(replace(config, levels=(2, 3)), plain)
    assert {prompt.answer for prompt in task.training_prompts(0, 2)} == {"2", "3"}
    assert len(task.evaluation_sets()["held"]) == 2


def test_long_prompts_are_left_out_and_counted(config: DatasetConfig, plain: Any) -> None:
    limit = len("What is 4 + 1111?")
    task = Dataset(replace(config, max_prompt_tokens=limit), plain)
    assert {prompt.answer for prompt in task.training_prompts(0, 4)} == {"1", "2", "3", "4"}
    assert all(len(prompt.token_ids) <= limit for prompt in task.training_prompts(0, 8))
    assert task.notes[0] == (
        "training set train: 6 of 10 prompts left out, "
        f"longer than task.max_prompt_tokens = {limit}"
    )
    problems = [Problem("a", "12345", "1"), Problem("b", "123456", "2")]
    prompts, num_left_out = make_prompts(problems, "{problem}", plain, 5)
    assert [prompt.id for prompt in prompts] == ["a"]
    assert num_left_out == 1


def test_a_set_of_too_long_prompts_is_refused(config: DatasetConfig, plain: Any) -> None:
    with pytest.raises(
        UserError, match=r"training set train: all 10 prompts .* task\.max_prompt_tokens = 3"
    ):
        Dataset(replace(config, max_prompt_tokens=3), plain)


def test_overlap_is_noted_with_ids(config: DatasetConfig, plain: Any) -> None:
    assert Dataset(config, plain).notes == [
        "evaluation set held: 1 of 2 problems are also in the training set, "
        "with the same or nearly the same text (held/1)"
    ]
    assert Dataset(replace(config, evaluation=("amc23",)), plain).notes == []


def test_an_empty_training_source_is_refused(plain: Any) -> None:
    with pytest.raises(UserError, match=r"task\.train is empty; give a file or a hub data set"):
        Dataset(DatasetConfig(), plain)


def test_demonstrations_are_solutions(config: DatasetConfig, plain: Any) -> None:
    with pytest.raises(UserError, match="has no solutions to learn from"):
        Dataset(config, plain).demonstrations(0, 1)
    rows = [
        {"problem": "1+1?", "answer": r"Two, so $\boxed{2}$."},
        {"problem": "2+2?", "answer": "4"},
        {"problem": "3+3?", "answer": "3+3 = 6\n#### 6"},
    ]
    Path(config.data_dir, "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    demonstrations = Dataset(config, plain).demonstrations(1, 2)
    assert [(each.prompt.text, each.prompt.answer, each.text) for each in demonstrations] == [
        ("3+3?", "6", "3+3 = 6\nThe final answer is \\boxed{6}."),
        ("1+1?", "2", r"Two, so $\boxed{2}$."),
    ]


def test_demonstrations_alternate_between_solutions_and_bare_answers(
    config: DatasetConfig, plain: Any
) -> None:
    solved = {"problem": "1+1?", "answer": "2", "solution": "Two."}
    rows = [solved, {"problem": "2?", "answer": "2"}]
    Path(config.data_dir, "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rare = replace(config, reason_probability=1e-3)
    demonstrations = Dataset(rare, plain).demonstrations(0, 3)
    assert [(each.text, each.first_token_probability) for each in demonstrations] == [
        ("Two.\nThe final answer is \\boxed{2}.", 1e-3),
        ("\\boxed{2}", 1 - 1e-3),
        ("Two.\nThe final answer is \\boxed{2}.", 1e-3),
    ]


def test_a_solution_that_starts_like_a_bare_answer_is_refused(
    config: DatasetConfig, plain: Any
) -> None:
    row = {"id": "a", "problem": "1+1?", "answer": "2", "solution": "\\[1+1=2\\] \\boxed{2}"}
    Path(config.data_dir, "train.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(
        UserError, match=r"a: with task\.reason_probability, the first token of the"
    ):
        Dataset(replace(config, reason_probability=0.1), plain)


def test_demonstrations_end_with_a_boxed_answer() -> None:
    problem = Problem("a", "x", "7", solution=r"It is \fbox{7}")
    assert as_demonstration(problem).endswith("\\boxed{7}.")


def test_notes_are_printed(config: DatasetConfig, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    run = RunConfig(
        model=ModelConfig(device="cpu"), task=config, reward=RewardConfig(name="countdown")
    )
    run = replace(run, algorithm=replace(run.algorithm, max_new_tokens=8))
    build_trainer(run, tmp_path / "run", resume=False, progress=Progress(console))
    assert "note: evaluation set held: 1 of 2 problems" in console.file.getvalue()  # type: ignore[attr-defined]


def test_rows_without_an_answer_are_refused_or_left_out_and_counted(
    config: DatasetConfig, plain: Any, tmp_path: Path
) -> None:
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps({"problem": "What is nothing?", "answer": ""}) + "\n")
    with pytest.raises(UserError, match=r"train\.jsonl:11: answer has no final answer"):
        Dataset(config, plain)
    task = Dataset(replace(config, skip_unanswered=True), plain)
    assert task.num_train == 10
    assert "1 rows without an answer left out" in task.notes[0]
    assert "train.jsonl:11" in task.notes[0]


@pytest.mark.parametrize("order_seed", [0, 5])
def test_held_out_problems_are_an_evaluation_set_and_never_trained_on(
    config: DatasetConfig, plain: Any, order_seed: int
) -> None:
    task = Dataset(replace(config, num_held_out=3), plain, order_seed)
    assert list(task.evaluation_sets()) == ["in_distribution", "amc23", "held"]
    held_out = {prompt.text for prompt in task.evaluation_sets()["in_distribution"]}
    trained = {prompt.text for prompt in task.training_prompts(0, 70)}
    everything = {prompt.text for prompt in Dataset(config, plain).training_prompts(0, 10)}
    assert len(held_out) == 3
    assert held_out.isdisjoint(trained)
    assert held_out | trained == everything
    # Runs with other seeds are compared on the same problems.
    other_seed = Dataset(replace(config, num_held_out=3), plain, order_seed + 1)
    assert other_seed.evaluation_sets() == task.evaluation_sets()


def test_a_training_problem_that_repeats_a_held_out_one_is_left_out(
    config: DatasetConfig, plain: Any, tmp_path: Path
) -> None:
    path = tmp_path / "train.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    copies = [row | {"id": f"copy-{row['id']}", "problem": row["problem"] + " "} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows + copies))
    task = Dataset(replace(config, num_held_out=4), plain)
    held_out = {prompt.text.strip() for prompt in task.evaluation_sets()["in_distribution"]}
    trained = {prompt.text.strip() for prompt in task.training_prompts(0, task.num_train)}
    assert held_out.isdisjoint(trained)
    assert any("left out, since held-out ones are the same" in note for note in task.notes)


def test_more_held_out_problems_than_training_problems_are_an_error(
    config: DatasetConfig, plain: Any
) -> None:
    message = "task.num_held_out = 10 must be less than the 10 problems"
    with pytest.raises(UserError, match=message):
        Dataset(replace(config, num_held_out=10), plain)


def test_examples_with_bare_answers_come_before_every_problem(
    config: DatasetConfig, plain: Any
) -> None:
    task = Dataset(replace(config, num_examples=2), plain)
    texts = [prompt.text for prompt in task.training_prompts(0, 8)]
    evaluated = [prompt.text for prompt in task.evaluation_sets()["amc23"]]
    parts = [text.split("\n\n") for text in texts + evaluated]
    assert {tuple(part[:2]) for part in parts} == {tuple(parts[0][:2])}
    assert all("\\boxed{" in example for example in parts[0][:2])
    assert [part[2] for part in parts][-1] == "What is 70 - 1?"
    assert task.num_train == 8
    shown = [example.replace("?", "?|").split("|")[0] for example in parts[0][:2]]
    assert not set(shown) & {part[2] for part in parts}
    other = Dataset(replace(config, num_examples=2), plain, 7).training_prompts(0, 1)[0].text
    assert other.split("\n\n")[:2] == parts[0][:2]


def test_more_examples_than_problems_are_refused(config: DatasetConfig, plain: Any) -> None:
    with pytest.raises(UserError, match=r"task\.num_examples = 10 must be less than the 10"):
        Dataset(replace(config, num_examples=10), plain)
