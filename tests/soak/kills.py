"""Kills fresh processes at random moments. What they finish must equal a run without kills."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from commands import HANG_SECONDS, Outcome, Running, start_fresh
from comparison import differences
from scenarios import ChangeCounter, Scenario, Workspace
from table import Findings

# How often each scenario is chosen. A sweep takes as long as three others.
WEIGHTS = {"train": 4, "rewarded": 3, "warmup": 2, "eval": 2, "sweep": 1}
MAX_KILLS = 4  # per folder


@dataclass(frozen=True)
class Moment:
    """When to kill: at a time, or at a change of the folder and a delay after it.

    Most of the life of a short process is the import of torch. Changes of the folder spread the
    other kills over all that follows: steps, saving, pruning, evaluation.
    """

    seconds: float
    change: int  # 0: the time alone
    with_children: bool  # False: what the process has started outlives it

    @classmethod
    def random(cls, scenario: Scenario, rng: random.Random) -> Moment:
        change = rng.randint(1, scenario.num_changes) if rng.random() < 0.8 else 0
        seconds = rng.uniform(0, 0.05 if change else scenario.seconds)
        return cls(seconds, change, with_children=rng.random() < 0.5)

    def watch(self, process: Running, out: Path) -> Callable[[], bool]:
        """Return a function that is True from this moment on."""
        counter, before = ChangeCounter(out), time.monotonic()
        counter.count()  # what earlier processes left does not count
        first, reached = counter.number, [] if self.change else [before]

        def now() -> bool:
            if not reached and counter.count() - first >= self.change:
                reached.append(time.monotonic())
            return bool(reached) and time.monotonic() - reached[0] >= self.seconds

        return now


def try_kills(workspace: Workspace, rng: random.Random) -> Findings:
    """Start a command, kill it one to four times, continue it to the end, and compare."""
    [name] = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
    scenario, findings = workspace.scenario(name), Findings(tried=0)
    out = workspace.new_folder(f"kill-{name}-{rng.getrandbits(32):08x}") / "out"
    moments = [Moment.random(scenario, rng) for _ in range(rng.randint(1, MAX_KILLS))]
    for moment in [*moments, None]:
        outcome = _run(scenario, out, workspace.folder, moment)
        if outcome.code == -9 and moment is not None:
            findings.tried += 1
        elif not check_ended(findings, outcome, f"{out}: {moments}"):
            return findings
    for line in differences(scenario.reference, out):
        findings.add("differences", f"{out}: {moments}: {line}")
    if not findings.failures:
        shutil.rmtree(out.parent)
    return findings


def check_ended(findings: Findings, outcome: Outcome, where: str) -> bool:
    """Record a command that did not end well; return whether it did."""
    if outcome.hung:
        findings.add("hangs", f"{where}: {outcome.last_line()}")
    elif outcome.has_traceback:
        findings.add("tracebacks", f"{where}: {outcome.last_line()}")
    elif outcome.code != 0:
        findings.add("differences", f"{where}: {outcome.last_line()}")
    return outcome.code == 0 and not outcome.has_traceback


def _run(scenario: Scenario, out: Path, folder: Path, moment: Moment | None) -> Outcome:
    """Run the command, up to `moment`. Wait for runs that have outlived an earlier process."""
    deadline = time.monotonic() + HANG_SECONDS
    while True:
        process = start_fresh(scenario.command(out), folder)
        if moment is None:
            outcome = process.wait()
        else:
            outcome = process.wait(moment.watch(process, out), moment.with_children)
        waits = outcome.is_one_line_error and "still running there" in outcome.errors
        if not waits or time.monotonic() > deadline:
            return outcome
        time.sleep(0.2)
