"""Orders the runs of an experiment: which are done, which can start, and which have to wait.

A run waits for the tuning runs that choose its values, for the run whose weights it evaluates, and
at equal time for the run of the baseline with the same seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from eepo.experiments.experiment import Experiment, NotTuned, Run
from eepo.experiments.plan import TUNE, Method, Selection
from eepo.types import UserError


@dataclass(frozen=True)
class Slot:
    """The runs of a method with one seed. Their values may not be chosen yet."""

    phase: str
    regime: str
    method: Method
    seed: int


class Schedule:
    """Hands out runs as soon as they can start: `ready`, then `finish`.

    A run that fails is never finished, so runs that need it never start.
    """

    def __init__(self, experiment: Experiment, selection: Selection) -> None:
        self.experiment = experiment
        self.slots = list(_slots(experiment, selection))
        if selection != Selection() and not self.slots:
            raise UserError(
                f"{experiment.plan.source} has no runs with {selection}; use fewer of these options"
            )
        self._positions = {
            (slot.phase, slot.regime, slot.method.name, slot.seed): position
            for position, slot in enumerate(self.slots)
        }
        self.started: set[Run] = set()
        self.done: set[Run] = set()
        self._unfinished_tuning = {
            (slot.regime, slot.method.name) for slot in self.slots if slot.phase == TUNE
        }
        self._find_done(self.slots)

    @property
    def num_runs(self) -> int:
        return sum(map(self.num_runs_of, self.slots))

    def unfinished_regimes(self) -> set[str]:
        """Return the regimes that have runs which are not done."""
        num_done = Counter((run.phase, run.regime, run.method, run.seed) for run in self.done)
        return {
            slot.regime
            for slot in self.slots
            if num_done[slot.phase, slot.regime, slot.method.name, slot.seed]
            < self.num_runs_of(slot)
        }

    def known_runs(self) -> list[Run]:
        """Return the runs whose values are chosen."""
        return [run for slot in self.slots for run in self._known_runs(slot)]

    def ready(self) -> list[Run]:
        """Return the runs that can start now and have not been handed out before."""
        runs = [
            run
            for run in self.known_runs()
            if run not in self.started and run not in self.done and self._can_start(run)
        ]
        self.started |= set(runs)
        return runs

    def position(self, run: Run) -> int:
        """Return the position of a run. Of the runs that can start, the first should start first.

        Tuning comes first, then seed by seed, so that a stopped experiment has complete seeds.
        """
        return self._positions[run.phase, run.regime, run.method, run.seed]

    def finish(self, run: Run) -> None:
        self.done.add(run)
        if run.phase == TUNE:
            self.experiment.forget_choices()
            self._update_tuning()

    def check(self) -> None:
        """Raise an error for a run that could never start: it needs a run that is not selected."""
        for slot in self.slots:
            if not self._waits_for_tuning(slot):
                self._expand(slot)
        runs = self.known_runs()
        for run in runs:
            for needed in self._needs(run):
                if needed not in runs and not self.experiment.is_done(needed):
                    title = self.experiment.title
                    raise UserError(
                        f"{title(run)} needs {title(needed)}, "
                        "which is not finished and not selected"
                    )

    def _find_done(self, slots: list[Slot]) -> None:
        """Find the runs that are done already. A finished tuning makes the values of more known."""
        known = [slot for slot in slots if not self._waits_for_tuning(slot)]
        for slot in known:
            self.done |= {run for run in self._known_runs(slot) if self.experiment.is_done(run)}
        if known:
            self._update_tuning()
            self._find_done([slot for slot in slots if slot not in known])

    def _update_tuning(self) -> None:
        """Find the methods whose tuning runs in this schedule are not all done."""
        num_done = Counter((run.regime, run.method, run.seed) for run in self._done_in(TUNE))
        self._unfinished_tuning = {
            (slot.regime, slot.method.name)
            for slot in self.slots
            if slot.phase == TUNE
            and num_done[slot.regime, slot.method.name, slot.seed] < self.num_runs_of(slot)
        }

    def _done_in(self, phase: str) -> Iterator[Run]:
        return (run for run in self.done if run.phase == phase)

    def num_runs_of(self, slot: Slot) -> int:
        """Return the number of runs of a slot, also if their values are not chosen yet."""
        points = len(self.experiment.plan.points(slot.regime, slot.method.name))
        if slot.phase == TUNE:
            return points
        return points if slot.method.every_value and points else 1

    def _waits_for_tuning(self, slot: Slot) -> bool:
        needed = self.experiment.plan.needs_choice_of(
            slot.regime, slot.method.name, own=slot.phase != TUNE
        )
        return bool(needed & self._unfinished_tuning)

    def _known_runs(self, slot: Slot) -> list[Run]:
        if self._waits_for_tuning(slot):
            return []
        try:
            return self._expand(slot)
        except NotTuned:
            return []

    def _expand(self, slot: Slot) -> list[Run]:
        phase, regime, name = slot.phase, slot.regime, slot.method.name
        values = self.experiment.values(phase, regime, name)
        runs = [Run(phase, regime, name, value, slot.seed) for value in values]
        for run in runs[:1]:
            self.experiment.knobs(run)  # raises an error if a value that it inherits is not chosen
        return runs

    def _can_start(self, run: Run) -> bool:
        return all(
            needed in self.done or (needed not in self.started and self.experiment.is_done(needed))
            for needed in self._needs(run)
        )

    def _needs(self, run: Run) -> list[Run]:
        """Return the runs that must be done before this run."""
        needed = (self.experiment.source(run), self.experiment.time_baseline(run))
        return [other for other in needed if other is not None]


def _slots(experiment: Experiment, selection: Selection) -> Iterator[Slot]:
    """Yield slots seed by seed, so that an experiment that is stopped has complete seeds."""
    plan = experiment.plan
    for phase in experiment.phases(selection):
        for seed in plan.phases[phase].seeds:
            if selection.seeds and seed not in selection.seeds:
                continue
            for regime in plan.regimes:
                if selection.regimes and regime not in selection.regimes:
                    continue
                for method in plan.runnable_methods(phase, regime):
                    chosen = not selection.methods or method.name in selection.methods
                    if not chosen or seed not in experiment.seeds(phase, method.name):
                        continue
                    if phase == TUNE and not (
                        method.is_tuned and plan.tuned_in(regime, method.name) == regime
                    ):
                        continue
                    yield Slot(phase, regime, method, seed)
