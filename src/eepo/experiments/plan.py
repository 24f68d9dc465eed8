"""Describes an experiment of many runs: methods in regimes, their knobs, values and seeds.

A plan is data: it knows no folder and no result. `plan_file.py` reads it from TOML and
`experiment.py` connects it with the folder of its runs.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eepo.types import UserError

TUNE, REPORT = "tune", "report"  # every other phase reports, too, on seeds of its own
NUM_STEPS = "training.num_steps"
KEEP_WEIGHTS = ("none", "final", "all")
EQUAL = ("rollouts", "time")
START_EVALUATIONS = ("recipe", "first")

Chosen = Callable[[str, str], str]  # regime, method -> the value that tuning chose


@dataclass(frozen=True)
class Point:
    """One combination of the values that a method is tried with."""

    value: str  # as in the records: "1e-4", or "algorithm.gate=token,algorithm.temperature=1.2"
    knobs: tuple[str, ...]  # as overrides: "training.learning_rate=1e-4"
    label: str  # the value without sections: "gate=token, temperature=1.2"


@dataclass(frozen=True)
class Method:
    name: str
    recipe: str = ""  # instead of the regime's; "+NAME" is combined with the regime's
    knobs: tuple[str, ...] = ()
    base: tuple[str, ...] = ()  # methods whose knobs it has, too, with their chosen values
    points: tuple[Point, ...] = ()  # empty: it has no values to choose from
    tuned_knob: str = ""  # the knob of its points; "" for a grid of several knobs
    every_value: bool = False  # report every point instead of the best one
    shares: Mapping[str, int] = field(default_factory=dict)  # knob -> total to divide by the value
    weights: str = ""  # train nothing: evaluate the final weights of this method
    train: bool = True  # False: evaluate the model of the recipe
    recorded: bool = False  # its lines are shown, but this version cannot run it
    against: str = ""  # the method to compare with, at the same value
    tuned_in: str = ""  # the regime whose tuning runs decide
    objective: tuple[str, ...] = ()
    regimes: tuple[str, ...] = ()  # empty: all
    phases: tuple[str, ...] = ()  # that report it; empty: all

    @property
    def trains(self) -> bool:
        return self.train and not self.weights

    @property
    def inherits(self) -> tuple[str, ...]:
        return (self.weights,) if self.weights else self.base

    @property
    def is_tuned(self) -> bool:
        return bool(self.points) and not self.every_value


@dataclass(frozen=True)
class Regime:
    name: str
    recipe: str
    knobs: tuple[str, ...] = ()
    points: Mapping[str, tuple[Point, ...]] = field(default_factory=dict)  # method -> other values
    tuned_in: str = ""
    methods: tuple[str, ...] = ()  # empty: all


@dataclass(frozen=True)
class Phase:
    name: str
    seeds: tuple[int, ...] = ()
    methods: tuple[str, ...] | Mapping[str, tuple[str, ...]] = ()  # all, a list, or by regime
    regimes: tuple[str, ...] = ()  # empty: all
    knobs: tuple[str, ...] = ()  # of its runs; the knobs of regimes and methods override them
    keep_weights: str = ""  # instead of the plan's
    recorded: bool = False  # its lines are shown as they are, but it cannot be run

    def has(self, regime: str, method: str) -> bool:
        if self.regimes and regime not in self.regimes:
            return False
        if isinstance(self.methods, Mapping):
            return regime not in self.methods or method in self.methods[regime]
        return not self.methods or method in self.methods


@dataclass(frozen=True)
class Start:
    """Describes a policy that regimes start from. It is trained by a warm start."""

    folder: str  # of the warm start
    recipe: str
    knobs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Benchmarks:
    """Benchmarks on which the final weights of every run are evaluated, as `eepo eval` does.

    A setting that is 0 or empty is that of the run.
    """

    names: tuple[str, ...]
    data_dir: str = ""
    samples: int = 0  # per problem, besides the greedy completion
    temperature: float = 0.0
    max_new_tokens: int = 0
    limit: int = 0  # problems per benchmark; 0: all
    sample_limit: int = 0  # problems per benchmark that are sampled; 0: all of these
    max_rows: int = 0
    template: str = ""
    reward: str = ""

    @property
    def sets(self) -> list[str]:
        """Return the names of the evaluation sets: a problem file has its name without ending."""
        return [Path(name).stem for name in self.names]


@dataclass(frozen=True)
class Selection:
    """Selects runs or lines. An empty tuple selects all."""

    phases: tuple[str, ...] = ()
    regimes: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()  # of runs; tables and figures have all seeds

    def options(self) -> dict[str, tuple[Any, ...]]:
        """Return the values of each command-line option that selects."""
        return {
            "--phase": self.phases,
            "--regime": self.regimes,
            "--method": self.methods,
            "--seed": self.seeds,
        }

    def __str__(self) -> str:
        given = self.options().items()
        return " ".join(f"{option} {value}" for option, values in given for value in values)


@dataclass(frozen=True)
class TableEntry:
    """Describes tables of the plan."""

    selection: Selection
    against: str = ""  # METHOD, or "METHOD VALUE": what differences are to
    heading: str = ""
    label: str = ""  # of the grader: show when half of the completions have it
    seconds: tuple[float, ...] = ()  # show the reward after so much training


@dataclass(frozen=True)
class FigureEntry:
    """Describes figures of the plan: one for each regime, or one over all regimes."""

    kind: str
    selection: Selection
    name: str = ""  # of the file; default: PLAN_REGIME_KIND
    sets: tuple[str, ...] = ()  # evaluation sets that are drawn; empty: all


@dataclass(frozen=True)
class Plan:
    source: str  # the file, for messages
    folder: Path  # recipes may be files next to the plan
    methods: Mapping[str, Method]
    regimes: Mapping[str, Regime]
    phases: Mapping[str, Phase]
    knobs: tuple[str, ...] = ()  # of all runs
    objective: tuple[str, ...] = ()
    equal: str = "rollouts"
    keep_weights: str = "final"
    start_evaluation: str = "recipe"  # "first": only the first run of a regime evaluates the start
    benchmarks: Benchmarks | None = None
    starts: tuple[Start, ...] = ()
    tables: tuple[TableEntry, ...] = ()
    figures: tuple[FigureEntry, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)  # names of methods in figures
    # Parts that the file leaves out are no folders: a comparison has OUT/METHOD/seed-N.
    has_phases: bool = True
    has_regimes: bool = True
    has_methods: bool = True

    @property
    def name(self) -> str:
        return Path(self.source).stem

    @property
    def baseline(self) -> str:
        """Return the first method. Others are compared with it."""
        return next(iter(self.methods))

    @property
    def timed_method(self) -> str:
        """Return the first method that trains. At equal time, it sets the time of the others."""
        return next((m.name for m in self.methods.values() if m.trains), "")

    def methods_in(self, regime: str) -> list[Method]:
        listed = self.regimes[regime].methods
        return [
            method
            for method in self.methods.values()
            if (not method.regimes or regime in method.regimes)
            and (not listed or method.name in listed)
        ]

    def runnable_methods(self, phase: str, regime: str) -> list[Method]:
        chosen = self.phases[phase]
        return [
            method
            for method in self.methods_in(regime)
            if not method.recorded
            and chosen.has(regime, method.name)
            and (phase == TUNE or not method.phases or phase in method.phases)
        ]

    def points(self, regime: str, name: str) -> tuple[Point, ...]:
        """Return the points of a method. A regime may have other values."""
        method = self.methods[name]
        points = self.regimes[regime].points
        return points.get(name, method.points)

    def point(self, regime: str, name: str, value: str) -> Point | None:
        return next((p for p in self.points(regime, name) if p.value == value), None)

    def tuned_in(self, regime: str, name: str) -> str:
        """Return the regime whose tuning runs choose the value of this method in `regime`."""
        return self.methods[name].tuned_in or self.regimes[regime].tuned_in or regime

    def keep_weights_in(self, phase: str) -> str:
        """Return what stays of the weights of finished runs."""
        return self.phases[phase].keep_weights or self.keep_weights

    def objective_of(self, name: str) -> tuple[str, ...]:
        return self.methods[name].objective or self.objective

    def method_knobs(self, regime: str, name: str, value: str, chosen: Chosen) -> list[str]:
        """Return the knobs of a method: first those of the methods that it builds on."""
        method = self.methods[name]
        inherited = [
            knob
            for other in method.inherits
            for knob in self.method_knobs(regime, other, chosen(regime, other), chosen)
        ]
        no_steps = [] if method.trains else [f"{NUM_STEPS}=0"]
        point = self.point(regime, name, value)
        own = list(point.knobs) if point else []
        shares = [f"{knob}={total // int(value)}" for knob, total in method.shares.items()]
        return [*inherited, *no_steps, *method.knobs, *own, *shares]

    def needs_choice_of(self, regime: str, name: str, own: bool) -> set[tuple[str, str]]:
        """Return (regime, method) whose tuning must be finished before this method can run.

        `own`: the method runs with its own chosen value, too.
        """
        method = self.methods[name]
        needed: set[tuple[str, str]] = set()
        if own and method.is_tuned:
            tuned_in = self.tuned_in(regime, name)
            needed |= {(tuned_in, name)} | self.needs_choice_of(tuned_in, name, own=False)
        for other in method.inherits:
            needed |= self.needs_choice_of(regime, other, own=True)
        return needed

    def recipe_of(self, regime: str, name: str) -> str:
        """Return the recipe of a method: a file next to the plan, or any recipe by its name."""
        own, general = self.methods[name].recipe, self.regimes[regime].recipe
        recipe = f"{general}{own}" if own.startswith("+") else own or general
        beside = self.folder / recipe
        return str(beside) if recipe and beside.is_file() else recipe

    def num_steps(self, line: Mapping[str, Any]) -> int:
        """Return the planned steps of a recorded run; 0 if the plan leaves them to the recipe."""
        regime = self.regimes[line["regime"]]
        knobs = [*self.knobs, *regime.knobs, *line["knobs"]]
        steps = [knob.partition("=")[2] for knob in knobs if knob.startswith(f"{NUM_STEPS}=")]
        return int(steps[-1]) if steps else 0

    def label(self, name: str) -> str:
        return self.labels.get(name, name)

    def check_selection(self, selection: Selection) -> None:
        """Raise an error for the first name that the plan does not have."""
        known: dict[str, Collection[Any]] = {
            "--phase": self.phases,
            "--regime": self.regimes,
            "--method": self.methods,
            "--seed": sorted({seed for phase in self.phases.values() for seed in phase.seeds}),
        }
        for option, values in selection.options().items():
            for value in values:
                if value not in known[option]:
                    allowed = ", ".join(map(str, known[option]))
                    raise UserError(f"{option} {value} is not in {self.source}; allowed: {allowed}")


def grid_points(grid: Mapping[str, Sequence[str]]) -> Iterator[Point]:
    """Yield every combination of values. Knobs are sorted, so their order does not matter."""
    choices: list[dict[str, str]] = [{}]
    for knob in sorted(grid):
        choices = [choice | {knob: value} for choice in choices for value in grid[knob]]
    for choice in choices:
        texts = {knob: shown_value(value) for knob, value in choice.items()}
        yield Point(
            value=",".join(f"{knob}={text}" for knob, text in texts.items()),
            knobs=tuple(f"{knob}={value}" for knob, value in choice.items()),
            label=", ".join(f"{knob.partition('.')[2]}={text}" for knob, text in texts.items()),
        )


def single_points(knob: str, values: Sequence[str]) -> Iterator[Point]:
    """Yield one point for each value of one knob."""
    for value in values:
        text = shown_value(value)
        yield Point(text, (f"{knob}={value}",), text)


def override_value(value: Any) -> str:
    """Return a value as the text after `=` in an override."""
    return value if isinstance(value, str) else json.dumps(value)


def shown_value(text: str) -> str:
    """Return the text of a value without the quotes of a TOML string."""
    if not text.startswith(('"', "'")):
        return text
    try:
        return str(tomllib.loads(f"value = {text}")["value"])
    except tomllib.TOMLDecodeError:
        return text
