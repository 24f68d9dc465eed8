"""The command line: parse, call, print. Heavy imports wait inside the commands, so that --help is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from eepo.progress import Progress
from eepo.types import UserError

app = typer.Typer(
    name="eepo",
    help="Reinforcement learning with verifiable rewards that explores: sample, forget, sample again.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

Recipe = Annotated[str, typer.Argument(help="A TOML file, or a shipped recipe by name, such as `countdown/eepo`.")]
Recipes = Annotated[list[str], typer.Argument(help="TOML files or shipped recipes by name; the first is the baseline.")]
Out = Annotated[Path, typer.Option("--out", help="The run's folder.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="Change one knob of the recipe; repeatable.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out, from its newest checkpoint.")]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="How many seeds for each recipe, from the recipe's own on.")]


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
    final = assemble.build_warmup(load_warmup(recipe, overrides or ()), out, resume, progress).run()
    progress.say(f"weights: {final}")


@app.command()
def train(recipe: Recipe, out: Out, overrides: Overrides = None, resume: Resume = False) -> None:
    """Train one recipe. Stop it at any time; --resume goes on as if it had never stopped."""
    from eepo import assemble
    from eepo.recipe import load_run

    progress = Progress()
    final = assemble.build_trainer(load_run(recipe, overrides or ()), out, resume, progress).run()
    progress.say(f"weights: {final}")
    progress.say(f"see it with: eepo report {out} --out report.html")


@app.command()
def compare(recipes: Recipes, out: Out, seeds: Seeds = 3, overrides: Overrides = None) -> None:
    """Train recipes over seeds at equal rollouts; print means with 95 % intervals, and write a report."""
    _compare(recipes, seeds, out, overrides, Progress())


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs; methods are told apart by their recipe's name.")],
    out: Annotated[Path, typer.Option("--out", help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one self-contained page of tables and figures from the folders of runs."""
    _report(runs, out, Progress())


def _compare(names: list[str], seeds: int, out: Path, overrides: list[str] | None, progress: Progress) -> None:
    from eepo.comparison import compare
    from eepo.recipe import load_run

    folders = compare([load_run(name, overrides or ()) for name in names], seeds, out, progress)
    _report(folders, out / "report.html", progress)


def _report(folders: list[Path], out: Path, progress: Progress) -> None:
    from eepo.reports import comparison_rows, read_run, summary_sentences, terminal_table, write_report

    runs = [read_run(folder) for folder in folders]
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
