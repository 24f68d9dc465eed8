"""Summarises a comparison in sentences. No sentence claims more than its numbers show."""

from __future__ import annotations

import math
from collections.abc import Sequence

from eepo.evaluation.estimates import seed_interval
from eepo.evaluation.results import set_title
from eepo.reports.measures import LABELS, full_evaluations, measure_value, shown_measures
from eepo.reports.records import Run, by_method, evaluation_sets
from eepo.reports.settings import differing_settings
from eepo.reports.strategies import new_labels, with_all_labels

FINAL_STEPS = 5


def summary_sentences(runs: Sequence[Run]) -> list[str]:
    """Compare every method with the first one, then list warnings about comparability."""
    methods = by_method(runs)
    baseline, *others = methods
    equal_time = is_equal_time(runs)
    suffix = " at equal training time" if equal_time else ""
    measures = shown_measures(runs)
    comparisons = [
        comparison
        for other in others
        for eval_set in evaluation_sets(runs)
        if (comparison := _compare(methods[baseline], methods[other], eval_set, measures, suffix))
    ]
    sentences = strategy_sentences(runs)
    sentences += [_time_sentence(runs)] if equal_time else []
    sentences += [sentence for sentence, _ in comparisons]
    if not others:
        sentences.append(f"Only one method ({baseline}), so there is nothing to compare.")
    elif not comparisons:
        sentences.append(
            "No two methods have a full evaluation of the same set, so there is nothing to compare."
        )
    num_intervals = sum(number for _, number in comparisons)
    if num_intervals > 1:
        sentences.append(
            f"There are {num_intervals} intervals at 95 %: even if no method differs, "
            "about 1 in 20 excludes 0."
        )
    return sentences + warning_sentences(runs)


def strategy_sentences(runs: Sequence[Run]) -> list[str]:
    """Say how much each method earns at the end, and how often it uses a strategy that grew."""
    labels = new_labels(runs)
    if not labels:
        return []
    label = labels[0]
    parts = []
    for method, seeds in by_method(with_all_labels(runs)).items():
        reward = _final_mean(seeds, "stage1/reward")
        share = _final_mean(seeds, f"stage1/label/{label}")
        parts.append(f"{method} earns {reward:.0%} reward and uses it in {share:.0%}")
    return [f'Strategy "{label}", last {FINAL_STEPS} steps: {"; ".join(parts)} of completions.']


def _final_mean(seeds: Sequence[Run], key: str) -> float:
    values = [value for run in seeds for value in list(run.series(key).values())[-FINAL_STEPS:]]
    return sum(values) / max(len(values), 1)


def is_equal_time(runs: Sequence[Run]) -> bool:
    """Return whether every seed had the training time of the baseline's run with that seed.

    At least one run must have a time limit.
    """
    baseline, *others = by_method(runs).values()
    baseline_seconds = {run.seed: _allowed_seconds(run) for run in baseline}
    pairs = [
        (_allowed_seconds(run), baseline_seconds.get(run.seed)) for seeds in others for run in seeds
    ]
    all_equal = all(
        expected is not None and math.isclose(seconds, expected, rel_tol=1e-6)
        for seconds, expected in pairs
    )
    return bool(pairs) and all_equal and any(_time_limit(run) for run in runs)


def _allowed_seconds(run: Run) -> float:
    return _time_limit(run) or run.seconds() or 0.0


def _time_limit(run: Run) -> float:
    return float(run.setting("training", "max_seconds") or 0.0)


def _time_sentence(runs: Sequence[Run]) -> str:
    """Give the steps and seconds of each method, from its lowest to its highest seed."""
    parts = [
        f"{method} {_range_text([run.last_step for run in seeds], '{:,.0f}')} steps in "
        f"{_range_text([run.seconds() or 0.0 for run in seeds], '{:,.1f}')} s"
        for method, seeds in by_method(runs).items()
    ]
    return f"Equal training time for each seed, without evaluations: {'; '.join(parts)}."


def _range_text(values: Sequence[float], number_format: str) -> str:
    ends = [number_format.format(end) for end in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


def warning_sentences(runs: Sequence[Run]) -> list[str]:
    """List what makes the runs less comparable than they look."""
    trained = [run for run in runs if not run.is_evaluation]
    sentences = [sentence for run in trained if (sentence := _unfinished(run))]
    sentences += [] if is_equal_time(runs) else _unequal_training(trained)
    settings = differing_settings(runs)
    evaluated_with = ("model.path", "model.revision", "task.", "evaluation.")
    differing = [key for key in settings if key.startswith(evaluated_with)]
    if differing:
        sentences.append(
            f"Not directly comparable: the runs also differ in {', '.join(differing)}."
        )
    for method in by_method(runs):
        mixed = [
            key
            for key, values in settings.items()
            if len(values[method]) > 1 and key != "training.max_seconds"
        ]
        if mixed:
            sentences.append(
                f"The runs of {method} are not seeds of one recipe: "
                f"they differ in {', '.join(mixed)}."
            )
    return sentences


def _unfinished(run: Run) -> str | None:
    """Say how far a run got. It may have been stopped, or it may still be training."""
    limit, seconds = _time_limit(run), run.seconds() or 0.0
    num_steps = run.setting("training", "num_steps") or 0
    recorded = f"{run.name}, seed {run.seed}: recorded up to step {run.last_step}"
    if limit and seconds < limit * (1 - 1e-9):
        return f"{recorded}, after {seconds:,.1f} of {limit:,.1f} s."
    if not limit and run.last_step < num_steps:
        return f"{recorded} of {num_steps}."
    return None


def _unequal_training(runs: Sequence[Run]) -> list[str]:
    sentences = []
    evaluations = [row for name in evaluation_sets(runs) for row in full_evaluations(runs, name)]
    last_steps = sorted({row["step"] for row in evaluations})
    if len(last_steps) > 1:
        steps = ", ".join(map(str, last_steps))
        sentences.append(f"The full evaluations were made at different steps: {steps}.")
    sampled = {method: seeds[0].num_completions() for method, seeds in by_method(runs).items()}
    if len(set(sampled.values())) > 1:
        counts = [f"{method} {count:,}" for method, count in sampled.items() if count is not None]
        sentences.append(
            f"Unequal rollouts: the number of completions sampled for training is "
            f"{', '.join(counts)}."
        )
    return sentences


def _compare(
    baseline: Sequence[Run],
    other: Sequence[Run],
    eval_set: str,
    measures: Sequence[str],
    suffix: str,
) -> tuple[str, int] | None:
    """Return a sentence and the number of intervals in it."""
    if not full_evaluations(baseline, eval_set) or not full_evaluations(other, eval_set):
        return None
    subject = f"{other[0].name} against {baseline[0].name} on {set_title(eval_set)}{suffix}"
    pairs = _seed_pairs(baseline, other, eval_set)
    if len(pairs) >= 2:
        subject += f", paired over {len(pairs)} seeds"
        return _compare_paired(subject, pairs, eval_set, measures)
    if max(len(baseline), len(other)) >= 2:
        return f"{subject}: fewer than two seeds in common, so no difference can be estimated.", 0
    parts = [
        part
        for measure in measures
        if (part := _values_text(other[0], baseline[0], eval_set, measure))
    ]
    return f"{subject}: {'; '.join(parts)}. One seed cannot show a difference between methods.", 0


def _seed_pairs(
    baseline: Sequence[Run], other: Sequence[Run], eval_set: str
) -> list[tuple[Run, Run]]:
    """Pair runs (baseline, other) with the same seed.

    They saw the same prompts in the same order, which lowers the variance of their difference.
    """
    by_seed = {run.seed: run for run in baseline if run.full_evaluation(eval_set)}
    return [
        (by_seed[run.seed], run)
        for run in other
        if run.seed in by_seed and run.full_evaluation(eval_set)
    ]


def _compare_paired(
    subject: str, pairs: Sequence[tuple[Run, Run]], eval_set: str, measures: Sequence[str]
) -> tuple[str, int]:
    """List the differences with their intervals, then say which are significant."""
    differences = {
        measure: values
        for measure in measures
        if (values := _differences(pairs, eval_set, measure))
    }
    parts = [_difference_text(measure, values) for measure, values in differences.items()]
    verdict = _verdict(pairs[0][1].name, differences)
    return f"{subject}, difference [95 % interval]: {'; '.join(parts)}. {verdict}", len(parts)


def _verdict(method: str, differences: dict[str, list[float]]) -> str:
    """Say for every measure whether the difference is significant, and in which direction."""
    significant, others = [], []
    for measure, values in differences.items():
        if _excludes_zero(values):
            direction = "higher" if sum(values) > 0 else "lower"
            significant.append(f"{_label(measure)} ({method} {direction})")
        else:
            others.append(_label(measure))
    if not significant:
        return "No significant difference: no interval excludes 0."
    shown = f"Significant (interval excludes 0): {', '.join(significant)}."
    return f"{shown} Not significant: {', '.join(others)}." if others else shown


def _differences(pairs: Sequence[tuple[Run, Run]], eval_set: str, measure: str) -> list[float]:
    """Return the difference for each pair; empty if any run lacks the measure."""
    differences = []
    for baseline, other in pairs:
        baseline_value = _final_value(baseline, eval_set, measure)
        other_value = _final_value(other, eval_set, measure)
        if baseline_value is None or other_value is None:
            return []
        differences.append(other_value - baseline_value)
    return differences


def _difference_text(measure: str, differences: Sequence[float]) -> str:
    is_count = measure == "distinct"
    factor, number_format, unit = (1, "{:+z.2f}", "") if is_count else (100, "{:+z.1f}", " points")
    mean = number_format.format(factor * sum(differences) / len(differences))
    text = f"{_label(measure)} {mean}{unit}"
    if _is_constant(differences):
        return f"{text} (equal in every seed, so the spread is unknown)"
    low, high = (number_format.format(factor * end) for end in seed_interval(differences) or ())
    return f"{text} [{low}, {high}]"


def _excludes_zero(differences: Sequence[float]) -> bool:
    """Treat zero spread over a few seeds as unknown: it is chance or coarse counting."""
    interval = seed_interval(differences)
    if interval is None or _is_constant(differences):
        return False
    return interval[0] > 0 or interval[1] < 0


def _is_constant(differences: Sequence[float]) -> bool:
    return max(differences) - min(differences) < 1e-12


def _values_text(other: Run, baseline: Run, eval_set: str, measure: str) -> str | None:
    values = [_final_value(run, eval_set, measure) for run in (other, baseline)]
    number_format = "{:.2f}" if measure == "distinct" else "{:.1%}"
    texts = [
        number_format.format(value).replace("%", " %") for value in values if value is not None
    ]
    return f"{_label(measure)} {' against '.join(texts)}" if len(texts) == 2 else None


def _final_value(run: Run, eval_set: str, measure: str) -> float | None:
    row = run.full_evaluation(eval_set)
    return measure_value(row, measure) if row else None


def _label(measure: str) -> str:
    return LABELS.get(measure, measure)
