"""The house rules that a linter does not hold."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "eepo"
MODULES = sorted(SOURCE.rglob("*.py"))
TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".cfg", ".html", ".jinja"}


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def imported(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def called(tree: ast.AST) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def test_there_is_source_to_check() -> None:
    assert len(MODULES) > 20


def test_the_algorithm_stays_on_one_page() -> None:
    assert len((SOURCE / "algorithm.py").read_text(encoding="utf-8").splitlines()) < 250


def test_the_algorithm_knows_no_trainer_engine_task_or_grader() -> None:
    above = (
        "trainer",
        "warmup",
        "assemble",
        "comparison",
        "cli",
        "rollout",
        "tasks",
        "rewards",
        "evaluation",
        "reports",
    )
    names = imported(ast.parse((SOURCE / "algorithm.py").read_text(encoding="utf-8")))
    assert "eepo.model.policy.Policy" in names, "the check itself must see imports"
    assert [
        name for name in names if name.startswith(tuple(f"eepo.{room}" for room in above))
    ] == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_evaluates_code_or_unpickles(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    forbidden_calls = {
        "eval",
        "exec",
        "compile",
        "__import__",
        "torch.load",
        "os.system",
        "builtins.eval",
    }
    assert called(tree) & forbidden_calls == set()
    roots = {name.partition(".")[0] for name in imported(tree)}
    assert roots & {"pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"} == set()
    assert not any(name.startswith("torch.load") for name in imported(tree))
    shells = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword)
        and node.arg == "shell"
        and getattr(node.value, "value", None) is not False
    ]
    assert shells == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_says_what_it_is(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring
    assert len(docstring) > 20


# Whatever a user's grading function raises there travels to the process that asked, and is raised again.
# What a logger of someone else's raises in the middle of a run is said on the screen: it must not end the run.
PASSES_ON = {"rewards/worker.py", "loggers.py"}
# `eepo watch` is a page on the loopback address, for whoever sits at this machine.
SERVES = {"watch.py"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_opens_a_server_or_swallows_every_error(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    roots = {name.partition(".")[0] for name in imported(tree)}
    servers = roots & {"socket", "http", "socketserver", "flask", "fastapi", "requests", "urllib"}
    assert servers == ({"http"} if name_of(path) in SERVES else set())
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: bare except"
            raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            broad = ast.unparse(node.type) in ("Exception", "BaseException")
            passed_on = name_of(path) in PASSES_ON
            assert raises or passed_on or not broad, (
                f"line {node.lineno}: swallows {ast.unparse(node.type)}"
            )


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_names_are_nouns_of_the_house(path: Path) -> None:
    """No `utils`, `manager`, `helper`, `cfg`."""
    names = {
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    } | {path.stem}
    assert [
        name for name in names if re.search(r"utils?$|manager|helper|\bcfg\b", name, re.IGNORECASE)
    ] == []


def project_files() -> list[Path]:
    """What git would ship; without git, what lies in the folders that do."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0 and listed.stdout:
        paths = [ROOT / line for line in listed.stdout.splitlines()]
    else:
        folders = [ROOT / name for name in ("src", "recipes", "tests", "docs", "benchmarks")]
        paths = [path for folder in folders for path in folder.rglob("*")]
    return [
        path
        for path in paths
        if path.is_file() and path.suffix in TEXT and path.resolve() != Path(__file__)
    ]


def test_project_text_points_at_nothing_outside_the_project() -> None:
    outside = re.compile(r"(?<![\w.])/work\b|shared/DESIGN|/root/|/home/\w+/|/tmp/pytest")
    files = project_files()
    assert SOURCE / "algorithm.py" in files
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in files
        for match in outside.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []
