"""Checks which arguments a user's reward function receives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eepo.config import DatasetConfig, RewardConfig
from eepo.rewards import build_reward, reward_columns
from eepo.rewards.arguments import Parameters, call, parameters_in, parameters_of
from eepo.rewards.isolation import PooledReward
from eepo.tasks import build_task
from eepo.types import Prompt, RowColumns, UserError, Verdict

COLUMNS = {"level": 3, "tests": ["a", "b"], "answer": "raw", "prompt": "raw"}


def called(function: Callable[..., Any]) -> Any:
    return call(function, parameters_of(function), "text", "gold", "the prompt", COLUMNS)


@pytest.mark.parametrize(
    ("function", "result"),
    [
        (lambda completion: completion, "text"),
        (lambda completion, gold: (completion, gold), ("text", "gold")),
        (lambda completion, answer: (completion, answer), ("text", "gold")),
        (lambda gold, completion: (gold, completion), ("gold", "text")),
        (lambda answer, completion: (answer, completion), ("gold", "text")),
        (lambda prompt, completion: (prompt, completion), ("the prompt", "text")),
        (lambda completion, level: (completion, level), ("text", 3)),
        (lambda completion, *, tests: (completion, tests), ("text", ["a", "b"])),
        (lambda completion, gold, level, absent=5: (level, absent), (3, 5)),
        (
            lambda completion, level, **columns: (level, columns),
            (3, {"tests": ["a", "b"]}),
        ),
        # two parameters of any name: (gold answer, completion)
        (lambda expected, text: (expected, text), ("gold", "text")),
        (lambda expected, completion: (expected, completion), ("gold", "text")),
        (lambda expected, text, level=1: (expected, text, level), ("gold", "text", 1)),
        (lambda expected, text, **others: (expected, text, others), ("gold", "text", {})),
        (lambda *both: both, ("gold", "text")),
    ],
)
def test_a_function_receives_what_its_parameters_name(
    function: Callable[..., Any], result: Any
) -> None:
    assert called(function) == result


def test_a_parameter_that_is_no_column_is_an_error() -> None:
    with pytest.raises(UserError, match=r"parameter lvl is no column.*prompt, level, tests$"):
        called(lambda completion, gold, lvl: 0)


@pytest.mark.parametrize(
    "function",
    [lambda: 0, lambda text: 0, lambda text, gold: 0, lambda a, b, c: 0, lambda **columns: 0],
)
def test_a_function_that_cannot_receive_the_completion_is_refused(
    function: Callable[..., Any],
) -> None:
    with pytest.raises(UserError, match="needs a parameter named completion"):
        parameters_of(function).check()


@pytest.mark.parametrize(
    "header",
    [
        "completion, gold",
        "completion, gold, /",
        "completion, gold=1, *, level, tests=2, **columns",
        "*values",
        "gold, *values, completion=3",
    ],
)
def test_the_text_of_a_module_gives_the_same_parameters_as_the_function(header: str) -> None:
    source = f"def grade({header}):\n    return 0\n"
    names: dict[str, Any] = {}
    exec(source, names)  # noqa: S102 (a text of this test)
    assert parameters_in(source, "grade") == parameters_of(names["grade"])


@pytest.mark.parametrize(
    "source",
    ["from x import grade", "@wrap\ndef grade(a, b): ...", "grade = len", "def grade(: ", "x = 1"],
)
def test_a_text_that_does_not_show_the_parameters_gives_none(source: str) -> None:
    assert parameters_in(source, "grade") is None


def test_only_named_columns_are_needed() -> None:
    parameters = Parameters(("completion", "gold", "level"), ("tests",))
    assert parameters.columns() == RowColumns(("level",), ("tests",))
    assert Parameters(("completion", "level")).columns() == RowColumns(("level",), gold=False)
    assert Parameters(("gold", "text")).columns() == RowColumns(ambiguous=("text",))


# --- in a grading process, from a data file


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text(
        '{"problem": "1+1?", "answer": "2", "level": 4, "tests": {"x": [1]}}\n'
        '{"problem": "1+2?", "answer": "3", "level": 5, "tests": null}\n'
    )
    return tmp_path


@pytest.fixture
def grade(folder: Path, byte_tokenizer: Any) -> Iterator[Callable[[str], list[Verdict]]]:
    """Return a function that grades "ok" for each row with a function, given as text."""
    rewards: list[PooledReward] = []

    def run(source: str, name: str = "mine:grade", train: str = "train.jsonl") -> list[Verdict]:
        (folder / "mine.py").write_text(source)
        config = RewardConfig(name=name, num_workers=1)
        task = build_task(
            DatasetConfig(train=train, template="Q: {problem}"),
            byte_tokenizer(),
            0,
            reward_columns(name),
        )
        reward = build_reward(config, DatasetConfig(train=train))
        assert isinstance(reward, PooledReward)
        rewards.append(reward)
        prompts = sorted(task.training_prompts(0, 2), key=lambda prompt: prompt.id)
        return reward.grade(prompts, ["ok"] * 2)

    yield run
    for reward in rewards:
        reward.close()


WITH_COLUMNS = """
from eepo import Verdict

def grade(completion, gold, prompt, level, tests=None):
    return Verdict(level, f"{completion} {gold} {prompt} {tests}")
"""


@pytest.mark.parametrize("name", ["mine:grade", "mine.py:grade"])
def test_the_columns_of_a_data_file_reach_the_function(grade: Any, name: str) -> None:
    first, second = grade(WITH_COLUMNS, name)
    assert (first.reward, first.answer) == (4.0, "ok 2 Q: 1+1? {'x': [1]}")
    assert (second.reward, second.answer) == (5.0, "ok 3 Q: 1+2? None")


def test_the_columns_of_a_parquet_file_reach_the_function(grade: Any, folder: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="reading Parquet needs pyarrow")
    import datetime

    from pyarrow.parquet import write_table

    rows = {
        "problem": ["1+1?", "1+2?"],
        "answer": ["2", "3"],
        "level": [4, 5],
        "tests": [datetime.date(2026, 1, 2), None],
        "image": [b"\xff", b"\xff"],
    }
    write_table(pa.table(rows), folder / "train.parquet")
    first, second = grade(WITH_COLUMNS, train="train.parquet")
    assert (first.reward, first.answer) == (4.0, "ok 2 Q: 1+1? 2026-01-02")
    assert second.reward == 5.0


def test_equal_completions_of_rows_with_other_columns_are_graded_apart(grade: Any) -> None:
    assert [v.reward for v in grade("def grade(completion, level):\n    return level")] == [4, 5]


def test_a_missing_column_is_reported_before_grading(grade: Any) -> None:
    with pytest.raises(
        UserError, match=r"train.jsonl:1: no column 'lvl' \(a parameter of the reward function\)"
    ):
        grade("def grade(completion, lvl):\n    return 0")


def test_rows_need_no_answer_if_the_function_names_none(grade: Any, folder: Path) -> None:
    (folder / "bare.jsonl").write_text('{"problem": "a", "n": 1}\n{"problem": "b", "n": 2}\n')
    source = "def grade(completion, n):\n    return n"
    assert [verdict.reward for verdict in grade(source, train="bare.jsonl")] == [1, 2]
    with pytest.raises(UserError, match="no column 'answer'"):
        grade("def grade(completion, gold, n):\n    return n", train="bare.jsonl")


def test_a_decorated_function_receives_all_columns(grade: Any) -> None:
    source = "import functools\n@functools.cache\ndef grade(completion, level):\n    return level"
    assert [v.reward for v in grade(source)] == [4, 5]


def test_two_parameters_of_which_one_is_a_column_are_refused(grade: Any) -> None:
    with pytest.raises(UserError, match=r"'level' is also a column; use \(completion, level\)"):
        grade("def grade(level, completion):\n    return 0")


def test_a_reward_without_a_completion_is_refused_before_a_process_starts(grade: Any) -> None:
    with pytest.raises(UserError, match=r'"mine:grade": a reward function needs a parameter'):
        grade("def grade(text):\n    return 0")


def test_a_missing_file_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r'"absent.py:grade": no file absent.py'):
        build_reward(RewardConfig(name="absent.py:grade"), DatasetConfig())


def test_built_in_graders_receive_no_columns(folder: Path) -> None:
    assert reward_columns("math") == RowColumns()
    reward = build_reward(RewardConfig(name="math", num_workers=1), DatasetConfig())
    assert isinstance(reward, PooledReward)
    prompt = Prompt("", "a long text", (), "2", {"level": 1})
    assert reward._as_json(prompt) == '["2", "", {}]'
