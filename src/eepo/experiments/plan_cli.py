"""Defines the commands `eepo plan run`, `show`, `tables` and `figures`.

Heavy imports such as torch happen inside the commands, so that `--help` is fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eepo.runs.progress import Progress
from eepo.types import UserError

if TYPE_CHECKING:
    from eepo.experiments.experiment import Experiment
    from eepo.experiments.plan import Selection

app = typer.Typer(
    help="Run an experiment of many runs that a TOML plan describes (docs/experiments.md).",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A TOML plan.")]
Out = Annotated[Path, typer.Option("--out", help="Folder of the experiment.")]
Phases = Annotated[
    list[str] | None, typer.Option("--phase", metavar="NAME", help="Only this phase; repeatable.")
]
Regimes = Annotated[
    list[str] | None, typer.Option("--regime", metavar="NAME", help="Only this regime; repeatable.")
]
Methods = Annotated[
    list[str] | None, typer.Option("--method", metavar="NAME", help="Only this method; repeatable.")
]
Seeds = Annotated[
    list[int] | None, typer.Option("--seed", metavar="N", help="Only this seed; repeatable.")
]


@app.command()
def run(
    plan: PlanFile,
    out: Out,
    phase: Phases = None,
    regime: Regimes = None,
    method: Methods = None,
    seed: Seeds = None,
    jobs: Annotated[
        int,
        typer.Option("--jobs", min=0, help="Parallel runs; 0: one per GPU, else one per 2 cores."),
    ] = 0,
) -> None:
    """Run everything that is not done, then write the plan's tables and figures.

    The same command continues, and tries failures again.
    """
    from eepo.experiments.plan_reports import write_reports
    from eepo.experiments.runner import make_schedule, run_in_processes
    from eepo.experiments.starts import train_starts

    progress = Progress()
    experiment = _experiment(plan, out)
    selection = _selection(phase, regime, method, seed)
    make_schedule(experiment, selection)  # finds mistakes before a warm start
    train_starts(experiment, selection, progress)
    outcome = run_in_processes(experiment, selection, jobs, progress, plan.stem)
    for line in outcome.failure_lines():
        progress.print(line)
    try:
        for file in write_reports(experiment):
            progress.print(f"wrote {file}")
    except UserError as error:  # such as a figure that needs more samples
        progress.print(f"note: not all tables and figures were written: {error}")
    if outcome.failed:
        raise typer.Exit(1)
    progress.print(f"{outcome.num_done} of {outcome.num_runs} runs are finished")


@app.command()
def show(
    plan: PlanFile,
    out: Out,
    phase: Phases = None,
    regime: Regimes = None,
    method: Methods = None,
    seed: Seeds = None,
    commands: Annotated[
        bool, typer.Option("--commands", help="Print the command of every run that is left.")
    ] = False,
) -> None:
    """Print what is done, running, failed and left, and the values that tuning chose."""
    from eepo.experiments.status import command_lines, status_lines

    progress, experiment = Progress(), _experiment(plan, out)
    lines = command_lines if commands else status_lines
    for line in lines(experiment, _selection(phase, regime, method, seed)):
        progress.print(line)


@app.command()
def tables(
    plan: PlanFile,
    out: Out,
    phase: Phases = None,
    regime: Regimes = None,
    method: Methods = None,
    against: Annotated[
        str,
        typer.Option(
            metavar="METHOD",
            help="What differences are to: METHOD or 'METHOD VALUE'; default: the first method.",
        ),
    ] = "",
) -> None:
    """Print tables in Markdown, with differences paired by seed and 95 % intervals.

    Without options, print those that the plan lists.
    """
    from eepo.experiments.plan_reports import plan_tables

    print(plan_tables(_experiment(plan, out), _selection(phase, regime, method), against), end="")


@app.command()
def figures(
    plan: PlanFile,
    out: Out,
    into: Annotated[Path, typer.Option("--into", help="Folder for the PNG files.")],
    phase: Phases = None,
    regime: Regimes = None,
    method: Methods = None,
    figure: Annotated[
        list[str] | None,
        typer.Option("--figure", metavar="KIND", help="Only this kind; repeatable."),
    ] = None,
) -> None:
    """Draw figures. Without --phase, --regime and --method, draw those that the plan lists."""
    from eepo.experiments.plan_reports import write_plan_figures

    selection = _selection(phase, regime, method)
    files = write_plan_figures(_experiment(plan, out), selection, figure or (), into)
    Progress().print(f"figures: {', '.join(map(str, files))}")


def _experiment(plan: Path, out: Path) -> Experiment:
    from eepo.experiments.experiment import Experiment
    from eepo.experiments.plan_file import read_plan

    return Experiment(read_plan(plan), out)


def _selection(
    phases: list[str] | None,
    regimes: list[str] | None,
    methods: list[str] | None,
    seeds: list[int] | None = None,
) -> Selection:
    from eepo.experiments.plan import Selection

    return Selection(
        tuple(phases or ()), tuple(regimes or ()), tuple(methods or ()), tuple(seeds or ())
    )
