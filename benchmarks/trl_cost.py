"""Compares seconds per step of examples/trl_eepo.py and examples/trl_grpo.py.

    python benchmarks/trl_cost.py [STEPS [ROUNDS]]

The two run alternately, so that other load on the machine slows both. The first step of each run is
left out.
"""

from __future__ import annotations

import runpy
import statistics
import sys
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def step_seconds(name: str, steps: int) -> list[float]:
    """Run an example and return the seconds of all steps but the first."""
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = [name, folder, str(steps)]
        log = runpy.run_path(str(EXAMPLES / name))["trainer"].state.log_history
    return [entry["step_time"] for entry in log if "step_time" in entry][1:]


def main(steps: int = 11, rounds: int = 3) -> None:
    medians: dict[str, list[float]] = {"trl_grpo.py": [], "trl_eepo.py": []}
    for _ in range(rounds):
        for name, values in medians.items():
            values.append(statistics.median(step_seconds(name, steps)))
    for name, values in medians.items():
        listed = ", ".join(f"{value:.3f}" for value in values)
        print(f"{name}: median seconds per step in each round: {listed}")
    pairs = zip(medians["trl_eepo.py"], medians["trl_grpo.py"], strict=True)
    ratios = sorted(eepo / grpo for eepo, grpo in pairs)
    print(f"EEPO / GRPO: {statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
