"""Reads evaluations of runs and models into the rows of a benchmark table.

A source is a run (its final evaluation), a folder of `eepo eval`, or a folder that contains such
folders. Runs of one method that differ only in their seed become one row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eepo.evaluation.defaults import fill_up
from eepo.evaluation.estimates import grouped_bootstrap_interval, seed_interval
from eepo.evaluation.options import BenchmarkOptions
from eepo.evaluation.results import estimate, set_title
from eepo.evaluation.store import SETTING_DEFAULTS
from eepo.evaluation.trained_run import TrainedRun
from eepo.reports.evaluation_folders import ALLOWED, is_evaluation, read_evaluation
from eepo.reports.measures import problem_values
from eepo.reports.records import Run, read_run, run_folders
from eepo.types import UserError

ACCURACY = "greedy/accuracy"
# Results are comparable only if these settings are equal.
COMPARED_SETTINGS = ("template", "max_new_tokens", "max_prompt_tokens", "limit", "reward")
Measures = dict[str, dict[str, float]]  # measure -> mean, low and high


@dataclass(frozen=True)
class ModelResult:
    """Holds the results of one row of a table."""

    label: str
    settings: dict[str, Any]
    benchmarks: dict[str, dict[str, Any]]  # with title, num_problems, measures, problems, ...
    average: Measures
    seed: int = 0
    folder: Path = Path()
    recipe: dict[str, Any] = field(default_factory=dict)  # empty for a model without a run
    num_seeds: int = 1

    def with_measure(self, measure: str) -> ModelResult:
        """Add pass@k for a k that is not recorded, where the benchmarks have enough samples."""
        benchmarks = {
            name: benchmark | {"measures": _with_pass_at_k(benchmark, measure)}
            for name, benchmark in self.benchmarks.items()
        }
        average = self.average
        if measure not in average:
            average = average | average_of(benchmarks, [measure])
        return dataclasses.replace(self, benchmarks=benchmarks, average=average)

    def only(self, names: Sequence[str]) -> ModelResult:
        """Keep these benchmarks, in this order, and average over them."""
        kept = {name: self.benchmarks[name] for name in names if name in self.benchmarks}
        measures = list(dict.fromkeys(key for b in kept.values() for key in b["measures"]))
        return dataclasses.replace(self, benchmarks=kept, average=average_of(kept, measures))


def read_results(
    sources: Sequence[str | Path], measure: str = ACCURACY, on: Sequence[str] = ()
) -> list[ModelResult]:
    """Read the rows of a table, in the order of the sources. `LABEL=FOLDER` sets a label.

    `measure` is one that the table needs. `on` selects benchmarks, in the order of the columns.
    """
    results: list[ModelResult] = []
    for source in sources:
        label, equals, folder_name = str(source).partition("=")
        is_labelled = bool(equals) and not Path(source).exists()
        found = _read_folder(Path(folder_name if is_labelled else source))
        if is_labelled:
            methods = dict.fromkeys(result.label for result in found)
            if len(methods) > 1:
                raise UserError(
                    f"{source}: the folder has several methods ({', '.join(methods)}); "
                    "a label needs a folder with one"
                )
            found = [dataclasses.replace(result, label=label) for result in found]
        results += found
    results = [result.with_measure(measure) for result in _select(results, on)]
    _check_measure(results, measure)
    return [_merge_seeds(rows) for rows in _by_label(results).values()]


def _select(results: list[ModelResult], on: Sequence[str]) -> list[ModelResult]:
    known = dict.fromkeys(name for result in results for name in result.benchmarks)
    for name in on:
        if name not in known:
            raise UserError(f"--on {name} must be one of {', '.join(known)}")
    return [result.only(on) for result in results] if on else results


def _check_measure(results: Sequence[ModelResult], measure: str) -> None:
    benchmarks = [benchmark for result in results for benchmark in result.benchmarks.values()]
    if measure != ACCURACY and not any(measure in b["measures"] for b in benchmarks):
        most = max((benchmark.get("num_samples", 0) for benchmark in benchmarks), default=0)
        name = measure.removeprefix("samples/")
        raise UserError(
            f"--measure {name}: the evaluations have at most {most} samples per problem"
        )


def _read_folder(folder: Path) -> list[ModelResult]:
    paths = run_folders(folder)
    if paths == [folder] and not is_evaluation(folder) and not (folder / "recipe.toml").is_file():
        problem = "not a run and not an evaluation" if folder.is_dir() else "no such folder"
        raise UserError(
            f"{folder}: {problem}; give run folders, the folder of a comparison or a sweep, or "
            f"{ALLOWED}"
        )
    return [_from_evaluation(path) if is_evaluation(path) else _from_run(path) for path in paths]


def _from_evaluation(folder: Path) -> ModelResult:
    evaluation = read_evaluation(folder)
    return ModelResult(
        evaluation.method,
        evaluation.settings,
        evaluation.benchmarks,
        evaluation.average,
        evaluation.seed,
        folder,
        evaluation.recipe,
    )


def _from_run(folder: Path) -> ModelResult:
    """Use the final evaluation of a run; of a run without steps, its only one."""
    run = read_run(folder)
    names = dict.fromkeys(row["set"] for row in run.evaluations if row["kind"] == "full")
    rows = [run.final_evaluation(name) for name in names]
    benchmarks = {row["set"]: _benchmark_of(row) for row in rows if row and row.get("problems")}
    if not benchmarks:
        raise UserError(f"{folder}: the run has no full evaluation yet; it is made at its end")
    if run.last_step and not any(row and row["step"] for row in rows):
        raise UserError(f"{folder}: the run was evaluated only at its start; it is not finished")
    measures = list(next(iter(benchmarks.values()))["measures"])
    average = average_of(benchmarks, measures)
    results = run.name, _settings_of(run), benchmarks, average
    return ModelResult(*results, run.seed, folder, run.recipe)


def _benchmark_of(row: dict[str, Any]) -> dict[str, Any]:
    """Convert a row of a run's evaluations to the form of `results.json`."""
    num_samples = row["num_samples"]
    measures = {
        ACCURACY: estimate([problem_values(row, "greedy")]),
        f"samples/mean@{num_samples}": estimate([problem_values(row, "mean")]),
        **{
            f"samples/pass@{k}": estimate([problem_values(row, f"pass@{k}")]) for k in row["pass@k"]
        },
    }
    shares = {
        "format_share": 1 - row.get("no_answer_share", 0),
        "truncated_share": row.get("truncated_share"),
        "length": row.get("length"),
    }
    measures |= {
        f"samples/{name}": {"mean": mean, "low": mean, "high": mean}
        for name, mean in shares.items()
        if mean is not None
    }
    return {
        "title": set_title(row["set"]),
        "num_problems": row["num_problems"],
        "num_left_out": 0,
        "num_samples": num_samples,
        "measures": measures,
        "problems": row["problems"],
    }


def _settings_of(run: Run) -> dict[str, Any]:
    """Return the settings that `eepo eval` would have for this run."""
    settings = fill_up(BenchmarkOptions(str(run.folder)), TrainedRun(run.folder, run.recipe))
    num_samples = run.setting("evaluation", "num_samples") or 0
    return vars(settings) | {"model": str(run.folder), "limit": 0, "num_samples": num_samples}


def _with_pass_at_k(benchmark: dict[str, Any], measure: str) -> Measures:
    """Return the measures of a benchmark, with pass@k if it can be computed."""
    measures: Measures = benchmark["measures"]
    _, is_pass, k = measure.partition("samples/pass@")
    num_samples, problems = benchmark.get("num_samples", 0), benchmark.get("problems")
    if not is_pass or measure in measures or not problems or not 1 <= int(k) <= num_samples:
        return measures
    return measures | {measure: estimate([problem_values(benchmark, f"pass@{k}")])}


def average_of(benchmarks: dict[str, dict[str, Any]], measures: Sequence[str]) -> Measures:
    """Average measures over benchmarks, with equal weights, where all benchmarks have them."""
    average: Measures = {}
    for measure in measures:
        estimates = [benchmark["measures"].get(measure) for benchmark in benchmarks.values()]
        means = [value["mean"] for value in estimates if value is not None]
        if means and len(means) == len(estimates):
            mean = sum(means) / len(means)
            low, high = _average_interval(list(benchmarks.values()), measure) or (mean, mean)
            average[measure] = {"mean": mean, "low": low, "high": high}
    return average


def _average_interval(
    benchmarks: Sequence[dict[str, Any]], measure: str
) -> tuple[float, float] | None:
    """Resample problems within each benchmark; None for measures without values per problem."""
    name = "greedy" if measure == ACCURACY else measure.removeprefix("samples/")
    name = "mean" if name.startswith("mean@") else name
    if name not in ("greedy", "mean") and not name.startswith("pass@"):
        return None
    if not all(benchmark.get("problems") for benchmark in benchmarks):
        return None
    return grouped_bootstrap_interval([problem_values(row, name) for row in benchmarks])


def _by_label(results: Sequence[ModelResult]) -> dict[str, list[ModelResult]]:
    """Group the seeds of a method. Several evaluations of one run are merged."""
    groups: dict[str, list[ModelResult]] = {}
    for result in results:
        seeds = groups.setdefault(result.label, [])
        index = next((i for i, other in enumerate(seeds) if other.seed == result.seed), None)
        if index is None:
            seeds.append(result)
        else:
            seeds[index] = _merge_evaluations(seeds[index], result)
    return groups


def _merge_evaluations(first: ModelResult, second: ModelResult) -> ModelResult:
    """Join two evaluations of one run, which has one recipe.

    For a benchmark in both, the evaluation with more problems and samples is used.
    """
    if not first.recipe or first.recipe != second.recipe:
        raise UserError(
            f"{first.folder} and {second.folder} are both {first.label} with seed {first.seed}; "
            "give one of them, or name a row with LABEL=FOLDER"
        )
    _check_same_settings([first, second])
    benchmarks = dict(first.benchmarks)
    for name, benchmark in second.benchmarks.items():
        if name not in benchmarks or _size(benchmark) > _size(benchmarks[name]):
            benchmarks[name] = benchmark
    return dataclasses.replace(first, benchmarks=benchmarks).only(list(benchmarks))


def _size(benchmark: dict[str, Any]) -> tuple[int, int]:
    return benchmark["num_problems"], benchmark.get("num_samples", 0)


def _merge_seeds(seeds: Sequence[ModelResult]) -> ModelResult:
    """Average over seeds, with a t-interval over them. A benchmark must have all seeds."""
    if len(seeds) == 1:
        return seeds[0]
    _check_same_settings(seeds)
    sampled = [seed for seed in seeds if seed.settings.get("num_samples")]
    _check_same_settings(sampled, ["sample_limit"])
    names = [name for name in seeds[0].benchmarks if all(name in s.benchmarks for s in seeds)]
    seeds = [seed.only(names) for seed in seeds]
    benchmarks = {
        name: benchmark
        | {"measures": _over_seeds([seed.benchmarks[name]["measures"] for seed in seeds])}
        for name, benchmark in seeds[0].benchmarks.items()
    }
    average = _over_seeds([seed.average for seed in seeds])
    return dataclasses.replace(
        seeds[0], benchmarks=benchmarks, average=average, num_seeds=len(seeds)
    )


def _check_same_settings(
    seeds: Sequence[ModelResult], keys: Sequence[str] = COMPARED_SETTINGS
) -> None:
    for key in keys:
        default = SETTING_DEFAULTS.get(key)
        values = list(dict.fromkeys(str(seed.settings.get(key, default)) for seed in seeds))
        if len(values) > 1:
            raise UserError(
                f"{seeds[0].label}: its evaluations have different {key} ({', '.join(values)}); "
                "evaluate them in the same way, or name a row with LABEL=FOLDER"
            )


def _over_seeds(seeds: Sequence[Measures]) -> Measures:
    merged: Measures = {}
    for measure in seeds[0]:
        if all(measure in values for values in seeds):
            means = [values[measure]["mean"] for values in seeds]
            mean = sum(means) / len(means)
            low, high = seed_interval(means) or (mean, mean)
            merged[measure] = {"mean": mean, "low": low, "high": high}
    return merged
