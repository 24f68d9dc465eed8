"""Shows how far an experiment is: done, running, failed, waiting, and the values it has chosen."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from eepo.experiments.experiment import Experiment, NotTuned, Run
from eepo.experiments.folder_lock import running_titles
from eepo.experiments.plan import TUNE, Selection
from eepo.experiments.runner import FAILED, train_command
from eepo.experiments.schedule import Schedule
from eepo.runs.jsonl import read_records
from eepo.runs.runlog import METRICS


def status_lines(experiment: Experiment, selection: Selection) -> Iterator[str]:
    """Yield lines for a terminal."""
    schedule = Schedule(experiment, selection)
    running = set(running_titles(experiment.out))
    known = schedule.known_runs()
    left = [run for run in known if run not in schedule.done]
    active = [run for run in left if experiment.title(run) in running]
    failed = [run for run in left if run not in active and _failure(experiment, run)]
    num_left = schedule.num_runs - len(schedule.done) - len(active) - len(failed)
    yield (
        f"{experiment.plan.source}: {schedule.num_runs} runs: {len(schedule.done)} done, "
        f"{len(active)} running, {len(failed)} failed, {num_left} left"
    )
    yield from _phase_lines(schedule)
    for run in active:
        yield f"running: {experiment.title(run)}, {_progress(experiment, run)}"
    for run in failed:
        yield f"failed: {experiment.title(run)}: {_failure(experiment, run)}"
    yield from _choice_lines(experiment, selection)


def _phase_lines(schedule: Schedule) -> Iterator[str]:
    """Yield how many runs are done, for every phase and regime with runs that are left."""
    totals: dict[tuple[str, str], int] = {}
    done: dict[tuple[str, str], int] = {}
    for slot in schedule.slots:
        key = slot.phase, slot.regime
        totals[key] = totals.get(key, 0) + schedule.num_runs_of(slot)
    for run in schedule.done:
        key = run.phase, run.regime
        done[key] = done.get(key, 0) + 1
    for (phase, regime), total in totals.items():
        name = f"{phase}, {regime}" if regime else phase
        yield f"  {name}: {done.get((phase, regime), 0)} of {total} done"


def _choice_lines(experiment: Experiment, selection: Selection) -> Iterator[str]:
    """Yield the chosen value of every tuned method, and of regimes that differ."""
    plan = experiment.plan
    for method in plan.methods.values():
        if not method.is_tuned or method.recorded:
            continue
        if selection.methods and method.name not in selection.methods:
            continue
        chosen: dict[str, list[str]] = {}
        for regime in selection.regimes or plan.regimes:
            if method in plan.methods_in(regime):
                chosen.setdefault(_choice(experiment, regime, method.name), []).append(regime)
        knob = method.tuned_knob or "grid"
        values = [
            f"{value} ({', '.join(regimes)})" if plan.has_regimes else value
            for value, regimes in chosen.items()
        ]
        yield f"chosen: {method.name}, {knob}: {'; '.join(values)}"


def _choice(experiment: Experiment, regime: str, name: str) -> str:
    try:
        return experiment.chosen(regime, name)
    except NotTuned:
        return f"no finished {TUNE} run"


def _failure(experiment: Experiment, run: Run) -> str:
    path = experiment.folder(run) / FAILED
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def _progress(experiment: Experiment, run: Run) -> str:
    path: Path = experiment.folder(run) / METRICS
    step = max((row["step"] for row in read_records(path)), default=0) if path.is_file() else 0
    return f"step {step} of {experiment.config(run).training.num_steps}"


def command_lines(experiment: Experiment, selection: Selection) -> Iterator[str]:
    """Yield the training command of every run that is left and whose values are chosen."""
    schedule = Schedule(experiment, selection)
    for run in schedule.known_runs():
        if run not in schedule.done:
            yield shlex.join(train_command(experiment, run))
