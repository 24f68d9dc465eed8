"""Checks which data sets of reasoning-gym are allowed.

The source of every scorer in the installed package is searched for calls that run code.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import subprocess
import sys
import textwrap
from types import FunctionType, ModuleType
from typing import Any

import pytest

reasoning_gym = pytest.importorskip("reasoning_gym")

from eepo.rewards import gym_datasets  # noqa: E402
from eepo.rewards.extraction import MAX_ANSWER  # noqa: E402
from eepo.types import UserError  # noqa: E402

DATASETS: dict[str, Any] = reasoning_gym.factory.DATASETS
DANGEROUS_CALLS = {eval, exec, compile, __import__, open, getattr, setattr}
DANGEROUS_MODULES = {"sympy", "pickle", "subprocess", "os", "importlib", "ast"}
SLOW = {"futoshiki", "zebra_puzzles", "sokoban"}  # slow to generate; their scorers are fast


def functions_of(value: Any) -> list[FunctionType]:
    """Return the function, or all methods of a class of reasoning-gym."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, FunctionType):
        generated = value.__code__.co_filename.startswith("<")  # a dataclass method has no source
        return [] if generated else [value]
    if inspect.isclass(value) and value.__module__.startswith("reasoning_gym"):
        return [function for member in vars(value).values() for function in functions_of(member)]
    return []


def resolve(node: ast.AST, names: dict[str, Any]) -> Any:
    """Return the object behind a name or an attribute chain; None if it exists only at run time."""
    if isinstance(node, ast.Name):
        return names.get(node.id, getattr(builtins, node.id, None))
    if isinstance(node, ast.Attribute):
        base = resolve(node.value, names)
        known = isinstance(base, ModuleType) or inspect.isclass(base)
        return inspect.getattr_static(base, node.attr, None) if known else None
    return None


def dangerous_calls(owner: Any, start: FunctionType) -> set[str]:
    """Return all dangerous calls that `start`, a method of `owner`, can reach in the package."""
    calls: set[str] = set()
    queue, seen = [start], set()
    while queue:
        function = queue.pop()
        if function in seen or not function.__module__.startswith("reasoning_gym"):
            continue
        seen.add(function)
        names = dict(function.__globals__) | {"self": owner, "cls": owner}
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
            value = resolve(node, names)
            is_module = isinstance(value, ModuleType)
            module = value.__name__ if is_module else getattr(value, "__module__", None) or ""
            is_dangerous_call = callable(value) and value in DANGEROUS_CALLS
            if is_dangerous_call or module.partition(".")[0] in DANGEROUS_MODULES:
                calls.add(f"{function.__qualname__}: {ast.unparse(node)}")
            if value is not owner:  # `self` alone calls nothing
                queue += functions_of(value)
    return calls


def dangerous_calls_of(name: str) -> set[str]:
    owner = DATASETS[name][0]
    return dangerous_calls(owner, owner.score_answer)


def test_every_data_set_of_the_package_is_listed() -> None:
    assert set(DATASETS) == gym_datasets.ALLOWED | set(gym_datasets.REFUSED)
    assert not gym_datasets.ALLOWED & set(gym_datasets.REFUSED)


@pytest.mark.parametrize("name", sorted(gym_datasets.ALLOWED))
def test_no_allowed_scorer_can_run_text_as_code(name: str) -> None:
    assert dangerous_calls_of(name) == set()


def test_the_search_finds_every_scorer_that_evaluates() -> None:
    evaluating = {name for name, reason in gym_datasets.REFUSED.items() if "evaluate" in reason}
    assert len(evaluating) == 11
    assert {name for name in evaluating if dangerous_calls_of(name)} == evaluating
    indirect_calls = dangerous_calls_of("bitwise_arithmetic")
    assert any("verify_solution: eval" in call for call in indirect_calls)


@pytest.mark.parametrize("name", sorted(gym_datasets.ALLOWED - SLOW))
def test_entries_have_text_questions_and_short_answers(name: str) -> None:
    dataset = gym_datasets.open_dataset(name, size=500, seed=11)
    for entry in (gym_datasets.read_entry(dataset, index) for index in (0, 1, 499)):
        assert isinstance(entry["question"], str)
        assert len(entry["answer"]) <= MAX_ANSWER


@pytest.mark.parametrize(
    "name", ["binary_matrix", "codeio", "coin_flip", "rubiks_cube", "composite"]
)
def test_refusals_state_a_reason(name: str) -> None:
    with pytest.raises(UserError, match=f'"{name}" of reasoning-gym is refused: i'):
        gym_datasets.open_dataset(name, size=1, seed=0)


def test_unlisted_names_are_refused() -> None:
    with pytest.raises(UserError, match=r'task\.dataset = "fresh" must be one of ab, acre, '):
        gym_datasets.check_allowed("fresh")


def test_a_missing_package_is_reported_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r'pip install "eepo\[reasoning_gym\]"'):
        gym_datasets.import_package()


@pytest.mark.slow
def test_problems_are_the_same_in_every_process() -> None:
    """A generator that iterates over a set depends on the hash seed of its process."""
    code = (
        "import json; from eepo.rewards import gym_datasets\n"
        f"for name in {sorted(gym_datasets.ALLOWED - SLOW)!r}:\n"
        "    dataset = gym_datasets.open_dataset(name, size=500, seed=3)\n"
        "    entries = [gym_datasets.read_entry(dataset, index) for index in (5, 1, 77)]\n"
        "    print(name, json.dumps(entries, default=str))\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]
    first, second = (dict(line.split(" ", 1) for line in run.stdout.splitlines()) for run in runs)
    assert len(first) == len(gym_datasets.ALLOWED - SLOW)
    assert [name for name in first if first[name] != second[name]] == []
