"""Trains a recipe over a grid of knobs and several seeds, each run in its own process.

    OUT/recipe.toml              the recipe that all points share
    OUT/recipes/POINT.toml       the knobs that a point changes
    OUT/POINT/seed-N/            a run, with its output in `log.txt`

The same command continues a stopped sweep. Other values, other knobs or more seeds add runs.
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
from eepo.assemble import check_folder
from eepo.config import RunConfig
from eepo.experiments.processes import Job, failure_reason, run_jobs
from eepo.model import loading
from eepo.runs.progress import Progress
from eepo.runs.runlog import METRICS, write_atomically
from eepo.tasks import build_task
from eepo.trainer import is_finished
from eepo.types import UserError

MAX_NAME_LENGTH = 120  # characters of a folder name


@dataclass(frozen=True)
class Grid:
    """Holds a knob and its values, each as the text after `=` in an override."""

    knob: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """Describes one combination of values."""

    knobs: dict[str, Any]  # e.g. {"algorithm.gate": "token"}, sorted by name
    config: RunConfig

    @property
    def folder_name(self) -> str:
        """Return a readable name; with a digest if characters had to be replaced or cut off."""
        text = ",".join(f"{knob}={_text(value)}" for knob, value in self.knobs.items())
        safe = re.sub(r"[^A-Za-z0-9._+=,-]", "_", text)
        if safe == text and len(safe) <= MAX_NAME_LENGTH:
            return safe
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return f"{safe[: MAX_NAME_LENGTH - 9]}-{digest}"

    @property
    def name(self) -> str:
        """Return the name of its runs. A report treats each point of a sweep as a method."""
        values = [f"{_knob_name(knob)}={_text(value)}" for knob, value in self.knobs.items()]
        return f"{self.config.name} {', '.join(values)}"

    def run_config(self, seed: int) -> RunConfig:
        training = dataclasses.replace(self.config.training, seed=seed)
        return dataclasses.replace(self.config, name=self.name, training=training)

    def recipe_text(self) -> str:
        """Return a recipe with the knobs that this point changes."""
        lines = ['extends = "../recipe.toml"', f"name = {_toml(self.name)}"]
        # Knobs are sorted, so the knobs of a section are adjacent.
        for section, knobs in itertools.groupby(self.knobs, key=_section):
            lines += ["", f"[{section}]"]
            lines += [f"{_knob_name(knob)} = {_toml(self.knobs[knob])}" for knob in knobs]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Sweep:
    """Lists all runs of a sweep."""

    base: RunConfig
    points: list[Point]
    num_seeds: int
    out: Path

    @property
    def runs(self) -> list[tuple[Point, int]]:
        """Return the runs seed by seed, so that a stopped sweep has complete seeds."""
        first = self.base.training.seed
        seeds = range(first, first + self.num_seeds)
        return [(point, seed) for seed in seeds for point in self.points]

    def folder(self, point: Point, seed: int) -> Path:
        return self.out / point.folder_name / f"seed-{seed}"

    def is_finished(self, point: Point, seed: int) -> bool:
        return is_finished(point.config, self.folder(point, seed))

    def job(self, point: Point, seed: int) -> Job:
        folder = self.folder(point, seed)
        command = [sys.executable, "-m", "eepo", "train", str(self.recipe_file(point))]
        command += ["--out", str(folder), "--resume", "--set", f"training.seed={seed}"]
        return Job(f"{point.folder_name} seed {seed}", tuple(command), folder / "log.txt")

    def recipe_file(self, point: Point) -> Path:
        return self.out / "recipes" / f"{point.folder_name}.toml"


def plan(
    recipe_name: str, overrides: Sequence[str], grids: Sequence[str], num_seeds: int, out: Path
) -> Sweep:
    """Check all points before the first run starts. This writes nothing."""
    base = recipe.load_run(recipe_name, overrides)
    parsed = sorted((parse_grid(text) for text in grids), key=lambda grid: grid.knob)
    for grid, after in itertools.pairwise(parsed):
        if grid.knob == after.knob:
            raise UserError(f"--grid {grid.knob} is given twice; give all its values in one --grid")
    points = [
        _point(recipe_name, overrides, choice)
        for choice in itertools.product(*map(_choices, parsed))
    ]
    for point in points:
        if sum(other.knobs == point.knobs for other in points) > 1:
            values = ", ".join(f"{knob} = {_toml(value)}" for knob, value in point.knobs.items())
            raise UserError(f"--grid: {values} is given twice, maybe in two spellings")
    sweep = Sweep(base, points, num_seeds, out)
    _check_folder(sweep)
    return sweep


def parse_grid(text: str) -> Grid:
    """Parse `section.knob=a,b,c`. Values are TOML or bare words.

    A text with a comma needs quotes. If one text has quotes, all texts need them.
    """
    knob, equals, values = (part.strip() for part in text.partition("="))
    if not equals or not re.fullmatch(r"[a-z_]+\.[a-z0-9_]+", knob):
        raise UserError(
            f"--grid {text}: must be section.knob=value,value, e.g. algorithm.temperature=1.0,1.2"
        )
    if knob == "training.seed":
        raise UserError(
            f"--grid {text}: the seed cannot be swept over; --seeds N runs every point N times"
        )
    if "'" in values or '"' in values:
        return Grid(knob, tuple(_quoted(text, values)))
    if set(values) & set("[]{}"):
        raise _not_scalar(text)
    parts = tuple(part.strip() for part in values.split(","))
    if not all(parts):
        raise UserError(f"--grid {text}: a value is empty; separate values with single commas")
    return Grid(knob, parts)


def _quoted(text: str, values: str) -> Iterator[str]:
    try:
        parsed = tomllib.loads(f"values = [{values}]")["values"]
    except tomllib.TOMLDecodeError as error:
        raise UserError(
            f"--grid {text}: if one value is in quotes, all words must be in quotes"
        ) from error
    for value in parsed:
        if not isinstance(value, str | int | float):
            raise _not_scalar(text)
        yield _toml(value)


def _not_scalar(text: str) -> UserError:
    return UserError(
        f"--grid {text}: lists and tables cannot be swept over; use numbers, words or quoted texts"
    )


def _choices(grid: Grid) -> list[tuple[str, str]]:
    return [(grid.knob, value) for value in grid.values]


def _point(recipe_name: str, overrides: Sequence[str], choice: Sequence[tuple[str, str]]) -> Point:
    changes = [f"{knob}={value}" for knob, value in choice]
    try:
        config = recipe.load_run(recipe_name, [*overrides, *changes])
    except UserError as error:
        # The user's --set were read without an error before, so the mistake is in the grid.
        reason = str(error).removeprefix("--set: ")
        raise UserError(f"--grid {' --grid '.join(changes)}: {reason}") from error
    # Take the values from the config: there 1 and 1.0 are the same float.
    knobs = {knob: getattr(getattr(config, _section(knob)), _knob_name(knob)) for knob, _ in choice}
    return Point(knobs, config)


def _check_folder(sweep: Sweep) -> None:
    """Refuse a folder that holds a run, or runs with other knobs."""
    if (sweep.out / METRICS).exists():
        raise UserError(f"--out {sweep.out} holds a run; give another folder")
    advice = "give the same recipe and --set again, or another --out"
    check_folder(sweep.base, sweep.out, True, advice=advice)
    for point, seed in sweep.runs:
        check_folder(point.run_config(seed), sweep.folder(point, seed), True, advice=advice)


def check_set(sweep: Sweep, name: str) -> None:
    """Check before the first run that the task has an evaluation set of this name."""
    if not name:
        return
    config = sweep.base
    task = build_task(config.task, loading.load_tokenizer(config.model), config.training.seed)
    if name not in (allowed := task.evaluation_sets()):
        raise UserError(f"--on {name} must be one of {', '.join(allowed)}")


def run_sweep(sweep: Sweep, num_jobs: int, progress: Progress) -> dict[str, str]:
    """Train all unfinished runs, `num_jobs` at a time (0: automatic).

    Return the reason of each failure, by title.
    """
    num_jobs = num_jobs or default_jobs(sweep)
    failed: dict[str, str] = {}
    with _locked(sweep.out) as lock:
        _write_recipes(sweep)
        jobs = [sweep.job(*run) for run in sweep.runs if not sweep.is_finished(*run)]
        num_done = len(sweep.runs) - len(jobs)
        if num_done:
            progress.print(f"{num_done} of {len(sweep.runs)} runs are already finished")
        with progress.bar(f"sweep, {num_jobs} at a time", len(sweep.runs), num_done) as bar:

            def on_exit(job: Job, code: int) -> None:
                if code:
                    failed[job.title] = failure_reason(job, code)
                    progress.print(f"failed: {job.title}: {failed[job.title]}")
                bar.advance(note=f"{len(failed)} failed" if failed else "")

            def on_stop() -> None:
                progress.print(
                    "stopping: runs end after their current step; stop again to end them at once"
                )

            environment = job_environment(num_jobs)
            completed = run_jobs(
                jobs, num_jobs, environment, on_exit, on_stop, inherited_fds=(lock,)
            )
    if not completed:
        num_done = sum(sweep.is_finished(*run) for run in sweep.runs)
        raise UserError(
            f"stopped with {num_done} of {len(sweep.runs)} runs finished; "
            "the same command continues"
        )
    return failed


def default_jobs(sweep: Sweep) -> int:
    """Return one job per two cores; on a GPU one job, because more may not fit."""
    devices = {point.config.model.device for point in sweep.points}
    on_gpu = any(device.startswith("cuda") for device in devices) or (
        "auto" in devices and torch.cuda.is_available()
    )
    return 1 if on_gpu else max(1, num_cores() // 2)


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def job_environment(num_jobs: int) -> dict[str, str]:
    """Return environment variables that give each run its share of the cores and of a GPU.

    More threads than cores would wait for each other. The GPU share sizes the KV cache.
    """
    shares = {"OMP_NUM_THREADS": max(1, num_cores() // num_jobs), "EEPO_GPU_SHARE": 1 / num_jobs}
    return {name: str(share) for name, share in shares.items()} | os.environ


def _write_recipes(sweep: Sweep) -> None:
    write_atomically(sweep.out / "recipe.toml", recipe.dump(sweep.base))
    (sweep.out / "recipes").mkdir(exist_ok=True)
    for point in sweep.points:
        write_atomically(sweep.recipe_file(point), point.recipe_text())


@contextmanager
def _locked(out: Path) -> Iterator[int]:
    """Lock the folder of the sweep; yield the file descriptor of the lock.

    Every run inherits the lock. So a run that outlives a killed sweep is not started twice.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be created ({error.strerror})") from error
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"--out {out}: a sweep, or a run of a killed sweep, is still running there"
            ) from error
        yield file.fileno()


def _section(knob: str) -> str:
    return knob.partition(".")[0]


def _knob_name(knob: str) -> str:
    return knob.partition(".")[2]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _toml(value)


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
