"""Checks the Python API: train, evaluate and grade, with recipes and rewards of every form."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import eepo
from eepo.config import RunConfig
from eepo.rewards.user_code import name_of

TINY: dict[str, Any] = {
    "training.num_steps": 1,
    "training.prompts_per_step": 2,
    "training.prompts_per_mini_batch": 2,
    "algorithm.group_size": 4,
    "algorithm.max_new_tokens": 12,
    "evaluation.num_samples": 2,
    "evaluation.every": 0,
}
REWARD = """
def digits(completion, gold, numbers):
    return len(set(completion) & set(str(numbers))) / 10 + (gold == "24")
"""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty working directory with a reward function and a data file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_reward.py").write_text(REWARD)
    rows = [
        {"problem": f"{n} 5 6 7 = 24 :", "answer": "24", "numbers": [n, 5, 6, 7]} for n in range(4)
    ]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def import_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Return a function that imports a module of the working directory."""
    monkeypatch.syspath_prepend(str(folder))
    imported: list[str] = []

    def run(name: str) -> types.ModuleType:
        imported.append(name)
        return __import__(name)

    yield run
    for name in imported:
        sys.modules.pop(name, None)


# --- import


def test_importing_eepo_imports_neither_torch_nor_the_trainer() -> None:
    code = (
        "import sys, eepo; eepo.UserError, eepo.train, eepo.load_recipe('countdown/eepo');"
        "sys.exit(', '.join({'torch', 'transformers', 'eepo.assemble'} & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_every_public_name_exists_and_has_a_complete_docstring() -> None:
    for name in set(eepo.__all__) - {"__version__"}:
        assert name in dir(eepo)
        assert getattr(eepo, name).__doc__
    for function in (eepo.train, eepo.evaluate, eepo.grade, eepo.load_recipe):
        for part in ("Args:", "Returns:", "Raises:", *function.__annotations__):
            if part != "return":
                assert part in (function.__doc__ or ""), (function, part)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        eepo.trian  # noqa: B018


# --- recipes


def test_a_recipe_may_be_a_name_a_file_a_dictionary_or_a_config(folder: Path) -> None:
    (folder / "mine.toml").write_text('name = "mine"\n[training]\nseed = 3\n')
    for recipe in (
        "mine.toml",
        folder / "mine.toml",
        {"name": "mine", "training": {"seed": 3}},
        eepo.load_recipe("mine.toml"),
    ):
        config = eepo.load_recipe(recipe, {"training.num_steps": 7, "model.lora_targets": ["a"]})
        assert isinstance(config, RunConfig)
        assert (config.name, config.training.seed, config.training.num_steps) == ("mine", 3, 7)
        assert config.model.lora_targets == ("a",)
    assert eepo.load_recipe("countdown/eepo").algorithm.num_stages == 2


def test_a_dictionary_may_extend_a_shipped_recipe_and_stays_unchanged() -> None:
    recipe = {"extends": "demo/eepo", "training": {"num_steps": 3}}
    config = eepo.load_recipe(recipe, {"training.seed": 1})
    assert (config.name, config.training.num_steps, config.algorithm.credit) == ("eepo", 3, "full")
    assert recipe == {"extends": "demo/eepo", "training": {"num_steps": 3}}


@pytest.mark.parametrize("value", ["é😀", 'a "quote"', "back\\slash", "line\nbreak", "3"])
def test_texts_reach_a_knob_unchanged(value: str) -> None:
    config = eepo.load_recipe({}, {"name": value})
    assert config.name == value


@pytest.mark.parametrize(
    ("recipe", "changes", "line"),
    [
        ({"training": {"steps": 1}}, {}, "recipe: unknown key training.steps = 1; did you mean"),
        ({"training": 3}, {}, r"recipe: training = 3 must be a section"),
        ({}, {"training.num_steps": "many"}, r'--set: training.num_steps = "many" must be'),
        ({}, {"training.num_steps": None}, r"training.num_steps = .* must be a whole number"),
        ({"algorithm": {"group_size": 7}}, {}, "recipe: algorithm.group_size must be even, got 7"),
        ({"extends": "nothing"}, {}, "nothing: no such recipe"),
        ("nothing", {}, "nothing: no such recipe"),
        (3, {}, "recipe = 3 must be a name, a file, a table or a RunConfig"),
        ({}, "training.num_steps=3", 'set = "training.num_steps=3" must be a dictionary or a list'),
    ],
)
def test_a_wrong_recipe_is_one_user_error(recipe: Any, changes: Any, line: str) -> None:
    with pytest.raises(eepo.UserError, match=line):
        eepo.load_recipe(recipe, changes)


# --- train and evaluate


@pytest.mark.slow
def test_train_and_evaluate_return_what_they_write(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = eepo.train("countdown/eepo", "run", set=TINY | {"task.num_evaluation": 2})
    assert "weights: run/final" in capsys.readouterr().out
    assert result.folder == Path("run")
    assert (result.weights / "model.safetensors").is_file()
    assert [row["step"] for row in result.metrics] == [1]
    assert set(result.final_evaluation) == {"in_range", "out_of_range"}
    assert result.final_evaluation["in_range"]["num_samples"] == 2

    with pytest.raises(eepo.UserError, match="already contains a run"):
        eepo.train("countdown/eepo", "run", set=TINY | {"task.num_evaluation": 2}, quiet=True)

    evaluation = eepo.evaluate(result, limit=1, num_samples=2, quiet=True)
    assert evaluation.folder == Path("evaluations/run-seed-0")
    assert set(evaluation.sets) == set(result.final_evaluation)
    measure = evaluation.sets["in_range"]["samples/pass@2"]
    assert measure["low"] <= measure["mean"] <= measure["high"]
    assert "greedy/accuracy" in evaluation.average
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"samples": 4}, "eepo.evaluate: unknown key samples = 4; did you mean num_samples"),
        ({"num_samples": -1}, "eepo.evaluate: num_samples = -1 must be >= 0"),
        ({"limit": "all"}, 'eepo.evaluate: limit = "all" must be a whole number'),
        ({"dtype": "int4"}, 'eepo.evaluate: dtype = "int4" must be one of "auto"'),
        ({"benchmarks": [1]}, "eepo.evaluate: benchmarks"),
        ({"benchmarks": "gsm8k,gsm8k", "data_dir": "."}, "gsm8k: no file"),
    ],
)
def test_a_wrong_option_of_evaluate_is_one_user_error(
    folder: Path, options: dict[str, Any], line: str
) -> None:
    with pytest.raises(eepo.UserError, match=line):
        eepo.evaluate("builtin:countdown", quiet=True, **options)


OWN = {
    "task": {"name": "dataset", "train": "own.jsonl", "template": "{problem}", "num_held_out": 1},
    "reward": {"num_workers": 1},
}


def test_a_reward_function_object_trains_on_a_data_file(
    folder: Path, import_module: Callable[[str], Any]
) -> None:
    """The reward depends on a column, so a wrong row would change it."""
    digits = import_module("my_reward").digits
    result = eepo.train(OWN, "run", set=TINY, reward=digits, quiet=True)
    assert "my_reward.py:digits" in (folder / "run" / "recipe.toml").read_text()
    logged = [json.loads(line) for line in (folder / "run" / "completions.jsonl").open()]
    assert logged
    for row in logged:
        numbers = [int(row["prompt"].split()[0]), 5, 6, 7]
        assert row["reward"] == pytest.approx(digits(row["text"], "24", numbers))
    assert result.metrics[0]["reward"] >= 1


# --- grade


def test_grade_returns_verdicts_in_order() -> None:
    rows = [
        {"completion": r"so \boxed{\frac{1}{2}}", "gold": "0.5"},
        {"completion": "no idea, really none at all", "gold": 3},
    ]
    first, second = eepo.grade(iter(rows), num_workers=1)
    assert (first.correct, first.reason) == (True, "same number")
    assert (second.reward, second.answer) == (0.0, None)
    assert [v.correct for v in eepo.grade(rows, "exact")] == [False, False]


def test_grade_passes_prompt_and_columns_to_a_function(folder: Path) -> None:
    (folder / "mine.py").write_text(
        "def grade(completion, gold, prompt, level):\n    return len(prompt) + level\n"
    )
    rows = [{"completion": "a", "gold": "b", "prompt": "four", "level": level} for level in (1, 2)]
    assert [v.reward for v in eepo.grade(rows, "mine:grade", num_workers=1)] == [5, 6]
    (folder / "other.py").write_text("def grade(completion):\n    return len(completion)\n")
    assert eepo.grade([{"completion": "four"}], "other.py:grade", num_workers=1)[0].reward == 4


SCRIPT = """
import eepo

def short(completion, gold):
    return float(len(completion) < 5)

{guard}
    print(eepo.grade([{{"completion": "four", "gold": "4"}}], short, num_workers=1))
"""


@pytest.mark.parametrize("guarded", [True, False])
def test_a_script_in_another_folder_grades_with_its_own_function(
    folder: Path, guarded: bool
) -> None:
    (folder / "scripts").mkdir()
    guard = 'if __name__ == "__main__":' if guarded else "if True:"
    (folder / "scripts" / "go.py").write_text(SCRIPT.format(guard=guard))
    command = [sys.executable, "scripts/go.py"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if guarded:
        assert "Verdict(reward=1.0" in result.stdout, result.stderr
    else:
        assert 'put the calls of a script under if __name__ == "__main__":' in result.stderr
        assert "the grading process did not start" in result.stderr


@pytest.mark.parametrize(
    ("row", "options", "line"),
    [
        ({"completion": "a"}, {}, 'row 0: has no "gold"'),
        ("text", {}, "row 0: must be an object"),
        ({"completion": "a", "gold": "b"}, {"cpu": 1}, "eepo.grade: unknown key cpu = 1"),
        ({"completion": "a", "gold": "b"}, {"cpu_seconds": 0}, "eepo.grade: cpu_seconds = 0 must"),
        ({"completion": "a", "gold": "b"}, {"reward": "maths"}, "maths must be math"),
    ],
)
def test_a_wrong_row_or_limit_of_grade_is_one_user_error(
    row: Any, options: dict[str, Any], line: str
) -> None:
    with pytest.raises(eepo.UserError, match=line):
        eepo.grade([row], **options)


# --- names of functions


def test_a_function_of_a_package_is_named_by_its_module() -> None:
    from eepo.rewards import math

    assert name_of(math.grade) == "eepo.rewards.math:grade"


def test_functions_that_no_process_can_import_are_refused(
    import_module: Callable[[str], Any],
) -> None:
    def inner(completion: str) -> float:
        return 0.0

    module = import_module("my_reward")
    assert name_of(module.digits) == "my_reward.py:digits"
    for function in (inner, lambda completion: 0, TINY.get, type("Callable", (), {})()):
        with pytest.raises(eepo.UserError, match=r"define it with def at the top level of a \.py"):
            name_of(function)
