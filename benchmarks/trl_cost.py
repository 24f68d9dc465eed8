"""What two-stage rollouts cost inside TRL: seconds a step of examples/trl_eepo.py over those of examples/trl_grpo.py.

    python benchmarks/trl_cost.py [STEPS [TURNS]]

The two take turns, so that a busy machine slows both. Of each turn the first step is left out.
"""

from __future__ import annotations

import runpy
import statistics
import sys
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def seconds(name: str, steps: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = [name, folder, str(steps)]
        log = runpy.run_path(str(EXAMPLES / name))["trainer"].state.log_history
    return [entry["step_time"] for entry in log if "step_time" in entry][1:]


def main(steps: int = 11, turns: int = 3) -> None:
    names = ("trl_grpo.py", "trl_eepo.py")
    times: dict[str, list[list[float]]] = {name: [] for name in names}
    for _ in range(turns):
        for name in names:
            times[name].append(seconds(name, steps))
    grpo, eepo = ([statistics.median(turn) for turn in times[name]] for name in names)
    for name, turn in zip(names, (grpo, eepo), strict=True):
        print(
            f"{name}: median seconds a step, turn by turn: {', '.join(f'{value:.3f}' for value in turn)}"
        )
    ratios = sorted(ours / theirs for ours, theirs in zip(eepo, grpo, strict=True))
    print(f"EEPO / GRPO: {statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
