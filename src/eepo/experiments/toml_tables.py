"""Reads and writes TOML tables strictly: every wrong or unknown key is a one-line error."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from eepo.types import UserError

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class Table:
    """Reads the keys of one table. Errors name the file, the key, its value and what is allowed."""

    def __init__(self, source: str, name: str, values: Any) -> None:
        self.source, self.name = source, name
        if not isinstance(values, Mapping):
            raise UserError(f"{source}: {name} = {shown(values)} must be a table: [{name}]")
        self.values: Mapping[str, Any] = values

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def allow(self, *keys: str) -> None:
        for key in self.values:
            if key not in keys:
                raise UserError(
                    f"{self.source}: unknown key {self.path(key)} = {shown(self.values[key])}; "
                    f"allowed: {', '.join(keys)}"
                )

    def path(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key

    def error(self, key: str, allowed: str) -> UserError:
        return UserError(
            f"{self.source}: {self.path(key)} = {shown(self.values.get(key))} must be {allowed}"
        )

    def text(self, key: str, default: str = "") -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def choice(self, key: str, allowed: Sequence[str], default: str) -> str:
        value = self.values.get(key, default)
        if value not in allowed:
            raise self.error(key, f"one of {', '.join(map(shown, allowed))}")
        return str(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def number(self, key: str, default: float, least: float = 0) -> float:
        value = self.values.get(key, default)
        if type(value) not in (int, float) or not least <= value < 2**63:
            raise self.error(key, f"a number >= {least}")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of positive numbers."""
        values = self.values.get(key, [])
        valid = isinstance(values, list) and all(
            type(value) in (int, float) and 0 < value < 2**63 for value in values
        )
        if not valid:
            raise self.error(key, "a list of numbers > 0")
        return tuple(map(float, values))

    def whole(self, key: str, default: int, least: int = 0) -> int:
        value = self.values.get(key, default)
        if type(value) is not int or not least <= value < 2**63:
            raise self.error(key, f"a whole number >= {least}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key, [])
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
            raise self.error(key, "a list of strings")
        return tuple(value)

    def names(self, key: str, known: Mapping[str, Any], kind: str) -> tuple[str, ...]:
        """Return a list of names that must be in `known`."""
        for name in self.texts(key):
            self._check_name(key, name, known, kind)
        return self.texts(key)

    def optional_name(self, key: str, known: Mapping[str, Any], kind: str) -> str:
        name = self.text(key)
        if name:
            self._check_name(key, name, known, kind)
        return name

    def _check_name(self, key: str, name: str, known: Mapping[str, Any], kind: str) -> None:
        if name not in known:
            raise UserError(
                f"{self.source}: {self.path(key)} = {shown(name)} is no {kind} of this plan; "
                f"allowed: {', '.join(known)}"
            )

    def wholes(self, key: str) -> tuple[int, ...]:
        value = self.values.get(key, [])
        if not isinstance(value, list | tuple) or not all(
            type(one) is int and 0 <= one < 2**63 for one in value
        ):
            raise self.error(key, "a list of whole numbers >= 0")
        return tuple(value)

    def scalars(self, key: str) -> list[Any]:
        """Return a list of values for a knob: numbers, words, true or false."""
        value = self.values.get(key, [])
        if not isinstance(value, list | tuple) or not value or not all(map(_is_scalar, value)):
            raise self.error(key, "a list of one or more numbers or strings")
        return list(value)

    def table(self, key: str) -> Table:
        return Table(self.source, self.path(key), self.values.get(key, {}))

    def tables(self, key: str) -> dict[str, Table]:
        """Return the tables inside a table, by name."""
        inner = self.table(key)
        return {name: inner.table(name) for name in inner.values}

    def table_list(self, key: str) -> list[Table]:
        """Return a list of tables: [[key]]."""
        value = self.values.get(key, [])
        if not isinstance(value, list):
            raise self.error(key, f"a list of tables: [[{self.path(key)}]]")
        return [Table(self.source, f"{self.path(key)}[{i}]", one) for i, one in enumerate(value)]


def shown(value: Any) -> str:
    """Return a value as TOML, shortened to fit a line."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def dump_tables(tables: Mapping[str, Any]) -> str:
    """Return nested tables as TOML. JSON and TOML write strings, numbers and lists alike."""
    return "\n".join(_lines(tables, ())).lstrip("\n") + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    lines = [
        f"{_key(key)} = {toml_value(value)}"
        for key, value in table.items()
        if not isinstance(value, Mapping) and not _is_table_list(value)
    ]
    if path and (lines or not table):
        lines = ["", f"[{_dotted(path)}]", *lines]
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += _lines(value, (*path, key))
        elif _is_table_list(value):
            for inner in value:
                lines += ["", f"[[{_dotted((*path, key))}]]"]
                lines += [f"{_key(name)} = {toml_value(one)}" for name, one in inner.items()]
    return lines


def toml_value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _is_table_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def _dotted(path: Sequence[str]) -> str:
    return ".".join(map(_key, path))


def _key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else toml_value(key)
