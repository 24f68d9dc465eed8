"""Defines the command line: each command parses its options, calls one function, prints the result.

Heavy imports such as torch happen inside the commands, so that `--help` is fast.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from eepo.adapters.verl.cluster import Cluster
from eepo.evaluation.options import BenchmarkOptions, option, option_name, split_names
from eepo.experiments import plan_cli
from eepo.experiments.reproduce_options import ReproduceOptions
from eepo.runs.memory_errors import check_limit, describe, is_out_of_memory
from eepo.runs.progress import Progress
from eepo.types import UserError, printable

if TYPE_CHECKING:
    from eepo.reports import Run

DEBUG_HINT = " (EEPO_DEBUG=1 shows the traceback)"
MEMORY_ADVICE = (
    "free memory or raise its limit, or lower model.micro_batch_tokens and rollout.max_rows; "
    "a run continues with --resume, and eepo doctor estimates what a recipe needs"
)

app = typer.Typer(
    name="eepo",
    help="An RLVR trainer for exploration: GRPO, and EEPO (sample, unlearn, sample again).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(plan_cli.app, name="plan")

Recipe = Annotated[
    str, typer.Argument(help="A TOML file, or the name of a shipped recipe, e.g. `countdown/eepo`.")
]
Recipes = Annotated[
    list[str],
    typer.Argument(help="TOML files or names of shipped recipes; the first is the baseline."),
]
Out = Annotated[Path, typer.Option("--out", help="Folder of the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="Change one knob of the recipe; repeatable."),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue the run in --out from its latest checkpoint.")
]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="With --resume: continue although all checkpoints are lost or another host may still "
        "write to --out. Copies of the records are kept.",
    ),
]
Seeds = Annotated[
    int,
    typer.Option("--seeds", min=1, help="Seeds per recipe; the first is the recipe's seed."),
]


@dataclass(frozen=True)
class PlotOptions:
    """Selects what the figure of a sweep shows."""

    measure: str = option("mean", help="greedy, mean, distinct or pass@K.")
    on: str = option("", metavar="SET", help="Evaluation set; default: the average of all sets.")
    line: list[Path] | None = option(  # noqa: RUF009 (it returns a dataclass field)
        None,
        metavar="RUN",
        help="A run, or a folder with its seeds, drawn as a dashed line; repeatable.",
    )

    def line_runs(self) -> list[Run]:
        from eepo.reports.sweep_tables import read_method

        return [run for folder in self.line or () for run in read_method(folder)]


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each dataclass parameter of a command by one option per field of the dataclass.

    The fields are declared with `eepo.evaluation.options.option`. Typer finds the options in the
    signature of the returned function.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += _field_parameters(parameter.annotation)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def call(**values: Any) -> None:
        for name, group in groups.items():
            settings = {field.name: values.pop(field.name) for field in fields(group)}
            for field in fields(group):
                if parse := field.metadata.get("parse"):
                    settings[field.name] = parse(settings[field.name])
            values[name] = group(**settings)
        command(**values)

    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call


def _field_parameters(options: Any) -> Iterator[inspect.Parameter]:
    types = get_type_hints(options)
    for field in fields(options):
        settings = dict(field.metadata)
        value_type = str if settings.pop("parse", None) else types[field.name]
        settings.pop("name", None)
        if settings.pop("argument", False):
            declaration: Any = typer.Argument(**settings)
        else:
            declaration = typer.Option(option_name(field), **settings)
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=Annotated[value_type, declaration],
        )


def _print_version(requested: bool) -> None:
    if requested:
        print(f"eepo {version('eepo')}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Define the options that need no command."""


@app.command()
def demo(out: Out = Path("runs/demo"), seeds: Seeds = 1, overrides: Overrides = None) -> None:
    """Train a small policy with GRPO and EEPO on the CPU, and write a report that compares them."""
    progress = Progress()
    progress.print(
        "Shortcut: add digits modulo 10. The policy guesses, which is right 10 % of the time; "
        "with probability 1e-5 it computes, which is always right. Which method learns to compute? "
        "Both start from the same policy and see the same prompts."
    )
    _compare(["demo/grpo", "demo/eepo"], seeds, out, overrides, progress)


@app.command()
def warmup(
    recipe: Recipe,
    out: Out,
    overrides: Overrides = None,
    resume: Resume = False,
    force: Force = False,
) -> None:
    """Supervised warm start: train a new or a base model on demonstrations of a task."""
    from eepo import assemble
    from eepo.api import print_if_nothing_to_resume
    from eepo.recipe import load_warmup

    progress = Progress()
    print_if_nothing_to_resume(out, resume, progress)
    config = load_warmup(recipe, overrides or ())
    final = assemble.build_warmup(config, out, resume, progress, force).run()
    progress.print(f"weights: {final}")


@app.command()
def train(
    recipe: Recipe,
    out: Out,
    overrides: Overrides = None,
    resume: Resume = False,
    force: Force = False,
) -> None:
    """Train one recipe. It may be stopped at any time; --resume continues as if never stopped."""
    from eepo import api

    api.train(recipe, out, set=overrides, resume=resume, force=force)


@app.command()
def doctor(
    recipe: Recipe,
    overrides: Overrides = None,
    samples: Annotated[
        int, typer.Option("--samples", min=1, max=1024, help="Prompts to sample completions for.")
    ] = 8,
    device: Annotated[
        str, typer.Option("--device", help="auto, cpu, cuda or cuda:N; default: the recipe's.")
    ] = "",
) -> None:
    """Check a recipe before a long run: model, data, prompts, gold answers, memory, samples."""
    from eepo.experiments.doctor import examine

    progress = Progress()
    changes = [*(overrides or ()), *([f"model.device={device}"] if device else ())]
    levels = []
    for finding in examine(recipe, changes, samples):
        progress.print(finding.line())
        levels.append(finding.level)
    progress.print(f"{levels.count('fail')} failed, {levels.count('warn')} warnings")
    if "fail" in levels:
        raise typer.Exit(1)


@app.command()
def compare(
    recipes: Recipes,
    out: Out,
    seeds: Seeds = 3,
    overrides: Overrides = None,
    equal_time: Annotated[
        bool,
        typer.Option(
            "--equal-time",
            help="Train every other recipe for as many seconds as the first one took.",
        ),
    ] = False,
) -> None:
    """Train recipes over seeds at equal rollouts or time; print 95 % intervals, write a report."""
    _compare(recipes, seeds, out, overrides, Progress(), equal_time)


@app.command()
@with_options
def sweep(
    recipe: Recipe,
    grid: Annotated[
        list[str],
        typer.Option("--grid", metavar="A.B=X,Y", help="A knob and its values; repeatable."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder of the sweep.")],
    plot: PlotOptions,
    seeds: Seeds = 3,
    overrides: Overrides = None,
    jobs: Annotated[
        int,
        typer.Option("--jobs", min=0, help="Parallel runs; 0: one per GPU, else one per 2 cores."),
    ] = 0,
) -> None:
    """Train a recipe over a grid of knobs and seeds. The same command continues a stopped sweep."""
    from eepo.experiments.sweep import check_set, plan_sweep, run_sweep
    from eepo.reports.sweep_tables import check_measure, make_criterion

    objective = f"{plot.on}/{plot.measure}" if plot.on else plot.measure
    planned = plan_sweep(recipe, overrides or (), grid, seeds, out, objective)
    check_measure(plot.measure, planned.base.evaluation.num_samples)
    check_set(planned, plot.on)
    line_runs = plot.line_runs()
    if line_runs:  # fail now, not after the sweep, if a line cannot be drawn
        make_criterion(line_runs, plot.measure, plot.on)
    progress = Progress()
    outcome = run_sweep(planned, jobs, progress)
    _write_sweep(out, line_runs, plot, progress)
    for line in outcome.failure_lines():
        progress.print(line)
    if outcome.failed:
        raise typer.Exit(1)


@app.command()
@with_options
def hyper(
    sweeps: Annotated[list[Path], typer.Argument(help="Folders of sweeps, one panel each.")],
    plot: PlotOptions,
    out: Annotated[
        Path, typer.Option("--out", help="The figure; written as PNG and as SVG.")
    ] = Path("hyper.png"),
) -> None:
    """Plot a measure against the knob of each sweep, with other methods as dashed lines."""
    from eepo.reports.sweep_figure import write_sweep_figure
    from eepo.reports.sweep_tables import make_criterion, read_sweep

    results = [read_sweep(folder) for folder in sweeps]
    line_runs = plot.line_runs()
    all_runs = [*(run for result in results for run in result.runs), *line_runs]
    criterion = make_criterion(all_runs, plot.measure, plot.on)
    files = write_sweep_figure(results, line_runs, criterion, out)
    Progress().print(f"figure: {', '.join(map(str, files))}")


@app.command()
@with_options
def reproduce(
    options: ReproduceOptions,
    out: Annotated[Path, typer.Option("--out", help="Folder of the runs and the results.")],
    jobs: Annotated[
        int,
        typer.Option("--jobs", min=0, help="Parallel runs; 0: one per GPU, else one per 2 cores."),
    ] = 0,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Only print runs, estimated hours, memory, disk and downloads."
        ),
    ] = False,
    commands: Annotated[
        bool,
        typer.Option(
            "--commands", help="Only print the command of every run that is left and can start."
        ),
    ] = False,
    results: Annotated[
        bool, typer.Option("--results", help="Only write the results of the runs that are done.")
    ] = False,
) -> None:
    """Reproduce tables and figures of the paper (docs/reproduce.md). The same command continues."""
    from eepo.experiments import reproduce as reproduction
    from eepo.experiments.reproduce_plan import plan_reproductions

    progress, planned = Progress(), plan_reproductions(options, out)
    if dry_run:
        from eepo.experiments.reproduce_cost import estimate_lines

        for line in estimate_lines(planned):
            progress.print(line)
        return
    if commands:
        print("\n".join(line for one in planned for line in reproduction.left_commands(one)))
        return
    if results:
        for one in planned:
            reproduction.report(one, progress)
        return
    outcomes = reproduction.reproduce(planned, jobs, progress)
    for outcome in outcomes:
        for line in outcome.failure_lines():
            progress.print(line)
    if any(outcome.failed for outcome in outcomes):
        raise typer.Exit(1)


@app.command()
def convert(
    file: Annotated[Path, typer.Argument(help="A GGUF file of a Llama- or Qwen2-type model.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the model; it must not exist.")],
    sha256: Annotated[
        str, typer.Option("--sha256", metavar="HASH", help="Check the file's SHA-256 hash first.")
    ] = "",
) -> None:
    """Convert a GGUF file into a model folder in fp32, for `model.path` and transformers."""
    from eepo.model.gguf_convert import convert as convert_file

    convert_file(file, out, sha256)
    Progress().print(f"model: {out}")


@app.command()
def grade(
    file: Annotated[
        Path, typer.Argument(help='A JSON Lines file: {"gold": ..., "completion": ...}.')
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Output file; default: the standard output.")
    ] = None,
    reward: Annotated[
        str, typer.Option(help="math, guess_or_reason, exact, or your module:function.")
    ] = "math",
    workers: Annotated[
        int, typer.Option(min=0, max=256, help="Processes; 0: one per core, at most 8.")
    ] = 0,
) -> None:
    """Add "correct" and "reason" to each completion, graded in processes with a time limit."""
    from rich.console import Console

    from eepo.config import RewardConfig
    from eepo.evaluation.grading import count_lines, grade_file, open_output
    from eepo.rewards import build_grader, reward_columns

    progress, total = Progress(Console(stderr=True)), count_lines(file)
    grader = build_grader(RewardConfig(name=reward, num_workers=workers))
    with contextlib.ExitStack() as stack:
        write = stack.enter_context(open_output(out))
        bar = stack.enter_context(progress.bar(f"grade {file.name}", total))
        needs_gold = reward_columns(reward).gold
        num_correct, num_lines = grade_file(file, write, grader, bar.advance, needs_gold)
    progress.print(f"{num_correct} of {num_lines} correct")


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of runs, comparisons, sweeps or evaluations; runs are grouped by recipe."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="The HTML page.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page with the tables and figures of runs."""
    _report(runs, out, Progress())


@app.command()
def watch(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders of runs, comparisons or sweeps; they may still be empty."),
    ],
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Local port; 0: any free port.")
    ] = 8642,
    interval: Annotated[
        float, typer.Option("--interval", min=0.5, max=3600, help="Seconds between updates.")
    ] = 5,
) -> None:
    """Serve a live report of runs to a browser on this machine."""
    from eepo.reports.watch import LiveReport, WatchServer

    with (
        WatchServer(LiveReport(runs), port, interval) as server,
        contextlib.suppress(KeyboardInterrupt),
    ):
        folders = ", ".join(map(str, runs))
        Progress().print(
            f"watching {folders} at {server.url} (Ctrl-C stops watching, training continues)"
        )
        server.serve_forever()


@app.command("eval")
@with_options
def evaluate(
    options: BenchmarkOptions,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Output folder; default: evaluations/ and the name of the model or run."
        ),
    ] = None,
) -> None:
    """Evaluate a model or a run: greedy pass@1, and pass@k of samples.

    A run is evaluated as it was trained. The same command continues a stopped evaluation.
    """
    from eepo import api

    api.run_evaluation(options, out, Progress())


@app.command()
def table(
    folders: Annotated[
        list[str],
        typer.Argument(
            help="Folders of runs, comparisons or evaluations, in the order of the rows; or "
            "LABEL=FOLDER. Seeds of one method become one row."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for the tables.")] = Path("tables"),
    measure: Annotated[str, typer.Option("--measure", help="greedy, mean or pass@K.")] = "greedy",
    on: Annotated[
        str, typer.Option("--on", metavar="SETS", help="Evaluation sets, separated by commas.")
    ] = "",
) -> None:
    """Write the evaluations of runs and models into one table, in Markdown and LaTeX."""
    from eepo.reports.benchmark_results import read_results
    from eepo.reports.benchmark_tables import (
        comparison_table,
        format_terminal,
        parse_measure,
        write_benchmark_tables,
    )

    progress, key = Progress(), parse_measure(measure)
    results = read_results(folders, key, split_names(on))
    files = write_benchmark_tables(results, out, key)
    table = comparison_table(results, key)
    progress.console.print(format_terminal(table, progress.console.width))
    progress.print(f"tables: {', '.join(map(str, files))}")


@app.command("export-verl")
@with_options
def export_verl(
    recipe: Recipe,
    cluster: Cluster,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for data files, script, logs and checkpoints."),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Convert a recipe for training with verl (`pip install 'eepo[verl]'`).

    With --out, write Parquet files and a script. Otherwise print a command line.
    """
    from eepo.adapters.verl.export import command_line
    from eepo.recipe import load_run

    config = load_run(recipe, overrides or ())
    if out is None:
        print("\n".join(map(printable, command_line(config, cluster).splitlines())))
        return
    from eepo.adapters.verl.export_folder import export_folder

    progress, export = Progress(), export_folder(config, cluster, out)
    for note in export.notes:
        progress.print(f"note: {note}")
    progress.print(f"{export.num_train} training rows, {export.num_val} evaluation rows")
    progress.print(f"train with: bash {shlex.quote(str(export.script))}")


@app.command("import-verl")
def import_verl(
    checkpoint: Annotated[
        Path,
        typer.Argument(help="A folder of export-verl (its newest checkpoint), or a global_step_N."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Model folder; default: `final` in the run.")
    ] = None,
) -> None:
    """Merge the shards of a verl checkpoint into a model folder for `eepo eval`. Needs verl."""
    from eepo.adapters.verl.merge import merge_checkpoint

    folder = merge_checkpoint(checkpoint, out)
    progress = Progress()
    progress.print(f"weights: {folder}")
    progress.print(f"evaluate with: eepo eval {folder} --benchmarks math500")


def _compare(
    names: list[str],
    seeds: int,
    out: Path,
    overrides: list[str] | None,
    progress: Progress,
    equal_time: bool = False,
) -> None:
    from eepo.experiments.compare import compare
    from eepo.recipe import load_run

    configs = [load_run(name, overrides or ()) for name in names]
    folders = compare(configs, seeds, out, progress, equal_time)
    _report(folders, out / "report.html", progress)


def _write_sweep(out: Path, line_runs: list[Run], plot: PlotOptions, progress: Progress) -> None:
    from eepo.reports import comparison_rows, terminal_table
    from eepo.reports.sweep_figure import write_sweep_figure
    from eepo.reports.sweep_tables import (
        make_criterion,
        read_sweep,
        sweep_sentences,
        write_sweep_tables,
    )

    result = read_sweep(out)
    if not result.runs:
        progress.print(
            "no run has a full evaluation, so there is no table; "
            "it needs finished runs and a recipe with evaluation sets"
        )
        return
    criterion = make_criterion([*result.runs, *line_runs], plot.measure, plot.on)
    files = write_sweep_tables(result, criterion, line_runs)
    files += write_sweep_figure([result], line_runs, criterion, out / "sweep.png")
    progress.console.print(terminal_table(comparison_rows(result.runs)))
    for sentence in sweep_sentences(result, criterion, line_runs):
        progress.print(sentence)
    progress.print(f"sweep: {', '.join(map(str, files))}")


def _report(folders: list[Path], out: Path, progress: Progress) -> None:
    from eepo.reports import (
        comparison_rows,
        read_runs,
        summary_sentences,
        terminal_table,
        write_report,
    )

    runs = read_runs(folders)
    page = write_report(folders, out)
    for run in runs:
        for note in run.notes:
            progress.print(f"note: {run.folder / note}")
    progress.console.print(terminal_table(comparison_rows(runs)))
    for sentence in summary_sentences(runs):
        progress.print(sentence)
    progress.print(f"report: {page.resolve()}")


def main() -> None:
    """Run a command. Errors that are no bug become one line; EEPO_DEBUG=1 shows their traceback.

    These are user errors, and errors of the operating system such as a full disk or too little
    memory. Any other error is a bug, which keeps its traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may not know every character
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            check_limit()
            app()
        finally:
            sys.stdout.flush()  # here, because errors during the exit of Python have a traceback
    except (UserError, OSError, MemoryError, RuntimeError, ImportError) as error:
        line = _error_line(error)
        if line is None or os.environ.get("EEPO_DEBUG"):
            raise
        print(f"eepo: {line}", file=sys.stderr)
        _drop_output_that_cannot_be_written()
        sys.exit(2 if isinstance(error, UserError) else 1)


def _error_line(error: Exception) -> str | None:
    """Return the message for the user. Return None for a bug."""
    if isinstance(error, UserError):
        return str(error)
    if is_out_of_memory(error):
        sys.unraisablehook = lambda _: None  # without memory, libraries may also fail at the exit
        return f"{describe(error)}; {MEMORY_ADVICE}{DEBUG_HINT}"
    if not isinstance(error, OSError) or error.strerror is None:  # a library made it up
        return None
    name = "" if error.filename is None else f"{error.filename}: "
    return printable(f"{name}{error.strerror}") + DEBUG_HINT


def _drop_output_that_cannot_be_written() -> None:
    """Send the rest of the output to /dev/null. Else Python tries again to write it, and fails."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
