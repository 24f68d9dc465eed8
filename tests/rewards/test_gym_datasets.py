"""Which of reasoning-gym's data sets are let in: the installed package's own scorers are read here, call by call."""

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

from eepo import gym  # noqa: E402
from eepo.rewards.extraction import MAX_ANSWER  # noqa: E402
from eepo.types import UserError  # noqa: E402

DATASETS: dict[str, Any] = reasoning_gym.factory.DATASETS
DANGEROUS = {
    eval,
    exec,
    compile,
    __import__,
    open,
    getattr,
    setattr,
}  # on the way of a model's text
FOREIGN = {"sympy", "pickle", "subprocess", "os", "importlib", "ast"}
SLOW = {
    "futoshiki",
    "zebra_puzzles",
    "sokoban",
}  # to make; their scorers are as quick as the others


def functions_of(found: Any) -> list[FunctionType]:
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    if isinstance(found, FunctionType):
        return (
            [] if found.__code__.co_filename.startswith("<") else [found]
        )  # a dataclass's own have no source
    if inspect.isclass(found) and found.__module__.startswith("reasoning_gym"):
        return [f for value in vars(found).values() for f in functions_of(value)]
    return []


def resolve(node: ast.AST, names: dict[str, Any]) -> Any:
    """What a name, or a chain of attributes, means in a module; None for what only exists when the code runs."""
    if isinstance(node, ast.Name):
        return names.get(node.id, getattr(builtins, node.id, None))
    if isinstance(node, ast.Attribute):
        base = resolve(node.value, names)
        known = isinstance(base, ModuleType) or inspect.isclass(base)
        return inspect.getattr_static(base, node.attr, None) if known else None
    return None


def dangers(owner: Any, start: FunctionType) -> set[str]:
    """Everything dangerous that can be reached from `start`, a method of `owner`, inside the package."""
    found: set[str] = set()
    waiting, seen = [start], set()
    while waiting:
        function = waiting.pop()
        if function in seen or not function.__module__.startswith("reasoning_gym"):
            continue
        seen.add(function)
        names = dict(function.__globals__) | {"self": owner, "cls": owner}
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
            thing = resolve(node, names)
            root = (
                thing.__name__
                if isinstance(thing, ModuleType)
                else getattr(thing, "__module__", None)
            ) or ""
            if (callable(thing) and thing in DANGEROUS) or root.partition(".")[0] in FOREIGN:
                found.add(f"{function.__qualname__}: {ast.unparse(node)}")
            waiting += (
                functions_of(thing) if thing is not owner else []
            )  # `self` alone calls nothing
    return found


def dangers_of(name: str) -> set[str]:
    owner = DATASETS[name][0]
    return dangers(owner, owner.score_answer)


def test_every_dataset_of_the_package_was_judged() -> None:
    assert set(DATASETS) == gym.ALLOWED | set(gym.REFUSED)
    assert not gym.ALLOWED & set(gym.REFUSED)


@pytest.mark.parametrize("name", sorted(gym.ALLOWED))
def test_no_allowed_scorer_can_run_what_a_model_wrote(name: str) -> None:
    assert dangers_of(name) == set()


def test_the_reader_of_scorers_sees_every_one_that_evaluates() -> None:
    evaluating = {name for name, reason in gym.REFUSED.items() if "evaluate" in reason}
    assert len(evaluating) == 11
    assert {name for name in evaluating if dangers_of(name)} == evaluating
    assert any("verify_solution: eval" in danger for danger in dangers_of("bitwise_arithmetic")), (
        "one call down"
    )


@pytest.mark.parametrize("name", sorted(gym.ALLOWED - SLOW))
def test_entries_are_text_that_can_be_answered(name: str) -> None:
    dataset = gym.open_dataset(name, size=500, seed=11)
    for entry in (gym.entry_at(dataset, index) for index in (0, 1, 499)):
        assert isinstance(entry["question"], str)
        assert len(entry["answer"]) <= MAX_ANSWER


@pytest.mark.parametrize(
    "name", ["binary_matrix", "codeio", "coin_flip", "rubiks_cube", "composite"]
)
def test_refusals_say_why(name: str) -> None:
    with pytest.raises(UserError, match=f'"{name}" of reasoning-gym is refused: i'):
        gym.open_dataset(name, size=1, seed=0)


def test_a_name_that_nobody_read_is_refused() -> None:
    with pytest.raises(UserError, match=r'task\.dataset = "fresh" must be one of ab, acre, '):
        gym.check("fresh")


def test_without_the_package_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r'pip install "eepo\[reasoning_gym\]"'):
        gym.package()


def test_problems_are_the_same_in_every_process() -> None:
    """Sets are ordered by hash seeds: a generator that walks one gives other problems after a restart."""
    code = (
        "import json; from eepo import gym\n"
        f"for name in {sorted(gym.ALLOWED - SLOW)!r}:\n"
        "    dataset = gym.open_dataset(name, size=500, seed=3)\n"
        "    print(name, json.dumps([gym.entry_at(dataset, index) for index in (5, 1, 77)], default=str))\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": s},
        )
        for s in ("1", "2")
    ]
    first, second = (dict(line.split(" ", 1) for line in run.stdout.splitlines()) for run in runs)
    assert len(first) == len(gym.ALLOWED - SLOW)
    assert [name for name in first if first[name] != second[name]] == []
