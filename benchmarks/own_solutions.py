"""Keep a model's own correct completions as solutions for a supervised warm start.

    eepo eval MODEL --benchmarks problems.jsonl --samples 2 --out evaluations/own
    python benchmarks/own_solutions.py evaluations/own/completions/problems.jsonl \
        problems.jsonl solved.jsonl --start To

`solved.jsonl` has the rows of `problems.jsonl` that were solved, with a column `solution`. With
`--start`, only completions that begin with this text are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def read(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:  # splitlines() would also split at U+2028
        return [json.loads(line) for line in lines]


def main(options: argparse.Namespace) -> None:
    solutions: dict[str, str] = {}
    for row in read(options.completions):
        if row["reward"] >= 1 and row["finished"] and row["text"].startswith(options.start):
            solutions.setdefault(row["id"], row["text"])
    problems = {
        name_of(row, index, options.problems.stem): row
        for index, row in enumerate(read(options.problems))
    }
    if not solutions.keys() & problems.keys():
        sys.exit(f"{options.completions}: no correct completion of a problem in {options.problems}")
    solved = [row | {"solution": solutions[n]} for n, row in problems.items() if n in solutions]
    with options.out.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in solved)
    print(f"{options.out}: {len(solved)} problems with a solution")


def name_of(row: dict[str, Any], index: int, stem: str) -> str:
    """Return the id that `eepo eval` gives to a row: a number gets the name of the file."""
    name = str(row.get("id", index))
    return f"{stem}/{name}" if name.isdigit() else name


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("completions", type=Path, help="written by `eepo eval`")
    result.add_argument("problems", type=Path, help="the problems that were evaluated")
    result.add_argument("out", type=Path)
    result.add_argument("--start", default="", help="text that a solution must begin with")
    return result


if __name__ == "__main__":
    main(parser().parse_args())
