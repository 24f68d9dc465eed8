"""The comparison in plain sentences. Every sentence says no more than its numbers do."""

from __future__ import annotations

import math
from collections.abc import Sequence

from eepo.evaluation.estimates import seed_interval
from eepo.reports.measures import LABELS, full_evaluations, shown_measures, value
from eepo.reports.records import Run, by_method, evaluation_sets
from eepo.reports.settings import differing_settings
from eepo.reports.tables import plain


def summary_sentences(runs: Sequence[Run]) -> list[str]:
    """Every method against the first one, then what a reader must know before believing it."""
    methods = by_method(runs)
    first, *others = methods
    basis = " at equal training time" if at_equal_time(runs) else ""
    compared = [
        found
        for other in others
        for name in evaluation_sets(runs)
        if (found := _compare(methods[first], methods[other], name, shown_measures(runs), basis))
    ]
    sentences = [sentence for sentence, _ in compared]
    num_intervals = sum(number for _, number in compared)
    if not others:
        sentences.append(f"Only {first} is here, so nothing is compared.")
    elif not sentences:
        sentences.append(
            "No two methods have a full evaluation of the same set, so nothing is compared."
        )
    if num_intervals > 1:
        sentences.append(
            f"These are {num_intervals} intervals at 95 %: where methods do not differ at all, "
            "about one in twenty still excludes 0."
        )
    return [_time_sentence(runs)] * bool(basis) + sentences + cautions(runs)


def at_equal_time(runs: Sequence[Run]) -> bool:
    """Whether time ended some of the runs, and gave every seed of every method what the first method's seed had."""
    first, *others = by_method(runs).values()
    given = {run.seed: _time_limit(run) or run.seconds() or 0.0 for run in first}
    limits = [
        (_time_limit(run) or run.seconds() or 0.0, given.get(run.seed))
        for seeds in others
        for run in seeds
    ]
    same = all(base is not None and math.isclose(own, base, rel_tol=1e-6) for own, base in limits)
    return bool(limits) and same and any(_time_limit(run) for run in runs)


def _time_limit(run: Run) -> float:
    return float(run.setting("training", "max_seconds") or 0.0)


def _time_sentence(runs: Sequence[Run]) -> str:
    """With the steps and the seconds of each method, from its lowest to its highest seed."""
    spent = [
        f"{method} {_span([run.last_step for run in seeds], '{:,.0f}')} steps in "
        f"{_span([run.seconds() or 0.0 for run in seeds], '{:,.1f}')} s"
        for method, seeds in by_method(runs).items()
    ]
    return f"At equal training time, seed by seed, evaluations not counted: {'; '.join(spent)}."


def _span(values: Sequence[float], form: str) -> str:
    ends = list(dict.fromkeys(form.format(end) for end in (min(values), max(values))))
    return " to ".join(ends)


def cautions(runs: Sequence[Run]) -> list[str]:
    """What makes the runs less comparable than they look."""
    sentences = [stopped for run in runs if (stopped := _stopped_early(run))]
    sentences += [] if at_equal_time(runs) else _unequal_training(runs)
    settings = differing_settings(runs)
    judged = [
        key
        for key in settings
        if key.startswith(("model.path", "model.revision", "task.", "evaluation."))
    ]
    if judged:
        sentences.append(f"Not like for like: the runs also differ in {', '.join(judged)}.")
    for method in by_method(runs):
        mixed = [
            key
            for key, values in settings.items()
            if len(values[method]) > 1 and key != "training.max_seconds"
        ]
        if mixed:
            sentences.append(
                f"The runs named {method} are not seeds of one recipe: they differ in {', '.join(mixed)}."
            )
    return sentences


def _stopped_early(run: Run) -> str | None:
    limit, num_steps, seconds = (
        _time_limit(run),
        run.setting("training", "num_steps") or 0,
        run.seconds() or 0.0,
    )
    if limit and seconds < limit * (1 - 1e-9):
        return f"{run.name} with seed {run.seed} stopped at step {run.last_step}, after {seconds:,.1f} s of {limit:,.1f}."
    if not limit and run.last_step < num_steps:
        return f"{run.name} with seed {run.seed} stopped at step {run.last_step} of {num_steps}."
    return None


def _unequal_training(runs: Sequence[Run]) -> list[str]:
    sentences = []
    final = {
        row["step"]
        for run in runs
        for name in evaluation_sets(runs)
        if (row := run.full_evaluation(name))
    }
    if len(final) > 1:
        steps = ", ".join(map(str, sorted(final)))
        sentences.append(f"The full evaluations were made at different steps ({steps}).")
    drawn = {method: seeds[0].num_completions() for method, seeds in by_method(runs).items()}
    if len(set(drawn.values())) > 1:
        numbers = ", ".join(
            f"{method} {number:,}" for method, number in drawn.items() if number is not None
        )
        sentences.append(f"Not at equal rollouts: completions drawn in training are {numbers}.")
    return sentences


def _compare(
    first: Sequence[Run], other: Sequence[Run], name: str, measures: Sequence[str], basis: str
) -> tuple[str, int] | None:
    """The sentence, and how many intervals it holds."""
    if not full_evaluations(first, name) or not full_evaluations(other, name):
        return None
    subject = f"{other[0].name} against {first[0].name} on {plain(name)}{basis}"
    pairs = _seed_pairs(first, other, name)
    if len(pairs) >= 2:
        return _paired(f"{subject}, paired over {len(pairs)} seeds", pairs, name, measures)
    if max(len(first), len(other)) >= 2:
        return (
            f"{subject}: fewer than two seeds in common, so nothing can be said about a difference.",
            0,
        )
    parts = [
        part for measure in measures if (part := _side_by_side(other[0], first[0], name, measure))
    ]
    return f"{subject}: {'; '.join(parts)}. One seed cannot show a difference between methods.", 0


def _seed_pairs(first: Sequence[Run], other: Sequence[Run], name: str) -> list[tuple[Run, Run]]:
    """(first, other) of the same seed: they saw the same prompts in the same order, so their difference is surer."""
    seeds = {run.seed: run for run in first if run.full_evaluation(name)}
    return [
        (seeds[run.seed], run) for run in other if run.seed in seeds and run.full_evaluation(name)
    ]


def _paired(
    subject: str, pairs: Sequence[tuple[Run, Run]], name: str, measures: Sequence[str]
) -> tuple[str, int]:
    """Differences with their intervals, then in words what they show, which is often nothing."""
    found = {
        measure: differences
        for measure in measures
        if (differences := _differences(pairs, name, measure))
    }
    parts = [_difference_text(measure, differences) for measure, differences in found.items()]
    return (
        f"{subject}, difference [95 % interval]: {'; '.join(parts)}. {_verdict(pairs[0][1].name, found)}",
        len(parts),
    )


def _verdict(method: str, found: dict[str, list[float]]) -> str:
    """For every measure, whether the data show a difference, and which way."""
    shown = {
        measure: sum(values) > 0 for measure, values in found.items() if _excludes_zero(values)
    }
    ways = {True: f"{method} higher", False: f"{method} lower"}
    excluding = ", ".join(f"{_label(measure)} ({ways[up]})" for measure, up in shown.items())
    if not shown:
        return "No interval excludes 0, so no difference is shown."
    if len(shown) == len(found):
        return f"Every interval excludes 0: {excluding}."
    others = ", ".join(_label(measure) for measure in found if measure not in shown)
    return f"Intervals that exclude 0: {excluding}; for {others} no difference is shown."


def _differences(pairs: Sequence[tuple[Run, Run]], name: str, measure: str) -> list[float]:
    """Seed by seed; none at all where a seed lacks the measure."""
    values = [(_final(base, name, measure), _final(run, name, measure)) for base, run in pairs]
    found = [run - base for base, run in values if run is not None and base is not None]
    return found if len(found) == len(pairs) else []


def _difference_text(measure: str, differences: Sequence[float]) -> str:
    scale, form, unit = (
        (1, "{:+z.2f}", "") if measure == "distinct" else (100, "{:+z.1f}", " points")
    )
    text = f"{_label(measure)} {form.format(scale * sum(differences) / len(differences))}{unit}"
    if _is_constant(differences):
        return f"{text} (the same in every seed, so its spread is unknown)"
    low, high = (form.format(scale * end) for end in seed_interval(differences) or ())
    return f"{text} [{low}, {high}]"


def _excludes_zero(differences: Sequence[float]) -> bool:
    """A spread of 0 over a few seeds is chance or coarse counting, not certainty."""
    interval = seed_interval(differences)
    return (
        interval is not None
        and not _is_constant(differences)
        and (interval[0] > 0 or interval[1] < 0)
    )


def _is_constant(differences: Sequence[float]) -> bool:
    return max(differences) - min(differences) < 1e-12


def _side_by_side(other: Run, first: Run, name: str, measure: str) -> str | None:
    ours, theirs = _final(other, name, measure), _final(first, name, measure)
    if ours is None or theirs is None:
        return None
    form = "{:.2f}" if measure == "distinct" else "{:.1%}"
    return f"{_label(measure)} {form.format(ours)} against {form.format(theirs)}".replace("%", " %")


def _final(run: Run, name: str, measure: str) -> float | None:
    row = run.full_evaluation(name)
    return value(row, measure) if row else None


def _label(measure: str) -> str:
    return LABELS.get(measure, measure)
