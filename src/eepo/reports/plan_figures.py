"""Draws the figures of a plan from its lines. Every function returns None without data for it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from eepo.evaluation.results import set_title
from eepo.reports.figures import exploration_figure, pass_at_k_figure
from eepo.reports.frontier import FrontierPanel, Seeds, frontier_figure, interval_arms
from eepo.reports.palette import method_styles
from eepo.reports.panels import WIDTH, add_legend, label_steps, method_handles, new_panels, styled
from eepo.reports.run_lines import Line, as_run, final_value, line_sets
from eepo.reports.steps_to_reward import steps_by_method_figure, steps_to_reward_figure
from eepo.reports.strategies import strategies_figure
from eepo.types import UserError

PASS_K = "pass@32"
LENGTH_MEASURES = ("mean", PASS_K)


@dataclass(frozen=True)
class MethodStyle:
    """Says how figures show the lines of a method."""

    label: str
    values: tuple[str, ...] = ()  # in order, if every value is reported: drawn as a line
    weights: str = ""  # label of the method whose weights it evaluates
    knob: str = ""  # that it is tuned over


@dataclass(frozen=True)
class FigureData:
    lines: Sequence[Line]  # in the order of the plan's methods
    methods: Mapping[str, MethodStyle]
    labels: Mapping[str, str]  # of regimes, and of the axis of figures over regimes
    num_steps: Callable[[Line], int]

    def points(self) -> list[Line]:
        """Return the lines of methods that report one value."""
        return [line for line in self.lines if not self.methods[line["method"]].values]

    def with_every_value(self, evaluated: bool) -> list[Line]:
        """Return the lines of methods with every value: trained, or evaluated with weights."""
        return [
            line
            for line in self.lines
            if (style := self.methods[line["method"]]).values and bool(style.weights) == evaluated
        ]

    def label(self, line: Line) -> str:
        return self.methods[line["method"]].label


def draw_exploration(data: FigureData) -> Figure | None:
    return exploration_figure([as_run(line, data.label(line)) for line in data.points()])


def draw_pass_at_k(data: FigureData) -> Figure | None:
    return pass_at_k_figure([as_run(line, data.label(line)) for line in data.points()])


def draw_strategies(data: FigureData) -> Figure | None:
    """Draw the reward of the policy, which samples stage 1, and the share of a rare strategy."""
    lines = [
        line | {"metrics": list(map(_strategy_row, line["metrics"]))} for line in data.points()
    ]
    return strategies_figure([as_run(line, data.label(line)) for line in lines])


def _strategy_row(row: dict[str, Any]) -> dict[str, Any]:
    """Add the share of completions without a recorded label: lines may not have all labels."""
    added = {}
    for stage in ("stage1", "stage2"):
        shares = [row[key] for key in row if key.startswith(f"{stage}/label/")]
        if f"{stage}/reward" in row:
            added[f"{stage}/label/other"] = max(0.0, 1 - sum(shares))
    return row | added


def draw_frontier(data: FigureData) -> Figure | None:
    """Draw trained methods: those with every value as lines, the others as points."""
    return frontier_figure(_panels(data, data.with_every_value(False), data.points()), PASS_K)


def draw_temperatures(data: FigureData) -> Figure | None:
    """Draw the evaluations of trained weights at every value, such as several temperatures."""
    return frontier_figure(_panels(data, data.with_every_value(True), []), PASS_K)


def draw_steps_to_reward(data: FigureData) -> Figure | None:
    lines = [line for line in data.points() if "steps_to_90" in line]
    labelled = [line | {"method": data.label(line)} for line in lines]
    return steps_to_reward_figure(labelled, data.labels) if lines else None


def draw_steps_by_method(data: FigureData) -> Figure | None:
    lines = [line | {"method": data.label(line)} for line in data.points()]
    reached = any(line.get("steps_to_90") for line in lines)
    return steps_by_method_figure(lines) if reached else None


def draw_lengths(data: FigureData) -> Figure | None:
    """Draw final measures against the steps of training, for methods run with several numbers."""
    measured = length_measures(data)
    if not measured:
        return None

    @styled
    def draw(_: Sequence[Any]) -> Figure:
        figure, panels = new_panels(len(measured), columns=2, height=2.0, width=WIDTH)
        methods = dict.fromkeys(method for by_method in measured.values() for method in by_method)
        for axes, (title, by_method) in zip(panels, measured.items(), strict=True):
            for method, by_steps in by_method.items():
                colour, marker = method_styles(methods)[method]
                steps = sorted(by_steps)
                low, high = zip(*(interval_arms(by_steps[step]) for step in steps), strict=True)
                axes.errorbar(
                    steps, [statistics.mean(by_steps[step]) for step in steps],
                    color=colour, marker=marker,
                    yerr=[[arm for [arm] in low], [arm for [arm] in high]], elinewidth=0.5,
                )  # fmt: skip
            label_steps(axes, title)
            axes.set_xlabel("steps of training")
        add_legend(figure, method_handles(methods, markers=True))
        return figure

    return draw([])


def length_measures(data: FigureData) -> dict[str, dict[str, dict[int, list[float]]]]:
    """Return title -> method -> steps -> a value per seed.

    Methods whose knobs differ only in the number of steps belong together. Return nothing if fewer
    than two methods have several numbers of steps.
    """
    families: dict[frozenset[str], list[Line]] = {}
    for line in data.points():
        knobs = (knob for knob in line["knobs"] if not knob.startswith("training.num_steps="))
        families.setdefault(frozenset(knobs), []).append(line)
    several = [lines for lines in families.values() if len(set(map(data.num_steps, lines))) > 1]
    if len(several) < 2:
        return {}
    measured: dict[str, dict[str, dict[int, list[float]]]] = {}
    for eval_set in line_sets(line for lines in several for line in lines):
        for measure in LENGTH_MEASURES:
            by_method = measured.setdefault(f"{measure}, {set_title(eval_set)}", {})
            for lines in several:
                by_steps = by_method.setdefault(data.label(lines[0]), {})
                for line in lines:
                    value = final_value(line, eval_set, measure)
                    by_steps.setdefault(data.num_steps(line), []).append(value)
    return measured


def draw_tuning(data: FigureData) -> Figure | None:
    """Draw reward over the steps: a panel for each value of a method, a line for each regime."""
    if not data.lines:
        return None
    if len(names := {line["method"] for line in data.lines}) > 1:
        raise UserError(
            f"the figure tuning shows one method, got {', '.join(sorted(names))}; give --method"
        )
    rewards: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for line in data.lines:
        steps = [(row["step"], row["reward"]) for row in line["metrics"] if "reward" in row]
        regime = data.labels.get(line["regime"], line["regime"])
        rewards.setdefault(line["value"], {})[regime] = steps
    compared = {value: by_regime for value, by_regime in rewards.items() if len(by_regime) > 1}
    highest = max(
        (r for by in compared.values() for steps in by.values() for _, r in steps), default=1
    )
    regimes = dict.fromkeys(line["regime"] for line in data.lines)
    labels = [data.labels.get(regime, regime) for regime in regimes]
    knob = data.methods[data.lines[0]["method"]].knob.partition(".")[2].replace("_", " ")

    @styled
    def draw(_: Sequence[Any]) -> Figure:
        values = sorted(compared, key=_number)
        columns = 2 if len(values) in (2, 4) else 3
        figure, panels = new_panels(len(values), columns=columns, height=1.8, width=WIDTH)
        for axes, value in zip(panels, values, strict=True):
            for label, steps in compared[value].items():
                axes.plot(*zip(*steps, strict=True), color=method_styles(labels)[label][0])
            label_steps(axes, f"reward, {knob} {value}")
            axes.set_ylim(0, 1.05 * highest)
        add_legend(figure, method_handles(labels))
        return figure

    return draw([]) if compared else None


def _number(text: str) -> tuple[float, str]:
    try:
        return float(text), ""
    except ValueError:
        return float("inf"), text


def _panels(data: FigureData, lines: Sequence[Line], points: Sequence[Line]) -> list[FrontierPanel]:
    panels = []
    for eval_set in line_sets([*points, *lines]):
        by_method: dict[str, Seeds] = {}
        for name in dict.fromkeys(line["method"] for line in lines):
            style = data.methods[name]
            seeds = _seeds((one for one in lines if one["method"] == name), "value", eval_set)
            by_method[style.weights or style.label] = {
                value: seeds[value] for value in style.values if value in seeds
            }
        labelled = [line | {"method": data.label(line)} for line in points]
        panels.append(FrontierPanel(eval_set, by_method, _seeds(labelled, "method", eval_set)))
    return panels


def _seeds(lines: Iterable[Line], key: str, eval_set: str) -> dict[str, list[tuple[float, float]]]:
    """Group the final mean and pass@k of each line by a key of the line."""
    found: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        values = final_value(line, eval_set, "mean"), final_value(line, eval_set, PASS_K)
        found.setdefault(line[key], []).append(values)
    return found


# By kind. The first ones are drawn for each regime, the others once over all regimes.
REGIME_FIGURES: dict[str, Callable[[FigureData], Figure | None]] = {
    "exploration": draw_exploration,
    "pass_at_k": draw_pass_at_k,
    "frontier": draw_frontier,
    "temperatures": draw_temperatures,
    "lengths": draw_lengths,
    "strategies": draw_strategies,
    "steps_by_method": draw_steps_by_method,
}
PLAN_FIGURES: dict[str, Callable[[FigureData], Figure | None]] = {
    "steps_to_reward": draw_steps_to_reward,
    "tuning": draw_tuning,
}
FIGURES = REGIME_FIGURES | PLAN_FIGURES
