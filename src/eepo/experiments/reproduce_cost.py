"""Says before a reproduction starts what it costs: runs, hours, memory, disk and downloads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eepo import recipe
from eepo.config import DatasetConfig, RunConfig
from eepo.experiments.experiment import Experiment
from eepo.experiments.plan import REPORT, TUNE, Selection
from eepo.experiments.reproduce_plan import Reproduction
from eepo.experiments.reproduce_targets import BASELINES, Baseline
from eepo.experiments.runner import make_schedule
from eepo.experiments.schedule import Slot
from eepo.experiments.step_time import NUM_PROMPT_TOKENS, Lengths, run_seconds, step_seconds
from eepo.model import loading, memory
from eepo.model.memory import Shape
from eepo.tasks.benchmarks import BENCHMARKS
from eepo.tasks.files import find_file

MEAN_LENGTH = 1000  # tokens of a completion, assumed: the paper gives no number
UNCERTAINTY = 2  # the hours may be too high or too low by this factor
PROMPT_TOKENS = 1024  # longest prompt that is not left out
MIN_GPU_PARAMETERS = 100_000_000  # smaller policies are trained on a CPU, too
GPU_MEMORY = {"one 80 GB GPU": 79 * 2**30, "one 141 GB GPU": 139 * 2**30}
MEMORY_SHARE = 0.9  # of a GPU that the estimate may use
GPU_RECIPES = {"paper/one-80gb": "one 80 GB GPU", "paper/one-141gb": "one 141 GB GPU"}
# Problems of each set, to estimate the time of evaluations.
NUM_PROBLEMS = {
    "minerva_math": 272, "olympiadbench": 675, "amc23": 40, "aime24": 30, "aime25": 30,
    "math500": 500, "gsm8k": 1319,
}  # fmt: skip
# The paper's models, so that an estimate needs no download.
SHAPES = {
    "Qwen/Qwen2.5-3B": Shape(3_085_938_688, 36, 2048, 11008, 2, 128, 151936, 32768),
    "meta-llama/Llama-3.2-3B-Instruct": Shape(
        3_212_749_824, 28, 3072, 8192, 8, 128, 128256, 131072
    ),
    "Qwen/Qwen3-8B-Base": Shape(8_190_735_360, 36, 4096, 12288, 8, 128, 151936, 32768),
    "Qwen/Qwen3-14B-Base": Shape(14_768_307_200, 40, 5120, 17408, 8, 128, 151936, 32768),
}


@dataclass(frozen=True)
class MethodCost:
    """Sums up the runs of a method in one phase."""

    method: str
    phase: str
    num_runs: int
    num_left: int
    seconds: float  # of all runs; 0 if unknown
    values: tuple[str, ...]  # that are tried; empty: one value


def estimate_lines(reproductions: Sequence[Reproduction]) -> Iterator[str]:
    """Yield the cost of every experiment and, of several, their sum."""
    num_runs, seconds = 0, 0.0
    for reproduction in reproductions:
        estimate = Estimate(reproduction)
        yield from estimate.lines()
        costs = estimate.methods()
        num_runs += sum(cost.num_runs for cost in costs)
        seconds += sum(cost.seconds for cost in costs)
    if len(reproductions) > 1:
        yield f"all: {num_runs} runs, about {_duration(seconds)}"


class Estimate:
    """Estimates the cost of one experiment."""

    def __init__(self, reproduction: Reproduction) -> None:
        self.reproduction = reproduction
        self.experiment = reproduction.experiment()
        self.schedule = make_schedule(self.experiment, Selection())
        self.shape = model_shape(reproduction.config)
        self.on_gpu = _on_gpu(reproduction.config, self.shape)
        self.factor = self._measured_factor()

    def methods(self) -> list[MethodCost]:
        costs: dict[tuple[str, str], list[MethodCost]] = {}
        for slot in self.schedule.slots:
            key = slot.phase, slot.method.name
            costs.setdefault(key, []).append(self._slot_cost(slot))
        return [
            MethodCost(
                method,
                phase,
                sum(cost.num_runs for cost in some),
                sum(cost.num_left for cost in some),
                sum(cost.seconds for cost in some),
                some[0].values,
            )
            for (phase, method), some in costs.items()
        ]

    def lines(self) -> Iterator[str]:
        """Yield lines for a terminal."""
        costs, config = self.methods(), self.reproduction.config
        num_runs = sum(cost.num_runs for cost in costs)
        num_done = num_runs - sum(cost.num_left for cost in costs)
        done = f", {num_done} done" if num_done else ""
        yield f"paper/{self.reproduction.target.name}: {num_runs} runs{done}, {config.model.path}"
        for cost in costs:
            yield f"  {self._method_line(cost)}"
        yield f"hours: {self._hours_text(costs)}"
        yield f"memory: {self._memory_text(config)}"
        reported = sum(cost.num_runs for cost in costs if cost.phase == REPORT)
        yield f"disk: {self._disk_text(reported)}"
        yield f"downloads: {'; '.join(downloads(config)) or 'none'}"

    def _method_line(self, cost: MethodCost) -> str:
        runs = "1 run" if cost.num_runs == 1 else f"{cost.num_runs} runs"
        hours = f", {_duration(cost.seconds)}" if cost.seconds else ""
        values = ""
        if cost.values:
            knob = self.experiment.plan.methods[cost.method].tuned_knob.partition(".")[2]
            values = f", {knob} = {', '.join(cost.values)}"
            if baseline := BASELINES.get(cost.method):
                values += f" ({_origin(baseline, cost.values)})"
        return f"{cost.phase} {cost.method}: {runs}{hours}{values}"

    def _hours_text(self, costs: list[MethodCost]) -> str:
        hours = sum(cost.seconds for cost in costs) / 3600
        if not hours:
            return "unknown: no rate was measured for this model on a CPU"
        left = sum(cost.seconds * cost.num_left / cost.num_runs for cost in costs) / 3600
        if self.factor:
            return (
                f"about {_duration(3600 * hours)}, {_duration(3600 * left)} of them left, by the "
                "training time of the runs that are done"
            )
        measured = "extrapolated from" if self.shape.num_parameters > 4e9 else "based on"
        size = _training_bytes(self.shape, self.reproduction.config)
        fitted = "" if size <= max(GPU_MEMORY.values()) else ", if the model fitted on it"
        return (
            f"about {hours:,.0f} on one H200{fitted}; expect {hours / UNCERTAINTY:,.0f} to "
            f"{hours * UNCERTAINTY:,.0f}: {measured} measured steps of 0.5B and 1.5B models and "
            f"rollouts of 3B models, for completions of {MEAN_LENGTH:,} tokens on average (assumed)"
        )

    def _memory_text(self, config: RunConfig) -> str:
        total = _training_bytes(self.shape, config, self.on_gpu)
        text = f"about {memory.format_bytes(total)}"
        if not self.on_gpu:
            return text
        fitting = [name for name, size in GPU_MEMORY.items() if total <= MEMORY_SHARE * size]
        if fitting:
            return f"{text}: fits on {fitting[0]}; the KV cache uses what is left"
        base = str(self.reproduction.tables["recipe"])
        return f"{text}: {_gpu_advice(base, config, self.shape)}"

    def _disk_text(self, num_reported: int) -> str:
        """Return the disk space: final weights, and checkpoints of a running run."""
        config = self.reproduction.config
        weights = memory.FP32_BYTES * self.shape.num_parameters
        keeps = self.reproduction.options.keep_weights == "final"
        kept = num_reported * weights if keeps else 0
        num_checkpoints = memory.most_checkpoints(config.training)
        running = memory.checkpoint_bytes(self.shape, config, num_checkpoints)
        where = _existing(self.experiment.out)
        text = (
            f"up to {memory.format_bytes(kept + running)}: {memory.format_bytes(kept)} for final "
            f"weights, {memory.format_bytes(running)} for the checkpoints of a running run; "
            f"{memory.format_bytes(memory.free_disk(where))} free in {where}"
        )
        return f"{text}; --keep-weights none needs less" if kept else text

    def _slot_cost(self, slot: Slot) -> MethodCost:
        plan, name = self.experiment.plan, slot.method.name
        points = [point.value for point in plan.points("", name)]
        every = bool(points) and (slot.phase == TUNE or slot.method.every_value)
        values = points if every else points[:1] or [""]
        configs = [slot_config(self.experiment, slot, value) for value in values]
        seconds = sum(map(self._seconds, configs))
        done = [run for run in self.schedule.done if run.phase == slot.phase]
        num_done = sum((run.method, run.seed) == (name, slot.seed) for run in done)
        num_runs = len(values)
        shown = tuple(points) if every else ()
        return MethodCost(name, slot.phase, num_runs, num_runs - num_done, seconds, shown)

    def _seconds(self, config: RunConfig) -> float:
        """Return the time of a run, scaled by that of finished runs; 0 if it is unknown."""
        factor = self.factor or float(self.on_gpu)
        return factor * run_seconds(self.shape, config, num_problems(config), MEAN_LENGTH)

    def _measured_factor(self) -> float | None:
        """Return how many times the estimate the steps of finished runs took; None without one.

        This corrects for the device and for the length of completions.
        """
        measured = estimated = 0.0
        for run in self.schedule.done:
            line, config = self.experiment.line(run), self.experiment.config(run)
            if line is None or not line["seconds"]:
                continue
            limit = config.algorithm.max_new_tokens
            lengths = Lengths(min(MEAN_LENGTH, limit), limit)
            step = step_seconds(self.shape, config, lengths, NUM_PROMPT_TOKENS)
            measured += line["seconds"]
            estimated += config.training.num_steps * step
        return measured / estimated if estimated else None


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} h" if seconds >= 1800 else f"{seconds / 60:,.1f} min"


def _origin(baseline: Baseline, values: tuple[str, ...]) -> str:
    """Say which values the paper names and which are ours."""
    ours = [value for value in baseline.more_values if value in values]
    return f"{baseline.origin}; ours: {', '.join(ours)}" if ours else baseline.origin


def slot_config(experiment: Experiment, slot: Slot, value: str) -> RunConfig:
    """Return the settings of a run. Values that are not chosen yet are the first ones."""

    def first_value(regime: str, name: str) -> str:
        points = experiment.plan.points(regime, name)
        return points[0].value if points else ""

    plan, name = experiment.plan, slot.method.name
    knobs = plan.method_knobs("", name, value, first_value)
    overrides = [*plan.knobs, *plan.phases[slot.phase].knobs, *knobs]
    return recipe.load_run(plan.recipe_of("", name), overrides)


def model_shape(config: RunConfig) -> Shape:
    """Return the shape of a model. Those of the paper's models are known without a download."""
    known = SHAPES.get(config.model.path)
    return known or memory.shape_of(*loading.load_shape(config.model))


def num_problems(config: RunConfig) -> int:
    """Return about how many problems an evaluation has."""
    task = config.task
    if not isinstance(task, DatasetConfig):
        return 0
    return task.num_held_out + sum(NUM_PROBLEMS.get(name, 500) for name in task.evaluation)


def downloads(config: RunConfig) -> list[str]:
    """Name the model and the data sets that come from the hub."""
    found = []
    path, task = config.model.path, config.task
    is_local = ":" in path or os.path.exists(os.path.expanduser(path))
    if not is_local:
        size = 2 * model_shape(config).num_parameters
        found.append(f"{path} ({memory.format_bytes(size)})")
    if not isinstance(task, DatasetConfig):
        return found
    if find_file(task.train, task.data_dir) is None:
        found.append(task.train)
    if not task.data_dir:
        found += [BENCHMARKS[name].hub for name in task.evaluation if name in BENCHMARKS]
    return found


def _gpu_advice(base: str, config: RunConfig, shape: Shape) -> str:
    """Name the recipe for one GPU that fits, or say that several GPUs are needed."""
    for part, gpu in GPU_RECIPES.items():
        small = recipe.load_run(f"{base}+{part}", [f"model.path={json.dumps(config.model.path)}"])
        if _training_bytes(shape, small) <= MEMORY_SHARE * GPU_MEMORY[gpu]:
            return f"{gpu} needs --recipe {base}+{part}"
    return "too much for one GPU; docs/reproduce.md shows how to train with verl"


def _training_bytes(shape: Shape, config: RunConfig, on_gpu: bool = True) -> int:
    dtype = torch.bfloat16 if on_gpu else torch.float32
    return memory.Budget(shape, config, PROMPT_TOKENS, dtype, on_gpu, 0).estimate().total


def _on_gpu(config: RunConfig, shape: Shape) -> bool:
    """Return whether the cost is that of a GPU. Large models are never planned for a CPU."""
    device = config.model.device
    if device == "cpu":
        return False
    return shape.num_parameters >= MIN_GPU_PARAMETERS or torch.cuda.is_available()


def _existing(folder: Path) -> Path:
    """Return the nearest folder that exists."""
    folder = folder.absolute()
    return next(one for one in (folder, *folder.parents) if one.is_dir())
