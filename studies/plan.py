"""Reads the plan of a study, and finds the tuned value of each knob in the records of its runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eepo.reports import records
from eepo.reports.measures import measure_value
from eepo.runs.jsonl import read_records
from eepo.types import UserError

TUNE, REPORT = "tune", "report"  # phases; a plan may have more that report, with seeds of their own
STEPS = "training.num_steps="
FINAL = "final"  # the folder of a run's last weights


@dataclass(frozen=True)
class Run:
    regime: str
    method: str
    value: str  # of the knob it is tuned over; "" if there is none
    seed: int

    @property
    def folder(self) -> Path:
        return Path(self.regime) / f"{self.method}={self.value or 'as-is'}" / f"seed-{self.seed}"

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.regime, self.method, self.value, self.seed


@dataclass
class Plan:
    """As the file says."""

    tables: dict[str, Any]
    out: Path
    chosen: dict[tuple[str, str], str] = field(
        default_factory=dict
    )  # by regime and method: what tuning found best

    def __post_init__(self) -> None:
        """A comparison that cannot be made is refused before anything runs."""
        methods = self.tables["methods"]
        for name, method in methods.items():
            other = methods.get(method.get("against", name))
            if other is None:
                raise UserError(
                    f"{name}: against = {method['against']} is not a method; "
                    f"allowed: {', '.join(methods)}"
                )
            if "against" in method and not (method.get("every_value") and other.get("every_value")):
                raise UserError(f"{name}: against = {method['against']} needs every_value in both")
            if "weights" in method and "weights" in methods.get(
                wrong := method["weights"], {"weights": ""}
            ):
                trained = ", ".join(own for own, other in methods.items() if "weights" not in other)
                raise UserError(
                    f"{name}: weights = {wrong} is not a method that trains; allowed: {trained}"
                )
        for name, regime in self.tables["regimes"].items():
            if strange := [
                own for own in regime.get("values", {}) if "values" not in methods.get(own, {})
            ]:
                tuned = [own for own, method in methods.items() if "values" in method]
                raise UserError(
                    f"{name}: values.{strange[0]} is not a tuned method; "
                    f"allowed: {', '.join(tuned)}"
                )

    def command(self, run: Run, folder: Path) -> tuple[str, ...]:
        regime, method = self.tables["regimes"][run.regime], self.tables["methods"][run.method]
        knobs = [
            *self.tables.get("set", []),
            *regime.get("set", []),
            *self.knobs(run.regime, run.method, run.value),
        ]
        if source := self.source(run):
            knobs.append(f"model.path={folder.parents[2] / source.folder / FINAL}")
        sets = [part for knob in [*knobs, f"training.seed={run.seed}"] for part in ("--set", knob)]
        recipe = method.get("recipe", regime["recipe"])
        return ("eepo", "train", recipe, "--out", str(folder), "--resume", *sets)

    def source(self, run: Run) -> Run | None:
        """The run whose final weights it evaluates, if it trains none of its own."""
        name = self.tables["methods"][run.method].get("weights")
        return Run(run.regime, name, self.value(run.regime, name), run.seed) if name else None

    def is_source(self, run: Run) -> bool:
        """Whether its weights are wanted by another."""
        return any(method.get("weights") == run.method for _, method in self.methods(run.regime))

    def knobs(self, regime: str, name: str, value: str) -> list[str]:
        """Those of the methods below it, tuned, then its own."""
        method = self.tables["methods"][name]
        bases = [method["weights"]] if "weights" in method else method.get("base", [])
        below = [
            knob for base in bases for knob in self.knobs(regime, base, self.value(regime, base))
        ]
        untrained = [f"{STEPS}0"] if "weights" in method else []
        own = [f"{method['tune']}={value}"] if value else []
        shares = [
            f"{knob}={total // int(value)}" for knob, total in method.get("shares", {}).items()
        ]
        return [*below, *untrained, *method.get("set", []), *own, *shares]

    def methods(self, regime: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, method in self.tables["methods"].items():
            if regime in method.get("regimes", self.tables["regimes"]):
                yield name, method

    def runs(self, phase: str, regimes: Sequence[str], methods: Sequence[str]) -> list[Run]:
        """Seed after seed, so that a study that is stopped has whole seeds."""
        self.check(regimes, methods, phase)
        found = []
        for seed in self.tables["seeds"][phase]:
            for regime in regimes or self.tables["regimes"]:
                for name, _ in self.methods(regime):
                    if not methods or name in methods:
                        found += [
                            Run(regime, name, value, seed)
                            for value in self.values(phase, regime, name)
                        ]
        return found

    def check(self, regimes: Sequence[str], methods: Sequence[str], phase: str = REPORT) -> None:
        """That the plan has what is asked for."""
        for table, asked in {"regimes": regimes, "methods": methods, "seeds": [phase]}.items():
            known = self.tables[table]
            if strange := set(asked) - set(known):
                raise UserError(
                    f"{', '.join(sorted(strange))} is not in the plan; allowed: {', '.join(known)}"
                )

    def values(self, phase: str, regime: str, name: str) -> list[str]:
        """Of the knob that a method is tuned over: those that this phase runs."""
        method, here = (
            self.tables["methods"][name],
            self.tables["regimes"][regime].get("values", {}),
        )
        every = [str(value) for value in here.get(name, method.get("values", []))]
        if method.get("every_value"):
            return [] if phase == TUNE else every
        return every if phase == TUNE else [self.value(regime, name)]

    def done(self, *phases: str) -> list[dict[str, Any]]:
        """Return the lines whose knobs match the plan: tuning may have chosen others since."""
        return [line for phase in phases for line in self.lines(phase) if self._holds(phase, line)]

    def num_steps(self, line: dict[str, Any]) -> int:
        """Of the run that wrote it; 0 if the plan leaves it to the recipe."""
        regime = self.tables["regimes"][line["regime"]]
        knobs = [*self.tables.get("set", []), *regime.get("set", []), *line["knobs"]]
        return next(
            (int(knob.removeprefix(STEPS)) for knob in reversed(knobs) if knob.startswith(STEPS)), 0
        )

    def _holds(self, phase: str, line: dict[str, Any]) -> bool:
        regime, name, value = line["regime"], line["method"], line["value"]
        if name not in dict(self.methods(regime)) or value not in self.values(phase, regime, name):
            return False
        return line.get("knobs") == self.knobs(regime, name, value)

    def lines(self, phase: str) -> list[dict[str, Any]]:
        path = self.out / f"{phase}.jsonl"
        return list(read_records(path)) if path.exists() else []

    def value(self, regime: str, name: str) -> str:
        """Return the best value of the method's tuned knob by its objective, "" without one."""
        method = self.tables["methods"][name]
        if "values" not in method:
            return ""
        if (regime, name) not in self.chosen:
            tuned_in = self.tables["regimes"][regime].get("tuned_in", regime)
            tuned_in = method.get("tuned_in", tuned_in)
            self.chosen[regime, name] = self._best(tuned_in, name, method)
        return self.chosen[regime, name]

    def _best(self, regime: str, name: str, method: dict[str, Any]) -> str:
        scores: dict[str, list[float]] = {}
        measures = method.get("objective", self.tables["objective"])
        for line in self.lines(TUNE):
            here = (line["regime"], line["method"]) == (regime, name)
            if here and line.get("knobs") == self.knobs(regime, name, line["value"]):
                scores.setdefault(line["value"], []).append(objective(line, measures))
        if not scores:
            raise UserError(
                f"{regime}, {name}: nothing is tuned yet; run --phase tune --method {name} first"
            )
        return max(scores, key=lambda value: statistics.mean(scores[value]))


def objective(line: dict[str, Any], names: Sequence[str]) -> float:
    """Return the mean of measures such as in_range/greedy.

    "speed" is the negative number of steps to 90 % reward; a run that fails counts twice its steps.
    """
    if list(names) == ["speed"]:
        return -float(line["steps_to_90"] or 2 * line["num_steps"])
    return statistics.mean(final(line, *name.split("/")) for name in names)


def final(line: dict[str, Any], where: str, measure: str) -> float:
    run = as_run(line)
    row = run.full_evaluation(where) or run.start_evaluation(
        where
    )  # the start is all there is of weights of others
    found = measure_value(row, measure) if row else None
    if found is None:
        raise UserError(f"{where} has no {measure}")
    return found


def as_run(line: dict[str, Any]) -> records.Run:
    """A run as reports know it."""
    return records.Run(
        Path(line["regime"]),
        line["method"],
        line["seed"],
        {},
        {},
        line["metrics"],
        line["evaluations"],
        [],
        [],
        0,
    )
