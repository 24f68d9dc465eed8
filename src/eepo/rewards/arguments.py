"""Decides which arguments a user's reward function receives, from the names of its parameters.

A function receives `completion`, `gold` (or `answer`), `prompt` and the columns of the row by name,
and only those that it names. A function of two parameters with other names is called with
(gold answer, completion).
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eepo.types import RowColumns, UserError

# `answer` is another name of the gold answer. A column of such a name is not passed.
RESERVED = ("completion", "gold", "answer", "prompt")


@dataclass(frozen=True)
class Parameters:
    """The parameters of a reward function."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()  # those with a default
    takes_all: bool = False  # **columns
    by_position: bool = False  # the names cannot be used or are unknown

    @property
    def is_pair(self) -> bool:
        """True if the function is called with (gold answer, completion), whatever their names."""
        if self.by_position:
            return True
        if len(self.required) != 2 or set(self.required) <= set(RESERVED):
            return False
        first, second = self.required
        return first not in ("completion", "prompt") and (
            second == "completion" or second not in RESERVED
        )

    def columns(self) -> RowColumns:
        """Return the columns of a row that the function receives."""
        if self.is_pair:
            names = [name for name in self.required if name not in RESERVED]
            return RowColumns(ambiguous=tuple(names))
        return RowColumns(
            required=tuple(name for name in self.required if name not in RESERVED),
            optional=tuple(name for name in self.optional if name not in RESERVED),
            all=self.takes_all,
            gold=bool({"gold", "answer"} & {*self.required, *self.optional}),
        )

    def check(self) -> None:
        """Raise an error if the completion cannot be passed."""
        if not self.is_pair and "completion" not in (*self.required, *self.optional):
            names = ", ".join((*self.required, *self.optional)) or "none"
            raise UserError(
                "a reward function needs a parameter named completion, such as "
                f"(completion, gold); its parameters are: {names}"
            )


def parameters_of(function: Callable[..., Any]) -> Parameters:
    """Read the parameters of a function."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions that are not written in Python
        return Parameters((), by_position=True)
    kinds = {parameter.kind for parameter in parameters}
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return Parameters(
        required=tuple(p.name for p in named if p.default is p.empty),
        optional=tuple(p.name for p in named if p.default is not p.empty),
        takes_all=inspect.Parameter.VAR_KEYWORD in kinds,
        by_position=inspect.Parameter.POSITIONAL_ONLY in kinds
        or (inspect.Parameter.VAR_POSITIONAL in kinds and not named),
    )


def parameters_in(source: str, function: str) -> Parameters | None:
    """Read the parameters of a top-level function from a module's text, without running it.

    Return None if the text does not tell, such as for a decorated or imported function.
    """
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError):  # the import reports it
        return None
    found = [node for node in body if getattr(node, "name", None) == function]
    if len(found) != 1 or not isinstance(found[0], ast.FunctionDef) or found[0].decorator_list:
        return None
    arguments = found[0].args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    num_required = len(names) - len(arguments.defaults)
    required, optional = names[:num_required], names[num_required:]
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        (required if default is None else optional).append(argument.arg)
    return Parameters(
        tuple(required),
        tuple(optional),
        takes_all=arguments.kwarg is not None,
        by_position=bool(arguments.posonlyargs) or (arguments.vararg is not None and not names),
    )


def call(
    function: Callable[..., Any],
    parameters: Parameters,
    completion: str,
    gold: Any,
    prompt: str,
    columns: Mapping[str, Any],
) -> Any:
    """Call the function with the arguments that it names."""
    if parameters.is_pair:
        return function(gold, completion)
    given = {**columns, "completion": completion, "gold": gold, "answer": gold, "prompt": prompt}
    if missing := [name for name in parameters.required if name not in given]:
        raise UserError(
            f"its parameter {missing[0]} is no column of the row; allowed: completion, gold, "
            f"prompt{''.join(f', {name}' for name in columns if name not in RESERVED)}"
        )
    arguments = {
        name: given[name] for name in (*parameters.required, *parameters.optional) if name in given
    }
    if parameters.takes_all:
        others = (name for name in columns if name not in RESERVED)
        arguments |= {name: columns[name] for name in others if name not in arguments}
    return function(**arguments)
