"""Methods tuned on some seeds and reported on others, in several regimes, many runs at a time.

    python studies/study.py run studies/countdown.toml --phase tune --out runs/study --jobs 16
    python studies/study.py run studies/countdown.toml --phase report --out runs/study --jobs 16
    python studies/study.py tables studies/countdown.toml --out runs/study

A plan (TOML) names regimes (a recipe and knobs), methods (knobs, and one knob with the values it is tuned over: as many
for each method), the seeds of both phases, and the measures by whose mean tuning chooses. A method with a `base` also
has that one's knobs, tuned: tune the base first (`--method`). Every finished run becomes one line
of OUT/tune.jsonl or OUT/report.jsonl; the same command goes on where it stopped, from the lines alone if the runs are
gone. `tables` compares with the first method, paired by seed, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eepo.estimates import seed_interval
from eepo.processes import Job, run_jobs, why_ended
from eepo.progress import Progress
from eepo.runlog import EVALUATIONS, METRICS, read_lines

SETS = ("in_range", "out_of_range")
MEASURES = ("mean", "greedy", "pass@8", "pass@32", "distinct")
LATE = 0.2  # of the steps, the last ones: what stages are averaged over


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

    def command(self, run: Run, folder: Path) -> tuple[str, ...]:
        regime, method = self.tables["regimes"][run.regime], self.tables["methods"][run.method]
        knobs = [*self.tables.get("set", []), *regime.get("set", []), *self.knobs(run.regime, run.method, run.value)]
        sets = [part for knob in [*knobs, f"training.seed={run.seed}"] for part in ("--set", knob)]
        recipe = method.get("recipe", regime["recipe"])
        return (sys.executable, "-m", "eepo", "train", recipe, "--out", str(folder), "--resume", *sets)

    def knobs(self, regime: str, name: str, value: str) -> list[str]:
        """Those of the methods below it, tuned, then its own."""
        method = self.tables["methods"][name]
        base = method.get("base")
        below = self.knobs(regime, base, self.value(regime, base)) if base else []
        own = [f"{method['tune']}={value}"] if value else []
        shares = [f"{knob}={total // int(value)}" for knob, total in method.get("shares", {}).items()]
        return [*below, *method.get("set", []), *own, *shares]

    def value(self, regime: str, name: str) -> str:
        """The tuned one, if there were several."""
        values = [str(value) for value in self.tables["methods"][name].get("values", [""])]
        return self.chosen(regime, name) if len(values) > 1 else values[0]

    def methods(self, regime: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, method in self.tables["methods"].items():
            if regime in method.get("regimes", self.tables["regimes"]):
                yield name, method

    def runs(self, phase: str, only: Sequence[str], methods: Sequence[str]) -> list[Run]:
        """Seed after seed, so that a study that is stopped has whole seeds."""
        found = []
        for seed in self.tables["seeds"][phase]:
            for regime in self.tables["regimes"]:
                if only and regime not in only:
                    continue
                for name, method in self.methods(regime):
                    if methods and name not in methods:
                        continue
                    values = [str(value) for value in method.get("values", [""])]
                    if phase == "tune" and len(values) == 1:
                        continue
                    if phase == "report":
                        values = [self.value(regime, name)]
                    found += [Run(regime, name, value, seed) for value in values]
        return found

    def chosen(self, regime: str, method: str) -> str:
        """The value whose tuning runs are best, by the plan's measure."""
        scores: dict[str, list[float]] = {}
        for line in lines(self.out / "tune.jsonl"):
            if (line["regime"], line["method"]) == (regime, method):
                scores.setdefault(line["value"], []).append(_objective(line, self.tables["objective"]))
        if not scores:
            raise SystemExit(f"{regime}, {method}: nothing is tuned yet; run --phase tune first")
        return max(scores, key=lambda value: statistics.mean(scores[value]))


def _objective(line: dict[str, Any], names: Sequence[str]) -> float:
    """The mean of measures such as in_range/greedy."""
    return statistics.mean(line[name] for name in names)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def summary(run: Run, folder: Path) -> dict[str, Any]:
    """What a finished run says, in a few numbers."""
    row: dict[str, Any] = {"regime": run.regime, "method": run.method, "value": run.value, "seed": run.seed}
    for line in read_lines(folder / EVALUATIONS):
        if line["kind"] == "full" and line["step"] > 0:
            for measure in MEASURES:
                curve = line["pass@k"].get(measure.removeprefix("pass@")) if "@" in measure else line[measure]
                row[f"{line['set']}/{measure}"] = round(curve, 5)
    steps = list(read_lines(folder / METRICS))
    late = steps[int(len(steps) * (1 - LATE)) :]
    names = [name for name in late[-1] if name.startswith(("stage", "entropy", "unlearn/", "gate_share", "reward", "policy_entropy"))]  # fmt: skip # noqa: E501
    for name in names:
        row[name] = round(statistics.mean(line[name] for line in late if name in line), 6)
    row["entropy_at_start"] = round(statistics.mean(line["entropy"] for line in steps[:5]), 5)
    row["steps"], row["seconds"] = len(steps), round(sum(line["seconds/total"] for line in steps), 2)
    return row


def run(plan: Plan, phase: str, num_jobs: int, only: Sequence[str], methods: Sequence[str]) -> None:
    record = plan.out / f"{phase}.jsonl"
    done = {(line["regime"], line["method"], line["value"], line["seed"]) for line in lines(record)}
    waiting = [one for one in plan.runs(phase, only, methods) if one.key not in done]
    plan.out.mkdir(parents=True, exist_ok=True)
    folders = {str(one.folder): one for one in waiting}
    jobs = [
        Job(title, plan.command(one, plan.out / phase / title), plan.out / phase / title / "log.txt")
        for title, one in folders.items()
    ]
    progress, failed = Progress(), 0
    with progress.bar(f"{phase}, {num_jobs} at a time", len(jobs), 0) as bar:

        def ended(job: Job, code: int) -> None:
            nonlocal failed
            if code:
                failed += 1
                progress.say(f"failed: {job.title}: {why_ended(job, code)}")
            else:
                with record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(summary(folders[job.title], job.log.parent)) + "\n")
            bar.advance()

        threads = str(max(1, (os.cpu_count() or 1) // num_jobs))
        run_jobs(jobs, num_jobs, {"OMP_NUM_THREADS": threads} | os.environ, ended)
    if failed:
        raise SystemExit(f"{failed} of {len(jobs)} runs failed; the same command tries them again")


def tables(plan: Plan) -> str:
    """Markdown: for each regime and set, every method beside the first, and what it differs by."""
    found = lines(plan.out / "report.jsonl")
    parts = []
    for regime in plan.tables["regimes"]:
        here = [line for line in found if line["regime"] == regime]
        methods = [name for name, _ in plan.methods(regime) if any(line["method"] == name for line in here)]
        for where in SETS:
            if not here or f"{where}/mean" not in here[0]:
                continue
            head = ["", *MEASURES, *(f"Δ {measure}" for measure in MEASURES)]
            rows = [head, ["---"] * len(head)]
            rows += [_row(here, methods[0], name, where) for name in methods]
            parts.append(
                f"### {regime}, {where.replace('_', ' ')}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows)
            )
    return "\n\n".join(parts) + "\n"


def _row(here: Sequence[dict[str, Any]], baseline: str, name: str, where: str) -> list[str]:
    own = {line["seed"]: line for line in here if line["method"] == name}
    base = {line["seed"]: line for line in here if line["method"] == baseline}
    value = next(iter(own.values()))["value"]
    cells = [f"{name} {value}".strip()]
    cells += [_number(statistics.mean(line[f"{where}/{measure}"] for line in own.values())) for measure in MEASURES]
    for measure in MEASURES:
        column = f"{where}/{measure}"
        gaps = [own[seed][column] - base[seed][column] for seed in sorted(own.keys() & base.keys())]
        interval = seed_interval(gaps) if name != baseline else None
        cells.append(f"{statistics.mean(gaps):+.3f} [{interval[0]:+.3f}, {interval[1]:+.3f}]" if interval else "")
    return cells


def _number(value: float) -> str:
    return f"{value:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "tables", "list"))
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--phase", choices=("tune", "report"), default="tune")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--regime", action="append", default=[], help="only this one; repeatable")
    parser.add_argument("--method", action="append", default=[], help="only this one; repeatable")
    args = parser.parse_args()
    plan = Plan(tomllib.loads(args.plan.read_text(encoding="utf-8")), args.out)
    if args.action == "run":
        run(plan, args.phase, args.jobs, args.regime, args.method)
    elif args.action == "list":
        print(
            "\n".join(
                " ".join(plan.command(one, one.folder)) for one in plan.runs(args.phase, args.regime, args.method)
            )
        )
    else:
        print(tables(plan))


if __name__ == "__main__":
    main()
