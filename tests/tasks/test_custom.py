"""Checks tasks that are classes of the user."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import eepo
from eepo import recipe
from eepo.assemble import build_warmup
from eepo.config import CustomTaskConfig, RunConfig, WarmupConfig
from eepo.runs.progress import Progress
from eepo.tasks import build_task

TASK = """
from eepo import Demonstration, Prompt

class Doubling:
    num_train = 40
    notes = ["a note"]

    def __init__(self, tokenizer, seed, largest=9, style={}):
        self.seed, self.largest = seed, largest

    def _prompt(self, name, number):
        columns = {"number": number}
        return Prompt(f"{name}/{number}", f"{number} + {number} = ", (), str(2 * number), columns)

    def training_prompts(self, first, count):
        positions = range(first, first + count)
        return [self._prompt(f"train/{p}", (p + self.seed) % self.largest) for p in positions]

    def evaluation_sets(self):
        return {"test": [self._prompt("test", number) for number in (10, 11)]}

    def demonstrations(self, first, count):
        return [Demonstration(p, p.answer) for p in self.training_prompts(first, count)]
"""
DOUBLING = CustomTaskConfig("my_task:Doubling")


@pytest.fixture
def write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str, str], CustomTaskConfig]:
    """Return a function that writes a module. Each test has a module of its own name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(source: str, name: str, class_name: str = "Doubling") -> CustomTaskConfig:
        (tmp_path / f"{name}.py").write_text(source)
        return CustomTaskConfig(f"{name}:{class_name}")

    return run


@pytest.mark.parametrize("form", ["by_module:Doubling", "by_file.py:Doubling"])
def test_the_class_is_built_with_tokenizer_seed_and_options(
    write: Any, tokenizer: Any, form: str
) -> None:
    write(TASK, form.partition(":")[0].removesuffix(".py"))
    task = build_task(CustomTaskConfig(form, {"largest": 5}), tokenizer, 3)
    prompts = task.training_prompts(1, 2)
    assert [prompt.text for prompt in prompts] == ["4 + 4 = ", "0 + 0 = "]
    assert prompts[0].token_ids == tuple(tokenizer("4 + 4 = ").input_ids)
    assert (prompts[0].answer, prompts[0].columns) == ("8", {"number": 4})
    assert [prompt.answer for prompt in task.evaluation_sets()["test"]] == ["20", "22"]
    assert task.demonstrations(0, 1)[0].prompt.token_ids
    assert (task.num_train, task.notes) == (40, ["a note"])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("index", "before", "after", "line"),
    [
        (0, "class Doubling", "class Tripling", r"broken_0.py has no class Doubling"),
        (
            1,
            "tokenizer, seed, largest=9, style={}",
            "tokenizer",
            r"built with \(tokenizer, seed, \*\*task.options\)",
        ),
        (2, "def training_prompts", "def prompts", r"needs a method training_prompts"),
        (3, "str(2 * number)", "{2}", "answer and columns of prompt 'train/0/0' must be JSON"),
        (4, "for p in positions]", "for p in positions][1:]", "must return 2 prompts, got 1"),
        (5, 'f"{name}/{number}"', '"same"', "two prompts with the same id"),
        (6, 'f"{number} + {number} = "', '""', "prompt 'train/0/0' has no text"),
        (
            7,
            "[self._prompt(f",
            "[str(f",
            "expected a list of eepo.Prompt, got a list with 'train/0'",
        ),
        (8, "return [self._prompt(f", "[self._prompt(f", "training_prompts: expected a .*got None"),
    ],
)
def test_a_wrong_class_is_one_user_error(
    write: Any, tokenizer: Any, index: int, before: str, after: str, line: str
) -> None:
    source = TASK.replace(before, after)
    assert source != TASK
    source = source.replace('str(f"train/{p}", (p + self.seed) % self.largest)', 'f"train/{p}"')
    config = write(source, f"broken_{index}")
    with pytest.raises(eepo.UserError, match=line):
        build_task(config, tokenizer).training_prompts(0, 2)


@pytest.mark.parametrize(
    ("index", "sets", "line"),
    [
        (0, '{"test": []}', "evaluation set 'test' has no prompts"),
        (1, '{"test": None}', "evaluation set 'test': expected a list of eepo.Prompt, got None"),
        (2, '{"test": ["1 + 1"]}', "expected a list of eepo.Prompt, got a list with '1 . 1'"),
        (3, "[]", r"evaluation_sets must return a dict of lists of eepo.Prompt, got \[\]"),
    ],
)
def test_wrong_evaluation_sets_are_one_user_error(
    write: Any, tokenizer: Any, index: int, sets: str, line: str
) -> None:
    source = TASK.partition("        return {")[0] + f"        return {sets}\n"
    with pytest.raises(eepo.UserError, match=line):
        build_task(write(source, f"broken_sets_{index}"), tokenizer).evaluation_sets()


@pytest.mark.parametrize(
    ("index", "found", "line"),
    [
        (0, "None", "demonstrations: expected a list of eepo.Demonstration, got None"),
        (1, '["a", "b"]', "expected a list of eepo.Demonstration, got a list with 'a'"),
        (2, "[]", r"demonstrations\(0, 2\) must return 2 demonstrations, got 0"),
    ],
)
def test_wrong_demonstrations_are_one_user_error(
    write: Any, tokenizer: Any, index: int, found: str, line: str
) -> None:
    source = TASK.rpartition("        return ")[0] + f"        return {found}\n"
    with pytest.raises(eepo.UserError, match=line):
        build_task(write(source, f"broken_demos_{index}"), tokenizer).demonstrations(0, 2)


def test_an_empty_evaluation_set_is_refused_before_a_warm_start(
    write: Any, tmp_path: Path, one_thread: None
) -> None:
    write(TASK.partition("        return {")[0] + '        return {"test": []}\n', "empty_set")
    config = recipe.parse(WarmupConfig, {"task": {"name": "empty_set:Doubling"}}, "test")
    with pytest.raises(eepo.UserError, match="evaluation set 'test' has no prompts"):
        build_warmup(config, tmp_path / "run", False, Progress(Console(file=io.StringIO())))


def test_optional_methods_may_be_missing(write: Any, tokenizer: Any) -> None:
    source = TASK.partition("    def evaluation_sets")[0]
    task = build_task(write(source, "short_task"), tokenizer)
    assert task.evaluation_sets() == {}
    with pytest.raises(eepo.UserError, match="a warm start needs demonstrations"):
        task.demonstrations(0, 1)


def test_a_missing_module_is_one_user_error(write: Any, tokenizer: Any) -> None:
    with pytest.raises(eepo.UserError, match=r'task.name = "absent:Task": no module absent'):
        build_task(CustomTaskConfig("absent:Task"), tokenizer)


# --- in recipes

OPTIONS = {"digits": 3, "share": 0.5, "on": True, "words": ["a", "é"], "deep": {"x": {"y": [1]}}}


def test_options_survive_writing_and_reading_a_recipe(tmp_path: Path) -> None:
    config = recipe.load_run({"task": {"name": "m:Task", "options": OPTIONS}})
    assert config.task == CustomTaskConfig("m:Task", OPTIONS)
    (tmp_path / "recipe.toml").write_text(recipe.dump(config), encoding="utf-8")
    assert recipe.load_run(tmp_path / "recipe.toml") == config


def test_one_option_can_be_set(tmp_path: Path) -> None:
    tables = {"task": {"name": "m:Task", "options": {"digits": 3}}}
    config: RunConfig = recipe.load_run(tables, ["task.options.digits=4", "task.options.more=x"])
    assert config.task == CustomTaskConfig("m:Task", {"digits": 4, "more": "x"})


@pytest.mark.parametrize(
    ("task", "line"),
    [
        ({"name": "m:Task", "digits": 3}, r"unknown key task.digits = 3.* allowed: name, options"),
        ({"name": "m:Task", "options": 3}, "task.options = 3 must be a table"),
        ({"name": "m:Task", "options": {"x": None}}, "task.options = .* must be a table"),
        ({"name": "Task"}, 'task.name = "Task" must be one of "countdown".*, or module:Class'),
        ({"name": "m:3"}, 'task.name = "m:3" must be one of'),
        ({"options": {}}, "unknown key task.options"),
    ],
)
def test_a_wrong_section_is_one_user_error(task: Any, line: str) -> None:
    with pytest.raises(eepo.UserError, match=line):
        recipe.load_run({"task": task})


def test_a_recipe_trains_on_the_class(write: Any, one_thread: None) -> None:
    """The data never needs a file, and the reward receives the columns of the prompts."""
    write(TASK + "\ndef score(completion, gold, number):\n    return 1 + number\n", "whole_task")
    tables = {
        "task": {"name": "whole_task:Doubling"},
        "reward": {"name": "whole_task:score", "num_workers": 1},
        "training": {"num_steps": 1, "prompts_per_step": 2, "prompts_per_mini_batch": 2},
        "algorithm": {"group_size": 2, "max_new_tokens": 4},
        "evaluation": {"num_samples": 2},
    }
    result = eepo.train(tables, "run", quiet=True)
    assert result.metrics[0]["reward"] == pytest.approx(1.5)
    assert result.final_evaluation["test"]["num_problems"] == 2
