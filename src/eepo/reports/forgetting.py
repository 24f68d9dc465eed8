"""What forgetting does: completions of a few problems, how likely they were under θ, and how likely under θ′."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from eepo.reports.labels import fitting_end, name_text, plain_text, shortened, text_width
from eepo.reports.palette import looks
from eepo.reports.panels import TEXT_SIZE, TITLE_SIZE, WIDTH, new_panels, styled
from eepo.reports.records import Row, Run, by_method, was_forgotten

MOST_PROBLEMS, MOST_SHOWN = 4, 5  # problems in the figure, completions of each
LONGEST_TEXT, WIDEST_TEXT = (
    26,
    95.0,
)  # characters, and points: wide letters would leave bars no room
TITLE_SHARE = 0.92  # of a panel's width, its labels included
LEFT_EDGE = 0.08  # inches that stay free before the labels
WIDEST_LINEAR = 20  # the likeliest over the least likely; past it bars need a log axis
FORGOTTEN_ALPHA = 0.35


@dataclass(frozen=True)
class Scale:
    """One for all problems. On a log axis places are powers of ten: a long completion's probability is no float."""

    start: float
    end: float
    is_log: bool

    @classmethod
    def over(cls, rows: Sequence[Row]) -> Scale:
        powers = [row[key] / math.log(10) for row in rows for key in ("logprob", "logprob_after")]
        if max(powers) - min(powers) > math.log10(WIDEST_LINEAR) or max(powers) < -6:
            return cls(math.floor(min(powers) - 0.5), math.ceil(max(powers)), is_log=True)
        return cls(0.0, 1.05 * 10 ** max(powers), is_log=False)

    def length(self, logprob: float) -> float:
        return logprob / math.log(10) - self.start if self.is_log else math.exp(logprob)


@styled
def forgetting_figure(runs: Sequence[Run]) -> Figure | None:
    """Bars for each completion: under θ, which sampled it, and under θ′, which had to forget it. From the latest such
    step of the first run that has one: a mean over problems would hide the modes that this is about."""
    run = next((run for run in runs if any(map(was_forgotten, run.completions))), None)
    if run is None:
        return None
    step, problems = forgotten_problems(run)
    tallest = max(len(rows) for rows in problems)
    figure, panels = new_panels(
        len(problems), columns=2, height=0.75 + 0.24 * tallest, left=LEFT_EDGE
    )
    colour = looks(by_method(runs))[run.name][0]
    scale = Scale.over([row for rows in problems for row in rows])
    own = own_texts([str(row["prompt"]) for row in run.completions])
    width = TITLE_SHARE * 72 * WIDTH / min(2, len(problems))  # points
    for axes, rows in zip(panels, problems, strict=True):
        _draw_problem(axes, rows, colour, scale)
        axes.set_title(fitting_end(own[str(rows[0]["prompt"])], width, TITLE_SIZE), loc="right")
    figure.suptitle(f"{name_text(run.name)}, seed {run.seed}, step {step}", fontsize="large")
    names = {"probability under θ": 1.0, "probability under θ′": FORGOTTEN_ALPHA}
    bars = [Patch(facecolor=colour, alpha=alpha, label=name) for name, alpha in names.items()]
    figure.legend(handles=bars, loc="outside lower center", ncol=2)
    return figure


def forgotten_problems(run: Run) -> tuple[int, list[list[Row]]]:
    """(step, for each problem its likeliest different completions under θ, the likeliest first)."""
    step = max(row["step"] for row in run.completions if was_forgotten(row))
    problems: dict[str, dict[str, Row]] = {}
    for row in run.completions:
        if row["step"] == step and was_forgotten(row):
            problems.setdefault(str(row["prompt_id"]), {}).setdefault(str(row["text"]), row)
    ranked = [
        sorted(texts.values(), key=lambda row: -row["logprob"])[:MOST_SHOWN]
        for texts in problems.values()
    ]
    return step, ranked[:MOST_PROBLEMS]


def own_texts(prompts: Iterable[str]) -> dict[str, str]:
    """Prompt → the problem in it: a template's lines, which all prompts begin or end with, name none of them. A lone
    prompt, or one that nothing would be left of, stays whole."""
    lines = {prompt: prompt.split("\n") for prompt in prompts}
    head = _num_shared(lines.values())
    tail = _num_shared([found[head:][::-1] for found in lines.values()])
    own = {prompt: "\n".join(found[head : len(found) - tail]) for prompt, found in lines.items()}
    return {prompt: text if text.strip() else prompt for prompt, text in own.items()}


def _num_shared(texts: Iterable[Sequence[str]]) -> int:
    """How many lines all of them begin with."""
    columns = zip(*texts, strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def _draw_problem(axes: Axes, rows: Sequence[Row], colour: str, scale: Scale) -> None:
    for key, alpha, shift in (("logprob", 1.0, -0.19), ("logprob_after", FORGOTTEN_ALPHA, 0.19)):
        places = [number + shift for number in range(len(rows))]
        axes.barh(
            places,
            [scale.length(row[key]) for row in rows],
            0.36,
            scale.start,
            facecolor=colour,
            alpha=alpha,
        )
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(scale.start, scale.end)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=3, integer=scale.is_log))
    if scale.is_log:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda power, _: f"$10^{{{power:.0f}}}$"))


def _label(row: Row) -> str:
    text, longest = str(row["text"]), LONGEST_TEXT
    while text_width(shortened(text, longest), TEXT_SIZE) > WIDEST_TEXT:
        longest -= 1
    return f"{plain_text(text, longest)}  {'✓' if row['reward'] >= 1 else '✗'}"
