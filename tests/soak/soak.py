"""Attacks the CLI for minutes or hours, and prints one table of what was tried and what failed.

    python tests/soak/soak.py --minutes 10
    python tests/soak/soak.py --only kills --tries 200
    python tests/soak/soak.py --goal

Each try has its own random numbers, from the seed, the kind and the index of the try. So
`--seed S --only KIND --first INDEX --tries 1` repeats one. docs/reliability.md describes the kinds.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from damage import try_damage
from full_disk import try_full_disk
from graders import try_hostile_answers, try_hostile_rewards
from inputs import try_data_files, try_overrides, try_recipes
from kills import try_kills
from long_run import try_long_run
from scenarios import Workspace
from table import Findings, Row, Table
from two_processes import try_two_processes

Try = Callable[[Workspace, random.Random], Findings]


@dataclass(frozen=True)
class Kind:
    """A kind of attack, its share of the time, and its number of cases in the goal."""

    run: Try
    share: float  # 0: it runs only if it is chosen, and in the goal
    goal: int


KINDS = {
    "kills": Kind(try_kills, 0.4, 200),
    "damage": Kind(try_damage, 0.2, 300),
    "full disk": Kind(try_full_disk, 0.05, 50),
    "two processes": Kind(try_two_processes, 0.05, 30),
    "recipes": Kind(try_recipes, 0.05, 10_000),
    "--set": Kind(try_overrides, 0.03, 10_000),
    "data files": Kind(try_data_files, 0.05, 2_000),
    "hostile answers": Kind(try_hostile_answers, 0.1, 10_000),
    "hostile rewards": Kind(try_hostile_rewards, 0.07, 200),
    "long run": Kind(try_long_run, 0, 1),
}


@dataclass(frozen=True)
class Limit:
    """Ends a kind after a number of cases, or else after a time. One try always runs."""

    cases: int
    seconds: float

    def reached(self, row: Row) -> bool:
        if self.cases:
            return row.tried >= self.cases
        return row.seconds >= self.seconds


def run_kind(name: str, limit: Limit, workspace: Workspace, seed: int, first: int = 0) -> Row:
    row, started, index = Row(name), time.monotonic(), first
    while index == first or not limit.reached(row):
        findings = KINDS[name].run(workspace, random.Random(f"{seed}/{name}/{index}"))
        row.add(findings)
        row.seconds = time.monotonic() - started
        for column, description in findings.failures:
            print(f"{name} {index}: {column}: {description}", file=sys.stderr)
        print(f"{name}: {row.tried} tried, {len(row.failures)} failures", file=sys.stderr)
        index += 1
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", flush=True)
    folder = Path(options.folder or tempfile.mkdtemp(prefix="eepo-soak-")).resolve()
    workspace, table = Workspace(folder, options.steps), Table(seed)
    chosen = options.only or [name for name in KINDS if KINDS[name].share or options.goal]
    total_share = sum(KINDS[name].share for name in chosen) or 1
    for name in chosen:
        cases = options.tries or (KINDS[name].goal if options.goal else 0)
        seconds = 60 * options.minutes * KINDS[name].share / total_share
        limit = Limit(cases, seconds)
        table.rows.append(run_kind(name, limit, workspace, seed, options.first))
    print(table.markdown())
    if table.failed:
        print(f"\n{table.examples()}\nseed {seed}; folders of the failures are in {folder}")
        return 1
    if not options.folder:
        shutil.rmtree(folder)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=10, help="total time (default: 10)")
    parser.add_argument("--goal", action="store_true", help="the numbers of docs/reliability.md")
    parser.add_argument("--only", type=_names, help=f"comma-separated: {', '.join(KINDS)}")
    parser.add_argument("--tries", type=int, default=0, help="cases per kind, instead of a time")
    parser.add_argument("--steps", type=int, default=2000, help="steps of the long run")
    parser.add_argument("--seed", type=int, help="default: a new one, which is printed")
    parser.add_argument("--first", type=int, default=0, help="index of the first try")
    parser.add_argument("--folder", help="work folder, which is kept (default: a temporary one)")
    return parser.parse_args(arguments)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in KINDS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} must be one of {', '.join(KINDS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
