"""Draws GRPO's reward on sums for each pair of dtypes: fp32 and bf16 in sampling and training.

    python studies/types_of_products.py --into docs/results/figures

From the lines of the tuning runs: one run for each rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from plan import TUNE, Plan

from eepo.recipe import read_toml
from eepo.reports.figure_list import image_bytes
from eepo.reports.palette import method_styles
from eepo.reports.panels import WIDTH, add_legend, label_steps, method_handles, new_panels, styled

ROOT = Path(__file__).parent.parent
TYPES = {  # by what is shown: the plan, and its regime
    "fp32 for both": ("smollm2", "sums_fp32"),
    "bf16 for both": ("smollm2", "sums"),
    "two types": ("smollm2_two_types", "sums"),
}
RATES = ("2e-6", "4e-6", "8e-6")


def rewards(plan: str, regime: str, rate: str) -> list[tuple[int, float]]:
    """Step by step, of the one run that tuned this rate; nothing if it was not tried."""
    lines = Plan(
        read_toml(ROOT / "studies" / f"{plan}.toml"), ROOT / "docs" / "results" / plan
    ).lines(TUNE)
    rows: list[dict[str, Any]] = next(
        (
            one["metrics"]
            for one in lines
            if (one["regime"], one["method"], one["value"]) == (regime, "grpo", rate)
        ),
        [],
    )
    return [(row["step"], row["reward"]) for row in rows]


@styled
def types_figure(_runs: Sequence[object]) -> Figure:
    """A panel for each rate."""
    figure, panels = new_panels(len(RATES), columns=3, height=1.8, width=WIDTH)
    for axes, rate in zip(panels, RATES, strict=True):
        for name, (plan, regime) in TYPES.items():
            if found := rewards(plan, regime, rate):
                colour, _ = method_styles(TYPES)[name]
                axes.plot(*zip(*found, strict=True), color=colour)
        label_steps(axes, f"reward, learning rate {rate}")
        axes.set_ylim(0, 0.9)
    add_legend(figure, method_handles(TYPES))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=Path, required=True)
    into: Path = parser.parse_args().into
    into.mkdir(parents=True, exist_ok=True)
    (into / "smollm2_types.png").write_bytes(image_bytes(types_figure([]), "png"))


if __name__ == "__main__":
    main()
