"""Trains a recipe over a grid of knobs and several seeds: a plan with a grid.

    OUT/recipe.toml              the recipe that all points share
    OUT/recipes/POINT.toml       the knobs that a point changes
    OUT/POINT/seed-N/            a run, with its output in `log.txt`

The same command continues a stopped sweep. Other values, other knobs or more seeds add runs.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eepo import recipe
from eepo.assemble import check_folder
from eepo.config import RunConfig
from eepo.experiments.draft import Draft
from eepo.experiments.experiment import Experiment, Run, folder_name
from eepo.experiments.plan import Point, Selection, grid_points
from eepo.experiments.runner import Outcome, run_in_processes
from eepo.experiments.toml_tables import toml_value
from eepo.model import loading
from eepo.runs.progress import Progress
from eepo.runs.runlog import METRICS
from eepo.tasks import build_task
from eepo.types import UserError

RECIPE = "recipe.toml"
ADVICE = "give the same recipe and --set again, or another --out"


@dataclass(frozen=True)
class Grid:
    """Holds a knob and its values, each as the text after `=` in an override."""

    knob: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Sweep:
    """Holds a sweep that has been checked, and is not written yet."""

    base: RunConfig
    experiment: Experiment
    runs: list[Run]  # seed by seed, so that a stopped sweep has complete seeds
    draft: Draft


def plan_sweep(
    recipe_name: str,
    overrides: Sequence[str],
    grids: Sequence[str],
    num_seeds: int,
    out: Path,
    objective: str = "mean",
) -> Sweep:
    """Check all points before the first run starts. This writes nothing."""
    base = recipe.load_run(recipe_name, overrides)
    parsed = sorted((parse_grid(text) for text in grids), key=lambda grid: grid.knob)
    for grid, after in itertools.pairwise(parsed):
        if grid.knob == after.knob:
            raise UserError(f"--grid {grid.knob} is given twice; give all its values in one --grid")
    values = _exact_values(recipe_name, overrides, parsed)
    if (out / METRICS).exists():
        raise UserError(f"--out {out} holds a run; give another folder")
    check_folder(base, out, resume=True, advice=ADVICE)
    first = base.training.seed
    tables = {
        "recipe": RECIPE,
        "seeds": list(range(first, first + num_seeds)),
        "objective": [objective],
        "keep_weights": "all",
        "grid": {knob: [_plain(value) for value in some] for knob, some in values.items()},
    }
    texts = {knob: [_override(value) for value in some] for knob, some in values.items()}
    recipes = {
        f"recipes/{folder_name(point.value)}.toml": recipe_text(base.name, point)
        for point in grid_points(texts)
    }
    draft = Draft(tables, {RECIPE: recipe.dump(base)} | recipes, out, ADVICE)
    return Sweep(base, *draft.check(), draft)


def run_sweep(sweep: Sweep, num_jobs: int, progress: Progress) -> Outcome:
    """Train all unfinished runs, `num_jobs` at a time (0: automatic)."""
    sweep.draft.write()
    return run_in_processes(sweep.experiment, Selection(), num_jobs, progress, "sweep")


def recipe_text(name: str, point: Point) -> str:
    """Return a recipe with the knobs that a point changes."""
    lines = [f'extends = "../{RECIPE}"', f"name = {toml_value(f'{name} {point.label}')}"]
    # Knobs are sorted, so the knobs of a section are adjacent.
    for section, knobs in itertools.groupby(point.knobs, key=lambda knob: knob.partition(".")[0]):
        lines += ["", f"[{section}]"]
        for knob in knobs:
            key, _, value = knob.partition(".")[2].partition("=")
            lines.append(f"{key} = {toml_value(_parse(value))}")
    return "\n".join(lines) + "\n"


def parse_grid(text: str) -> Grid:
    """Parse `section.knob=a,b,c`. Values are TOML or bare words.

    A text with a comma needs quotes. If one text has quotes, all texts need them.
    """
    knob, equals, values = (part.strip() for part in text.partition("="))
    if not equals or not re.fullmatch(r"[a-z_]+\.[a-z0-9_]+", knob):
        raise UserError(
            f"--grid {text}: must be section.knob=value,value, e.g. algorithm.temperature=1.0,1.2"
        )
    if knob == "training.seed":
        raise UserError(
            f"--grid {text}: the seed cannot be swept over; --seeds N runs every point N times"
        )
    if "'" in values or '"' in values:
        return Grid(knob, tuple(_quoted(text, values)))
    if set(values) & set("[]{}"):
        raise _not_scalar(text)
    parts = tuple(part.strip() for part in values.split(","))
    if not all(parts):
        raise UserError(f"--grid {text}: a value is empty; separate values with single commas")
    return Grid(knob, parts)


def check_set(sweep: Sweep, name: str) -> None:
    """Check before the first run that the task has an evaluation set of this name."""
    if not name:
        return
    config = sweep.base
    task = build_task(config.task, loading.load_tokenizer(config.model), config.training.seed)
    if name not in (allowed := task.evaluation_sets()):
        raise UserError(f"--on {name} must be one of {', '.join(allowed)}")


def _exact_values(
    recipe_name: str, overrides: Sequence[str], grids: Sequence[Grid]
) -> dict[str, list[Any]]:
    """Check every combination, and return the values of each knob as the config has them.

    There 1 and 1.0 are the same float.
    """
    values: dict[str, dict[Any, None]] = {grid.knob: {} for grid in grids}
    seen: set[tuple[Any, ...]] = set()
    choices = ([(grid.knob, value) for value in grid.values] for grid in grids)
    for choice in itertools.product(*choices):
        config = _load(recipe_name, overrides, [f"{knob}={value}" for knob, value in choice])
        point = {knob: _knob_value(config, knob) for knob, _ in choice}
        if tuple(point.values()) in seen:
            text = ", ".join(f"{knob} = {toml_value(value)}" for knob, value in point.items())
            raise UserError(f"--grid: {text} is given twice, maybe in two spellings")
        seen.add(tuple(point.values()))
        for knob, value in point.items():
            values[knob][value] = None
    return {knob: list(some) for knob, some in values.items()}


def _load(recipe_name: str, overrides: Sequence[str], changes: Sequence[str]) -> RunConfig:
    try:
        return recipe.load_run(recipe_name, [*overrides, *changes])
    except UserError as error:
        # The user's --set were read without an error before, so the mistake is in the grid.
        reason = str(error).removeprefix("--set: ")
        raise UserError(f"--grid {' --grid '.join(changes)}: {reason}") from error


def _knob_value(config: RunConfig, knob: str) -> Any:
    section, _, name = knob.partition(".")
    return getattr(getattr(config, section), name)


def _quoted(text: str, values: str) -> Iterator[str]:
    try:
        parsed = recipe.load_toml(f"values = [{values}]", "--grid")["values"]
    except tomllib.TOMLDecodeError as error:
        raise UserError(
            f"--grid {text}: if one value is in quotes, all words must be in quotes"
        ) from error
    for value in parsed:
        if not isinstance(value, str | int | float):
            raise _not_scalar(text)
        yield toml_value(value)


def _not_scalar(text: str) -> UserError:
    return UserError(
        f"--grid {text}: lists and tables cannot be swept over; use numbers, words or quoted texts"
    )


def _override(value: Any) -> str:
    """Return a value of a config as the text of an override that gives this value."""
    if not isinstance(value, str) or not _is_word(value):
        return toml_value(value)
    return value


def _plain(value: Any) -> Any:
    """Return a value as a plan has it: there, a string is the text of an override."""
    return _override(value) if isinstance(value, str) else value


def _is_word(text: str) -> bool:
    """Return whether an override reads this text as the same string."""
    return _parse(text) == text and text == text.strip() and text.isprintable()


def _parse(text: str) -> Any:
    """Read the text of an override: TOML, or else a string."""
    try:
        found: Mapping[str, Any] = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return found["value"] if len(found) == 1 else text
