"""Builds the plan of a reproduction from its options."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eepo import recipe
from eepo.config import DatasetConfig, RunConfig
from eepo.experiments.draft import PLAN
from eepo.experiments.experiment import Experiment
from eepo.experiments.plan import REPORT, TUNE, Plan
from eepo.experiments.plan_file import parse_plan
from eepo.experiments.reproduce_options import ReproduceOptions
from eepo.experiments.reproduce_targets import (
    BASELINES,
    BUILDS_ON,
    Target,
    find_targets,
    select_methods,
)
from eepo.reports.paper_numbers import BASE, EEPO, GRPO
from eepo.tasks.benchmarks import BENCHMARKS, load_benchmark
from eepo.tasks.files import SUFFIXES, column_names, find_file, short_name
from eepo.types import UserError

FIRST_TUNE_SEED = 100  # far from the seeds of the report
PAPERS_TRAINING_SET = "hkust-nlp/SimpleRL-Zoo-Data:"  # on the hub
# Its file names in --data-dir, and its columns on the hub.
TRAIN_STEMS = ("math_lvl3to5_train", "simplelr_qwen_level3to5", "train")
HUB_COLUMNS, PLAIN_COLUMNS = ("question", "gt_answer"), ("problem", "answer")
ADVICE = "give the same options again, or another --out"


@dataclass(frozen=True)
class Reproduction:
    """Holds the experiment of one model."""

    target: Target
    options: ReproduceOptions
    config: RunConfig  # of GRPO
    tables: Mapping[str, Any]  # of the plan
    plan: Plan
    folder: Path  # of the experiment
    out: Path  # as given by the user: `folder`, or the folder that contains it

    def experiment(self) -> Experiment:
        """Return the experiment with the lines that its folder has now."""
        return Experiment(self.plan, self.folder, ADVICE)


def plan_reproductions(options: ReproduceOptions, out: Path) -> list[Reproduction]:
    """Return the experiments of a target. This writes nothing.

    Several experiments have folders of their own in `out`.
    """
    targets = find_targets(options.target)
    several = len(targets) > 1
    if several and (options.recipe or options.model):
        raise UserError(
            f"{options.target} has a model for each table; give --recipe and --model with one "
            "table, such as paper/table1"
        )
    return [
        _reproduction(target, options, out / target.name if several else out, out)
        for target in targets
    ]


def _reproduction(
    target: Target, options: ReproduceOptions, folder: Path, out: Path
) -> Reproduction:
    base = _base_recipe(target, options)
    knobs = _knobs(options, recipe.load_run(f"{base}+paper/{GRPO}"))
    config = recipe.load_run(f"{base}+paper/{GRPO}", knobs)
    _check_files(config)
    tables = plan_tables(target, options, base, knobs, objective(config))
    plan = parse_plan(tables, str(folder / PLAN), folder)
    return Reproduction(target, options, config, tables, plan, folder, out)


def plan_tables(
    target: Target,
    options: ReproduceOptions,
    base: str,
    knobs: Sequence[str],
    measures: Sequence[str],
) -> dict[str, Any]:
    """Return the plan as TOML tables."""
    names = select_methods(target, options.methods)
    methods = {name: _method(name, target, options.tune_seeds) for name in names}
    phases: dict[str, Any] = {}
    if any("tune" in table and "every_value" not in table for table in methods.values()):
        seeds = range(FIRST_TUNE_SEED, FIRST_TUNE_SEED + options.tune_seeds)
        # Greedy accuracy chooses the values, so more samples would be wasted.
        knobs_of_tuning = ["evaluation.num_samples=1"]
        phases[TUNE] = {"seeds": list(seeds), "set": knobs_of_tuning, "keep_weights": "none"}
    phases[REPORT] = {"seeds": list(range(options.seeds))}
    compared = [name for name in (GRPO, EEPO) if name in names]
    figures = ("exploration", "pass_at_k") if compared else ()
    tables = [{"heading": f"paper/{target.name}", "against": GRPO}] if GRPO in names else []
    return {
        "recipe": base,
        "set": list(knobs),
        "objective": list(measures),
        "keep_weights": options.keep_weights,
        # The base model is a row of its own, so no other run evaluates the start.
        "start_evaluation": "first",
        "phases": phases,
        "methods": methods,
        "tables": tables,
        "figures": [{"figure": kind, "methods": compared} for kind in figures],
    }


def objective(config: RunConfig) -> list[str]:
    """Return the measures whose mean is the average of the paper's tables."""
    sets = benchmark_sets(config)
    return [f"{name}/greedy" for name in sets] if sets else ["greedy"]


def benchmark_sets(config: RunConfig) -> list[str]:
    """Return the evaluation sets of a data set's recipe, without held-out training problems."""
    if not isinstance(config.task, DatasetConfig):
        return []
    return [name if name in BENCHMARKS else short_name(name) for name in config.task.evaluation]


def _method(name: str, target: Target, tune_seeds: int) -> dict[str, Any]:
    """Return the table of a method. A baseline with a single value is not tuned."""
    if name == BASE:
        return {"recipe": f"+paper/{GRPO}", "train": False}
    if name in BUILDS_ON:
        return {"recipe": f"+paper/{EEPO}", "base": [BUILDS_ON[name]]}
    baseline = BASELINES.get(name)
    if baseline is None:
        return {"recipe": f"+paper/{name}"}
    values = baseline.values
    if target.every_value:
        values = tuple(sorted({*values, *baseline.more_values}, key=float))
        table = {"tune": baseline.knob, "values": list(values), "every_value": True}
    elif len(values) > 1 and tune_seeds:
        table = {"tune": baseline.knob, "values": list(values)}
    else:
        table = {"set": [f"{baseline.knob}={_recipe_value(name)}"]}
    return {"recipe": f"+paper/{GRPO}"} | table


def _recipe_value(name: str) -> str:
    """Return the value of a baseline in its recipe."""
    section, _, knob = BASELINES[name].knob.partition(".")
    tables = recipe.read_toml(recipe.find(f"paper/{name}"))
    return json.dumps(tables[section][knob])


def _base_recipe(target: Target, options: ReproduceOptions) -> str:
    """Return the recipe that methods are combined with. A file gets an absolute path.

    So `eepo plan` finds it from any folder.
    """
    base = options.recipe or target.recipe
    first, plus, rest = base.partition("+")
    return f"{os.path.abspath(first)}{plus}{rest}" if os.path.isfile(first) else base


def _knobs(options: ReproduceOptions, plain: RunConfig) -> list[str]:
    """Return the knobs that the options change. `plain` is the recipe without them."""
    knobs = [f"evaluation.num_samples={options.samples}"]
    if options.model:
        local = os.path.expanduser(options.model)
        path = os.path.abspath(local) if os.path.exists(local) else options.model
        knobs.append(f"model.path={json.dumps(path)}")
    if options.data_dir:
        knobs += _data_knobs(options.data_dir, plain)
    return [*knobs, *(options.overrides or ())]


def _check_files(config: RunConfig) -> None:
    """Raise an error for the first data file that is missing or damaged."""
    task = config.task
    if not isinstance(task, DatasetConfig):
        return
    is_file = task.train.endswith(SUFFIXES) and ":" not in task.train
    if is_file and find_file(task.train, task.data_dir) is None:
        raise UserError(f"task.train = {task.train!r}: no such file in {task.data_dir or '.'}")
    for name in task.evaluation:
        if task.data_dir and name in BENCHMARKS:
            load_benchmark(name, task.data_dir)


def _data_knobs(data_dir: str, plain: RunConfig) -> list[str]:
    """Return the knobs that read data from a folder: benchmarks, and the paper's training set.

    A recipe with another training set keeps it.
    """
    folder = Path(os.path.abspath(os.path.expanduser(data_dir)))
    if not folder.is_dir():
        raise UserError(f"--data-dir {data_dir} is no folder")
    knobs = [f"task.data_dir={json.dumps(str(folder))}"]
    files = [folder / f"{stem}{suffix}" for stem in TRAIN_STEMS for suffix in SUFFIXES]
    file = next((file for file in files if file.is_file()), None)
    train = getattr(plain.task, "train", "")
    if file is None or not train.startswith(PAPERS_TRAINING_SET):
        return knobs
    names = column_names(file)
    columns = HUB_COLUMNS if set(HUB_COLUMNS) <= set(names) else PLAIN_COLUMNS
    knobs.append(f"task.train={json.dumps(file.name)}")
    knobs += [f"task.problem_column={columns[0]}", f"task.answer_column={columns[1]}"]
    return knobs
