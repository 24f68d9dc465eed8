"""What longer training does to each method: does it go on rising, level off, or fall?"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from frontier import arms
from matplotlib.figure import Figure

from eepo.reports.palette import method_styles
from eepo.reports.panels import WIDTH, add_legend, label_steps, method_handles, new_panels, styled

Lengths = Mapping[
    str, Mapping[int, Sequence[float]]
]  # of each method: by number of steps, a measure of each seed


def length_figure(measured: Mapping[str, Lengths]) -> Figure | None:
    """Draw a panel per measure and a line per method, with 95 % intervals over seeds."""

    @styled
    def draw(_runs: Sequence[object]) -> Figure:
        figure, panels = new_panels(len(measured), columns=2, height=2.0, width=WIDTH)
        methods = dict.fromkeys(method for lengths in measured.values() for method in lengths)
        for axes, (title, lengths) in zip(panels, measured.items(), strict=True):
            for method, line in lengths.items():
                colour, marker = method_styles(methods)[method]
                steps = sorted(line)
                low, high = zip(*(arms(line[step]) for step in steps), strict=True)
                axes.errorbar(
                    steps, [statistics.mean(line[step]) for step in steps],
                    color=colour, marker=marker,
                    yerr=[[arm for [arm] in low], [arm for [arm] in high]], elinewidth=0.5,
                )  # fmt: skip
            label_steps(axes, title)
            axes.set_xlabel("steps of training")
        add_legend(figure, method_handles(methods, markers=True))
        return figure

    return draw([]) if any(measured.values()) else None
