"""Writes the page of a reproduction: tables, figures, settings, hardware, times and choices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from eepo.reports.benchmark_tables import ResultTable, format_markdown
from eepo.reports.paper_figures import PaperFigure
from eepo.reports.records import Run, by_method
from eepo.reports.settings import differing_settings
from eepo.reports.tables import MISSING

# What the paper leaves open, what this project chose, and why. `docs/recipes.md` has more.
CHOICES = (
    (
        "seeds",
        "values of baselines are chosen on other seeds than those of the table",
        "The paper reports the best of several settings and names no seeds. Choosing and reporting "
        "on the same run would favour the baselines with more values.",
    ),
    (
        "tuning set",
        "the benchmarks of the table, by greedy accuracy",
        "As in the paper, whose figure of hyperparameters shows the average over the benchmarks.",
    ),
    (
        "values of the upper clip",
        "0.24, 0.28, 0.32",
        "The paper names none. 0.28 is DAPO's value.",
    ),
    (
        "in-distribution test set",
        "200 problems that are held out of the training set",
        "The paper shows a test set of MATH without naming it.",
    ),
    (
        "prompts",
        "`boxed` for base models, `chat` for instruct models (docs/data.md)",
        "The paper gives no prompt text.",
    ),
    ("grader", "ours (docs/grader.md)", "The paper does not name its grader."),
    (
        "gate",
        "single tokens, as in the equation for I_t",
        "Algorithm 1 gates whole steps: the recipe `paper/eepo_step_gate`.",
    ),
    (
        "ratio of stage 2",
        "divides by the probability under the weights that sampled",
        "As in the paper's text. verl's default would be `credit = \"full\"` (docs/credit.md).",
    ),
    ("ε of the unlearning loss", "1e-4", 'The paper writes "a small constant".'),
    (
        "loss",
        "all tokens of a mini-batch weigh the same",
        'As in verl. The paper\'s equation is `loss_normalisation = "group"`.',
    ),
    ("temperature of GRPO and EEPO", "1.0", "Not given."),
    ("AdamW", "weight decay 0.01, gradient norm at most 1", "Not given."),
    (
        "epochs",
        "133 steps of 128 prompts: 2.05 epochs without the held-out problems",
        "The paper trains 2 epochs of 8.5K problems.",
    ),
    ("samples for pass@k", "temperature 1", "Not given."),
)
SHOWN_SETTINGS = (
    ("model", "path"), ("task", "train"), ("task", "evaluation"), ("task", "data_dir"),
    ("task", "template"), ("task", "num_held_out"), ("reward", "name"),
    ("algorithm", "group_size"), ("algorithm", "temperature"), ("algorithm", "max_new_tokens"),
    ("algorithm", "kl_coef"), ("algorithm", "entropy_coef"), ("algorithm", "clip_high"),
    ("training", "num_steps"), ("training", "prompts_per_step"),
    ("training", "prompts_per_mini_batch"), ("training", "learning_rate"),
    ("training", "optimizer"), ("evaluation", "num_samples"), ("evaluation", "temperature"),
)  # fmt: skip


@dataclass(frozen=True)
class PageContents:
    """Holds everything that the page shows."""

    title: str
    command: str
    status: Sequence[str]  # sentences: how many runs are finished, which failed
    tables: Sequence[tuple[str, ResultTable]]  # heading, table
    figures: Sequence[PaperFigure]  # those that were drawn
    runs: Sequence[Run]
    chosen: Mapping[str, str]  # method -> the value that tuning chose


def page_text(contents: PageContents) -> str:
    """Return the page as Markdown. Figures are files in the folder `figures` next to it."""
    parts = [f"# {contents.title}\n", f"```\n{contents.command}\n```\n", *contents.status, ""]
    for heading, table in contents.tables:
        parts += [f"## {heading}\n", format_markdown(table)]
    if contents.figures:
        parts.append("## Figures\n")
    for figure in contents.figures:
        name = f"Figure {figure.number}"
        parts += [f"![{name}](figures/{figure.file})\n", f"**{name}.** {figure.caption}\n"]
    parts += ["## Settings\n", *_settings(contents)]
    parts += ["## Hardware and software\n", *_hardware(contents.runs)]
    parts += ["## Times\n", *_times(contents.runs)]
    parts += [
        "## What the paper leaves open\n",
        "These are the choices of the recipes `paper/*`. The settings above show what was used.\n",
        *_rows(("what", "our choice", "why"), CHOICES),
    ]
    return "\n".join(parts)


def _settings(contents: PageContents) -> list[str]:
    """List the settings of the first trained run, and those that differ between methods."""
    trained = [run for run in contents.runs if run.metrics] or list(contents.runs)
    if not trained:
        return ["No run is finished.\n"]
    first, methods = trained[0], by_method(contents.runs)
    settings = (
        (f"`{section}.{key}`", _text(value))
        for section, key in SHOWN_SETTINGS
        if (value := first.setting(section, key)) not in (None, "")
    )
    parts = [f"Of {first.name}:\n", *_rows(("setting", "value"), settings)]
    differing = differing_settings(contents.runs)
    if differing:
        rows = (
            [f"`{key}`", *(" or ".join(values[method]) for method in methods)]
            for key, values in differing.items()
        )
        parts += ["What differs between methods:\n", *_rows(("setting", *methods), rows)]
    if contents.chosen:
        rows = ([method, value] for method, value in contents.chosen.items())
        parts += ["Chosen by tuning:\n", *_rows(("method", "value"), rows)]
    return parts


def _hardware(runs: Sequence[Run]) -> list[str]:
    """List the different environments, and how many runs had each."""
    counts: dict[tuple[str, ...], int] = {}
    for run in runs:
        environment = run.environment
        packages = environment.get("packages") or {}
        versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
        keys = ("device", "num_cores", "platform", "python", "eepo", "commit")
        row = (*(_text(environment.get(key)) for key in keys), versions or MISSING)
        counts[row] = counts.get(row, 0) + 1
    headings = ("device", "cores", "platform", "Python", "eepo", "commit", "packages", "runs")
    return _rows(headings, ([*row, str(count)] for row, count in counts.items()))


def _times(runs: Sequence[Run]) -> list[str]:
    """List seconds per step, hours of training and of evaluations, averaged over seeds."""
    rows = []
    for method, seeds in by_method(runs).items():
        steps = [len(run.series("seconds/total")) for run in seeds]
        seconds = [run.seconds() or 0.0 for run in seeds]
        evaluations = [sum(row.get("seconds", 0.0) for row in run.evaluations) for run in seeds]
        peak = max((value for run in seeds for value in run.series("memory/peak").values()),
                   default=None)  # fmt: skip
        rows.append(
            [
                method,
                str(len(seeds)),
                f"{sum(steps) / len(seeds):,.0f}",
                f"{sum(seconds) / sum(steps):,.2f}" if sum(steps) else MISSING,
                _hours(sum(seconds) / len(seeds)),
                _hours(sum(evaluations) / len(seeds)),
                MISSING if peak is None else f"{peak:,.1f}",
            ]
        )
    headings = (
        "method", "seeds", "steps", "seconds per step", "training", "evaluation", "peak memory, GB",
    )  # fmt: skip
    return _rows(headings, rows)


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} h" if seconds >= 360 else f"{seconds:,.1f} s"


def _rows(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table, followed by an empty line."""
    lines = [list(headings), ["---"] * len(headings), *map(list, rows)]
    return ["| " + " | ".join(map(_escape, line)) + " |" for line in lines] + [""]


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return MISSING if value is None else str(value)
