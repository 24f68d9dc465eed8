"""Starts the same command twice: one process does the work, the other is refused with one line."""

from __future__ import annotations

import random
import shutil
import time

from commands import Outcome, run_fork, start_fork
from comparison import differences
from kills import check_ended
from scenarios import Workspace
from table import Findings


def try_two_processes(workspace: Workspace, rng: random.Random) -> Findings:
    """Half of the time, the first process is killed later, and the command starts a third time."""
    scenario = workspace.scenario(rng.choice(["train", "warmup", "eval"]))
    out = workspace.new_folder(f"two-{scenario.name}-{rng.getrandbits(32):08x}") / "out"
    command, findings = scenario.command(out), Findings()
    first = start_fork(command, workspace.folder)
    time.sleep(rng.choice([0, rng.uniform(0, 0.1), rng.uniform(0, scenario.seconds / 3)]))
    second = start_fork(command, workspace.folder)
    outcomes = {second.pid: second.wait()}
    if rng.random() < 0.5:
        time.sleep(rng.uniform(0, 0.5))
        first.kill()
    outcomes[first.pid] = first.wait()
    for pid, outcome in outcomes.items():
        other = first.pid if pid == second.pid else second.pid
        if not is_refused(outcome, other) and outcome.code != -9:
            check_ended(findings, outcome, f"{out}: one of two processes")
    outcome = run_fork(command, workspace.folder)
    if check_ended(findings, outcome, f"{out}: after two processes"):
        for line in differences(scenario.reference, out):
            findings.add("differences", f"{out}: {line}")
    if not findings.failures:
        shutil.rmtree(out.parent)
    return findings


def is_refused(outcome: Outcome, other_pid: int) -> bool:
    """Return whether the command said in one line which process uses the folder."""
    return outcome.is_one_line_error and f"process {other_pid} " in outcome.errors
