"""Tests that the memory of `eepo watch` does not grow with the run, in a process of its own."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from eepo.reports.freed_memory import return_freed_memory

STATUS = Path("/proc/self/status")
STEPS = (200, 1100, 2000)  # a drawing after each
WARM_STEPS = 200  # caches have filled after these
ALLOWED_MEGABYTES = 20.0  # about 5 are needed; with figures as PNG files it was more than 100

# Appends steps to a run, asks for the page, and prints the memory of the process in MB.
FOLLOW_RUN = """
import json, sys
from pathlib import Path
from eepo.reports.watch import LiveReport
from eepo.runs.runlog import COMPLETIONS, EVALUATIONS, METRICS, RunLog

STAGES = ("stage1", "stage2")
MEASURES = ("reward", "entropy", "length", "truncated_share", "ratio_mean", "clip_share")

def metrics(step):
    names = ["reward", "entropy", "length", "zero_advantage_share", "gate_share", "seconds/total"]
    names += ["unlearn/kl", "unlearn/lr", "unlearn/weights_changed_share", "grad_norm"]
    names += [f"{stage}/{measure}" for stage in STAGES for measure in MEASURES]
    values = {name: 0.5 + 0.4 * (-1) ** (step + i) / (i + 1) for i, name in enumerate(names)}
    return values | {"step": step}

def completion(step, index):
    return {
        "step": step, "prompt_id": f"train/{step}", "prompt": "1 9 12 3 = 25 :", "text": "1+9" * 9,
        "stage": 1 + index // 8, "reward": float(index % 2), "reason": "hits the target",
        "advantage": 0.3, "finished": True, "logprob": -2.8 - index, "logprob_after": -3.1 - index,
    }

def evaluation(step):
    return {
        "step": step, "kind": "quick", "set": "in_range", "num_problems": 4, "num_samples": 4,
        "greedy": 0.5, "mean": 0.5, "distinct": 1.5, "pass@k": {"1": 0.5, "2": 0.6, "4": 0.7},
    }

def write(folder, name, rows):
    with (folder / name).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\\n" for row in rows)

def megabytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))

folder, draw_after = Path(sys.argv[1]), json.loads(sys.argv[2])
RunLog(folder).write_recipe('name = "eepo"\\n[training]\\nnum_steps = 2000\\nseed = 0\\n')
report = LiveReport([folder], timer=lambda: 0.0)  # no time passes, so there is no pause
before = 0
for last in draw_after:
    steps = range(before + 1, last + 1)
    write(folder, METRICS, map(metrics, steps))
    write(folder, COMPLETIONS, (completion(step, i) for step in steps for i in range(16)))
    write(folder, EVALUATIONS, (evaluation(step) for step in steps if step % 100 == 0))
    assert f"{last} steps".encode() in report.page()
    print(json.dumps([last, megabytes()]))
    before = last
"""


needs_proc = pytest.mark.skipif(not STATUS.exists(), reason="needs /proc, which only Linux has")


def megabytes() -> float:
    """Return the memory of this process."""
    lines = STATUS.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


@needs_proc
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_blocks_between_used_ones_are_returned() -> None:
    blocks = [b"x" * 30_000 for _ in range(3000)]  # below the size that has pages of its own
    used = blocks[::30]
    del blocks
    before = megabytes()
    return_freed_memory()
    assert megabytes() < before - 40
    assert len(used) == 100


@pytest.mark.slow
@needs_proc
def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    arguments = (str(tmp_path / "run"), json.dumps(STEPS))
    child = subprocess.run(
        [sys.executable, "-c", FOLLOW_RUN, *arguments], capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    memory = dict(json.loads(line) for line in child.stdout.splitlines())
    assert list(memory) == list(STEPS)
    assert max(memory.values()) < memory[WARM_STEPS] + ALLOWED_MEGABYTES, memory
