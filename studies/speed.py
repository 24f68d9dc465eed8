"""Draws the figures of the shortcut study from its records.

    python studies/speed.py docs/results/shortcut/report.jsonl --out speed.png
    python studies/speed.py docs/results/shortcut/report.jsonl --curves p_1e-5 --out curves.png

The first command draws steps to 90 % reward against the probability p of the rare strategy. The
second one draws reward and the share of completions that compute over the steps, at one p.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eepo.reports.figure_list import image_bytes
from eepo.reports.palette import LINE_STYLES, method_styles
from eepo.reports.panels import add_legend, method_handles, new_panels, styled, use_percent
from eepo.runs.jsonl import read_records

Line = dict[str, Any]
NAMES = {
    "grpo": "GRPO",
    "higher_temperature": "higher temperature",
    "more_entropy": "entropy bonus",
    "more_rollouts": "larger groups",
    "clip_higher": "clip-higher",
    "eepo_paper": "EEPO as published",
    "importance_failures_exact": "EEPO, importance credit",
    "full_failures_exact": "EEPO, full credit",
    "full_all_exact": "EEPO, full credit, unlearn all",
}


@styled
def speed_figure(lines: Sequence[Line]) -> Figure:
    """Draw steps to 90 % reward: every seed, and the median per method. Failures are on top."""
    methods = [name for name in NAMES if any(line["method"] == name for line in lines)]
    regimes = sorted({line["regime"] for line in lines}, key=probability)
    limit = max(line["num_steps"] for line in lines)
    figure, (axes,) = new_panels(1, height=2.6)
    styles = method_styles([NAMES[name] for name in methods])
    for index, name in enumerate(methods):
        colour, marker = styles[NAMES[name]]
        points = []
        for regime in regimes:
            seeds = [line for line in lines if (line["method"], line["regime"]) == (name, regime)]
            steps = [line["steps_to_90"] or failed_position(limit, index) for line in seeds]
            x = probability(regime) * 1.07 ** (index - len(methods) / 2)  # side by side
            axes.plot([x] * len(steps), steps, ".", color=colour, markersize=3, alpha=0.6)
            if seeds and sum(line["steps_to_90"] is not None for line in seeds) > len(seeds) / 2:
                points.append((x, statistics.median(steps)))
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4)
    axes.axhline(limit * 1.05, color="#888888", linewidth=0.6, linestyle="dotted")
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = [20, 40, 60, 100]
    axes.set_yticks(ticks, [*map(str, ticks)])
    axes.minorticks_off()
    axes.set_xlabel("probability p of the rare strategy at the start")
    axes.set_title(f"steps to 90 % reward (above the dotted line: not within {limit} steps)")
    add_legend(figure, method_handles([NAMES[name] for name in methods], markers=True))
    return figure


def failed_position(limit: int, index: int) -> float:
    return limit * (1.15 + 0.045 * index)


def probability(regime: str) -> float:
    return float(regime.removeprefix("p_"))


@styled
def curves_figure(lines: Sequence[Line]) -> Figure:
    """Draw reward, and the share of completions that compute, as means over seeds with a band."""
    methods = [name for name in NAMES if any(line["method"] == name for line in lines)]
    figure, (reward, share) = new_panels(2)
    styles = method_styles([NAMES[name] for name in methods])
    for name in methods:
        seeds = [line for line in lines if line["method"] == name]
        colour, _ = styles[NAMES[name]]
        draw_band(reward, seeds, "stage1/reward", colour)
        for stage, dashes in enumerate(LINE_STYLES[:2], 1):
            draw_band(share, seeds, f"stage{stage}/label/compute", colour, dashes)
    for axes, title in ((reward, "reward"), (share, "completions that compute (dashed: stage 2)")):
        axes.set_title(title)
        axes.set_xlabel("step")
        use_percent(axes)
    add_legend(figure, method_handles([NAMES[name] for name in methods]))
    return figure


def draw_band(
    axes: Axes, seeds: Sequence[Line], key: str, colour: str, dashes: Any = "solid"
) -> None:
    """Draw the mean over seeds and a band from the lowest to the highest one."""
    steps = [row["step"] for row in seeds[0]["metrics"]]
    # A label that no completion had in a row is not recorded: its share is 0.
    columns = list(
        zip(*([row.get(key, 0.0) for row in line["metrics"]] for line in seeds), strict=True)
    )
    if not any(any(column) for column in columns):
        return
    mean = [statistics.fmean(column) for column in columns]
    axes.plot(steps, mean, color=colour, linestyle=dashes)
    low, high = ([pick(column) for column in columns] for pick in (min, max))
    axes.fill_between(steps, low, high, color=colour, alpha=0.13, linewidth=0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lines", type=Path, help="records of a study, one line per run")
    parser.add_argument("--out", type=Path, required=True, help="the PNG file")
    parser.add_argument("--curves", metavar="REGIME", help="draw curves of this regime")
    parser.add_argument("--method", action="append", default=[], choices=NAMES)
    args = parser.parse_args()
    lines = list(read_records(args.lines))
    if args.curves:
        chosen = args.method or ["grpo", "full_failures_exact"]
        lines = [line for line in lines if line["regime"] == args.curves]
        figure = curves_figure([line for line in lines if line["method"] in chosen])
    else:
        chosen = args.method or list(NAMES)
        figure = speed_figure([line for line in lines if line["method"] in chosen])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_bytes(image_bytes(figure, "png"))


if __name__ == "__main__":
    main()
