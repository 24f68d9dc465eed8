"""Runs the runs of an experiment: in parallel processes, or one after another in this process.

The same command continues a stopped experiment, and tries failed runs again. Methods, values and
seeds that are added to the plan add runs.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from eepo import assemble, recipe
from eepo.evaluation.options import BenchmarkOptions, option_name
from eepo.experiments.experiment import CHECKPOINTS, FINAL, Experiment, Run
from eepo.experiments.folder_lock import FolderLock, locked_folder
from eepo.experiments.gpus import GpuPool, visible_gpus
from eepo.experiments.lines import BENCHMARKS
from eepo.experiments.plan import Benchmarks, Selection
from eepo.experiments.processes import Job, Process, Starter, failure_reason, run_jobs
from eepo.experiments.schedule import Schedule
from eepo.experiments.warm import WarmStarter
from eepo.model.memory import GPU_SHARE
from eepo.runs.memory_errors import OUT_OF_MEMORY
from eepo.runs.progress import Bar, Progress
from eepo.runs.runlog import write_atomically
from eepo.trainer import Interrupted, Stopped, is_finished
from eepo.types import UserError

FAILED = "failed.txt"  # in the folder of a run: why it failed
LOG, BENCHMARKS_LOG = "log.txt", "benchmarks_log.txt"
BENCHMARK_KEYS = (  # options of `eepo eval` that the runner gives
    "data_dir", "num_samples", "temperature", "max_new_tokens", "limit", "sample_limit",
    "template", "reward", "max_rows", "device",
)  # fmt: skip


@dataclass
class Outcome:
    """Says how an experiment ended."""

    num_runs: int
    num_done: int = 0
    failed: dict[str, str] = field(default_factory=dict)  # title -> reason
    num_waiting: int = 0  # runs that need a failed run

    def failure_lines(self) -> list[str]:
        """Return what the user should know about failures; nothing if there are none."""
        if not self.failed:
            return []
        lines = [f"failed: {title}: {reason}" for title, reason in self.failed.items()]
        waiting = f", and {self.num_waiting} runs wait for them" if self.num_waiting else ""
        failed = f"{len(self.failed)} of {self.num_runs} runs failed{waiting}"
        return [*lines, f"{failed}; the same command tries them again"]


def run_in_processes(
    experiment: Experiment,
    selection: Selection,
    num_jobs: int,
    progress: Progress,
    title: str = "plan",
) -> Outcome:
    """Run everything that is not done, `num_jobs` runs at a time (0: automatic).

    A run that fails does not affect the others. A stop raises a `UserError`.
    """
    with locked_folder(experiment.out) as lock:
        schedule = prepare(experiment, selection)
        num_jobs = num_jobs or default_jobs(experiment, schedule.known_runs())
        if num_jobs > 1 and experiment.plan.equal == "time":
            raise UserError(
                f'--jobs {num_jobs}: {experiment.plan.source} has equal = "time", which needs '
                "--jobs 1: parallel runs slow each other down"
            )
        if schedule.done:
            progress.print(f"{len(schedule.done)} of {schedule.num_runs} runs are already finished")
        bar_title = f"{title}, {num_jobs} at a time"
        with progress.bar(bar_title, schedule.num_runs, len(schedule.done)) as bar:
            workers = _Workers(schedule, lock, progress, bar)
            completed = workers.run(num_jobs)
    outcome = workers.outcome
    outcome.num_done = len(schedule.done)
    outcome.num_waiting = schedule.num_runs - outcome.num_done - len(outcome.failed)
    if not completed:
        raise UserError(
            f"stopped with {outcome.num_done} of {outcome.num_runs} runs finished; "
            "the same command continues"
        )
    return outcome


def run_here(experiment: Experiment, selection: Selection, progress: Progress) -> Outcome:
    """Run everything that is not done in this process, one run after another.

    Progress of each run is visible, and torch is imported once. An error of a run ends all.
    """
    with locked_folder(experiment.out) as lock:
        schedule = prepare(experiment, selection)
        waiting = schedule.ready()
        while waiting:
            run = waiting.pop(0)
            lock.list_running([experiment.title(run)])
            if not is_trained(experiment, run):
                finished = f"{len(schedule.done)} of {schedule.num_runs} runs finished"
                _train_here(experiment, run, progress, finished)
            _evaluate_here(experiment, run, progress)
            complete(experiment, run)
            schedule.finish(run)
            waiting = sorted([*schedule.ready(), *waiting], key=schedule.position)
    return Outcome(schedule.num_runs, len(schedule.done))


def make_schedule(experiment: Experiment, selection: Selection) -> Schedule:
    """Check all runs before the first one starts. This writes nothing."""
    schedule = Schedule(experiment, selection)
    schedule.check()
    for run in schedule.known_runs():
        check_folder(experiment, run)
    return schedule


def prepare(experiment: Experiment, selection: Selection) -> Schedule:
    """Check all runs, and record those that are finished already."""
    schedule = make_schedule(experiment, selection)
    for run in schedule.known_runs():
        finished = is_trained(experiment, run) and not experiment.lacks_benchmarks(run)
        if finished and run not in schedule.done:
            complete(experiment, run)
            schedule.finish(run)
    return schedule


def check_folder(experiment: Experiment, run: Run) -> None:
    """Refuse a folder whose run has other knobs or another kind of limit.

    A run that ended by its number of steps may already have trained longer than the time limit.
    """
    folder, config = experiment.folder(run), experiment.config(run)
    recipe_file = folder / "recipe.toml"
    if recipe_file.exists():
        by_time = experiment.time_baseline(run) is not None or config.training.max_seconds > 0
        existing_by_time = recipe.load_run(recipe_file).training.max_seconds > 0
        if existing_by_time != by_time:
            limits = {True: "time", False: "its number of steps"}
            raise UserError(
                f"{folder} contains a run limited by {limits[existing_by_time]}, but this run is "
                f"limited by {limits[by_time]}; give another --out"
            )
    assemble.check_folder(config, folder, resume=True, advice=experiment.advice)


def complete(experiment: Experiment, run: Run) -> None:
    """Record a finished run, and delete the weights that the plan does not keep."""
    folder, keep = experiment.folder(run), experiment.plan.keep_weights_in(run.phase)
    (folder / FAILED).unlink(missing_ok=True)
    experiment.record(run)
    if keep != "all":
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    if keep == "none" and not experiment.is_source(run):
        shutil.rmtree(folder / FINAL, ignore_errors=True)


def train_command(experiment: Experiment, run: Run) -> tuple[str, ...]:
    """Return the command that trains a run, without the interpreter."""
    changes = [word for knob in experiment.overrides(run) for word in ("--set", knob)]
    folder = str(experiment.folder(run))
    force = ["--force"] if experiment.must_restart(run) else []
    return ("eepo", "train", experiment.recipe(run), "--out", folder, "--resume", *force, *changes)


def benchmark_command(experiment: Experiment, run: Run, benchmarks: Benchmarks) -> tuple[str, ...]:
    """Return the command that evaluates the final weights of a run on the plan's benchmarks."""
    options = benchmark_options(experiment, run, benchmarks)
    words = ["eepo", "eval", options.model, "--benchmarks", ",".join(options.benchmarks)]
    words += ["--out", str(experiment.folder(run) / BENCHMARKS)]
    for option in dataclasses.fields(options):
        value = getattr(options, option.name)
        if option.name in BENCHMARK_KEYS and value is not None:
            words += [option_name(option), str(value)]
    return tuple(words)


def benchmark_options(experiment: Experiment, run: Run, benchmarks: Benchmarks) -> BenchmarkOptions:
    """Return the options of `eepo eval`. What the plan leaves open is as in the run."""
    return BenchmarkOptions(
        model=str(experiment.folder(run)),
        benchmarks=benchmarks.names,
        data_dir=benchmarks.data_dir or None,
        num_samples=benchmarks.samples,
        temperature=benchmarks.temperature or None,
        max_new_tokens=benchmarks.max_new_tokens or None,
        limit=benchmarks.limit,
        sample_limit=benchmarks.sample_limit,
        template=benchmarks.template or None,
        reward=benchmarks.reward or None,
        max_rows=benchmarks.max_rows or None,
        device=experiment.config(run).model.device,
    )


def default_jobs(experiment: Experiment, runs: Sequence[Run]) -> int:
    """Return one job per two cores, or one per GPU, because more may not fit.

    At equal time, or if recipes name a GPU, runs are trained one after another.
    """
    devices = {experiment.config(run).model.device for run in runs}
    if experiment.plan.equal == "time" or any(device.startswith("cuda:") for device in devices):
        return 1
    on_gpu = "cuda" in devices or ("auto" in devices and torch.cuda.is_available())
    return max(1, len(visible_gpus()) if on_gpu else num_cores() // 2)


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def job_environment(num_jobs: int) -> dict[str, str]:
    """Return environment variables that give each run its share of the cores.

    More threads than cores would wait for each other. So would the processes that compile kernels:
    by default, every run starts one per core.
    """
    share = str(max(1, num_cores() // num_jobs))
    return {"OMP_NUM_THREADS": share, "TORCHINDUCTOR_COMPILE_THREADS": share} | os.environ


class _Workers:
    """Turns runs into jobs, and the ends of jobs into records."""

    def __init__(self, schedule: Schedule, lock: FolderLock, progress: Progress, bar: Bar) -> None:
        self.schedule, self.experiment = schedule, schedule.experiment
        self.lock, self.progress, self.bar = lock, progress, bar
        self.outcome = Outcome(schedule.num_runs)
        self._runs: dict[str, Run] = {}  # by title
        self._running: set[str] = set()  # titles
        self._num_parallel = 1
        self._gpus = GpuPool(visible_gpus())
        self._out_of_memory: list[Job] = []  # they continue later, with fewer jobs at a time

    def run(self, num_jobs: int) -> bool:
        """Run all jobs; return False if the user stopped them.

        Runs share the memory. Those that run out of it are tried again with half as many at a time.
        """
        jobs, completed = self.new_jobs(), True
        while jobs and completed:
            self._num_parallel, self._out_of_memory = num_jobs, []
            environment = job_environment(num_jobs)
            completed = run_jobs(
                jobs, num_jobs, environment, self.on_exit, self.on_stop,
                inherited_fds=(self.lock.descriptor,), starter=self.starter(environment),
            )  # fmt: skip
            jobs, num_jobs = self._out_of_memory, max(1, num_jobs // 2)
        return completed

    def starter(self, environment: Mapping[str, str]) -> Starter:
        """Return a function that starts jobs and notes that they are running."""
        start = WarmStarter(environment)

        def start_noted(job: Job, given: Mapping[str, str], inherited: Sequence[int]) -> Process:
            self._running.add(job.title)
            self.lock.list_running(sorted(self._running))
            return start(job, {**given, **self._gpu_environment(job)}, inherited)

        return start_noted

    def _may_choose_gpu(self, job: Job) -> bool:
        """Say whether a job may use any GPU: its recipe names none, and not the CPU."""
        return self.experiment.config(self._runs[job.title]).model.device in ("auto", "cuda")

    def _num_sharing(self, job: Job) -> int:
        """Return how many jobs may use the same GPU; all, if the recipe names its device."""
        if not self._may_choose_gpu(job):
            return self._num_parallel
        return math.ceil(self._num_parallel / max(1, len(self._gpus)))

    def _gpu_environment(self, job: Job) -> dict[str, str]:
        """Return variables that select a GPU, and the share of it that sizes the KV cache."""
        share = os.environ.get(GPU_SHARE, str(1 / self._num_sharing(job)))
        gpu = self._gpus.take(job.title) if self._may_choose_gpu(job) else {}
        return {GPU_SHARE: share, **gpu}

    def new_jobs(self) -> list[Job]:
        """Return jobs for the runs that can start now."""
        runs = self.schedule.ready()
        self._runs |= {self.experiment.title(run): run for run in runs}
        return [self._next_job(run) or self._training(run) for run in runs]

    def on_exit(self, job: Job, code: int) -> list[Job]:
        """Record the run, and return the jobs that can run now."""
        self._gpus.release(job.title)
        run = self._runs[job.title]
        next_job = None if code else self._next_job(run)
        if next_job and next_job.log != job.log:
            return [next_job]
        self._running.discard(job.title)
        self.lock.list_running(sorted(self._running))
        if code:
            reason = failure_reason(job, code)
            if lack := self._lack_of_memory(job, code, reason):
                self._out_of_memory.append(job)
                self.progress.print(f"{job.title}: {lack}; it continues later")
                return []
            self._fail(job, reason)
        elif next_job:  # it would do the same again
            self._fail(job, f"ended without an error, but is not finished; see {job.log}")
        else:
            complete(self.experiment, run)
            self.schedule.finish(run)
        failed = self.outcome.failed
        self.bar.advance(note=f"{len(failed)} failed" if failed else "")
        return self.new_jobs()

    def _lack_of_memory(self, job: Job, code: int, reason: str) -> str:
        """Say why a job needs more memory than others left for it; "" if it ended otherwise."""
        if code == -signal.SIGKILL:  # by the kernel, if the memory of the machine runs out
            return "killed" if self._num_parallel > 1 else ""
        return OUT_OF_MEMORY if OUT_OF_MEMORY in reason and self._num_sharing(job) > 1 else ""

    def on_stop(self) -> None:
        self.progress.print(
            "stopping: runs end after their current step; stop again to end them at once"
        )

    def _fail(self, job: Job, reason: str) -> None:
        self.outcome.failed[job.title] = reason
        write_atomically(job.log.parent / FAILED, reason + "\n")
        self.progress.print(f"failed: {job.title}: {reason}")

    def _next_job(self, run: Run) -> Job | None:
        """Return the next job of a run: its training, then its benchmarks; None if it is done."""
        if not is_trained(self.experiment, run):
            return self._training(run)
        benchmarks = self.experiment.plan.benchmarks
        if benchmarks is None or not self.experiment.lacks_benchmarks(run):
            return None
        command = benchmark_command(self.experiment, run, benchmarks)
        return self._job(run, command, BENCHMARKS_LOG)

    def _training(self, run: Run) -> Job:
        return self._job(run, train_command(self.experiment, run), LOG)

    def _job(self, run: Run, command: tuple[str, ...], log: str) -> Job:
        words = (sys.executable, "-m", *command)
        position = self.schedule.position(run)
        return Job(self.experiment.title(run), words, self.experiment.folder(run) / log, position)


def _train_here(experiment: Experiment, run: Run, progress: Progress, finished: str) -> None:
    """Train a run. `finished` says in the message of a stop how far the experiment is."""
    folder, force = experiment.folder(run), experiment.must_restart(run)
    trainer = assemble.build_trainer(experiment.config(run), folder, True, progress, force)
    try:
        trainer.run()
    except Stopped as stop:
        raise Interrupted(
            f"stopped after step {trainer.step} of {folder}, with {finished}; "
            "the same command continues"
        ) from stop


def _evaluate_here(experiment: Experiment, run: Run, progress: Progress) -> None:
    """Evaluate the final weights of a run on the plan's benchmarks."""
    benchmarks = experiment.plan.benchmarks
    if benchmarks and experiment.lacks_benchmarks(run):
        options = benchmark_options(experiment, run, benchmarks)
        assemble.build_evaluation(options, experiment.folder(run) / BENCHMARKS, progress).run()


def is_trained(experiment: Experiment, run: Run) -> bool:
    return is_finished(experiment.config(run), experiment.folder(run))
