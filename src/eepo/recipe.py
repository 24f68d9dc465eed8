"""Reads recipes: TOML files that are parsed strictly into a config.

Every mistake is a one-line error with the key, its value and what is allowed.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import itertools
import json
import math
import os
import re
import shlex
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from eepo.config import RunConfig, WarmupConfig, check_run, check_warmup
from eepo.types import UserError

HUGE = 2**63
METHODS = "methods"  # the folder of recipes that combine with any other
OPTIONS = "task.options."  # of a custom task; every name is allowed
MAX_EXTENDS = 100  # files in a chain of `extends`
MAX_DEPTH = 20  # levels of lists and tables; a recipe needs three
MAX_BITS = 13_300  # 4,000 digits; Python refuses to print integers of more than 4,300 digits
USER_NAME = re.compile(r"[^:]+:[^\W\d]\w*")  # module:Class
UNUSABLE = re.compile("[\0\ud800-\udfff]")  # in file names and prompts
# Old names of knobs, for the "did you mean" hint where the new name looks different.
RENAMED = {
    "algorithm.later_advantages": "algorithm.stage2_negative_advantages",
    "alarm.rewarded_ratio_below": "alarm.lost_share_above",
}
Config = TypeVar("Config", bound=RunConfig | WarmupConfig)


def load_run(
    recipe: str | Path | typing.Mapping[str, Any] | RunConfig, overrides: typing.Sequence[str] = ()
) -> RunConfig:
    """Load a training recipe: a file, a shipped recipe by name such as `countdown/eepo`, or tables.

    `extends` in tables names a file or a shipped recipe.
    """
    return load(RunConfig, recipe, overrides)


def load_warmup(recipe: str | Path, overrides: typing.Sequence[str] = ()) -> WarmupConfig:
    return load(WarmupConfig, recipe, overrides)


def load(
    kind: type[Config],
    recipe: str | Path | typing.Mapping[str, Any] | RunConfig,
    overrides: typing.Sequence[str] = (),
) -> Config:
    if isinstance(recipe, str | Path):
        tables, source = _tables(recipe), str(recipe)
    else:
        tables, source = _given(recipe), "recipe"
    _check_kind(kind, tables, source)
    given = {_override(tables, override, kind) for override in overrides}
    return parse(kind, tables, source, given)


def parse(
    kind: type[Config],
    tables: dict[str, Any],
    source: str,
    given: typing.Collection[str] = frozenset(),
) -> Config:
    """Convert `tables` to a `kind`, or raise a `UserError` for the first wrong key.

    `given` are the knobs that --set has set.
    """
    config = _read(kind, tables, Source(source, _knobs(kind), given), prefix="")
    broken = check_run(config) if isinstance(config, RunConfig) else check_warmup(config)
    if broken is not None:
        raise UserError(f"{source}: {broken}")
    return config


def read_section(kind: type[Any], table: dict[str, Any], source: str, prefix: str) -> Any:
    """Convert one section, for hosts with their own file format. `prefix` is their name for it."""
    return _read(kind, table, Source(source, [f"{prefix}{knob}" for knob in _knobs(kind)]), prefix)


def dump(config: Any) -> str:
    """Return the config as TOML that reads back to the same config.

    JSON and TOML write the values of our knobs in the same way.
    """
    tables = dataclasses.asdict(config)
    lines = [
        f"{key} = {_toml(value)}" for key, value in tables.items() if not isinstance(value, dict)
    ]
    for name, table in tables.items():
        if isinstance(table, dict):
            knobs = [f"{key} = {_toml_value(value)}" for key, value in table.items()]
            lines += ["", f"[{name}]", *knobs]
    return "\n".join(lines) + "\n"


def find(recipe: str | Path, siblings: typing.Sequence[str] = ()) -> Path:
    """Return the file of a recipe: a path, or a shipped recipe by name.

    `siblings` are names to suggest first if there is no such recipe.
    """
    path = Path(recipe)
    if os.path.isfile(path):  # unlike Path.is_file, it is false for names that are too long
        return path
    for folder in recipe_folders():
        for name in (f"{recipe}.toml", str(recipe)):
            if os.path.isfile(folder / name):
                return folder / name
    names = sorted(
        str(p.relative_to(f).with_suffix("")) for f in recipe_folders() for p in f.rglob("*.toml")
    )
    guess = _guess(_closest(str(recipe), siblings, "/") or _closest(str(recipe), names, "/"))
    raise UserError(
        f"{recipe}: no such recipe; {guess}give a TOML file or one of: {', '.join(names)}"
    )


def recipe_folders() -> list[Path]:
    """Return the folders of shipped recipes: in the installed package, or in a clone."""
    package = Path(__file__).parent
    return [
        folder
        for folder in (package / "recipes", package.parents[1] / "recipes")
        if folder.is_dir()
    ]


def _tables(recipe: str | Path) -> dict[str, Any]:
    """Read a recipe. In `a/model+method`, the method's file overrides the model's.

    Recipes in `methods/` add their name to that of the recipe before them.
    """
    first, *others = [str(recipe)] if os.path.isfile(recipe) else str(recipe).split("+")
    path = find(first)
    tables = read_toml(path)
    methods: dict[str, dict[str, Any]] = {}
    for other in others:
        file = _part(other, path.parent)
        part = read_toml(file)
        if file.parent.name == METHODS:
            _check_conflicts(str(recipe), file.stem, part, methods)
            methods[file.stem] = part
            part = part | {"name": f"{tables.get('name', RunConfig.name)}+{file.stem}"}
        tables = _merged(tables, part)
    return tables


def _given(recipe: typing.Mapping[str, Any] | RunConfig) -> dict[str, Any]:
    """Copy the tables of a recipe that is not a file."""
    if isinstance(recipe, RunConfig):
        return dataclasses.asdict(recipe)
    if not isinstance(recipe, typing.Mapping):
        raise UserError(f"recipe = {_short(recipe)} must be a name, a file, a table or a RunConfig")
    tables = copy.deepcopy(dict(recipe))
    _check_contents(tables, "recipe")
    base = tables.pop("extends", None)
    return tables if base is None else _merged(_tables(str(base)), tables)


def _part(name: str, folder: Path) -> Path:
    """Find a part after `+`: next to the first part, in `methods/`, or by its full name."""
    folders = [folder, *(shipped / METHODS for shipped in recipe_folders())]
    for parent in folders:
        if os.path.isfile(parent / f"{name}.toml"):
            return parent / f"{name}.toml"
    return find(name, sorted({file.stem for parent in folders for file in parent.glob("*.toml")}))


def _check_conflicts(
    source: str, name: str, part: dict[str, Any], methods: dict[str, dict[str, Any]]
) -> None:
    """Raise an error if two methods give different values to a knob: one would be lost."""
    values = part.get("algorithm", {})
    for other, before in methods.items():
        others = before.get("algorithm", {})
        for knob in (name for name in values if name in others):
            if values[knob] != others[knob]:
                raise UserError(
                    f"{source}: {other} and {name} cannot be combined: algorithm.{knob} is "
                    f"{_short(others[knob])} in one and {_short(values[knob])} in the other"
                )


def _check_kind(kind: type[Config], tables: dict[str, Any], source: str) -> None:
    """Raise an error if the recipe has sections that only the other kind of recipe has."""
    runs = {field.name for field in dataclasses.fields(RunConfig)}
    warmups = {field.name for field in dataclasses.fields(WarmupConfig)}
    sections = {key for key, value in tables.items() if isinstance(value, dict)}
    for_run, for_warmup = sections & (runs - warmups), sections & (warmups - runs)
    if kind is RunConfig and for_warmup and not for_run:
        raise UserError(
            f"{source} is a warm-start recipe: eepo warmup {shlex.quote(source)} --out DIR"
        )
    if kind is WarmupConfig and for_run and not for_warmup:
        raise UserError(
            f"{source} is a training recipe, not a warm-start recipe: "
            f"eepo train {shlex.quote(source)} --out DIR"
        )


def read_toml(path: Path) -> dict[str, Any]:
    """Read a file. It overrides the recipe that its `extends` names (a path relative to it)."""
    files: list[Path] = []
    layers: list[dict[str, Any]] = []
    while True:
        if path.resolve() in files:
            raise UserError(f"{path}: extends itself through {' -> '.join(p.name for p in files)}")
        if len(files) == MAX_EXTENDS:
            raise UserError(f"{files[0]}: a chain of more than {MAX_EXTENDS} files by extends")
        files.append(path.resolve())
        layers.append(read_tables(path))
        base = layers[-1].pop("extends", None)
        if base is None:
            return functools.reduce(_merged, reversed(layers))
        if not isinstance(base, str) or not os.path.isfile(path.parent / base):
            raise UserError(
                f"{path}: extends = {_short(base)}, but there is no such file next to it"
            )
        path = path.parent / base


def read_tables(path: Path) -> dict[str, Any]:
    """Read a TOML file without the recipe that it extends."""
    try:
        return load_toml(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from error


def load_toml(text: str, source: str) -> dict[str, Any]:
    """Parse TOML, and refuse valid TOML that no knob can hold.

    This is deep nesting, an integer of thousands of digits, or a NUL character.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise UserError(f"{source}: nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:  # an integer of 5,000 digits
        reason = str(error).partition(";")[0]
        raise UserError(f"{source}: {reason}") from None
    _check_contents(tables, source)
    return tables


def _check_contents(tables: dict[str, Any], source: str) -> None:
    level: list[Any] = [tables]
    for _ in range(MAX_DEPTH):
        dicts = [value for value in level if isinstance(value, dict)]
        texts = [text for text in itertools.chain(level, *dicts) if isinstance(text, str)]
        if unusable := next(filter(UNUSABLE.search, texts), None):
            raise UserError(f"{source}: a NUL character or invalid UTF-8 in {_short(unusable)}")
        if any(isinstance(value, int) and value.bit_length() > MAX_BITS for value in level):
            raise UserError(f"{source}: an integer has more than 4,000 digits")
        lists = [value for value in level if isinstance(value, list)]
        level = list(itertools.chain(*lists, *(table.values() for table in dicts)))
        if not level:
            return
    raise UserError(f"{source}: nested deeper than {MAX_DEPTH} levels")


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def _override(tables: dict[str, Any], override: str, kind: Any) -> str:
    """Apply one `a.b=value` and return `a.b`."""
    key, equals, text = override.partition("=")
    *parents, name = key.strip().split(".")
    if not equals or not all([*parents, name]):
        raise UserError(
            f"--set {_cut(override)}: expected section.key=value, such as training.seed=1"
        )
    value = _override_value(text, f"--set {_cut(override)}")
    for parent in parents:
        tables = tables.setdefault(parent, {})
        if not isinstance(tables, dict):
            raise UserError(f"--set {_cut(override)}: {parent} is a value, not a section")
    tables[name] = value
    knob, known = key.strip(), _knobs(kind)
    if knob not in known and not knob.startswith(OPTIONS):
        section = f"{parents[0]}." if parents and parents[0] in known else ""
        allowed = [name.removeprefix(section) for name in known if name.startswith(section)]
        raise _unknown("--set", knob, value, [name for name in allowed if "." not in name], known)
    return knob


def _override_value(text: str, source: str) -> Any:
    """Read the value of an override. What is not one TOML value is a string."""
    try:
        tables = load_toml(f"value = {text}", source)
    except tomllib.TOMLDecodeError:
        tables = {}
    if len(tables) == 1:
        return tables["value"]
    _check_contents({"value": text}, source)
    return text


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a value comes from, for error messages: a recipe, or --set."""

    recipe: str
    known: typing.Sequence[str]  # every knob of every section
    given: typing.Collection[str] = frozenset()

    def of(self, knob: str) -> str:
        return "--set" if knob in self.given else self.recipe


@functools.cache  # plans load hundreds of recipes
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _knobs(kind: Any) -> list[str]:
    """Return all keys of a config: sections, and knobs as `section.knob`."""
    names: list[str] = []
    for key, hint in _hints(kind).items():
        names += [
            key,
            *(
                f"{key}.{field.name}"
                for part in _sections(hint)
                for field in dataclasses.fields(part)
            ),
        ]
    return list(dict.fromkeys(names))


def _unknown(
    source: str, knob: str, value: Any, allowed: typing.Iterable[str], known: typing.Sequence[str]
) -> UserError:
    others = [name for name in known if name != knob]
    new_name = RENAMED.get(knob, "")
    guess = _guess([new_name] if new_name in known else _closest(knob, others, "."))
    return UserError(
        f"{source}: unknown key {_cut(knob)} = {_short(value)}; "
        f"{guess}allowed: {', '.join(allowed)}"
    )


def _closest(word: str, names: typing.Sequence[str], separator: str) -> list[str]:
    """Return the names whose last part is closest to `word`: the first part may be missing.

    If a whole name is close, return only that one.
    """

    def last(name: str) -> str:
        return name.rpartition(separator)[2]

    ending = difflib.get_close_matches(last(word), [last(name) for name in names], n=1)
    alike = [name for name in names if last(name) in ending]
    return difflib.get_close_matches(word, alike, n=1, cutoff=0.8) or alike[:3]


def _guess(names: typing.Sequence[str]) -> str:
    return f"did you mean {' or '.join(names)}? " if names else ""


def _read(kind: Any, tables: dict[str, Any], source: Source, prefix: str) -> Any:
    hints = _hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in tables:
        if key not in fields:
            knob = f"{prefix}{key}"
            raise _unknown(source.of(knob), knob, tables[key], fields, source.known)
    values = {}
    for key, value in tables.items():
        kinds, knob = _sections(hints[key]), f"{prefix}{key}"
        where = f"{source.of(knob)}: {knob} = {_short(value)}"
        if kinds:
            if not isinstance(value, dict):
                raise UserError(f"{where} must be a section: [{knob}]")
            chosen = _chosen(kinds, value, f"{source.of(f'{knob}.name')}: {knob}.name")
            values[key] = _read(chosen, value, source, f"{knob}.")
        else:
            values[key] = _value(hints[key], value, fields[key].metadata, where)
    return kind(**values)


def _sections(hint: Any) -> list[Any]:
    """Return the dataclasses of a section: one, or several that `name` selects from."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return list(options) if all(dataclasses.is_dataclass(option) for option in options) else []


def _chosen(kinds: list[Any], table: dict[str, Any], where: str) -> Any:
    if len(kinds) == 1 or "name" not in table:
        return kinds[0]
    named = {kind.name: kind for kind in kinds if kind.name}
    custom = next((kind for kind in kinds if not kind.name), None)  # its name is the user's
    name = table["name"]
    if custom is not None and isinstance(name, str) and USER_NAME.fullmatch(name):
        return custom
    if not isinstance(name, str) or name not in named:
        own = ", or module:Class" if custom else ""
        allowed = f"{', '.join(map(_toml, named))}{own}"
        raise UserError(f"{where} = {_short(name)} must be one of {allowed}")
    return named[name]


def _value(hint: Any, value: Any, bounds: typing.Mapping[str, Any], where: str) -> Any:
    """Return `value` if its type and bounds are allowed. Only int -> float is converted."""
    options = (
        typing.get_args(hint)
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        else (hint,)
    )
    for option in options:
        if typing.get_origin(option) is tuple:
            kind = typing.get_args(option)[0]
            if isinstance(value, list | tuple) and all(type(item) is kind for item in value):
                return tuple(value)
            continue
        if typing.get_origin(option) is dict:
            fits = _is_table(value)
        elif typing.get_origin(option) is typing.Literal:
            fits = isinstance(value, str) and value in typing.get_args(option)
        elif option in (int, float):
            fits = type(value) in (int, option) and _within(value, bounds)
        else:
            fits = type(value) is option
        if fits:
            return float(value) if option is float else value
    raise UserError(f"{where} must be {_allowed(options, bounds)}")


def _is_table(value: Any) -> bool:
    """Check that JSON and TOML can both store the table."""
    return isinstance(value, dict) and all(
        isinstance(key, str) and _is_plain(inner) for key, inner in value.items()
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _within(value, {})
    return isinstance(value, str | bool) or _is_table(value)


def _within(value: float, bounds: typing.Mapping[str, Any]) -> bool:
    """Check the bounds. NaN, infinity and integers beyond 64 bits are never allowed."""
    above, least, most = (bounds.get(name) for name in ("above", "least", "most"))
    fits = (
        (above is None or value > above)
        and (least is None or value >= least)
        and (most is None or value <= most)
    )
    return fits and (abs(value) < HUGE if isinstance(value, int) else math.isfinite(value))


def _allowed(options: tuple[Any, ...], bounds: typing.Mapping[str, Any]) -> str:
    words = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    signs = {"above": "> {}", "least": ">= {}", "most": "<= {}"}
    limits = " and ".join(
        sign.format(bounds[name]) for name, sign in signs.items() if bounds.get(name) is not None
    )
    texts = []
    for option in options:
        if option is types.NoneType:
            continue
        if typing.get_origin(option) is tuple:
            texts.append(f"a list of {words[typing.get_args(option)[0]].removeprefix('a ')}s")
        elif typing.get_origin(option) is dict:
            texts.append("a table of texts, numbers, booleans, lists and tables")
        elif typing.get_origin(option) is typing.Literal:
            texts.append("one of " + ", ".join(_toml(choice) for choice in typing.get_args(option)))
        else:
            texts.append(
                f"{words[option]} {limits}" if limits and option in (int, float) else words[option]
            )
    return ", or ".join(texts)


def _short(value: Any) -> str:
    return _cut(_toml(value))


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")


def _toml_value(value: Any) -> str:
    """Write a value as TOML. It differs from JSON in tables only."""
    if isinstance(value, dict):
        knobs = (f"{_toml(key)} = {_toml_value(inner)}" for key, inner in value.items())
        return f"{{{', '.join(knobs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    return _toml(value)
