"""Trains thousands of steps, and checks that memory, descriptors and files stop growing.

One run is the own trainer with EEPO, with `eepo watch` open and its page polled. The other one is
the TRL adapter. Every process is measured once per second.
"""

from __future__ import annotations

import contextlib
import random
import re
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from commands import Running, start_fresh, start_python
from comparison import files
from kills import check_ended
from scenarios import TRAIN, Workspace
from table import Findings

WARM_STEPS = 200  # caches and allocators have filled after these
WINDOW = 200  # steps that are compared: the first after WARM_STEPS, and the last
# Allocators move by a few MB. A leak of 10 kB per step would be 16 MB after 1,600 steps. A
# drawing of the watch page needs more memory in a longer run, and Python keeps some of it.
MEMORY_MB = {"trainer": 12.0, "TRL": 12.0, "watch": 20.0}
PAGES = ("", "status", "report")
KNOBS = {
    "num_steps = 6": "num_steps = {steps}",
    "max_new_tokens = 8": "max_new_tokens = 4",
    "prompts_per_step = 4": "prompts_per_step = 1",
    "prompts_per_mini_batch = 2": "prompts_per_mini_batch = 1",
    "checkpoint_every = 2": "checkpoint_every = 50",
    "every = 2\nnum_samples": "every = 100\nnum_samples",
}


@dataclass(frozen=True)
class Measurement:
    step: int
    megabytes: float
    num_descriptors: int
    num_files: int


def try_long_run(workspace: Workspace, rng: random.Random) -> Findings:
    workspace.write_inputs()
    own, trl = _own_trainer(workspace), _trl(workspace)
    return Findings(2 * workspace.long_steps, own.failures + trl.failures)


def _own_trainer(workspace: Workspace) -> Findings:
    """Train with the own trainer, and poll the page of `eepo watch` meanwhile."""
    folder = workspace.new_folder("long-own")
    text = TRAIN.replace("{policy}", str(workspace.folder / "policy"))
    for before, after in KNOBS.items():
        assert before in text, before
        text = text.replace(before, after.format(steps=workspace.long_steps))
    (folder / "long.toml").write_text(text)
    out, findings = folder / "out", Findings()
    train = start_fresh(["train", "long.toml", "--out", str(out)], folder)
    watch = start_fresh(["watch", str(out), "--port", "0", "--interval", "2"], folder)

    def step() -> int:
        metrics = out / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def poll() -> None:
        if address := re.search(r"http://\S+", watch.output()):
            for page in PAGES:
                with contextlib.suppress(OSError):  # the first report is not drawn yet
                    urllib.request.urlopen(f"{address.group()}/{page}", timeout=30).read()

    series: dict[str, list[Measurement]] = {"trainer": [], "watch": []}
    for _ in _seconds(train):
        poll()
        series["trainer"].append(measure(train.pid, step(), out))
        series["watch"].append(measure(watch.pid, step(), out))
    watch.kill()
    watch.wait()
    _finish(findings, train, series)
    return findings


def _trl(workspace: Workspace) -> Findings:
    folder, findings = workspace.new_folder("long-trl"), Findings()
    out, progress = folder / "out", folder / "step"
    script = [str(Path(__file__).with_name("trl_run.py")), str(workspace.folder / "policy")]
    process = start_python([*script, str(out), str(progress), str(workspace.long_steps)], folder)
    series: dict[str, list[Measurement]] = {"TRL": []}
    for _ in _seconds(process):
        step = int(progress.read_text() or 0) if progress.exists() else 0
        series["TRL"].append(measure(process.pid, step, out))
    _finish(findings, process, series)
    return findings


def _seconds(process: Running) -> Iterator[None]:
    """Yield about once per second while the process runs."""
    while process.alive():
        yield
        time.sleep(1)


def _finish(findings: Findings, process: Running, series: dict[str, list[Measurement]]) -> None:
    check_ended(findings, process.wait(), f"long run of {', '.join(series)}")
    for name, measurements in series.items():
        for line in growth(measurements, MEMORY_MB[name]):
            findings.add("differences", f"{name}: {line}")


def measure(pid: int, step: int, folder: Path) -> Measurement:
    """Measure a process and the folder that it writes. An ended process has 0 of everything."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        kilobytes = int(re.search(r"VmRSS:\s+(\d+)", status).group(1))  # type: ignore[union-attr]
    except (OSError, AttributeError):
        return Measurement(step, 0.0, 0, 0)
    return Measurement(step, kilobytes / 1024, descriptors, len(files(folder)))


def growth(measurements: list[Measurement], allowed_mb: float) -> list[str]:
    """Compare the last steps with those after the start; return one line per value that grew."""
    alive = [each for each in measurements if each.num_descriptors]
    last = max((each.step for each in alive), default=0)
    early = [m for m in alive if WARM_STEPS <= m.step < WARM_STEPS + WINDOW]
    late = [m for m in alive if m.step > last - WINDOW]
    if last < WARM_STEPS + 2 * WINDOW or not early:
        return [f"only {last} steps were measured"]
    values: dict[str, tuple[Callable[[Measurement], float], float]] = {
        "MB of memory": (lambda m: m.megabytes, allowed_mb),
        "descriptors": (lambda m: m.num_descriptors, 1),
        "files": (lambda m: m.num_files, 1),
    }
    lines = []
    for name, (value, allowed) in values.items():
        before, after = (statistics.median(map(value, part)) for part in (early, late))
        line = f"{before:.1f} {name} after step {WARM_STEPS}, {after:.1f} at step {last}"
        print(line, file=sys.stderr)
        if after > before + allowed:
            lines.append(line)
    return lines
