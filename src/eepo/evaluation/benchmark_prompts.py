"""Makes the prompts of benchmarks in the form of the prompts that a run was trained with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from eepo import recipe
from eepo.config import DatasetConfig, RunConfig, WarmupConfig
from eepo.evaluation.defaults import EvaluationSettings
from eepo.evaluation.options import BenchmarkOptions
from eepo.evaluation.sets import PromptSet, load_problems, make_prompt_sets
from eepo.evaluation.trained_run import TrainedRun
from eepo.rewards import reward_columns
from eepo.tasks.dataset import Dataset
from eepo.tasks.templates import Example


def benchmark_sets(
    options: BenchmarkOptions, settings: EvaluationSettings, run: TrainedRun | None, tokenizer: Any
) -> list[PromptSet]:
    """Return the prompts of the benchmarks in `options`, in the form of the run's prompts."""
    columns = reward_columns(settings.reward)
    problems = load_problems(options.benchmarks, settings.data_dir, options.limit, columns)
    examples = examples_of_run(run, options, tokenizer)
    limit = settings.max_prompt_tokens
    return make_prompt_sets(problems, settings.template, tokenizer, limit, examples)


def examples_of_run(
    run: TrainedRun | None, options: BenchmarkOptions, tokenizer: Any
) -> list[Example]:
    """Return the solved examples in the prompts of a run. A template of the user's has none."""
    if run is None or options.template is not None or not run.knob("task", "num_examples", 0):
        return []
    kind: type[RunConfig | WarmupConfig] = RunConfig if run.seed is not None else WarmupConfig
    task = recipe.load(kind, run.folder / "recipe.toml").task
    if not isinstance(task, DatasetConfig):  # sums have their own examples
        return []
    data_dir = task.data_dir if options.data_dir is None else options.data_dir
    return Dataset(replace(task, data_dir=data_dir, evaluation=()), tokenizer).examples
