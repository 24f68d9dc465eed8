"""The reference pages name every command, option, knob and public function."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

import eepo.algorithm
from eepo import config
from eepo.cli import app

DOCS = Path(__file__).parents[2] / "docs"
# A file of a checkpoint, and settings of verl.
NOT_KNOBS = {"training.safetensors", "model.custom_chat_template", "rollout.n"}


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """Import the hook from its file, as MkDocs does: docs/ is not a package."""
    path = DOCS / "generate" / "reference.py"
    spec = importlib.util.spec_from_file_location("docs_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def all_commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", {})
    for child, each in children.items():
        yield from all_commands(f"{name} {child}", each)
    if not children:
        yield name, command


def test_every_command_and_option_is_in_the_reference(reference: ModuleType) -> None:
    sections = {part.split("`")[1]: part for part in reference.cli().split("## ")[1:]}
    commands = dict(all_commands("eepo", typer.main.get_command(app)))
    assert set(sections) == set(commands)
    assert len(commands) > 15
    for name, command in commands.items():
        options = [opt for p in command.params if p.param_type_name == "option" for opt in p.opts]
        assert [option for option in options if f"`{option}`" not in sections[name]] == []
        assert command.help in sections[name]


def test_every_knob_is_in_the_reference_with_its_help(reference: ModuleType) -> None:
    text = reference.knobs()
    kinds = [kind for kind in vars(config).values() if dataclasses.is_dataclass(kind)]
    helps = [field.metadata.get("help") for kind in kinds for field in dataclasses.fields(kind)]
    assert len(kinds) > 12
    assert [help for help in helps if help and " ".join(help.split()) not in text] == []


def test_a_knob_has_its_default_and_its_range(reference: ModuleType) -> None:
    rows = [line for line in reference.knobs().splitlines() if line.startswith("| `")]
    cells = {row.split("`")[1]: [cell.strip() for cell in row.split(" | ")] for row in rows}
    assert cells["algorithm.unlearn_lr"][1:3] == ["`0.003`", 'float, `"auto"` (≥ 0)']
    assert cells["reward.memory_mb"][1:3] == ["`1024`", "int (≥ 64)"]
    assert cells["algorithm.gate"][2] == '`"token"`, `"step"`, `"always"`, `"never"`'
    assert cells["task.levels"][1:3] == ["`[]`", "list of int"]


def test_every_public_function_of_the_algorithm_is_in_the_reference(reference: ModuleType) -> None:
    text = reference.python()
    names = eepo.algorithm.__all__
    assert [name for name in names if f"### `{name}`" not in text] == []
    assert "advantages: Tensor,  # [..., n]" in text, "signatures keep the comments on shapes"


def test_markers_of_the_reference_pages_are_replaced(reference: ModuleType) -> None:
    used = set()
    for path in [*(DOCS / "reference").glob("*.md"), DOCS / "metrics.md"]:
        text = path.read_text(encoding="utf-8")
        used |= {match[1] for match in reference.MARKER.finditer(text)}
        assert "<!-- generated" not in reference.on_page_markdown(text)
    assert used == set(reference.GENERATORS)


def test_knobs_in_the_text_of_all_pages_exist(reference: ModuleType) -> None:
    known = set(re.findall(r"^\| `([\w.]+)` \|", reference.knobs(), re.MULTILINE)) | NOT_KNOBS
    sections = "model|task|reward|algorithm|training|rollout|evaluation|alarm|logging"
    name = re.compile(rf"`(?:--set )?((?:{sections})\.[a-z_0-9]+)(?:`| ?=)")
    pages = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
    found = [(p.name, knob) for p in pages for knob in name.findall(p.read_text(encoding="utf-8"))]
    assert len(found) > 50
    assert [(page, knob) for page, knob in found if knob not in known] == []


def test_the_first_sentence_of_a_page_follows_its_title() -> None:
    """Each page starts with a title and a paragraph that says what the page is for."""
    pages = [path for path in sorted(DOCS.rglob("*.md")) if path.parent.name != "results"]
    assert len(pages) > 40
    for path in pages:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line]
        assert lines[0].startswith("# "), path
        assert re.match(r"[A-Z]|`\w", lines[1]), f"{path} starts with {lines[1]!r}"
