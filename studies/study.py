"""Tunes methods on some seeds and reports them on others, in several regimes, many runs at a time.

    python studies/study.py run studies/countdown.toml --phase tune --out runs/study --jobs 16
    python studies/study.py run studies/countdown.toml --phase report --out runs/study --jobs 16
    python studies/study.py tables studies/countdown.toml --out runs/study
    python studies/study.py figures studies/countdown.toml --out runs/study --into figures

A plan (TOML) has regimes (a recipe and knobs), methods (knobs, and one knob with the values it is
tuned over), the seeds of each phase, and the `objective` of tuning: measures whose mean decides,
or "speed".

- `base`: a method also has the tuned knobs of these methods. Tune them first (`--method`).
- `values.NAME` in a regime: other values for a method.
- `tuned_in`: the regime whose tuning runs decide, of a regime or of a method.
- `every_value`: report the method with each of its values instead of the best one.
- `weights = "OTHER"`: train nothing, evaluate the final weights of OTHER.
- `against`: compare with this method at the same value. By default, compare with the first method.

Intervals are 95 %, paired by seed. More phases in `seeds` report again on other seeds. Every
finished run becomes one line of OUT/PHASE.jsonl, and its weights are deleted. The same command
continues a stopped study from these lines.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frontier import Points, frontier_figure
from lengths import Lengths, length_figure
from matplotlib.figure import Figure
from plan import FINAL, REPORT, STEPS, TUNE, Plan, Run, as_run, final
from tables import tables
from warm import WarmStarter

from eepo.experiments.processes import Job, failure_reason, run_jobs
from eepo.experiments.sweep import job_environment
from eepo.recipe import read_toml
from eepo.reports import records
from eepo.reports.figure_list import image_bytes
from eepo.reports.figures import exploration_figure, pass_at_k_figure
from eepo.runs.jsonl import read_records
from eepo.runs.progress import Progress
from eepo.runs.runlog import EVALUATIONS, METRICS
from eepo.types import UserError

KEPT = ("step", "entropy", "reward", "stage1/entropy", "stage2/entropy",
        "stage1/reward", "stage2/reward",
        "stage1/length", "stage2/length", "unlearn/kl", "unlearn/lr", "gate_share",
        "missed_share", "second_half_recovery",
        "mismatch_kl", "stage1/clip_share", "stage2/clip_share",
        "stage1/label/compute", "stage2/label/compute", "stage2/rewarded_ratio_min",
        "seconds/total", "memory/peak",
        "memory/held")  # fmt: skip
MOST_ROWS = 30  # of a run's metrics
WEIGHTS = FINAL, "checkpoints"  # folders of a run
FRONTIER = "pass@32"
LENGTHS = "mean", "pass@32"


def line_of(run: Run, folder: Path) -> dict[str, Any]:
    """Summarise a finished run: its full evaluations, and its metrics as means over some steps."""
    metrics = list(read_records(folder / METRICS))
    every = max(1, -(-len(metrics) // MOST_ROWS))
    kept = [_mean_row(metrics[first : first + every]) for first in range(0, len(metrics), every)]
    evaluations = [
        {name: _short(one) for name, one in row.items() if name != "problems"}
        for row in read_records(folder / EVALUATIONS)
        if row["kind"] == "full"
    ]
    seconds = sum(row["seconds/total"] for row in metrics)
    speed = {
        "num_steps": len(metrics),
        "steps_to_50": steps_to(metrics, 0.5),
        "steps_to_90": steps_to(metrics, 0.9),
    }
    return speed | {"regime": run.regime, "method": run.method,
            "value": run.value, "seed": run.seed,
            "seconds": round(seconds, 1), "evaluations": evaluations, "metrics": kept}  # fmt: skip


def steps_to(metrics: Sequence[dict[str, Any]], reward: float, window: int = 5) -> int | None:
    """Return the first step at which the mean stage-1 reward of the last steps exceeds `reward`."""
    values = [row.get("stage1/reward", 0.0) for row in metrics]
    for end in range(window, len(values) + 1):
        if statistics.fmean(values[end - window : end]) > reward:
            return end
    return None


def _mean_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Under the last one's step."""
    found = {name: [row[name] for row in rows if row.get(name) is not None] for name in KEPT}
    means = {name: _short(statistics.fmean(values)) for name, values in found.items() if values}
    return means | {"step": rows[-1]["step"]}


def _short(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _short(one) for name, one in found.items()}
    return float(f"{found:.4g}") if isinstance(found, float) else found


def run(
    plan: Plan, phase: str, num_jobs: int, regimes: Sequence[str], methods: Sequence[str]
) -> None:
    """What trains comes first, then what evaluates its weights."""
    done = {
        (line["regime"], line["method"], line["value"], line["seed"]) for line in plan.done(phase)
    }
    left = [one for one in plan.runs(phase, regimes, methods) if one.key not in done]
    for trains in (True, False):
        if some := [one for one in left if (plan.source(one) is None) == trains]:
            _run_all(plan, phase, num_jobs, some)


def _run_all(plan: Plan, phase: str, num_jobs: int, runs: Sequence[Run]) -> None:
    record = plan.out / f"{phase}.jsonl"
    waiting = {str(one.folder): one for one in runs}
    folders = {title: plan.out / phase / title for title in waiting}
    jobs = [
        Job(title, plan.command(one, folders[title]), folders[title] / "log.txt")
        for title, one in waiting.items()
    ]
    progress, failed = Progress(), 0
    with progress.bar(f"{phase}, {num_jobs} at a time", len(jobs), 0) as bar:

        def ended(job: Job, code: int) -> None:
            nonlocal failed
            if code:
                failed += 1
                progress.print(f"failed: {job.title}: {failure_reason(job, code)}")
            else:
                with record.open("a", encoding="utf-8") as file:
                    one = waiting[job.title]
                    knobs = {"knobs": plan.knobs(one.regime, one.method, one.value)}
                    file.write(json.dumps(line_of(one, job.log.parent) | knobs) + "\n")
                kept = FINAL if plan.is_source(one) else ""
                for weights in {*WEIGHTS} - {
                    kept
                }:  # hundreds of runs of a larger model would fill a disk
                    shutil.rmtree(job.log.parent / weights, ignore_errors=True)
            bar.advance()

        shares = job_environment(num_jobs)
        whole = run_jobs(jobs, num_jobs, shares, ended, starter=WarmStarter(shares))
    if not whole:
        raise SystemExit("stopped; the same command goes on")
    if failed:
        raise SystemExit(f"{failed} of {len(jobs)} runs failed; the same command tries them again")


def figures(
    plan: Plan,
    into: Path,
    study: str,
    names: Sequence[str] = (),
    regimes: Sequence[str] = (),
    methods: Sequence[str] = (),
    phases: Sequence[str] = (REPORT,),
) -> None:
    """Up to five for each regime, named after study and regime; or only those `names`."""
    into.mkdir(parents=True, exist_ok=True)
    lined = {
        name: method for name, method in plan.tables["methods"].items() if method.get("every_value")
    }
    always = {name for name, method in lined.items() if "weights" not in method}
    found = [
        line for line in plan.done(*phases) if not methods or line["method"] in {*methods, *always}
    ]
    order = list(plan.tables["methods"])
    found.sort(
        key=lambda line: order.index(line["method"])
    )  # legends as the plan has them, not as runs ended
    for regime in regimes or plan.tables["regimes"]:
        here = [line for line in found if line["regime"] == regime]
        drawn = Drawn(
            plan,
            trained=[one for one in here if one["method"] in always],
            evaluated=[one for one in here if one["method"] in {*lined} - always],
            points=[one for one in here if one["method"] not in lined],
        )
        for name in names or FIGURES:
            if (figure := FIGURES[name](drawn)) is not None:
                (into / f"{study}_{regime}_{name}.png").write_bytes(image_bytes(figure, "png"))


@dataclass(frozen=True)
class Drawn:
    """The lines of one regime: methods with every value, trained or evaluated, and the others."""

    plan: Plan
    trained: list[dict[str, Any]]
    evaluated: list[dict[str, Any]]
    points: list[dict[str, Any]]

    @property
    def runs(self) -> list[records.Run]:
        return list(map(as_run, self.points))


def _frontiers(
    plan: Plan, line: Sequence[dict[str, Any]], points: Sequence[dict[str, Any]]
) -> dict[str, tuple[dict[str, Points], Points]]:
    """By evaluation set: a line for each method with every value, along its values, and the others.

    What evaluates the weights of another has that one's name.
    """
    named = plan.tables["methods"]

    def of(some: Iterable[dict[str, Any]], name: str, where: str) -> Points:
        found: dict[str, list[tuple[float, float]]] = {}
        for one in some:
            found.setdefault(one[name], []).append(
                (final(one, where, "mean"), final(one, where, FRONTIER))
            )
        return found

    def along(name: str, where: str) -> Points:
        found = of((one for one in line if one["method"] == name), "value", where)
        return {value: found[value] for value in map(str, named[name]["values"]) if value in found}

    sets = records.evaluation_sets([as_run(one) for one in [*points, *line]])
    titles = {one["method"]: named[one["method"]].get("weights", one["method"]) for one in line}
    return {
        where: (
            {title: along(name, where) for name, title in titles.items()},
            of(points, "method", where),
        )
        for where in sets
    }


def _lengths(plan: Plan, points: Sequence[dict[str, Any]]) -> dict[str, Lengths]:
    """Collect methods that were run with several numbers of steps, by measure and set."""
    families: dict[frozenset[str], list[dict[str, Any]]] = {}
    for one in points:
        knobs = frozenset(knob for knob in one["knobs"] if not knob.startswith(STEPS))
        families.setdefault(knobs, []).append(one)
    several = [own for own in families.values() if len(set(map(plan.num_steps, own))) > 1]
    if len(several) < 2:  # nothing to compare
        return {}
    measured: dict[str, Lengths] = {}
    for where in records.evaluation_sets([as_run(one) for own in several for one in own]):
        for measure in LENGTHS:
            lengths = measured[f"{measure}, {where.replace('_', ' ')}"] = {}
            for own in several:
                line = lengths.setdefault(own[0]["method"], {})
                for one in own:
                    line.setdefault(plan.num_steps(one), []).append(final(one, where, measure))
    return measured


FIGURES: dict[str, Callable[[Drawn], Figure | None]] = {
    "exploration": lambda of: exploration_figure(of.runs) if of.points else None,
    "pass_at_k": lambda of: pass_at_k_figure(of.runs) if of.points else None,
    "frontier": lambda of: frontier_figure(_frontiers(of.plan, of.trained, of.points), FRONTIER),
    "temperatures": lambda of: frontier_figure(_frontiers(of.plan, of.evaluated, []), FRONTIER),
    "lengths": lambda of: length_figure(_lengths(of.plan, of.points)),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("run", "list", "tables", "figures"))
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--phase", action="append", default=[],
        help="a phase of the plan; default: tune for runs, report otherwise; "
        "repeatable for tables and figures",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--regime", action="append", default=[], help="only this one; repeatable")
    parser.add_argument("--method", action="append", default=[], help="only this one; repeatable")
    parser.add_argument(
        "--against", default="", help="of tables: what differences are to, METHOD or 'METHOD VALUE'"
    )
    parser.add_argument(
        "--figure", action="append", default=[], choices=FIGURES, help="only this one; repeatable"
    )
    parser.add_argument(
        "--into", type=Path, default=Path("docs/results/figures"), help="where figures go"
    )
    args = parser.parse_args()
    try:
        if args.jobs < 1:
            raise UserError(f"--jobs = {args.jobs} must be at least 1")
        if not args.plan.is_file():
            raise UserError(f"{args.plan}: no such plan")
        plan = Plan(read_toml(args.plan), args.out)
        runs = args.action in ("run", "list")
        phases = args.phase or [TUNE if runs else REPORT]
        if runs and len(phases) > 1:
            raise UserError(f"--phase {' --phase '.join(phases)}: {args.action} takes one")
        for phase in phases:
            plan.check(args.regime, [*args.method, *args.against.split()[:1]], phase)
        if args.action == "run":
            run(plan, phases[0], args.jobs, args.regime, args.method)
        elif args.action == "list":
            wanted = plan.runs(phases[0], args.regime, args.method)
            print("\n".join(" ".join(plan.command(one, one.folder)) for one in wanted))
        elif args.action == "tables":
            print(tables(plan, args.regime, args.method, args.against, phases))
        else:
            figures(plan, args.into, args.plan.stem, args.figure, args.regime, args.method, phases)
    except UserError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
