"""Draws examples of unlearning: the probability of a few completions under θ and under θ′."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from eepo.reports.labels import fitting_end, name_label, shorten_middle, text_label, text_width
from eepo.reports.palette import method_styles
from eepo.reports.panels import TEXT_SIZE, TITLE_SIZE, WIDTH, label_bars, new_panels, styled
from eepo.reports.records import Row, Run, by_method, has_logprob_after

MAX_PROBLEMS, MAX_COMPLETIONS = 4, 5  # problems in the figure, completions of each
# A label is limited in characters and in points: wide letters would leave no space for bars.
MAX_LABEL_CHARACTERS, MAX_LABEL_WIDTH = 26, 95.0
TITLE_SHARE = 0.92  # of a panel's width, including its labels
LEFT_MARGIN = 0.08  # inches before the labels
MAX_LINEAR_RATIO = 20  # highest over lowest probability; beyond it, the axis is logarithmic
AFTER_ALPHA = 0.35  # of the bars under θ′


@dataclass(frozen=True)
class ProbabilityAxis:
    """Describes the axis that all panels share, linear or logarithmic.

    Positions on a log axis are powers of ten: the probability of a long completion underflows.
    """

    start: float
    end: float
    is_log: bool

    @classmethod
    def fitting(cls, rows: Sequence[Row]) -> ProbabilityAxis:
        powers = [row[key] / math.log(10) for row in rows for key in ("logprob", "logprob_after")]
        if max(powers) - min(powers) > math.log10(MAX_LINEAR_RATIO) or max(powers) < -6:
            return cls(math.floor(min(powers) - 0.5), math.ceil(max(powers)), is_log=True)
        return cls(0.0, 1.05 * 10 ** max(powers), is_log=False)

    def bar_length(self, logprob: float) -> float:
        return logprob / math.log(10) - self.start if self.is_log else math.exp(logprob)


@styled
def unlearning_examples_figure(runs: Sequence[Run]) -> Figure | None:
    """Draw two bars for each completion: its probability under θ and under θ′.

    The completions are from the latest unlearning step of the first run that has one. A mean over
    problems would hide the modes of single problems.
    """
    run = next((run for run in runs if any(map(has_logprob_after, run.completions))), None)
    if run is None:
        return None
    step, problems = unlearned_problems(run)
    height = 0.75 + 0.24 * max(len(rows) for rows in problems)
    figure, panels = new_panels(len(problems), columns=2, height=height, left=LEFT_MARGIN)
    colour, _ = method_styles(by_method(runs))[run.name]
    axis = ProbabilityAxis.fitting([row for rows in problems for row in rows])
    titles = strip_shared_lines([str(row["prompt"]) for row in run.completions])
    title_width = TITLE_SHARE * 72 * WIDTH / min(2, len(problems))  # points
    for axes, rows in zip(panels, problems, strict=True):
        _draw_problem(axes, rows, colour, axis)
        title = titles[str(rows[0]["prompt"])]
        axes.set_title(fitting_end(title, title_width, TITLE_SIZE), loc="right")
    figure.suptitle(f"{name_label(run.name)}, seed {run.seed}, step {step}", fontsize="large")
    alphas = {"probability under θ": 1.0, "probability under θ′": AFTER_ALPHA}
    handles = [Patch(facecolor=colour, alpha=alpha, label=text) for text, alpha in alphas.items()]
    figure.legend(handles=handles, loc="outside lower center", ncol=2)
    return figure


def unlearned_problems(run: Run) -> tuple[int, list[list[Row]]]:
    """Return the latest step with unlearning, and the completions of its problems.

    Completions of a problem are different from each other, the most likely under θ first.
    """
    unlearned = [row for row in run.completions if has_logprob_after(row)]
    step = max(row["step"] for row in unlearned)
    problems: dict[str, dict[str, Row]] = {}
    for row in unlearned:
        if row["step"] == step:
            problems.setdefault(str(row["prompt_id"]), {}).setdefault(str(row["text"]), row)
    ranked = [
        sorted(texts.values(), key=lambda row: -row["logprob"])[:MAX_COMPLETIONS]
        for texts in problems.values()
    ]
    return step, ranked[:MAX_PROBLEMS]


def strip_shared_lines(prompts: Iterable[str]) -> dict[str, str]:
    """Map each prompt to its problem: drop the lines that all prompts begin or end with.

    Such lines belong to a template. A prompt stays whole if it is the only one, or if nothing
    would be left.
    """
    lines = {prompt: prompt.split("\n") for prompt in prompts}
    num_first = _num_shared_lines(lines.values())
    num_last = _num_shared_lines([texts[num_first:][::-1] for texts in lines.values()])
    problems = {
        prompt: "\n".join(texts[num_first : len(texts) - num_last])
        for prompt, texts in lines.items()
    }
    return {prompt: text if text.strip() else prompt for prompt, text in problems.items()}


def _num_shared_lines(texts: Iterable[Sequence[str]]) -> int:
    """Count the first lines that all texts share."""
    columns = zip(*texts, strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def _draw_problem(axes: Axes, rows: Sequence[Row], colour: str, axis: ProbabilityAxis) -> None:
    for key, alpha, offset in (("logprob", 1.0, -0.19), ("logprob_after", AFTER_ALPHA, 0.19)):
        positions = [index + offset for index in range(len(rows))]
        lengths = [axis.bar_length(row[key]) for row in rows]
        axes.barh(positions, lengths, 0.36, axis.start, facecolor=colour, alpha=alpha)
    label_bars(axes, [_label(row) for row in rows])
    axes.set_xlim(axis.start, axis.end)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=3, integer=axis.is_log))
    if axis.is_log:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda power, _: f"$10^{{{power:.0f}}}$"))


def _label(row: Row) -> str:
    text, max_characters = str(row["text"]), MAX_LABEL_CHARACTERS
    while text_width(shorten_middle(text, max_characters), TEXT_SIZE) > MAX_LABEL_WIDTH:
        max_characters -= 1
    return f"{text_label(text, max_characters)}  {'✓' if row['reward'] >= 1 else '✗'}"
