"""Checks the code in README.md and docs/: Python runs, recipes are valid, commands exist.

Blocks are found automatically. All Python blocks of a page run in order in one process and one
folder, as a reader would type them. A comment before a block changes this:

    <!-- not run: REASON -->    needs a GPU or a cluster: only its syntax, its imports and the
                                names of its arguments are checked
    <!-- file: NAME -->         the block is saved as this file

A block whose first line is a comment with a file name, such as `# my_reward.py`, is saved as that
file, too.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from eepo import recipe
from eepo.cli import app
from eepo.config import RunConfig, WarmupConfig
from eepo.experiments.plan_file import parse_plan
from eepo.types import UserError

from .code_blocks import (
    ALL_BLOCKS,
    PAGES,
    ROOT,
    Block,
    commands,
    of_language,
    read_blocks,
)

PYTHON = of_language("python", "py")
RUNNABLE = [
    page
    for page in PAGES
    if any(block.language == "python" and not block.reason for block in read_blocks(page))
]
HUB_MODEL = re.compile(r'"Qwen/[\w.-]+"')  # a small local model takes its place
# TRL refuses its default bf16=True without a GPU, unless it is told to use the CPU.
TRL_IMPORT = re.compile(r"^from eepo\.adapters\.trl import EEPOConfig.*$", re.MULTILINE)
ON_A_CPU = r"\g<0>; from functools import partial; EEPOConfig = partial(EEPOConfig, use_cpu=True)"
DATA_LINE = re.compile(r"^# (\w+\.jsonl): (\{.+\})$", re.MULTILINE)  # a file, and a line of it
EEPO: Any = typer.main.get_command(app)
RECIPES = [  # that name a model and data of the reader
    block
    for block in of_language("toml")
    if {"name", "model", "task", "training"} <= set(tomllib.loads(block.text))
]
HOSTS = ("EEPOConfig", "EEPOTrainer")  # fragments use these without an import


def test_code_is_found() -> None:
    assert len(PYTHON) > 5
    assert len(of_language("toml")) > 5
    assert sum(1 for page in PAGES for _ in commands(page)) > 150
    assert RUNNABLE
    assert len(RECIPES) >= 2
    assert len(of_language("diff")) >= 2


@pytest.mark.parametrize("block", ALL_BLOCKS, ids=str)
def test_a_reason_not_to_run_is_given_only_for_python(block: Block) -> None:
    assert not block.reason or block.language == "python"


# --- Python


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_compiles_and_names_exist(block: Block) -> None:
    """Check syntax, imports from eepo and installed packages, and names of arguments."""
    tree = ast.parse(block.text)
    names: dict[str, Any] = {}
    own_files = {b.file.removesuffix(".py") for b in read_blocks(block.page)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module not in own_files:
            names |= imported(node)
        elif isinstance(node, ast.Import):
            names |= {each.name: importlib.import_module(each.name) for each in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            check_arguments(node, names)


def imported(node: ast.ImportFrom) -> dict[str, Any]:
    assert node.module is not None
    module = importlib.import_module(node.module)
    names = {}
    for each in node.names:
        if not hasattr(module, each.name):
            importlib.import_module(f"{node.module}.{each.name}")  # a module of a package
            continue
        names[each.asname or each.name] = getattr(module, each.name)
    return names


def check_arguments(call: ast.Call, names: dict[str, Any]) -> None:
    """Check the arguments of functions and classes that the block imports from eepo."""
    name = ast.unparse(call.func)
    if name in HOSTS and name not in names:
        names |= {name: getattr(importlib.import_module("eepo.adapters.trl"), name)}
    head, *attributes = name.split(".")
    called = names.get(head)
    for attribute in attributes:
        called = getattr(called, attribute, None)
    if called is None or not getattr(called, "__module__", "").startswith("eepo"):
        return
    is_partial = any(keyword.arg is None for keyword in call.keywords)  # **others
    is_partial |= any(isinstance(each, ast.Starred) for each in call.args)
    signature = inspect.signature(called)
    bind = signature.bind_partial if is_partial else signature.bind
    bind(*call.args, **{keyword.arg: None for keyword in call.keywords if keyword.arg})


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_runs(page: Path, tmp_path: Path, chat_model: Callable[[Path], None]) -> None:
    blocks = read_blocks(page)
    for block in blocks:
        if block.file:
            (tmp_path / block.file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        for name, line in DATA_LINE.findall(block.text):
            (tmp_path / name).write_text(f"{line}\n" * 8, encoding="utf-8")
    code = "\n".join(text for block in blocks if (text := code_of(block)))
    if HUB_MODEL.search(code):
        chat_model(tmp_path / "model")
        code = HUB_MODEL.sub('"model"', code)
    code = TRL_IMPORT.sub(ON_A_CPU, code)
    (tmp_path / "page.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-c", "exec(open('page.py').read())"]
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    result = subprocess.run(
        command, cwd=tmp_path, env=offline, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr[-4000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("block", RECIPES, ids=str)
def test_complete_recipes_train(
    block: Block, tmp_path: Path, chat_model: Callable[[Path], None]
) -> None:
    chat_model(tmp_path / "model")
    tables = tomllib.loads(HUB_MODEL.sub('"model"', block.text))
    rows = [{"problem": f"What is {n} + 1?", "answer": n + 1, "level": 1} for n in range(120)]
    data = tmp_path / tables["task"]["train"]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for section, knobs in TINY.items():
        tables[section] = tables.get(section, {}) | knobs
    code = f"import eepo\neepo.train({tables}, 'run')"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr[-4000:]


@pytest.mark.parametrize("block", of_language("diff"), ids=str)
def test_a_config_takes_the_options_of_a_diff(block: Block, tmp_path: Path) -> None:
    """Import what the diff imports, and build an `EEPOConfig` with its options."""
    new = [line[1:].strip() for line in block.lines if not line.startswith("-")]
    for line in new:
        if line.startswith("from "):
            imported(ast.parse(line).body[0])
    options = dict(pair for line in new for pair in re.findall(r"^(\w+)=([^=]+?),?$", line))
    assert options
    values = {name: ast.literal_eval(value) for name, value in options.items()}
    config = importlib.import_module("eepo.adapters.trl").EEPOConfig
    built = config(str(tmp_path), use_cpu=True, **values)
    assert {name: getattr(built, name) for name in values} == values


def code_of(block: Block) -> str:
    """Return the code that runs a block: of a file, its import; of a recipe, its user's code."""
    if block.reason:
        return ""
    if block.language == "python":
        return f"import {Path(block.file).stem}" if block.file else block.text
    tables = tomllib.loads(block.text) if block.language == "toml" else {}
    if ":" in tables.get("task", {}).get("name", ""):
        return TRAIN.format(tables | TINY)
    if ":" in tables.get("reward", {}).get("name", ""):
        return IMPORT_REWARD.format(tables["reward"])
    return ""


TINY = {
    "training": {"num_steps": 1, "prompts_per_step": 2, "prompts_per_mini_batch": 2},
    "algorithm": {"group_size": 2, "max_new_tokens": 4},
    "evaluation": {"num_samples": 1},
}
TRAIN = """
import eepo
eepo.train({}, "runs/custom_task")
"""
IMPORT_REWARD = """
from eepo.config import DatasetConfig, RewardConfig
from eepo.rewards import build_reward
reward = build_reward(RewardConfig(**{}), DatasetConfig())
reward.start()
reward.close()
"""


# --- recipes


@pytest.mark.parametrize("block", of_language("toml"), ids=str)
def test_toml_is_a_valid_recipe_plan_or_section(block: Block) -> None:
    tables = tomllib.loads(block.text)
    knobs = {*RunConfig.__dataclass_fields__, *WarmupConfig.__dataclass_fields__, "extends"}
    if set(tables) <= knobs:
        kind = WarmupConfig if {"supervised", "scratch"} & set(tables) else RunConfig
        tables.pop("extends", None)
        recipe.parse(kind, tables, str(block))
    elif "methods" in tables:
        parse_plan(tables, str(block), ROOT / "studies")
    else:
        check_fragment(tables, str(block))


def check_fragment(tables: dict[str, Any], where: str) -> None:
    """Check that the knobs belong to one section, which the text of the page names."""
    errors = []
    for section in RunConfig.__dataclass_fields__:
        tasks = ({"name": "dataset"}, {"name": "countdown"}) if section == "task" else ({},)
        for task in tasks:
            try:
                recipe.parse(RunConfig, {section: task | tables}, where)
                return
            except UserError as error:
                errors.append(str(error))
    pytest.fail("\n".join(errors))


@pytest.mark.parametrize("block", of_language("json"), ids=str)
def test_json_lines_are_valid(block: Block) -> None:
    assert all(isinstance(json.loads(line), dict) for line in block.lines)


# --- commands


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_options_knobs_and_recipes_exist(page: Path) -> None:
    for words in commands(page):
        if words[0] in ("--help", "--version", "COMMAND"):
            continue
        command, arguments = find_command(words)
        options = {name for option in command.params for name in option.opts} | {"--help"}
        used = {word.partition("=")[0] for word in arguments if word.startswith("--")}
        assert used <= options, words
        for flag, value in itertools.pairwise(arguments):
            if flag in ("--set", "--grid"):
                assert is_knob(value.partition("=")[0]), words
        positional = [each.name for each in command.params if each.param_type_name == "argument"]
        if positional in (["recipe"], ["recipes"]):
            for name in recipe_names(arguments):
                recipe._tables(name)  # raises an error if there is no such recipe


def find_command(words: list[str]) -> tuple[Any, list[str]]:
    """Return the command that the first words name, and the words after it."""
    command, arguments = EEPO, list(words)
    while arguments and hasattr(command, "commands"):
        assert arguments[0] in command.commands, words
        command = command.commands[arguments.pop(0)]
    return command, arguments


def is_knob(name: str) -> bool:
    """Names in capitals stand for a knob of the reader."""
    known = {*recipe._knobs(RunConfig), *recipe._knobs(WarmupConfig)}
    return name in known or name.startswith(recipe.OPTIONS) or name.isupper()


def recipe_names(arguments: list[str]) -> Iterator[str]:
    """Yield the arguments that are names of shipped recipes: `folder/name`, not files or runs."""
    for before, word in zip(["", *arguments], arguments, strict=False):
        is_value = before in ("--out", "--set", "--grid", "--line", "--on", "--measure")
        is_name = re.fullmatch(r"[a-z]\w*/[a-z][\w+.]*", word) and not word.endswith(".toml")
        if is_name and not is_value and not word.startswith("runs/"):
            yield word
