"""The Python API: `eepo.train`, `eepo.evaluate` and `eepo.grade`. The command line calls it, too.

Heavy imports such as torch happen inside the functions, so that `import eepo` is fast.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eepo import recipe as recipes
from eepo.config import RewardConfig, RunConfig
from eepo.evaluation.options import BenchmarkOptions, split_names
from eepo.rewards.user_code import name_of
from eepo.runs.jsonl import read_records
from eepo.runs.progress import Progress
from eepo.runs.runlog import EVALUATIONS, METRICS
from eepo.types import UserError, Verdict

if TYPE_CHECKING:
    from eepo.protocols import Reward

Recipe = str | Path | Mapping[str, Any] | RunConfig
RewardFunction = Callable[..., Any]


@dataclass(frozen=True)
class TrainResult:
    """What a training run has written.

    Attributes:
        folder: The run folder. `eepo report`, `eepo watch` and `eepo.evaluate` read it.
        weights: The final weights and the tokenizer, as a folder for `transformers`.
        metrics: One row per step, as in `metrics.jsonl`. The metrics page explains the keys.
        evaluations: One row per evaluation and set, as in `evaluations.jsonl`.
    """

    folder: Path
    weights: Path
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    @property
    def final_evaluation(self) -> dict[str, dict[str, Any]]:
        """The last full evaluation: set → its row, with `greedy`, `mean` and `pass@k`."""
        full = [row for row in self.evaluations if row["kind"] == "full"]
        return {row["set"]: row for row in full if row["step"] == full[-1]["step"]}


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation has written.

    Attributes:
        folder: The folder of the evaluation, with `results.json` and all completions.
        sets: Set → measure → `{"mean": ..., "low": ..., "high": ...}`, with 95 % intervals.
            Measures are `greedy/accuracy`, `samples/pass@4` and others.
        average: The same measures, averaged over the sets.
    """

    folder: Path
    sets: dict[str, dict[str, dict[str, float]]]
    average: dict[str, dict[str, float]]


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    set: Mapping[str, Any] | Sequence[str] | None = None,
    reward: str | RewardFunction | None = None,
    resume: bool = False,
    force: bool = False,
    quiet: bool = False,
) -> TrainResult:
    """Train a recipe, like the command `eepo train`.

    Args:
        recipe: The name of a shipped recipe such as `"countdown/eepo"`, the path of a TOML file, a
            dictionary of the same form, or a `RunConfig`.
        out: The run folder.
        set: Knobs to change, such as `{"training.num_steps": 10}`.
        reward: A reward function, or its name as in `reward.name`. A function must be defined at
            the top level of a module or script, because grading processes import it.
        resume: Continue the run in `out` from its latest checkpoint. If there is none, start.
        force: With `resume`: continue although all checkpoints are lost, or although another host
            may still write to `out`.
        quiet: Print nothing.

    Returns:
        The run folder, the final weights, and the rows of metrics and evaluations.

    Raises:
        UserError: If the recipe, the data or the reward is wrong, if `out` contains another run,
            if GPU memory runs out in a step, or if the run is stopped. The message is one line.
    """
    _refuse_in_grading_process("train")
    from eepo import assemble

    progress, folder = _progress(quiet), Path(out)
    print_if_nothing_to_resume(folder, resume, progress)
    config = load_recipe(recipe, set, reward)
    weights = assemble.build_trainer(config, folder, resume, progress, force).run()
    progress.print(f"weights: {weights}")
    progress.print(f"write a report with: eepo report {folder} --out report.html")
    rows = [list(read_records(folder / name)) for name in (METRICS, EVALUATIONS)]
    return TrainResult(folder, weights, *rows)


def evaluate(
    model: str | Path | TrainResult,
    out: str | Path | None = None,
    *,
    reward: str | RewardFunction | None = None,
    quiet: bool = False,
    **options: Any,
) -> EvaluationResult:
    """Evaluate a model or a run, like the command `eepo eval`.

    A run is evaluated as it was trained: the same prompts, grader and length limit. The same call
    continues an evaluation that was stopped.

    Args:
        model: A hub name, a model folder, a run folder (its newest weights), or the result of
            `eepo.train`.
        out: The folder of the evaluation. Default: `evaluations/` and the name of the model or run.
        reward: A grader's name, or a reward function as in `eepo.train`. Default: the run's, else
            `"math"`.
        quiet: Print nothing.
        **options: The options of `eepo eval` with underscores, such as `benchmarks` (a list of
            names and files), `data_dir`, `num_samples`, `temperature`, `seed`, `max_new_tokens`,
            `limit`, `template`, `dtype` and `device`.

    Returns:
        The folder, and the measures of each evaluation set with their 95 % intervals.

    Raises:
        UserError: If an option, the data or the model is wrong, or if `out` contains an evaluation
            with other settings.
    """
    _refuse_in_grading_process("evaluate")
    path = str(model.folder if isinstance(model, TrainResult) else model)
    if reward is not None:
        options["reward"] = _reward_name(reward)
    return run_evaluation(_benchmark_options(path, options), out, _progress(quiet))


def grade(
    rows: Iterable[Mapping[str, Any]], reward: str | RewardFunction = "math", **limits: float
) -> list[Verdict]:
    """Grade completions in processes with time and memory limits, like the command `eepo grade`.

    Args:
        rows: Dictionaries with `completion` (a text) and `gold` (a text or a number; optional for a
            reward function without it). `prompt` and other keys reach a function that names them.
        reward: `"math"`, `"exact"`, `"guess_or_reason"`, the name of a reward function, or a reward
            function as in `eepo.train`.
        **limits: The knobs of `[reward]`: `num_workers`, `cpu_seconds`, `wall_seconds` and
            `memory_mb`.

    Returns:
        One verdict per row, in order: its `reward`, the extracted `answer`, a `reason` and a
        `label`. `verdict.correct` is true for reward 1.

    Raises:
        UserError: If a row or a limit is wrong, or if the reward function fails.
    """
    _refuse_in_grading_process("grade")
    from eepo.evaluation.grading import check_row, grade_rows
    from eepo.rewards import build_grader, reward_columns

    knobs = {**limits, "name": _reward_name(reward)}
    config = recipes.read_section(RewardConfig, knobs, "eepo.grade", "")
    rows, needs_gold = list(rows), reward_columns(config.name).gold
    for index, row in enumerate(rows):
        check_row(row, f"row {index}", needs_gold)
    if ":" not in config.name:
        return grade_rows(rows, _built_in_grader(config))
    grader = build_grader(config)  # a new one: the user may have edited the function
    try:
        return grade_rows(rows, grader)
    finally:
        getattr(grader, "close", lambda: None)()


def load_recipe(
    recipe: Recipe,
    set: Mapping[str, Any] | Sequence[str] | None = None,
    reward: str | RewardFunction | None = None,
) -> RunConfig:
    """Read a training recipe and check all of its knobs, without training.

    Args:
        recipe: As in `eepo.train`.
        set: As in `eepo.train`.
        reward: As in `eepo.train`.

    Returns:
        The config, with all defaults filled in.

    Raises:
        UserError: If a knob is unknown or has a wrong value.
    """
    changes = dict(set) if isinstance(set, Mapping) else {}
    if reward is not None:
        changes["reward.name"] = _reward_name(reward)
    texts = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in changes.items()]
    given = [] if set is None or isinstance(set, Mapping) else list(set)
    if isinstance(set, str):
        raise UserError(f'set = "{set}" must be a dictionary or a list, such as ["{set}"]')
    return recipes.load_run(recipe, [*given, *texts])


def print_if_nothing_to_resume(out: Path, resume: bool, progress: Progress) -> None:
    """Print that the run starts at step 1.

    Scripts may always ask to resume, so this is no error. The line helps if `out` is misspelt.
    """
    if resume and not any((out / name).exists() for name in ("recipe.toml", METRICS)):
        progress.print(f"no run in {out} yet: starts at step 1")


def run_evaluation(
    options: BenchmarkOptions, out: str | Path | None, progress: Progress
) -> EvaluationResult:
    """Evaluate, write the tables and print them. `evaluate` describes the arguments."""
    from eepo import assemble
    from eepo.evaluation.trained_run import evaluation_name
    from eepo.reports.benchmark_results import ACCURACY, read_results
    from eepo.reports.benchmark_tables import (
        format_terminal,
        measures_table,
        write_benchmark_tables,
    )

    folder = Path(out) if out else Path("evaluations") / evaluation_name(options.model)
    file = assemble.build_evaluation(options, folder, progress).run()
    rows = read_results([folder])
    files = [file, *write_benchmark_tables(rows, folder, ACCURACY)]
    progress.console.print(format_terminal(measures_table(rows[0]), progress.console.width))
    progress.print(f"results: {', '.join(map(str, files))}; completions: {folder / 'completions'}")
    results = json.loads(file.read_text(encoding="utf-8"))
    sets = {name: benchmark["measures"] for name, benchmark in results["benchmarks"].items()}
    return EvaluationResult(folder, sets, results["average"])


def _progress(quiet: bool) -> Progress:
    from rich.console import Console

    return Progress(Console(file=io.StringIO()) if quiet else None)


def _reward_name(reward: str | RewardFunction) -> str:
    return reward if isinstance(reward, str) else name_of(reward)


@functools.cache  # its processes serve later calls, such as those of a reward function in TRL
def _built_in_grader(config: RewardConfig) -> Reward:
    from eepo.rewards import build_grader

    return build_grader(config)


def _benchmark_options(model: str, options: dict[str, Any]) -> BenchmarkOptions:
    """Build the options of an evaluation. The command line checks types and bounds by itself."""
    values = options | {"model": model}
    if isinstance(values.get("benchmarks"), str):
        values["benchmarks"] = split_names(values["benchmarks"])
    if isinstance(values.get("data_dir"), Path):
        values["data_dir"] = str(values["data_dir"])
    given = {name: value for name, value in values.items() if value is not None}
    checked = recipes.read_section(BenchmarkOptions, given, "eepo.evaluate", "")
    for field in dataclasses.fields(BenchmarkOptions):
        value, least = getattr(checked, field.name), field.metadata.get("min")
        if least is not None and value is not None and value < least:
            raise UserError(f"eepo.evaluate: {field.name} = {value} must be >= {least}")
    return checked


def _refuse_in_grading_process(name: str) -> None:
    """Raise an error if a grading process calls the API, because it imports the user's script."""
    if script := os.environ.get("EEPO_GRADING"):
        raise UserError(
            f"eepo.{name} was called in a grading process of {script}; put the calls of a script "
            'under if __name__ == "__main__":'
        )
