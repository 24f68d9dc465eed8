"""Writes the reference from the code: command line, knobs, metrics and Python interface.

A page has a line `<!-- generated: NAME -->`. This MkDocs hook replaces it by the text of the
function `NAME` below, so the reference cannot differ from the code.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
SECTION = re.compile("(Args|Attributes|Returns|Raises|Yields):")
ITEM = re.compile(r" {4}(\*{0,2}\w+): (.*)")
# The modules of the page on Python, with the names that it shows. Empty: `__all__` of the module.
PUBLIC_NAMES: dict[str, tuple[str, ...]] = {
    "eepo.api": ("train", "evaluate", "grade", "load_recipe", "TrainResult", "EvaluationResult"),
    "eepo.types": ("Prompt", "Completion", "Verdict", "Sampling", "Demonstration", "UserError"),
    "eepo.protocols": ("Reward", "Task", "RolloutEngine"),
    "eepo.algorithm": (),
    "eepo.adapters.trl": ("EEPOConfig", "EEPOTrainer"),
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the markers of a page by generated text."""
    return MARKER.sub(lambda match: GENERATORS[match[1]](), markdown)


# --- the command line


def cli() -> str:
    """Describe every command of `eepo`, from its Typer application."""
    import typer

    from eepo.cli import app

    group: Any = typer.main.get_command(app)
    return "\n".join(_commands("eepo", group))


def _commands(name: str, command: Any) -> Iterator[str]:
    if subcommands := getattr(command, "commands", None):
        for subname, subcommand in subcommands.items():
            yield from _commands(f"{name} {subname}", subcommand)
        return
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    usage = " ".join([name, *map(_argument_name, arguments), "[OPTIONS]" if options else ""])
    yield f"## `{name}`\n\n{_text(command.help)}\n\n```\n{usage.strip()}\n```\n"
    if arguments:
        yield "| argument | meaning |\n|---|---|"
        yield from (f"| `{_argument_name(each)}` | {_cell(each.help)} |" for each in arguments)
        yield ""
    if options:
        yield "| option | default | meaning |\n|---|---|---|"
        yield from (_option_row(each) for each in options)
        yield ""


def _argument_name(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return f"{name}..." if argument.nargs == -1 and not name.endswith("...") else name


def _option_row(option: Any) -> str:
    names = " ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    if option.metavar:
        names += f" `{option.metavar}`"
    default = "required" if option.required else _option_default(option)
    return f"| {names} | {default} | {_cell(option.help)} |"


def _option_default(option: Any) -> str:
    if option.default in (None, False, "", [], ()):
        return "–"
    return f"`{option.default}`"


# --- knobs


def knobs() -> str:
    """Describe every knob of a training recipe and of a warm start, from `eepo.config`."""
    from eepo.config import RunConfig, WarmupConfig

    run = dict(_sections(RunConfig))
    warm_start = {name: kinds for name, kinds in _sections(WarmupConfig) if name not in run}
    lines = ["## Top level\n", *_knob_table("", RunConfig)]
    for name, kinds in run.items():
        lines += _section(name, kinds)
    lines.append("## Warm starts\n\nThese knobs exist only in recipes of `eepo warmup`.\n")
    lines += _knob_table("", WarmupConfig)
    for name, kinds in warm_start.items():
        lines += _section(name, kinds)
    return "\n".join(lines)


def _sections(config: type) -> Iterator[tuple[str, list[type]]]:
    """Yield the sections of a recipe, each with its dataclasses: `[task]` has one per task."""
    for name, hint in typing.get_type_hints(config).items():
        kinds = [kind for kind in typing.get_args(hint) or (hint,) if is_dataclass(kind)]
        if kinds:
            yield name, typing.cast(list[type], kinds)


def _section(name: str, kinds: list[type]) -> Iterator[str]:
    yield f"## `[{name}]`\n"
    for kind in kinds:
        if len(kinds) > 1:
            # A task of your own has no fixed name.
            yield f'### `name = "{getattr(kind, "name", "") or "module:Class"}"`\n'
        yield f"{_text(kind.__doc__)}\n"
        yield from _knob_table(name, kind)


def _knob_table(section: str, kind: type) -> Iterator[str]:
    hints = typing.get_type_hints(kind)
    yield "| knob | default | values | meaning |\n|---|---|---|---|"
    for each in fields(kind):
        if not is_dataclass(each.default):
            yield _knob_row(section, each, hints[each.name])
    yield ""


def _knob_row(section: str, each: Field[Any], hint: Any) -> str:
    name = f"{section}.{each.name}" if section else each.name
    help = each.metadata.get("help", "") or "Selects this task."
    default = each.default if each.default_factory is MISSING else each.default_factory()
    return f"| `{name}` | `{_toml(default)}` | {_allowed(each, hint)} | {_cell(help)} |"


def _toml(value: Any) -> str:
    """Write a default as TOML does."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _allowed(each: Field[Any], hint: Any) -> str:
    words, names = [], []
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    for kind in typing.get_args(hint) if is_union else (hint,):
        if typing.get_origin(kind) is typing.Literal:
            words += [f'`"{choice}"`' for choice in typing.get_args(kind)]
        elif typing.get_origin(kind) is dict:
            names.append("table")
        elif typing.get_origin(kind) is tuple:
            names.append(f"list of {typing.get_args(kind)[0].__name__}")
        else:
            names.append(kind.__name__)
    values = ", ".join([*names, *words])
    return f"{values}{_range(each)}"


def _range(each: Field[Any]) -> str:
    symbols = {"above": "> ", "least": "≥ ", "most": "≤ "}
    bounds = {name: each.metadata.get(name) for name in symbols}
    texts = [f"{symbols[name]}{value:g}" for name, value in bounds.items() if value is not None]
    return f" ({', '.join(texts)})" if texts else ""


# --- metrics


def metrics() -> str:
    """Describe every metric of a step, from `eepo.runs.metric_meanings`."""
    from eepo.runs.metric_meanings import STEP_METRICS

    return "\n".join(line for section in STEP_METRICS for line in _metric_section(section))


def evaluation_metrics() -> str:
    """Describe the lines of an evaluation, from `eepo.runs.metric_meanings`."""
    from eepo.runs.metric_meanings import EVALUATION_METRICS

    return "\n".join(_metric_section(EVALUATION_METRICS, level=2))


def _metric_section(section: Any, level: int = 3) -> Iterator[str]:
    """Write a section. Names in braces in its texts become the defaults of alarms."""
    from eepo.config import AlarmConfig

    yield f"{'#' * level} {section.title}\n\n{section.before}\n"
    yield "| name | meaning |\n|---|---|"
    bounds = vars(AlarmConfig())
    for names, meaning in section.metrics.items():
        cell = ", ".join(f"`{name}`" for name in names)
        yield f"| {cell} | {_cell(meaning.format_map(bounds))} |"
    yield f"\n{section.after}\n"


# --- Python


def python() -> str:
    """Describe the public names of the package: signatures and docstrings."""
    found = [name for name in PUBLIC_NAMES if importlib.util.find_spec(name)]
    return "\n".join(line for name in found for line in _module(name))


def _module(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    yield f"## `{name}`\n\n{_text(module.__doc__)}\n"
    for public in PUBLIC_NAMES[name] or module.__all__:
        yield from _object(name, public, getattr(module, public))


def _object(module: str, name: str, value: Any) -> Iterator[str]:
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        return
    yield f"### `{name}` {{ #{module}.{name} }}\n"
    doc = _text(value.__doc__)
    generated_doc = doc.startswith(f"{name}(")  # of a dataclass without a docstring
    yield f"```python\n{signature(value)}\n```\n\n{'' if generated_doc else doc}\n"
    for method_name, method in vars(value).items() if inspect.isclass(value) else ():
        if method_name[0] != "_" and inspect.isfunction(method):
            yield f"```python\n{signature(method)}\n```\n\n{_text(inspect.getdoc(method))}\n"


def signature(value: Any) -> str:
    """Return the source of a signature, or of a class and its fields, with their comments."""
    source = textwrap.dedent(inspect.getsource(value)).splitlines()
    node = ast.parse("\n".join(source)).body[0]
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    first, body = node.lineno - 1, node.body
    if ast.get_docstring(node) is not None:
        head, body = source[first : body[0].lineno - 1], body[1:]
    else:
        head = source[first : body[0].lineno - 1] or source[first : first + 1]
    has_fields = isinstance(node, ast.ClassDef) and body and isinstance(body[0], ast.AnnAssign)
    if has_fields:
        start = body[0].lineno - 1
        ends = [each.lineno - 1 for each in body if isinstance(each, ast.FunctionDef)]
        head += source[start : min(ends, default=len(source))]
    lines = [line for line in head if not line.lstrip().startswith("@")]
    return "\n".join(lines).rstrip()


# --- text


def _text(text: str | None) -> str:
    """Return a docstring as Markdown: sections such as `Args:` become lists."""
    lines, in_section = [], False
    for line in inspect.cleandoc(text or "").splitlines():
        if SECTION.fullmatch(line):
            in_section = True
            lines += [f"**{line}**", ""]
        elif in_section and (item := ITEM.fullmatch(line)):
            lines.append(f"- `{item[1]}`: {item[2]}")
        else:
            in_section = in_section and (not line or line[0] == " ")
            lines.append(line.removeprefix("    ") if in_section else line)
    return "\n".join(lines)


def _cell(text: str | None) -> str:
    """Return a text that fits into a cell of a table."""
    return " ".join((text or "").split()).replace("|", "\\|")


GENERATORS: dict[str, Callable[[], str]] = {
    each.__name__: each for each in (cli, knobs, metrics, evaluation_metrics, python)
}
