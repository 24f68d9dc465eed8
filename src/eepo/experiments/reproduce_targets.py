"""Lists what can be reproduced of the paper: which model, which methods, which tables.

A method is a recipe `paper/METHOD` on top of the recipe of a model. The values of baselines are
those that the paper names. Where it names none, they are ours (`docs/reproduce.md`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from eepo.reports.paper_numbers import BASE, EEPO, GRPO
from eepo.types import UserError

PREFIX = "paper/"


@dataclass(frozen=True)
class Baseline:
    """Describes a variant of GRPO with one knob."""

    knob: str
    values: tuple[str, ...]  # that tuning chooses from
    more_values: tuple[str, ...] = ()  # that only the figure of hyperparameters shows, too
    origin: str = ""  # of the values


BASELINES = {
    "higher_temperature": Baseline(
        "algorithm.temperature", ("1.2", "1.5"), ("1.1",), "the paper's text names 1.2 and 1.5"
    ),
    "more_entropy": Baseline(
        "algorithm.entropy_coef",
        ("1e-4", "1e-3"),
        ("1e-2",),
        "the paper's text names 1e-4 and 1e-3",
    ),
    "clip_higher": Baseline(
        "algorithm.clip_high",
        ("0.24", "0.28", "0.32"),
        (),
        "ours: 0.28 is DAPO's value; the paper names none",
    ),
    "more_rollouts": Baseline(
        "algorithm.group_size", ("16",), ("4", "32"), "the paper's text names 16"
    ),
}
# Methods that use the chosen value of another method.
BUILDS_ON = {"eepo_more_entropy": "more_entropy", "eepo_clip_higher": "clip_higher"}
TABLE_METHODS = (BASE, GRPO, *BASELINES, EEPO)
VARIANT_METHODS = (
    BASE, GRPO, EEPO, "more_entropy", "eepo_more_entropy", "clip_higher", "eepo_clip_higher",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """Describes the experiment of one model."""

    name: str
    recipe: str
    methods: tuple[str, ...]
    tables: tuple[str, ...]
    every_value: bool = False  # report all values of baselines instead of the best one


TARGETS = {
    target.name: target
    for target in (
        Target("table1", "paper/qwen2.5-3b", TABLE_METHODS, ("table1",)),
        Target("table2", "paper/llama-3.2-3b-instruct", TABLE_METHODS, ("table2",)),
        Target("table3", "paper/qwen3-8b-base", TABLE_METHODS, ("table3",)),
        Target("table4", "paper/qwen3-14b-base", (BASE, GRPO, EEPO), ("table4",)),
        Target("on_variants", "paper/qwen2.5-3b", VARIANT_METHODS, ("on_variants",)),
        Target("hyperparameters", "paper/qwen2.5-3b", TABLE_METHODS, (), every_value=True),
    )
}
ALL = "all"


def find_targets(name: str) -> list[Target]:
    """Return the experiments of a target: one, or for `paper/all` one for each model.

    There, Tables 1 and 5 share their runs, and the tuning runs are those of the figure of
    hyperparameters.
    """
    short = name.removeprefix(PREFIX)
    if short == ALL:
        both = (*TABLE_METHODS, *BUILDS_ON)
        first = Target("qwen2.5-3b", "paper/qwen2.5-3b", both, ("table1", "on_variants"))
        others = {"table2": "llama-3.2-3b-instruct", "table3": "qwen3-8b-base"}
        others["table4"] = "qwen3-14b-base"
        return [first, *(_renamed(TARGETS[table], model) for table, model in others.items())]
    if short not in TARGETS:
        allowed = ", ".join(f"{PREFIX}{one}" for one in (*TARGETS, ALL))
        raise UserError(f"unknown target {name!r}; allowed: {allowed}")
    return [TARGETS[short]]


def _renamed(target: Target, name: str) -> Target:
    return Target(name, target.recipe, target.methods, target.tables)


def select_methods(target: Target, names: Iterable[str]) -> list[str]:
    """Return the chosen methods in the order of the target, with the base model and what they need.

    No name selects all methods.
    """
    names = list(names)
    for name in names:
        if name not in target.methods:
            raise UserError(
                f"--methods {name} is no method of {PREFIX}{target.name}; "
                f"allowed: {', '.join(target.methods)}"
            )
    needed = {BASE, *names, *(BUILDS_ON[name] for name in names if name in BUILDS_ON)}
    return [name for name in target.methods if not names or name in needed]
