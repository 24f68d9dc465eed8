"""Finds a user's reward function or task class: `module:name` or `file.py:name`.

Only the grading processes import the module of a reward. The trainer's process reads its text.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from eepo.rewards.arguments import Parameters, parameters_in
from eepo.types import RowColumns, UserError

FORMS = "module:function or file.py:function"


def split_name(name: str) -> tuple[str, str]:
    """Split at the last colon, into the module or file, and the function."""
    module, _, function = name.rpartition(":")
    return module, function


def is_user_function(name: str) -> bool:
    return all(split_name(name)) and split_name(name)[1].isidentifier()


def check_user_function(name: str) -> Parameters | None:
    """Check that the function exists, and return its parameters if the module's text shows them."""
    _, function = split_name(name)
    source = find_source(name, "reward.name")
    text = source.read_text("utf-8", "replace") if source.suffix == ".py" else ""
    # A star import or __getattr__ may provide any name.
    if text and not re.search(rf"\b{function}\b|import \*|__getattr__", text):
        raise UserError(f'reward.name = "{name}": {source} has no function {function}')
    parameters = parameters_in(text, function)
    if parameters is not None:
        try:
            parameters.check()
        except UserError as error:
            raise UserError(f'reward.name = "{name}": {error}') from None
    return parameters


def columns_for(name: str) -> RowColumns:
    """Return the columns of a row that the function receives; all if its text does not tell."""
    parameters = check_user_function(name)
    return RowColumns(all=True) if parameters is None else parameters.columns()


def name_of(function: Callable[..., Any]) -> str:
    """Return the name by which grading processes can import a function.

    A function of a script or a single module is named by its file: the folder of the script may not
    be on the path of the grading processes.
    """
    name = getattr(function, "__qualname__", type(function).__qualname__)
    module = sys.modules.get(getattr(function, "__module__", ""))
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None) or ""
    found = name.isidentifier() and getattr(module, name, None) is function
    module_name = spec.name if spec else getattr(module, "__name__", "")  # of `python -m`, too
    if found and "." in module_name:
        return f"{module_name}:{name}"
    if found and file.endswith(".py"):
        inside = Path(file).resolve().is_relative_to(Path.cwd())
        return f"{os.path.relpath(file) if inside else os.path.abspath(file)}:{name}"
    raise UserError(
        f"the reward function {name} cannot be imported by the grading processes; define it with "
        "def at the top level of a .py file"
    )


def load_module(name: str) -> ModuleType:
    """Import the module of `name`, from the working directory, the environment or a file."""
    module, _ = split_name(name)
    if module.endswith(".py"):
        return _import_file(Path(module))
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(module)


def _import_file(file: Path) -> ModuleType:
    """Import a file as a module of its name. The modules next to it can be imported, too."""
    folders = [str(file.resolve().parent), os.getcwd()]
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses and pickle look it up
    spec.loader.exec_module(module)
    return module


def find_source(name: str, knob: str) -> Path:
    """Return the file of the module of `name`; for built-in modules, a path without .py.

    `knob` is the knob that has the name, for error messages.
    """
    module, _ = split_name(name)
    if module.endswith(".py"):
        if not os.path.isfile(module):
            raise UserError(f'{knob} = "{name}": no file {module}')
        return Path(module)
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path.pop(0)
    if spec is None:
        raise UserError(
            f'{knob} = "{name}": no module {module} in the working directory or environment'
        )
    return Path(spec.origin or "")
