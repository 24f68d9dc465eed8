"""Connects a plan with the folder of its runs and their lines.

    OUT/PHASE.jsonl                                a line for each finished run
    OUT/PHASE/REGIME/METHOD=VALUE/seed-N/          a run, with its output in log.txt

Parts that the plan leaves out are no folders: `eepo compare` writes OUT/METHOD/seed-N.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from eepo import recipe
from eepo.config import RunConfig
from eepo.evaluation.results import RESULTS
from eepo.experiments.lines import BENCHMARKS, append_line, read_lines, summarize_run
from eepo.experiments.plan import NUM_STEPS, TUNE, Plan, Selection
from eepo.experiments.tuning import best_value, needs_benchmarks
from eepo.reports.run_lines import Line
from eepo.runs.jsonl import parse_json
from eepo.runs.runlog import METRICS
from eepo.trainer import is_finished, trained_seconds
from eepo.types import UserError

FINAL, CHECKPOINTS = "final", "checkpoints"  # folders of a run
MAX_NAME_LENGTH = 120  # characters of a folder name
# At equal time, a run ends at the latest after this many times the steps of its recipe.
MAX_STEP_FACTOR = 100


@dataclass(frozen=True)
class Run:
    """Identifies one run of a plan."""

    phase: str
    regime: str
    method: str
    value: str  # of the point; "" if the method has no points
    seed: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.regime, self.method, self.value, self.seed


class Experiment:
    """Finds the runs of a plan, their settings, and what is recorded about them."""

    def __init__(self, plan: Plan, out: Path, advice: str = "") -> None:
        self.plan, self.out = plan, out
        # Ends the error message if a run in `out` has other settings.
        self.advice = advice or "give the same plan, or another --out"
        self._lines: dict[str, list[Line]] = {}
        self._chosen: dict[tuple[str, str], str] = {}
        self._config = functools.cache(recipe.load_run)

    # --- runs

    def phases(self, selection: Selection) -> list[str]:
        """Return the chosen phases in the order of the plan; by default all that can be run."""
        self.plan.check_selection(selection)
        for name in selection.phases:
            if self.plan.phases[name].recorded:
                raise UserError(
                    f"--phase {name}: its runs are recorded, but this version cannot run them"
                )
        return [
            name
            for name, phase in self.plan.phases.items()
            if (name in selection.phases if selection.phases else not phase.recorded)
        ]

    def values(self, phase: str, regime: str, name: str) -> list[str]:
        """Return the values that a phase runs a method with; [""] if the method has no points."""
        method = self.plan.methods[name]
        every = [point.value for point in self.plan.points(regime, name)]
        if phase == TUNE:
            decides = method.is_tuned and self.plan.tuned_in(regime, name) == regime
            return every if decides else []
        if method.every_value and every:
            return every
        return [self.chosen(regime, name)]

    def seeds(self, phase: str, name: str) -> tuple[int, ...]:
        """Return the seeds of a method. An untrained model is evaluated once: it has no seeds."""
        method, seeds = self.plan.methods[name], self.plan.phases[phase].seeds
        return seeds if method.train else seeds[:1]

    def folder(self, run: Run) -> Path:
        return self.out.joinpath(*self.path_parts(run), f"seed-{run.seed}")

    def path_parts(self, run: Run) -> list[str]:
        """Return the folders between OUT and seed-N."""
        plan = self.plan
        name = f"{run.method}={run.value}" if run.value else run.method
        parts = [
            run.phase if plan.has_phases else "",
            run.regime if plan.has_regimes else "",
            folder_name(name if plan.has_methods else run.value or run.method),
        ]
        return [part for part in parts if part]

    def title(self, run: Run) -> str:
        return f"{'/'.join(self.path_parts(run))} seed {run.seed}"

    def source(self, run: Run) -> Run | None:
        """Return the run whose final weights this run evaluates, if it trains nothing itself."""
        name = self.plan.methods[run.method].weights
        if not name:
            return None
        return Run(run.phase, run.regime, name, self.chosen(run.regime, name), run.seed)

    def is_source(self, run: Run) -> bool:
        """Return whether another method evaluates the weights of this run."""
        methods = self.plan.methods_in(run.regime)
        return any(method.weights == run.method for method in methods)

    def time_baseline(self, run: Run) -> Run | None:
        """Return the run whose training time limits this run, if the plan has equal time."""
        name = self.plan.timed_method
        if self.plan.equal != "time" or run.method == name:
            return None
        if not self.plan.methods[run.method].trains or run.phase == TUNE:
            return None
        return Run(run.phase, run.regime, name, self.chosen(run.regime, name), run.seed)

    # --- settings

    def knobs(self, run: Run) -> list[str]:
        """Return the knobs of the method, as they are recorded in the line of a run."""
        return self.plan.method_knobs(run.regime, run.method, run.value, self.chosen)

    def recipe(self, run: Run) -> str:
        return self.plan.recipe_of(run.regime, run.method)

    def overrides(self, run: Run) -> list[str]:
        """Return all changes to the recipe of a run."""
        knobs = [*self._general_knobs(run), *self.knobs(run)]
        if source := self.source(run):
            knobs.append(f"model.path={json.dumps(str(self.folder(source) / FINAL))}")
        if self.plan.start_evaluation == "first":
            is_first = run.method == self.plan.baseline
            is_first &= run.seed == self.plan.phases[run.phase].seeds[0]
            knobs.append(f"evaluation.start={json.dumps(is_first)}")
        knobs.append(f"training.seed={run.seed}")
        knobs += [f"name={json.dumps(name, ensure_ascii=False)}" for name in self._names(run)]
        if (baseline := self.time_baseline(run)) and (self.folder(baseline) / METRICS).is_file():
            knobs += self._time_limit(run, trained_seconds(self.folder(baseline)))
        return knobs

    def _general_knobs(self, run: Run) -> list[str]:
        """Return the knobs of the plan, of the phase and of the regime."""
        plan = self.plan
        return [*plan.knobs, *plan.phases[run.phase].knobs, *plan.regimes[run.regime].knobs]

    def config(self, run: Run) -> RunConfig:
        return self._config(self.recipe(run), tuple(self.overrides(run)))

    def _names(self, run: Run) -> list[str]:
        """Return the name of the run, by which reports group runs."""
        if self.plan.has_methods:
            return [f"{run.method} {run.value}".strip()]
        point = self.plan.point(run.regime, run.method, run.value)
        name = self._config(self.recipe(run), self.plan.knobs).name
        return [f"{name} {point.label}"] if point else []

    def _time_limit(self, run: Run, seconds: float) -> list[str]:
        """Limit a run by time instead of by its number of steps."""
        knobs = (*self._general_knobs(run), *self.knobs(run))
        steps = self._config(self.recipe(run), knobs).training.num_steps
        num_steps = MAX_STEP_FACTOR * steps if seconds else 0
        return [f"training.max_seconds={seconds!r}", f"{NUM_STEPS}={num_steps}"]

    # --- records

    def lines(self, phase: str) -> list[Line]:
        if phase not in self._lines:
            self._lines[phase] = read_lines(self.out / f"{phase}.jsonl")
        return self._lines[phase]

    def done(self, *phases: str) -> list[Line]:
        """Return the lines that match the plan, the newest of each run."""
        found = {}
        for phase in phases:
            for line in self.lines(phase):
                if self._matches(phase, line):
                    found[phase, line_key(line)] = line
        return list(found.values())

    def line(self, run: Run) -> Line | None:
        """Return the newest line of a run that matches its knobs."""
        knobs = self.knobs(run)
        for line in reversed(self.lines(run.phase)):
            if line_key(line) == run.key and line.get("knobs") == knobs:
                return line
        return None

    def record(self, run: Run) -> None:
        """Write the line of a finished run."""
        line = {"regime": run.regime, "method": run.method, "value": run.value, "seed": run.seed}
        config = self.config(run)
        completions = config.training.prompts_per_step * config.algorithm.group_size
        line |= summarize_run(self.folder(run)) | {"completions_per_step": completions}
        line["knobs"] = self.knobs(run)
        if line != self.line(run):  # a second command writes nothing
            append_line(self.out / f"{run.phase}.jsonl", line)
            self.lines(run.phase).append(line)

    def is_done(self, run: Run) -> bool:
        """Return whether a run is recorded and, if the plan keeps weights, in its folder.

        A change of the number of steps makes a run unfinished.
        """
        folder = self.folder(run)
        if self.line(run) is None or (folder.is_dir() and self.lacks_benchmarks(run)):
            return False
        if self.plan.keep_weights_in(run.phase) != "none":
            return is_finished(self.config(run), folder)
        recipe_file = folder / "recipe.toml"
        if not recipe_file.is_file() or self.time_baseline(run):
            return True
        return (
            recipe.load_run(recipe_file).training.num_steps == self.config(run).training.num_steps
        )

    def must_restart(self, run: Run) -> bool:
        """Return whether the checkpoints that the run would continue from were deleted.

        A finished run with deleted checkpoints trains again from step 1, such as for more steps.
        """
        deleted = not (self.folder(run) / CHECKPOINTS).exists()
        keep = self.plan.keep_weights_in(run.phase)
        return keep != "all" and deleted and self.line(run) is not None

    def lacks_benchmarks(self, run: Run) -> bool:
        """Return whether the run must still be evaluated on the plan's benchmarks.

        A tuning run must be only if its value is chosen by a benchmark.
        """
        benchmarks = self.plan.benchmarks
        if benchmarks is None:
            return False
        objective = self.plan.objective_of(run.method)
        if run.phase == TUNE and not needs_benchmarks(objective, benchmarks.sets):
            return False
        file = self.folder(run) / BENCHMARKS / RESULTS
        if not file.is_file():
            return True
        results = parse_json(file.read_bytes(), str(file))
        settings = results["settings"]
        samples = settings["num_samples"], settings.get("sample_limit") or 0
        same_samples = samples == (benchmarks.samples, benchmarks.sample_limit)
        return not same_samples or len(results["benchmarks"]) < len(benchmarks.names)

    def chosen(self, regime: str, name: str) -> str:
        """Return the best value of a method by its objective; "" if it has no points."""
        if not self.plan.methods[name].points:
            return ""
        if (regime, name) not in self._chosen:
            self._chosen[regime, name] = self._best(self.plan.tuned_in(regime, name), name)
        return self._chosen[regime, name]

    def forget_choices(self) -> None:
        """Choose values again from the lines that have been written since."""
        self._chosen.clear()

    def _best(self, regime: str, name: str) -> str:
        known = {point.value for point in self.plan.points(regime, name)}
        lines = [
            line
            for line in self.lines(TUNE)
            if (line["regime"], line["method"]) == (regime, name)
            and line["value"] in known
            and line.get("knobs")
            == self.plan.method_knobs(regime, name, line["value"], self.chosen)
        ]
        if not lines:
            where = f"{regime}, {name}" if self.plan.has_regimes else name
            raise NotTuned(
                f"{where}: no tuning run has finished; run --phase {TUNE} --method {name} first"
            )
        return best_value(lines, self.plan.objective_of(name))

    def _matches(self, phase: str, line: Line) -> bool:
        """Return whether the plan would make this line: tuning may have chosen another value."""
        if self.plan.phases[phase].recorded:
            return True
        regime, name, value = line["regime"], line["method"], line["value"]
        if regime not in self.plan.regimes or name not in self.plan.methods:
            return False
        if self.plan.methods[name].recorded:
            return True
        if self.plan.methods[name] not in self.plan.methods_in(regime):
            return False
        try:
            knobs = self.plan.method_knobs(regime, name, value, self.chosen)
            return value in self.values(phase, regime, name) and line.get("knobs") == knobs
        except NotTuned:
            return False


class NotTuned(UserError):
    """The value of a method is not chosen yet, because its tuning runs are not finished."""


def line_key(line: Line) -> tuple[str, str, str, int]:
    return line["regime"], line["method"], line["value"], line["seed"]


def folder_name(text: str) -> str:
    """Return a readable name, with a digest if characters had to be replaced or cut off."""
    safe = re.sub(r"[^A-Za-z0-9._+=,-]", "_", text)
    if safe == text and len(safe) <= MAX_NAME_LENGTH:
        return safe
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{safe[: MAX_NAME_LENGTH - 9]}-{digest}"
