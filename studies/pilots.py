"""What was tried as a patch is in no plan: its lines, compared with any other lines, seed by seed.

    python studies/pilots.py docs/results/countdown/pilots.jsonl --against grpo
    python studies/pilots.py docs/results/smollm2/pilots.jsonl \
        --beside docs/results/smollm2/sampled.jsonl \
        --against "grpo_mild_160_sampled 1.0"
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plan import as_run
from tables import MEASURES, row_of, table_of, title_of

from eepo.reports import records
from eepo.runs.jsonl import read_records
from eepo.types import UserError


def pilots(lines: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], against: str) -> str:
    """Return Markdown: the difference of each method to `against`, on the seeds of both."""
    parts = []
    for regime in dict.fromkeys(line["regime"] for line in lines):
        base = [
            one for one in [*lines, *others] if one["regime"] == regime and title_of(one) == against
        ]
        seeds = {one["seed"] for one in base}
        own: dict[str, list[dict[str, Any]]] = {}
        for one in lines:
            if one["regime"] == regime and one["seed"] in seeds and title_of(one) != against:
                own.setdefault(title_of(one), []).append(one)
        for where in records.evaluation_sets([as_run(one) for one in base]):
            rows = [row_of(base, some, where, "") for some in own.values()]
            parts.append(table_of(f"{regime}, {where.replace('_', ' ')}", ["", *MEASURES], rows))
    if not parts:
        known = ", ".join(sorted({title_of(one) for one in [*lines, *others]}))
        raise UserError(f"--against {against!r} is in no line; allowed: {known}")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lines", type=Path)
    parser.add_argument(
        "--beside", type=Path, action="append", default=[], help="lines to compare with; repeatable"
    )
    parser.add_argument(
        "--against", required=True, help="what differences are to, METHOD or 'METHOD VALUE'"
    )
    args = parser.parse_args()
    try:
        for path in (args.lines, *args.beside):
            if not path.is_file():
                raise UserError(f"{path}: no such file of lines")
        others = [line for path in args.beside for line in read_records(path)]
        print(pilots(list(read_records(args.lines)), others, args.against))
    except UserError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
