"""A grid of knobs over one recipe and several seeds: every point and seed is a run in a process of its own.

    OUT/recipe.toml              the recipe that all points share
    OUT/recipes/POINT.toml       what a point changes in it
    OUT/POINT/seed-N/            a run, and beside its records `log.txt`, what it printed

The same command goes on where it stopped; other values, knobs or more seeds add runs to those that are there.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eepo import recipe
from eepo.assemble import find_start
from eepo.config import RunConfig
from eepo.experiments.processes import Job, run_jobs, why_ended
from eepo.model import loading
from eepo.runs.progress import Progress
from eepo.runs.runlog import METRICS, write_whole
from eepo.tasks import build_task
from eepo.trainer import is_finished
from eepo.types import UserError

LONGEST_NAME = 120  # characters of a folder's name


@dataclass(frozen=True)
class Grid:
    """One knob and its values, each as the text that stands after `=` in an override."""

    knob: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Point:
    knobs: dict[str, Any]  # "algorithm.gate" → "token", by name
    config: RunConfig

    @property
    def folder_name(self) -> str:
        """Readable where it can be; what a file system would not take is replaced, and told apart by a digest."""
        text = ",".join(f"{knob}={_plain(value)}" for knob, value in self.knobs.items())
        safe = re.sub(r"[^A-Za-z0-9._+=,-]", "_", text)
        if safe == text and len(safe) <= LONGEST_NAME:
            return safe
        return f"{safe[: LONGEST_NAME - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    @property
    def name(self) -> str:
        """Of its runs: in a report the points of a sweep are methods of their own."""
        label = ", ".join(
            f"{knob.partition('.')[2]}={_plain(value)}" for knob, value in self.knobs.items()
        )
        return f"{self.config.name} {label}"

    def run_config(self, seed: int) -> RunConfig:
        training = dataclasses.replace(self.config.training, seed=seed)
        return dataclasses.replace(self.config, name=self.name, training=training)

    def recipe_text(self) -> str:
        """What this point changes. Knobs are sorted, so those of one section stand together."""
        lines = ['extends = "../recipe.toml"', f"name = {_toml(self.name)}"]
        for section, knobs in itertools.groupby(
            self.knobs, key=lambda knob: knob.partition(".")[0]
        ):
            lines += [
                "",
                f"[{section}]",
                *(f"{knob.partition('.')[2]} = {_toml(self.knobs[knob])}" for knob in knobs),
            ]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Sweep:
    """Every run of the grid, none of them started."""

    base: RunConfig
    points: list[Point]
    num_seeds: int
    out: Path

    @property
    def runs(self) -> list[tuple[Point, int]]:
        """Seed after seed: a sweep that is stopped has whole seeds, in which points can be compared."""
        first = self.base.training.seed
        return [
            (point, seed) for seed in range(first, first + self.num_seeds) for point in self.points
        ]

    def folder(self, point: Point, seed: int) -> Path:
        return self.out / point.folder_name / f"seed-{seed}"

    def is_finished(self, point: Point, seed: int) -> bool:
        return is_finished(point.config, self.folder(point, seed))

    def job(self, point: Point, seed: int) -> Job:
        folder, file = self.folder(point, seed), self.out / "recipes" / f"{point.folder_name}.toml"
        command = (
            sys.executable,
            "-m",
            "eepo",
            "train",
            str(file),
            "--out",
            str(folder),
            "--resume",
        )
        title = f"{point.folder_name} seed {seed}"
        return Job(title, (*command, "--set", f"training.seed={seed}"), folder / "log.txt")


def plan(
    recipe_name: str, overrides: Sequence[str], grids: Sequence[str], num_seeds: int, out: Path
) -> Sweep:
    """Read everything and write nothing: a mistake in any point shows before the first one starts."""
    base = recipe.load_run(recipe_name, overrides)
    parsed = sorted((parse_grid(text) for text in grids), key=lambda grid: grid.knob)
    for grid, after in itertools.pairwise(parsed):
        if grid.knob == after.knob:
            raise UserError(f"--grid {grid.knob} is given twice; put all its values behind one")
    points = [
        _point(recipe_name, overrides, choice)
        for choice in itertools.product(*map(_choices, parsed))
    ]
    for point in points:
        if sum(other.knobs == point.knobs for other in points) > 1:
            values = ", ".join(f"{knob} = {_toml(value)}" for knob, value in point.knobs.items())
            raise UserError(f"--grid: {values} is there twice, in two spellings perhaps")
    sweep = Sweep(base, points, num_seeds, out)
    _check_folder(sweep)
    return sweep


def parse_grid(text: str) -> Grid:
    """`section.knob=a,b,c`. A value is TOML or a bare word; texts with commas need quotes, and then all texts do."""
    knob, equals, values = (part.strip() for part in text.partition("="))
    if not equals or not re.fullmatch(r"[a-z_]+\.[a-z0-9_]+", knob):
        raise UserError(
            f"--grid {text}: expected section.knob=value,value, such as algorithm.temperature=1.0,1.2"
        )
    if knob == "training.seed":
        raise UserError(
            f"--grid {text}: seeds are no knob here; --seeds N runs every point with N of them"
        )
    if "'" in values or '"' in values:
        return Grid(knob, tuple(_quoted(text, values)))
    if set(values) & set("[]{}"):
        raise UserError(
            f"--grid {text}: lists and tables cannot be swept over; numbers, words and texts can"
        )
    parts = tuple(part.strip() for part in values.split(","))
    if not all(parts):
        raise UserError(f"--grid {text}: a value is empty; write them with one comma between two")
    return Grid(knob, parts)


def _quoted(text: str, values: str) -> Iterator[str]:
    try:
        found = tomllib.loads(f"values = [{values}]")["values"]
    except tomllib.TOMLDecodeError as error:
        raise UserError(
            f"--grid {text}: where one value is in quotes, every word must be"
        ) from error
    for value in found:
        if not isinstance(value, str | int | float):
            raise UserError(
                f"--grid {text}: lists and tables cannot be swept over; numbers, words and texts can"
            )
        yield _toml(value)


def _choices(grid: Grid) -> list[tuple[str, str]]:
    return [(grid.knob, value) for value in grid.values]


def _point(recipe_name: str, overrides: Sequence[str], choice: Sequence[tuple[str, str]]) -> Point:
    changes = [f"{knob}={value}" for knob, value in choice]
    try:
        config = recipe.load_run(recipe_name, [*overrides, *changes])
    except UserError as error:
        why = str(error).removeprefix("--set: ")  # the user's own --set were read before
        raise UserError(f"--grid {' --grid '.join(changes)}: {why}") from error
    values = {}
    for knob, _ in choice:  # as read: 1 and 1.0 are one value where a number is expected
        section, name = knob.split(".")
        values[knob] = getattr(getattr(config, section), name)
    return Point(values, config)


def _check_folder(sweep: Sweep) -> None:
    """What is in the folder must be of this sweep, knob for knob."""
    if (sweep.out / METRICS).exists():
        raise UserError(f"--out {sweep.out} holds a run; a sweep needs a folder of its own")
    advice = "give the same recipe and --set again, or another --out"
    find_start(sweep.base, sweep.out, True, advice)
    for point, seed in sweep.runs:
        find_start(point.run_config(seed), sweep.folder(point, seed), True, advice)


def check_set(sweep: Sweep, name: str) -> None:
    """Before the first run: which sets there are is known to the task alone."""
    if not name:
        return
    config = sweep.base
    task = build_task(config.task, loading.load_tokenizer(config.model), config.training.seed)
    if name not in (allowed := task.evaluation_sets()):
        raise UserError(f"--on {name} must be one of {', '.join(allowed)}")


def run_sweep(sweep: Sweep, num_jobs: int, progress: Progress) -> dict[str, str]:
    """Train what is not finished, `num_jobs` at a time (0: chosen here). Returns title → why, of runs that failed."""
    num_jobs = num_jobs or default_jobs(sweep)
    failed: dict[str, str] = {}
    with _locked(sweep.out) as lock:
        _write_recipes(sweep)
        jobs = [sweep.job(*run) for run in sweep.runs if not sweep.is_finished(*run)]
        num_done = len(sweep.runs) - len(jobs)
        if num_done:
            progress.say(f"{num_done} of {len(sweep.runs)} runs are finished already")
        with progress.bar(f"sweep, {num_jobs} at a time", len(sweep.runs), num_done) as bar:

            def ended(job: Job, code: int) -> None:
                if code:
                    failed[job.title] = why_ended(job, code)
                    progress.say(f"failed: {job.title}: {failed[job.title]}")
                bar.advance(note=f"{len(failed)} failed" if failed else "")

            def stopping() -> None:
                progress.say(
                    "stopping: runs end after the step they are in; once more, and they end at once"
                )

            whole = run_jobs(
                jobs, num_jobs, job_environment(num_jobs), ended, stopping, held_open=(lock,)
            )
    if not whole:
        num_done = sum(sweep.is_finished(*run) for run in sweep.runs)
        raise UserError(
            f"stopped with {num_done} of {len(sweep.runs)} runs finished; the same command goes on"
        )
    return failed


def default_jobs(sweep: Sweep) -> int:
    """Two cores a run. A GPU takes one run at a time unless the user knows that more fit."""
    devices = {point.config.model.device for point in sweep.points}
    on_gpu = any(device.startswith("cuda") for device in devices) or (
        "auto" in devices and torch.cuda.is_available()
    )
    return 1 if on_gpu else max(1, num_cores() // 2)


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def job_environment(num_jobs: int) -> dict[str, str]:
    """Each run has its share of the cores: more threads than cores wait for each other. And of a GPU, for its cache."""
    shares = {"OMP_NUM_THREADS": max(1, num_cores() // num_jobs), "EEPO_GPU_SHARE": 1 / num_jobs}
    return {name: str(share) for name, share in shares.items()} | os.environ


def _write_recipes(sweep: Sweep) -> None:
    write_whole(sweep.out / "recipe.toml", recipe.dump(sweep.base))
    (sweep.out / "recipes").mkdir(exist_ok=True)
    for point in sweep.points:
        write_whole(sweep.out / "recipes" / f"{point.folder_name}.toml", point.recipe_text())


@contextmanager
def _locked(out: Path) -> Iterator[int]:
    """Held by us and by every run we start, so that runs which outlive a killed sweep are not started a second time."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be made: {error.strerror}") from error
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"--out {out}: a sweep, or a run that one left behind, is at work there"
            ) from error
        yield file.fileno()


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _toml(value)


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
