"""The command line: parse, call, print. Heavy imports wait inside the commands, so that --help is quick."""

from __future__ import annotations

import contextlib
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eepo.runs.progress import Progress
from eepo.types import UserError

if TYPE_CHECKING:
    from eepo.reports import Run

app = typer.Typer(
    name="eepo",
    help="Reinforcement learning with verifiable rewards that explores: sample, forget, sample again.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

Recipe = Annotated[
    str, typer.Argument(help="A TOML file, or a shipped recipe by name, such as `countdown/eepo`.")
]
Recipes = Annotated[
    list[str],
    typer.Argument(help="TOML files or shipped recipes by name; the first is the baseline."),
]
Out = Annotated[Path, typer.Option("--out", help="The run's folder.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="Change one knob of the recipe; repeatable."),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run in --out, from its newest checkpoint.")
]
Measure = Annotated[str, typer.Option("--measure", help="greedy, mean, distinct or pass@K.")]
On = Annotated[
    str,
    typer.Option(
        "--on", metavar="SET", help="The evaluation set it is on; default: average of all."
    ),
]
Line = Annotated[
    list[Path] | None,
    typer.Option(
        "--line", metavar="RUN", help="A run, or a folder of its seeds, as a dashed line."
    ),
]
Seeds = Annotated[
    int,
    typer.Option(
        "--seeds", min=1, help="How many seeds for each recipe, from the recipe's own on."
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"eepo {version('eepo')}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version, and end."
        ),
    ] = False,
) -> None:
    """What goes without a command."""


@app.command()
def demo(out: Out = Path("runs/demo"), seeds: Seeds = 1, overrides: Overrides = None) -> None:
    """Train a small policy with GRPO and with EEPO on the CPU, compare them, and write a page with pictures."""
    progress = Progress()
    progress.say(
        "Countdown: from four numbers, write an expression that hits the target. Same policy, prompts and seeds."
    )
    _compare(["demo/grpo", "demo/eepo"], seeds, out, overrides, progress)


@app.command()
def warmup(recipe: Recipe, out: Out, overrides: Overrides = None, resume: Resume = False) -> None:
    """Teach a model a task's own demonstrations before reinforcement: from scratch, or a base model."""
    from eepo import assemble
    from eepo.recipe import load_warmup

    progress = Progress()
    _say_start(out, resume, progress)
    final = assemble.build_warmup(load_warmup(recipe, overrides or ()), out, resume, progress).run()
    progress.say(f"weights: {final}")


@app.command()
def train(recipe: Recipe, out: Out, overrides: Overrides = None, resume: Resume = False) -> None:
    """Train one recipe. Stop it at any time; --resume goes on as if it had never stopped."""
    from eepo import assemble
    from eepo.recipe import load_run

    progress = Progress()
    _say_start(out, resume, progress)
    final = assemble.build_trainer(load_run(recipe, overrides or ()), out, resume, progress).run()
    progress.say(f"weights: {final}")
    progress.say(f"see it with: eepo report {out} --out report.html")


@app.command()
def doctor(
    recipe: Recipe,
    overrides: Overrides = None,
    samples: Annotated[
        int, typer.Option("--samples", min=1, max=1024, help="Prompts to sample completions for.")
    ] = 8,
    device: Annotated[
        str, typer.Option("--device", help="auto, cpu, cuda or cuda:N; empty: the recipe's.")
    ] = "",
) -> None:
    """Check a recipe before hours are spent: model, data, prompt, gold answers, memory and a few samples."""
    from eepo.experiments.doctor import examine

    progress = Progress()
    levels = []
    for finding in examine(
        recipe, [*(overrides or ()), *([f"model.device={device}"] if device else ())], samples
    ):
        progress.say(finding.line())
        levels.append(finding.level)
    progress.say(f"{levels.count('fail')} failed, {levels.count('warn')} to look at")
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
            help="Every other recipe trains for as many seconds as the first one took.",
        ),
    ] = False,
) -> None:
    """Train recipes over seeds at equal rollouts, or equal time; print means with 95 % intervals, write a report."""
    _compare(recipes, seeds, out, overrides, Progress(), equal_time)


@app.command()
def sweep(
    recipe: Recipe,
    grid: Annotated[
        list[str],
        typer.Option("--grid", metavar="A.B=X,Y", help="A knob and its values; repeatable."),
    ],
    out: Annotated[Path, typer.Option("--out", help="The sweep's folder.")],
    seeds: Seeds = 3,
    overrides: Overrides = None,
    jobs: Annotated[
        int, typer.Option("--jobs", min=0, help="Runs at a time; 0: one a GPU, or two cores each.")
    ] = 0,
    measure: Measure = "mean",
    on: On = "",
    line: Line = None,
) -> None:
    """Train a recipe over a grid of knobs and seeds, several at a time. Stopped, it goes on with the same command."""
    from eepo.experiments.sweep import check_set, plan, run_sweep
    from eepo.reports.sweep_tables import check_measure, make_scale, read_method

    planned = plan(recipe, overrides or (), grid, seeds, out)
    check_measure(measure, planned.base.evaluation.num_samples)
    check_set(planned, on)
    lines = [run for folder in line or () for run in read_method(folder)]
    if lines:
        make_scale(lines, measure, on)  # a line that cannot be drawn is a mistake to know of now
    progress = Progress()
    failed = run_sweep(planned, jobs, progress)
    _swept(out, lines, measure, on, progress)
    for title, why in failed.items():
        progress.say(f"failed: {title}: {why}")
    if failed:
        progress.say(
            f"{len(failed)} of {len(planned.runs)} runs failed; the same command tries them again"
        )
        raise typer.Exit(1)


@app.command()
def hyper(
    sweeps: Annotated[list[Path], typer.Argument(help="Folders of sweeps, one panel each.")],
    out: Annotated[
        Path, typer.Option("--out", help="The picture; written as PNG and as SVG.")
    ] = Path("hyper.png"),
    measure: Measure = "mean",
    on: On = "",
    line: Line = None,
) -> None:
    """Draw a measure against the knob of each sweep, and other methods as dashed lines across."""
    from eepo.reports.sweep_figure import write_hyper
    from eepo.reports.sweep_tables import make_scale, read_method, read_sweep

    results = [read_sweep(folder) for folder in sweeps]
    lines = [run for folder in line or () for run in read_method(folder)]
    scale = make_scale([*(run for result in results for run in result.runs), *lines], measure, on)
    files = write_hyper(results, lines, scale, out)
    Progress().say(f"figure: {', '.join(map(str, files))}")


@app.command()
def grade(
    file: Annotated[Path, typer.Argument(help='Lines {"gold": ..., "completion": ...}.')],
    out: Annotated[
        Path | None, typer.Option("--out", help="Where to write; the standard output by default.")
    ] = None,
    reward: Annotated[str, typer.Option(help="math, exact, or your own module:function.")] = "math",
    workers: Annotated[
        int, typer.Option(min=0, max=256, help="Processes; 0: one for each core, at most 8.")
    ] = 0,
) -> None:
    """Grade completions in processes that can be killed: the same lines, with "correct" and "reason", in order."""
    from rich.console import Console

    from eepo.config import RewardConfig
    from eepo.evaluation.grading import count_lines, grade_file, writing
    from eepo.rewards import build_grader

    progress, total = Progress(Console(stderr=True)), count_lines(file)
    grader = build_grader(RewardConfig(name=reward, num_workers=workers))
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(writing(out))
        bar = stack.enter_context(progress.bar(f"grade {file.name}", total))
        num_correct, num_lines = grade_file(file, stream, grader, bar.advance)
    progress.say(f"{num_correct} of {num_lines} correct")


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of runs, or of a comparison or a sweep; a recipe's name tells methods apart."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one self-contained page of tables and figures from the folders of runs."""
    _report(runs, out, Progress())


@app.command()
def watch(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of runs, or of a comparison or a sweep; they may be empty yet."
        ),
    ],
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="On this machine alone; 0: any.")
    ] = 8642,
    interval: Annotated[
        float, typer.Option("--interval", min=0.5, max=3600, help="Seconds between two looks.")
    ] = 5,
) -> None:
    """Serve the report of runs to a browser on this machine, and keep it up to date as steps arrive."""
    from eepo.reports.watch import Watched, WatchServer

    with (
        WatchServer(Watched(runs), port, interval) as server,
        contextlib.suppress(KeyboardInterrupt),
    ):
        Progress().say(
            f"watching {', '.join(map(str, runs))} at {server.url} (Ctrl-C ends this, not the run)"
        )
        server.serve_forever()


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="A hub name, a folder, or a run: its last weights.")],
    benchmarks: Annotated[
        str, typer.Option("--benchmarks", help="Names or files of problems, with commas.")
    ],
    data_dir: Annotated[
        str, typer.Option("--data-dir", help="Folder of the benchmarks' files; else the hub.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option("--out", help="Default: evaluations/ and the model's name.")
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", min=0, help="Drawn for each problem, for pass@k.")
    ] = 0,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="Of the samples; default 1.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the samples.")] = 0,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 4096,
    max_prompt_tokens: Annotated[
        int, typer.Option("--max-prompt-tokens", min=1, help="Longer: left out.")
    ] = 1024,
    limit: Annotated[
        int, typer.Option("--limit", min=0, help="Only the first problems of each; 0: all.")
    ] = 0,
    template: Annotated[
        str | None,
        typer.Option(
            "--template", help="boxed, chat, or a text with {problem}; default: a run's own."
        ),
    ] = None,
    reward: Annotated[
        str, typer.Option("--reward", help="The grader: math, exact or module:function.")
    ] = "math",
    max_rows: Annotated[
        int, typer.Option("--max-rows", min=1, help="Completions sampled at the same time.")
    ] = 128,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    revision: Annotated[str, typer.Option("--revision", help="Of a hub model.")] = "main",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the model's own code.")
    ] = False,
) -> None:
    """Evaluate on maths benchmarks: greedy pass@1, and pass@k of samples. Stopped, it goes on with the same command."""
    if temperature is not None and (not samples or not 0 < temperature < float("inf")):
        raise UserError(
            f"--temperature {temperature} must be > 0 and goes with --samples; without them it is greedy"
        )
    from eepo import assemble
    from eepo.evaluation.benchmark_run import BenchmarkOptions
    from eepo.reports.benchmark_tables import (
        measures_grid,
        model_label,
        read_result,
        terminal,
        write_tables,
    )

    names = tuple(name.strip() for name in benchmarks.split(",") if name.strip())
    options = BenchmarkOptions(
        model=model,
        benchmarks=names,
        data_dir=data_dir,
        num_samples=samples,
        temperature=1.0 if temperature is None else temperature,
        seed=seed,
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=max_prompt_tokens,
        limit=limit,
        template=template,
        reward=reward,
        max_rows=max_rows,
        device=device,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    progress, folder = Progress(), out or Path("evaluations") / model_label(model)
    found = assemble.build_evaluation(options, folder, progress).run()
    files = [found, *write_tables([folder], folder)]
    progress.console.print(terminal(measures_grid(read_result(folder)), progress.console.width))
    progress.say(f"results: {', '.join(map(str, files))}; completions: {folder / 'completions'}")


@app.command()
def table(
    folders: Annotated[
        list[str], typer.Argument(help="Evaluations, in the order of the rows; or LABEL=FOLDER.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder of the tables.")] = Path("tables"),
) -> None:
    """Put evaluations of several models into one table, in Markdown and LaTeX."""
    from eepo.reports.benchmark_tables import accuracy_grid, read_result, terminal, write_tables

    progress = Progress()
    files = write_tables(folders, out)
    grid = accuracy_grid([read_result(folder) for folder in folders])
    progress.console.print(terminal(grid, progress.console.width))
    progress.say(f"tables: {', '.join(map(str, files))}")


@app.command("export-verl")
def export_verl(recipe: Recipe, overrides: Overrides = None) -> None:
    """Print a recipe as a command line for verl (`pip install 'eepo[verl]'`), for clusters: the same numbers there."""
    from eepo.adapters.verl.export import command_line
    from eepo.recipe import load_run

    print(command_line(load_run(recipe, overrides or ())))


def _say_start(out: Path, resume: bool, progress: Progress) -> None:
    """--resume is no mistake where nothing is yet, for scripts that always give it; but --out may be misspelt."""
    if resume and not (out / "recipe.toml").exists():
        progress.say(f"no run in {out} yet: starts at step 1")


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

    folders = compare(
        [load_run(name, overrides or ()) for name in names], seeds, out, progress, equal_time
    )
    _report(folders, out / "report.html", progress)


def _swept(out: Path, lines: list[Run], measure: str, on: str, progress: Progress) -> None:
    from eepo.reports import comparison_rows, terminal_table
    from eepo.reports.sweep_figure import write_hyper
    from eepo.reports.sweep_tables import make_scale, read_sweep, sweep_sentences, write_tables

    result = read_sweep(out)
    if not result.runs:
        return
    scale = make_scale([*result.runs, *lines], measure, on)
    files = write_tables(result, scale, lines) + write_hyper(
        [result], lines, scale, out / "sweep.png"
    )
    progress.console.print(terminal_table(comparison_rows(result.runs)))
    for sentence in sweep_sentences(result, scale, lines):
        progress.say(sentence)
    progress.say(f"sweep: {', '.join(map(str, files))}")


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
    progress.console.print(terminal_table(comparison_rows(runs)))
    for sentence in summary_sentences(runs):
        progress.say(sentence)
    progress.say(f"report: {page.resolve()}")


def main() -> None:
    """User errors become one line; everything else is a bug and keeps its traceback."""
    try:
        app()
    except UserError as error:
        print(f"eepo: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
