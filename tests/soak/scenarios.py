"""Small commands that write a folder: train, warm up, evaluate, sweep. Each can be continued."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from commands import Outcome, start_fork, start_fresh

OUT = "OUT"  # in a command: the folder that it writes

TRAIN = """
name = "eepo"
[model]
path = "{policy}"
device = "cpu"
[task]
num_evaluation = 3
[algorithm]
group_size = 4
max_new_tokens = 8
gate = "always"
entropy_coef = 0.1
kl_coef = 0.01
[training]
num_steps = 6
prompts_per_step = 4
prompts_per_mini_batch = 2
learning_rate = 1e-3
checkpoint_every = 2
keep_checkpoints = 2
[evaluation]
every = 2
num_samples = 2
quick_problems = 2
quick_samples = 1
"""
# The shipped policy earns rewards, so that grading and advantages are part of the comparison. The
# step gate and the search of the rate depend on earlier steps.
REWARDED = (
    TRAIN.replace("{policy}", "builtin:countdown")
    + """
[alarm]
patience = 1
entropy_below = 100.0
action = "halve_unlearn_lr"
"""
)
REWARDED = REWARDED.replace('gate = "always"', 'gate = "step"\nunlearn_lr = "auto"')
REWARDED = REWARDED.replace("max_new_tokens = 8", "max_new_tokens = 14\ngate_threshold = 5.0")
REWARDED = REWARDED.replace("checkpoint_every = 2", "checkpoint_every = 1")
WARMUP = """
name = "warmup"
max_new_tokens = 8
[model]
path = "scratch"
device = "cpu"
[scratch]
hidden_size = 16
intermediate_size = 32
num_layers = 1
num_heads = 2
[task]
num_evaluation = 3
[supervised]
num_steps = 8
batch_size = 8
ramp_steps = 2
checkpoint_every = 2
[evaluation]
num_samples = 2
"""


@dataclass(frozen=True)
class Scenario:
    """A command, and an uninterrupted run of it to compare with."""

    name: str
    arguments: tuple[str, ...]  # OUT stands for the folder
    reference: Path
    seconds: float  # the life of a fresh process
    num_changes: int  # times that its folder changes

    def command(self, out: Path) -> list[str]:
        return [str(out) if word == OUT else word for word in self.arguments]


@dataclass
class Workspace:
    """The folder of a soak: inputs, reference runs, and one folder per try."""

    folder: Path
    long_steps: int = 2000  # of a long run

    def __post_init__(self) -> None:
        self._scenarios: dict[str, Scenario] = {}
        self.folder.mkdir(parents=True, exist_ok=True)

    def scenario(self, name: str) -> Scenario:
        """Return a scenario. The first call runs it once, without interruption."""
        if name not in self._scenarios:
            self._scenarios[name] = self._with_reference(name)
        return self._scenarios[name]

    def new_folder(self, name: str) -> Path:
        folder = self.folder / "tries" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def _with_reference(self, name: str) -> Scenario:
        self.write_inputs()
        arguments, reference = COMMANDS[name], self.folder / "reference" / name
        shutil.rmtree(reference, ignore_errors=True)
        counter = ChangeCounter(reference)
        command = [str(reference) if word == OUT else word for word in arguments]
        process = start_fresh(command, self.folder)
        outcome = process.wait(lambda: counter.count() < 0)
        if outcome.code != 0:
            raise SystemExit(f"the reference of {name} failed: {outcome.errors}{outcome.output}")
        return Scenario(name, arguments, reference, process.seconds, counter.number)

    def write_inputs(self) -> None:
        if (self.folder / "problems.jsonl").exists():
            return
        policy = self.folder / "policy"
        write_policy(policy)
        (self.folder / "train.toml").write_text(TRAIN.replace("{policy}", str(policy)))
        (self.folder / "rewarded.toml").write_text(REWARDED)
        (self.folder / "warmup.toml").write_text(WARMUP)
        problems = [{"problem": f"{n} 2 3 4", "answer": str(n + 9)} for n in range(12)]
        text = "".join(json.dumps(row) + "\n" for row in problems)
        (self.folder / "problems.jsonl").write_text(text)


COMMANDS: dict[str, tuple[str, ...]] = {
    "train": ("train", "train.toml", "--out", OUT, "--resume"),
    "rewarded": ("train", "rewarded.toml", "--out", OUT, "--resume"),
    "warmup": ("warmup", "warmup.toml", "--out", OUT, "--resume"),
    "eval": (
        *("eval", "policy", "--benchmarks", "problems.jsonl", "--samples", "3", "--reward"),
        *("exact", "--max-new-tokens", "8", "--max-rows", "4", "--template", "{problem}"),
        *("--device", "cpu", "--out", OUT),
    ),
    "sweep": (
        *("sweep", "train.toml", "--grid", "algorithm.unlearn_lr=1e-3,1e-2", "--seeds", "1"),
        *("--jobs", "2", "--out", OUT),
    ),
}


def write_policy(folder: Path) -> None:
    """Write a decoder of one layer with random weights, in a fork: this process must not run torch.

    It samples noise. Entropy bonus, KL and unlearning still change its weights in every step.
    """
    scratch = folder.with_name("scratch.toml")
    scratch.write_text(WARMUP.replace("num_steps = 8", "num_steps = 1"))
    out = folder.with_name("scratch")
    outcome: Outcome = start_fork(["warmup", str(scratch), "--out", str(out)], folder.parent).wait()
    if outcome.code != 0:
        raise SystemExit(f"the policy cannot be made: {outcome.errors}{outcome.output}")
    shutil.copytree(out / "final", folder)


class ChangeCounter:
    """Counts how often the names or sizes of files in a folder change, as far as polls see it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        self._last: frozenset[tuple[str, int]] = frozenset()

    def count(self) -> int:
        now = frozenset(_names_and_sizes(self.folder))
        if now != self._last:
            self._last, self.number = now, self.number + 1
        return self.number


def _names_and_sizes(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield what exists now. Files and folders may be removed meanwhile."""
    for where, folders, names in os.walk(folder):  # it ignores errors
        for name in (*folders, *names):
            path = os.path.join(where, name)
            with contextlib.suppress(OSError):
                yield path, os.stat(path).st_size
