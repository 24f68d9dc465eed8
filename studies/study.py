"""Methods tuned on some seeds and reported on others, in several regimes, many runs at a time.

    python studies/study.py run studies/countdown.toml --phase tune --out runs/study --method grpo --jobs 16
    python studies/study.py run studies/countdown.toml --phase tune --out runs/study --jobs 16
    python studies/study.py run studies/countdown.toml --phase report --out runs/study --jobs 16
    python studies/study.py tables studies/countdown.toml --out runs/study
    python studies/study.py figures studies/countdown.toml --out runs/study --into docs/results/figures

A plan (TOML) names regimes (a recipe and knobs), methods (knobs, and one knob with the values it is tuned over: as many
for each method), the seeds of both phases, and the measures by whose mean tuning chooses (`objective`, of the plan or
of a method). A method also has the knobs of those in its `base`, tuned: tune these first (`--method`). One that says
`every_value` is not tuned but reported with each of its values: what the knob trades, a line in a figure. Tables
compare with the first method, or, at the same value, with the one that is named in `against`; paired by seed, with 95 %
intervals.
Every finished run becomes one line of OUT/tune.jsonl or OUT/report.jsonl, and its weights are deleted; the same command
goes on where it stopped, from the lines alone if the runs are gone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frontier import Points, frontier_figure
from warm import WarmStarter

from eepo.estimates import seed_interval
from eepo.processes import Job, run_jobs, why_ended
from eepo.progress import Progress
from eepo.recipe import read_toml
from eepo.reports import runs as records
from eepo.reports.figures import exploration_figure, pass_at_k_figure
from eepo.reports.measures import full_evaluations, value
from eepo.reports.pictures import image_bytes
from eepo.runlog import EVALUATIONS, METRICS, read_lines
from eepo.sweep import job_environment
from eepo.types import UserError

MEASURES = ("mean", "greedy", "pass@8", "pass@32", "distinct")
KEPT = ("step", "entropy", "reward", "stage1/entropy", "stage2/entropy", "stage1/reward", "stage2/reward",
        "stage1/length", "stage2/length", "unlearn/kl", "unlearn/lr", "gate_share", "seconds/total",
        "memory/peak", "memory/held")  # fmt: skip
MOST_ROWS = 30  # of a run's metrics
WEIGHTS = "final", "checkpoints"  # folders of a run
TOLD = {"entropy": "entropy", "stage1/entropy": "of stage 1", "stage2/entropy": "of stage 2", "reward": "reward",
        "stage1/reward": "of stage 1", "stage2/reward": "of stage 2", "unlearn/kl": "KL", "unlearn/lr": "η",
        "gate_share": "gated", "seconds": "seconds"}  # fmt: skip
FRONTIER = "pass@32"


@dataclass(frozen=True)
class Run:
    regime: str
    method: str
    value: str  # of the knob it is tuned over; "" if there is none
    seed: int

    @property
    def folder(self) -> Path:
        return Path(self.regime) / f"{self.method}={self.value or 'as-is'}" / f"seed-{self.seed}"

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.regime, self.method, self.value, self.seed


@dataclass
class Plan:
    """As the file says."""

    tables: dict[str, Any]
    out: Path
    chosen: dict[tuple[str, str], str] = field(default_factory=dict)  # by regime and method: what tuning found best

    def __post_init__(self) -> None:
        """A comparison that cannot be made is refused before anything runs."""
        methods = self.tables["methods"]
        for name, method in methods.items():
            other = methods.get(method.get("against", name))
            if other is None:
                raise UserError(f"{name}: against = {method['against']} is not a method; allowed: {', '.join(methods)}")
            if "against" in method and not (method.get("every_value") and other.get("every_value")):
                raise UserError(f"{name}: against = {method['against']} needs every_value in both")

    def command(self, run: Run, folder: Path) -> tuple[str, ...]:
        regime, method = self.tables["regimes"][run.regime], self.tables["methods"][run.method]
        knobs = [*self.tables.get("set", []), *regime.get("set", []), *self.knobs(run.regime, run.method, run.value)]
        sets = [part for knob in [*knobs, f"training.seed={run.seed}"] for part in ("--set", knob)]
        recipe = method.get("recipe", regime["recipe"])
        return ("eepo", "train", recipe, "--out", str(folder), "--resume", *sets)

    def knobs(self, regime: str, name: str, value: str) -> list[str]:
        """Those of the methods below it, tuned, then its own."""
        method = self.tables["methods"][name]
        below = [knob for base in method.get("base", []) for knob in self.knobs(regime, base, self.value(regime, base))]
        own = [f"{method['tune']}={value}"] if value else []
        shares = [f"{knob}={total // int(value)}" for knob, total in method.get("shares", {}).items()]
        return [*below, *method.get("set", []), *own, *shares]

    def methods(self, regime: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, method in self.tables["methods"].items():
            if regime in method.get("regimes", self.tables["regimes"]):
                yield name, method

    def runs(self, phase: str, regimes: Sequence[str], methods: Sequence[str]) -> list[Run]:
        """Seed after seed, so that a study that is stopped has whole seeds."""
        self.check(regimes, methods)
        found = []
        for seed in self.tables["seeds"][phase]:
            for regime in regimes or self.tables["regimes"]:
                for name, _ in self.methods(regime):
                    if not methods or name in methods:
                        found += [Run(regime, name, value, seed) for value in self.values(phase, regime, name)]
        return found

    def check(self, regimes: Sequence[str], methods: Sequence[str]) -> None:
        """That the plan has what is asked for."""
        for asked, known in ((regimes, self.tables["regimes"]), (methods, self.tables["methods"])):
            if strange := set(asked) - set(known):
                raise UserError(f"{', '.join(sorted(strange))} is not in the plan; allowed: {', '.join(known)}")

    def values(self, phase: str, regime: str, name: str) -> list[str]:
        """Of the knob that a method is tuned over: those that this phase runs."""
        method = self.tables["methods"][name]
        every = [str(value) for value in method.get("values", [])]
        if method.get("every_value"):
            return every if phase == "report" else []
        return [self.value(regime, name)] if phase == "report" else every

    def done(self, phase: str) -> list[dict[str, Any]]:
        """Lines of runs whose knobs are those they would have now: tuning may have chosen others since."""
        return [line for line in self.lines(phase) if self._holds(phase, line)]

    def _holds(self, phase: str, line: dict[str, Any]) -> bool:
        regime, name, value = line["regime"], line["method"], line["value"]
        if name not in dict(self.methods(regime)) or value not in self.values(phase, regime, name):
            return False
        return line.get("knobs") == self.knobs(regime, name, value)

    def lines(self, phase: str) -> list[dict[str, Any]]:
        path = self.out / f"{phase}.jsonl"
        return list(read_lines(path)) if path.exists() else []

    def value(self, regime: str, name: str) -> str:
        """Of the knob that is tuned: the one whose tuning runs are best, by its measures; "" without one."""
        method = self.tables["methods"][name]
        if "values" not in method:
            return ""
        if (regime, name) not in self.chosen:
            self.chosen[regime, name] = self._best(regime, name, method)
        return self.chosen[regime, name]

    def _best(self, regime: str, name: str, method: dict[str, Any]) -> str:
        scores: dict[str, list[float]] = {}
        measures = method.get("objective", self.tables["objective"])
        for line in self.lines("tune"):
            here = (line["regime"], line["method"]) == (regime, name)
            if here and line.get("knobs") == self.knobs(regime, name, line["value"]):
                scores.setdefault(line["value"], []).append(objective(line, measures))
        if not scores:
            raise UserError(f"{regime}, {name}: nothing is tuned yet; run --phase tune --method {name} first")
        return max(scores, key=lambda value: statistics.mean(scores[value]))


def objective(line: dict[str, Any], names: Sequence[str]) -> float:
    """The mean of measures such as in_range/greedy."""
    return statistics.mean(final(line, *name.split("/")) for name in names)


def final(line: dict[str, Any], where: str, measure: str) -> float:
    [row] = full_evaluations([as_run(line)], where)
    found = value(row, measure)
    if found is None:
        raise UserError(f"{where} has no {measure}")
    return found


def line_of(run: Run, folder: Path) -> dict[str, Any]:
    """What a finished run says: its evaluations without their problems, and its metrics in rows, each a mean."""
    metrics = list(read_lines(folder / METRICS))
    every = -(-len(metrics) // MOST_ROWS)
    kept = [_mean_row(metrics[first : first + every]) for first in range(0, len(metrics), every)]
    evaluations = [
        {name: _short(one) for name, one in row.items() if name != "problems"}
        for row in read_lines(folder / EVALUATIONS)
        if row["kind"] == "full"
    ]
    seconds = sum(row["seconds/total"] for row in metrics)
    return {"regime": run.regime, "method": run.method, "value": run.value, "seed": run.seed,
            "seconds": round(seconds, 1), "evaluations": evaluations, "metrics": kept}  # fmt: skip


def _mean_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Under the last one's step."""
    found = {name: [row[name] for row in rows if row.get(name) is not None] for name in KEPT}
    means = {name: _short(statistics.fmean(values)) for name, values in found.items() if values}
    return means | {"step": rows[-1]["step"]}


def _short(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _short(one) for name, one in found.items()}
    return float(f"{found:.4g}") if isinstance(found, float) else found


def as_run(line: dict[str, Any]) -> records.Run:
    """A run as reports know it."""
    return records.Run(
        Path(line["regime"]), line["method"], line["seed"], {}, {}, line["metrics"], line["evaluations"], [], [], 0
    )


def run(plan: Plan, phase: str, num_jobs: int, regimes: Sequence[str], methods: Sequence[str]) -> None:
    record = plan.out / f"{phase}.jsonl"
    done = {(line["regime"], line["method"], line["value"], line["seed"]) for line in plan.done(phase)}
    waiting = {str(one.folder): one for one in plan.runs(phase, regimes, methods) if one.key not in done}
    folders = {title: plan.out / phase / title for title in waiting}
    jobs = [Job(title, plan.command(one, folders[title]), folders[title] / "log.txt") for title, one in waiting.items()]
    progress, failed = Progress(), 0
    with progress.bar(f"{phase}, {num_jobs} at a time", len(jobs), 0) as bar:

        def ended(job: Job, code: int) -> None:
            nonlocal failed
            if code:
                failed += 1
                progress.say(f"failed: {job.title}: {why_ended(job, code)}")
            else:
                with record.open("a", encoding="utf-8") as file:
                    one = waiting[job.title]
                    knobs = {"knobs": plan.knobs(one.regime, one.method, one.value)}
                    file.write(json.dumps(line_of(one, job.log.parent) | knobs) + "\n")
                for weights in WEIGHTS:  # hundreds of runs of a larger model would fill a disk
                    shutil.rmtree(job.log.parent / weights, ignore_errors=True)
            bar.advance()

        shares = job_environment(num_jobs)
        whole = run_jobs(jobs, num_jobs, shares, ended, starter=WarmStarter(shares))
    if not whole:
        raise SystemExit("stopped; the same command goes on")
    if failed:
        raise SystemExit(f"{failed} of {len(jobs)} runs failed; the same command tries them again")


def tables(plan: Plan, regimes: Sequence[str] = (), names: Sequence[str] = (), against: str = "") -> str:
    """Markdown: for each regime what every method did in training, then, set by set, what came of it.

    Differences are to the plan's first method, or to `against`: a method, or one with its value (grpo_rates 2e-5).
    """
    found = plan.done("report")
    titles = list(dict.fromkeys(map(_title, found)))
    if " " in against and against not in titles:
        raise UserError(f"--against {against!r} is not reported; allowed: {', '.join(titles)}")
    parts = []
    for regime in regimes or plan.tables["regimes"]:
        here = [line for line in found if line["regime"] == regime]
        methods = _by_method(plan, regime, here)
        if not methods:
            continue
        first = next(iter(methods))
        chosen = next((title for title, own in methods.items() if against in (title, own[0]["method"])), "")
        shown = {title: own for title, own in methods.items() if not names or own[0]["method"] in names}
        parts.append(_table(f"{regime}, training", ["", "seeds", *TOLD.values()], map(_training_row, shown.values())))
        for where in records.evaluation_sets([as_run(line) for line in here]):
            rows = []
            for own in shown.values():
                other = chosen or _other(plan, own[0]) or first
                note = "" if other == first else f" (to {other})"
                rows.append(_row(methods.get(other, []), own, where, note))
            parts.append(_table(f"{regime}, {where.replace('_', ' ')}", ["", *MEASURES], rows))
    return "\n\n".join(parts) + "\n"


def _by_method(plan: Plan, regime: str, here: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """By title, in the plan's order of methods and of their values."""
    reported = {line["method"] for line in here}
    found: dict[str, list[dict[str, Any]]] = {}
    for name in (name for name, _ in plan.methods(regime) if name in reported):
        order = plan.values("report", regime, name)
        for line in sorted(
            (line for line in here if line["method"] == name), key=lambda one: order.index(one["value"])
        ):
            found.setdefault(_title(line), []).append(line)
    return found


def _other(plan: Plan, line: dict[str, Any]) -> str:
    """What a line's method is compared with, if its plan says so: another method with the same value."""
    other = plan.tables["methods"][line["method"]].get("against", "")
    return _title(line | {"method": other}) if other else ""


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return f"### {title}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _title(line: dict[str, Any]) -> str:
    return f"{line['method']} {line['value']}".strip()


def _training_row(own: Sequence[dict[str, Any]]) -> list[str]:
    """Means over seeds; of what varies over the steps, over the last third of them."""
    cells = [_title(own[0]), str(len(own))]
    for name in TOLD:
        if name == "seconds":
            cells.append(f"{statistics.mean(line['seconds'] for line in own):.0f}")
            continue
        late = [
            row[name] for line in own for row in line["metrics"][-max(1, len(line["metrics"]) // 3) :] if name in row
        ]
        cells.append(f"{statistics.mean(late):.3g}" if late else "")
    return cells


def _row(base: Sequence[dict[str, Any]], own: Sequence[dict[str, Any]], where: str, note: str) -> list[str]:
    """Of each measure the mean over seeds, and the difference to `base`, paired by seed; bold where it is not 0."""
    cells = [_title(own[0]) + note]
    for measure in MEASURES:
        values = {line["seed"]: final(line, where, measure) for line in own}
        others = {line["seed"]: final(line, where, measure) for line in base}
        gaps = [values[seed] - others[seed] for seed in sorted(values.keys() & others.keys())]
        cell = f"{statistics.mean(values.values()):.3f}"
        if own is not base and (interval := seed_interval(gaps)):
            gap = f"{statistics.mean(gaps):+.3f} [{interval[0]:+.3f}, {interval[1]:+.3f}]"
            cell += f"<br>{f'**{gap}**' if interval[0] > 0 or interval[1] < 0 else gap}"
        cells.append(cell)
    return cells


def figures(plan: Plan, into: Path, methods: Sequence[str], study: str) -> None:
    """Three for each regime, named after study and regime."""
    into.mkdir(parents=True, exist_ok=True)
    lined = {name for name, method in plan.tables["methods"].items() if method.get("every_value")}
    found = [line for line in plan.done("report") if not methods or line["method"] in {*methods, *lined}]
    for regime in plan.tables["regimes"]:
        here = [line for line in found if line["regime"] == regime]
        line = [one for one in here if one["method"] in lined]
        points = [one for one in here if one["method"] not in lined]
        drawn = {
            "exploration": exploration_figure(list(map(as_run, points))) if points else None,
            "pass_at_k": pass_at_k_figure(list(map(as_run, points))) if points else None,
            "frontier": frontier_figure(_frontiers(plan, line, points), FRONTIER),
        }
        for name, figure in drawn.items():
            if figure is not None:
                (into / f"{study}_{regime}_{name}.png").write_bytes(image_bytes(figure, "png"))


def _frontiers(
    plan: Plan, line: Sequence[dict[str, Any]], points: Sequence[dict[str, Any]]
) -> dict[str, tuple[dict[str, Points], Points]]:
    """By evaluation set: a line for each method with every value, along its values, and the others."""

    def of(some: Iterable[dict[str, Any]], name: str, where: str) -> Points:
        found: dict[str, list[tuple[float, float]]] = {}
        for one in some:
            found.setdefault(one[name], []).append((final(one, where, "mean"), final(one, where, FRONTIER)))
        return found

    def along(name: str, where: str) -> Points:
        found = of((one for one in line if one["method"] == name), "value", where)
        values = map(str, plan.tables["methods"][name]["values"])
        return {value: found[value] for value in values if value in found}

    sets = records.evaluation_sets([as_run(one) for one in points])
    names = dict.fromkeys(one["method"] for one in line)
    return {where: ({name: along(name, where) for name in names}, of(points, "method", where)) for where in sets}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "list", "tables", "figures"))
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--phase", choices=("tune", "report"), default="tune")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--regime", action="append", default=[], help="only this one; repeatable")
    parser.add_argument("--method", action="append", default=[], help="only this one; repeatable")
    parser.add_argument("--against", default="", help="of tables: what differences are to, METHOD or 'METHOD VALUE'")
    parser.add_argument("--into", type=Path, default=Path("docs/results/figures"), help="where figures go")
    args = parser.parse_args()
    try:
        if args.jobs < 1:
            raise UserError(f"--jobs = {args.jobs} must be at least 1")
        if not args.plan.is_file():
            raise UserError(f"{args.plan}: no such plan")
        plan = Plan(read_toml(args.plan), args.out)
        plan.check(args.regime, [*args.method, *args.against.split()[:1]])
        if args.action == "run":
            run(plan, args.phase, args.jobs, args.regime, args.method)
        elif args.action == "list":
            wanted = plan.runs(args.phase, args.regime, args.method)
            print("\n".join(" ".join(plan.command(one, one.folder)) for one in wanted))
        elif args.action == "tables":
            print(tables(plan, args.regime, args.method, args.against))
        else:
            figures(plan, args.into, args.method, args.plan.stem)
    except UserError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
