"""Rules of the code base that no linter checks."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "eepo"
MODULES = sorted(SOURCE.rglob("*.py"))
TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".cfg", ".html", ".jinja"}

MAX_PARAMETERS = 7
MAX_TOP_LEVEL_MODULES = 11
MAX_LINES_OF_ALGORITHM = 150

# The process of a grader sends every error of a user's reward function to its parent, which raises
# it. The thread of the background grader puts every error into a future, which raises it. A logger
# that fails is reported and disabled: it must not end a run. Rust libraries have no type for a full
# disk: `writing` looks at the text of an error, and raises every error again.
MAY_CATCH_EVERYTHING = {
    "algorithm/background_grader.py",
    "rewards/worker.py",
    "runs/loggers.py",
    "runs/writing.py",
}
# `eepo watch` serves a page on the loopback address only.
MAY_SERVE = {"reports/watch.py"}

# File names that two packages may share, because the modules belong together.
SHARED_NAMES = {
    "countdown.py": {"rewards", "tasks"},  # a task and its grader
    "reasoning_gym.py": {"rewards", "tasks"},
    "shortcut.py": {"rewards", "tasks"},
    "lm_head.py": {"kernels", "model"},  # a kernel and its caller
}

every_module = pytest.mark.parametrize(
    "path", MODULES, ids=lambda path: str(path.relative_to(SOURCE))
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_names(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def imported_packages(tree: ast.AST) -> set[str]:
    return {name.partition(".")[0] for name in imported_names(tree)}


def called_names(tree: ast.AST) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


# --- architecture


def test_there_are_modules_to_check() -> None:
    assert len(MODULES) > 20


def test_there_are_few_top_level_modules() -> None:
    modules = [path.name for path in SOURCE.glob("*.py")]
    assert len(modules) <= MAX_TOP_LEVEL_MODULES, modules


def test_the_algorithm_fits_on_one_page() -> None:
    lines = (SOURCE / "algorithm" / "eepo.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_LINES_OF_ALGORITHM


def test_the_algorithm_imports_no_trainer_engine_task_or_grader() -> None:
    packages = ("trainer", "warmup", "assemble", "experiments", "cli", "rollout", "tasks")
    packages += ("rewards", "evaluation", "reports", "runs")
    names = set()
    for path in (SOURCE / "algorithm").glob("*.py"):
        names |= imported_names(parse(path))
    assert "eepo.model.policy.Policy" in names, "the check itself must see imports"
    forbidden = tuple(f"eepo.{package}" for package in packages)
    assert [name for name in names if name.startswith(forbidden)] == []


def test_the_trainer_imports_of_the_algorithm_only_its_metrics() -> None:
    names = imported_names(parse(SOURCE / "trainer.py"))
    used = {name for name in names if name.startswith("eepo.algorithm.")}
    assert used == {"eepo.algorithm.StepMetrics"}


def test_file_names_are_unique() -> None:
    """Adapters are left out: their modules are named like those of the host framework."""
    packages = defaultdict(set)
    for path in MODULES:
        package = path.relative_to(SOURCE).parts[0]
        if package != "adapters" and path.name != "__init__.py":
            packages[path.name].add(package)
    shared = {name: where for name, where in packages.items() if len(where) > 1}
    assert {name: where for name, where in shared.items() if where != SHARED_NAMES.get(name)} == {}


@every_module
def test_functions_have_few_parameters(path: Path) -> None:
    """Group related parameters in a dataclass. Kernels are left out: they take no objects."""
    if path.relative_to(SOURCE).parts[0] == "kernels":
        return
    too_many = []
    for node in ast.walk(parse(path)):
        if isinstance(node, Function):
            arguments = node.args
            parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            parameters += [extra for extra in (arguments.vararg, arguments.kwarg) if extra]
            if len(parameters) > MAX_PARAMETERS:
                too_many.append(f"{node.name}: {len(parameters)} parameters")
    assert too_many == []


# --- language


@every_module
def test_every_module_has_a_docstring(path: Path) -> None:
    docstring = ast.get_docstring(parse(path))
    assert docstring
    assert len(docstring) > 20


@every_module
def test_public_docstrings_are_sentences(path: Path) -> None:
    """They start with a capital letter or `code`, and have a sentence that ends with a period."""
    tree = parse(path)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef | Function)]
    docstrings = [(node.name, ast.get_docstring(node)) for node in nodes if node.name[0] != "_"]
    docstrings.append(("module", ast.get_docstring(tree)))
    wrong = [
        f"{name}: {text}"
        for name, text in docstrings
        if text and not (re.match(r"[A-Z`]", text) and re.search(r"\.(\s|$)", text))
    ]
    assert wrong == []


@every_module
def test_names_are_specific(path: Path) -> None:
    """No `utils`, `manager`, `helper` or `cfg`."""
    nodes = [node for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef | Function)]
    names = {node.name for node in nodes} | {path.stem}
    vague = re.compile(r"utils?$|manager|helper|\bcfg\b", re.IGNORECASE)
    assert [name for name in names if vague.search(name)] == []


# --- safety


@every_module
def test_nothing_evaluates_code_or_unpickles(path: Path) -> None:
    tree = parse(path)
    calls = {"eval", "exec", "compile", "__import__", "builtins.eval", "torch.load", "os.system"}
    assert called_names(tree) & calls == set()
    packages = {"pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
    assert imported_packages(tree) & packages == set()
    assert not any(name.startswith("torch.load") for name in imported_names(tree))
    keywords = [node for node in ast.walk(tree) if isinstance(node, ast.keyword)]
    shells = [node.value for node in keywords if node.arg == "shell"]
    assert all(isinstance(value, ast.Constant) and value.value is False for value in shells)


@every_module
def test_nothing_opens_a_server(path: Path) -> None:
    packages = {"socket", "http", "socketserver", "flask", "fastapi", "requests", "urllib"}
    allowed = {"http"} if name_of(path) in MAY_SERVE else set()
    assert imported_packages(parse(path)) & packages == allowed


@every_module
def test_nothing_swallows_every_error(path: Path) -> None:
    for node in ast.walk(parse(path)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        assert node.type is not None, f"line {node.lineno}: bare except"
        if ast.unparse(node.type) in ("Exception", "BaseException"):
            raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            assert raises or name_of(path) in MAY_CATCH_EVERYTHING, f"line {node.lineno}"


def project_files() -> list[Path]:
    """Return the text files that git tracks; without git, those in the folders of the project."""
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
    this_file = Path(__file__)
    texts = [path for path in paths if path.is_file() and path.suffix in TEXT]
    return [path for path in texts if path.resolve() != this_file]


def test_project_files_mention_no_path_outside_the_project() -> None:
    outside = re.compile(r"(?<![\w.])/work\b|shared/DESIGN|/root/|/home/\w+/|/tmp/pytest")
    files = project_files()
    assert SOURCE / "algorithm" / "eepo.py" in files
    matches = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in files
        for match in outside.finditer(path.read_text(encoding="utf-8"))
    ]
    assert matches == []
