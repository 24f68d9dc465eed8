"""Fills up the options of `eepo eval` from the recipe of the run that is evaluated.

A policy is then evaluated as it was trained: same prompts, length limit, stop text and dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eepo.config import check_template
from eepo.evaluation.options import BenchmarkOptions
from eepo.evaluation.trained_run import TrainedRun, model_label
from eepo.rewards import DEFAULT_REWARDS
from eepo.types import Sampling, UserError

if TYPE_CHECKING:  # reports import this module and must start without torch
    from eepo.evaluation.sets import PromptSet


@dataclass(frozen=True)
class EvaluationSettings:
    """Holds the settings of an evaluation that depend on the evaluated run."""

    data_dir: str
    template: str
    max_prompt_tokens: int
    max_new_tokens: int
    temperature: float  # of the samples
    stop: str
    reward: str
    dtype: str
    max_rows: int  # 0: the default of the engine

    def sampling(self, seed: int) -> Sampling:
        return Sampling(self.temperature, self.max_new_tokens, seed)


# For a model without a run
DEFAULTS = EvaluationSettings(
    data_dir="",
    template="boxed",
    max_prompt_tokens=1024,
    max_new_tokens=4096,
    temperature=1.0,
    stop="",
    reward="math",
    dtype="auto",
    max_rows=0,
)


def fill_up(options: BenchmarkOptions, run: TrainedRun | None) -> EvaluationSettings:
    """Return the options; for those that are not given, the knobs of the run; else defaults."""
    knobs = vars(DEFAULTS)
    if run:
        knobs = knobs | _sampling_knobs(run) | _problem_knobs(run, bool(options.benchmarks))
    given = {name: getattr(options, name) for name in knobs if getattr(options, name) is not None}
    settings = EvaluationSettings(**knobs | given)
    if "template" in given and check_template(settings.template):
        raise UserError(
            f'--template must be "boxed", "chat" or a text with {{problem}}, '
            f"got {settings.template!r}"
        )
    return settings


def describe_evaluation(
    options: BenchmarkOptions,
    settings: EvaluationSettings,
    run: TrainedRun | None,
    sets: Sequence[PromptSet],
) -> dict[str, Any]:
    """Return what identifies an evaluation. A folder holds one evaluation."""
    shared = ("template", "max_prompt_tokens", "max_new_tokens", "stop", "reward")
    sampling = {
        "temperature": settings.temperature,
        "seed": options.seed,
        "sample_limit": options.sample_limit,
    }
    return {
        "model": options.model,
        "revision": options.revision,
        "method": run.method if run else model_label(options.model),
        "run_seed": run.seed if run else None,
        "step": run.step if run else None,
        **{name: getattr(settings, name) for name in shared},
        "limit": options.limit,
        "num_samples": options.num_samples,
        **(sampling if options.num_samples else dict.fromkeys(sampling)),
        "benchmarks": {prompt_set.name: prompt_set.settings() for prompt_set in sets},
    }


def _sampling_knobs(run: TrainedRun) -> dict[str, Any]:
    """Return how the run's recipe samples. A warm start has its length limit at the top."""
    length = run.tables.get("max_new_tokens", DEFAULTS.max_new_tokens)
    return {
        "max_new_tokens": run.knob("algorithm", "max_new_tokens", length),
        "temperature": run.knob("evaluation", "temperature", DEFAULTS.temperature),
        "stop": run.knob("rollout", "stop", DEFAULTS.stop),
        "dtype": run.knob("rollout", "dtype", DEFAULTS.dtype),
        "max_rows": run.knob("rollout", "max_rows", DEFAULTS.max_rows),
    }


def _problem_knobs(run: TrainedRun, on_benchmarks: bool) -> dict[str, Any]:
    """Return prompts and grader of the run's recipe.

    Templates and graders of tasks other than data sets do not fit the problems of benchmarks.
    """
    task = run.knob("task", "name", "countdown")
    if on_benchmarks and task != "dataset":
        return {}
    reward = run.knob("reward", "name", "auto")
    reward = DEFAULT_REWARDS.get(task, reward) if reward == "auto" else reward
    template = DEFAULTS.template if task == "dataset" else ""  # "": the task has none
    return {
        "reward": reward,
        "data_dir": run.knob("task", "data_dir", DEFAULTS.data_dir),
        "template": run.knob("task", "template", template),
        "max_prompt_tokens": run.knob("task", "max_prompt_tokens", DEFAULTS.max_prompt_tokens),
    }
