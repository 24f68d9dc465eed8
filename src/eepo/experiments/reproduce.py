"""Runs a reproduction of the paper: plans, trains, evaluates, and writes the results.

The plan is written to OUT/plan.toml and run by the runner of all experiments. So the same command
continues, and `eepo plan show`, `tables` and `figures` work on it.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

from eepo.evaluation.options import option_name
from eepo.experiments.draft import PLAN
from eepo.experiments.folder_lock import locked_folder
from eepo.experiments.plan import REPORT, Selection
from eepo.experiments.reproduce_options import ReproduceOptions
from eepo.experiments.reproduce_plan import Reproduction
from eepo.experiments.reproduce_results import write_results
from eepo.experiments.runner import Outcome, make_schedule, prepare, run_in_processes
from eepo.experiments.status import command_lines
from eepo.experiments.toml_tables import dump_tables
from eepo.model import loading
from eepo.rewards import build_reward
from eepo.runs.progress import Progress
from eepo.runs.runlog import write_atomically
from eepo.tasks import build_task
from eepo.types import UserError


def reproduce(
    reproductions: Sequence[Reproduction], num_jobs: int, progress: Progress
) -> list[Outcome]:
    """Run all experiments, one after another, and write their results."""
    for reproduction in reproductions:  # a mistake is found before the first run
        check(reproduction)
    outcomes = []
    for reproduction in reproductions:
        _write_plan(reproduction)
        title = f"paper/{reproduction.target.name}"
        experiment = reproduction.experiment()
        outcomes.append(run_in_processes(experiment, Selection(), num_jobs, progress, title))
        if experiment.done(REPORT):
            report(reproduction, progress)
    return outcomes


def left_commands(reproduction: Reproduction) -> list[str]:
    """Return a training command for every run that is left and can start, to run it elsewhere.

    Runs that were trained so are recorded first: they may choose the values of others.
    """
    check(reproduction)
    _write_plan(reproduction)
    experiment = reproduction.experiment()
    with locked_folder(experiment.out):
        prepare(experiment, Selection())
    return list(command_lines(experiment, Selection()))


def check(reproduction: Reproduction) -> None:
    """Raise an error if a run cannot start: other settings in the folder, or missing data.

    Nothing is written. Data are not needed any more if all runs are finished.
    """
    config, schedule = reproduction.config, make_schedule(reproduction.experiment(), Selection())
    if len(schedule.done) == schedule.num_runs:
        return
    task = build_task(config.task, loading.load_tokenizer(config.model), config.training.seed)
    if not task.evaluation_sets():
        raise UserError(
            f"{reproduction.tables['recipe']}: the recipe has no evaluation sets, "
            "so there is nothing to put into a table"
        )
    reward = build_reward(config.reward, config.task)
    getattr(reward, "close", lambda: None)()


def report(reproduction: Reproduction, progress: Progress) -> list[Path]:
    """Write the results of the finished runs, and print where they are."""
    files = write_results(reproduction, command_line(reproduction))
    page, *others = files
    progress.print(f"results: {page}; {', '.join(str(file) for file in others)}")
    return files


def command_line(reproduction: Reproduction) -> str:
    """Return the command that made the results."""
    options, words = reproduction.options, ["eepo", "reproduce", reproduction.options.target]
    for field in dataclasses.fields(ReproduceOptions):
        value = getattr(options, field.name)
        if field.metadata.get("argument") or value in (field.default, (), None):
            continue
        if isinstance(value, list):
            words += [word for text in value for word in (option_name(field), text)]
        else:
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            words += [option_name(field), text]
    return shlex.join([*words, "--out", str(reproduction.out)])


def _write_plan(reproduction: Reproduction) -> None:
    folder = reproduction.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / PLAN, dump_tables(reproduction.tables))
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written ({error.strerror})") from error
