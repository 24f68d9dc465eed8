r"""Compares this project's math grader with math-verify, on the gold answers of data files.

    python benchmarks/grader.py DATA_DIR [--out docs/grader.md]

Each gold answer is edited in four ways. Two edits must be accepted: unchanged, and lightly
reformatted. Two must be rejected: the last digit changed, and another gold answer of the same
file. Both graders see the same completion, `\boxed{edited}`. math-verify runs with its defaults
(LaTeX and expressions, time-outs of 5 s), with one process per core. Pairs that must be rejected
are skipped if the edited answer means the same, such as two gold answers that differ in a unit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from math_verify import parse, verify

from eepo.config import RewardConfig
from eepo.rewards.isolation import PooledReward
from eepo.runs.jsonl import read_rows
from eepo.runs.progress import Progress
from eepo.types import Prompt

# edit → whether a grader must accept it
EDITS = {"unchanged": True, "reformatted": True, "last digit": False, "other gold": False}


@dataclass(frozen=True)
class Case:
    """A gold answer and the edited answer that is graded against it."""

    gold: str
    edited: str


@dataclass(frozen=True)
class Count:
    """Mistakes of both graders on a number of cases."""

    ours: int
    math_verify: int
    cases: int

    def __add__(self, other: Count) -> Count:
        return Count(
            self.ours + other.ours,
            self.math_verify + other.math_verify,
            self.cases + other.cases,
        )

    def __str__(self) -> str:
        return f"{self.ours} : {self.math_verify} of {self.cases:,}"


def main() -> None:
    """Measure all files, print the table and write it to the Markdown file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data_dir", type=Path, help="folder of .jsonl files with an answer column")
    parser.add_argument("--out", type=Path, help="Markdown file whose table is replaced")
    parser.add_argument("--show", type=int, default=0, help="mistakes of each kind to print")
    parser.add_argument("--limit", type=int, help="gold answers per file")
    options = parser.parse_args()
    progress = Progress()
    counts: dict[str, dict[str, Count]] = {}
    seconds = {"ours": 0.0, "math-verify": 0.0}
    for path in sorted(options.data_dir.glob("*.jsonl")):
        golds = read_golds(path)[: options.limit]
        if golds:
            counts[path.stem] = measure(path.stem, golds, progress, seconds, options.show)
    table = render(counts)
    print(table)
    for name, spent in seconds.items():
        print(f"{name}: {spent:.1f} s")
    if options.out:
        text = options.out.read_text(encoding="utf-8")
        options.out.write_text(replace_table(text, table), encoding="utf-8")


def read_golds(path: Path) -> list[str]:
    return [str(row["answer"]) for _, row in read_rows(path) if "answer" in row]


def measure(
    name: str, golds: list[str], progress: Progress, seconds: dict[str, float], show: int
) -> dict[str, Count]:
    """Return the mistakes for each edit, and add the time of both graders to `seconds`."""
    counts: dict[str, Count] = {}
    for edit, must_accept in EDITS.items():
        cases = build_cases(edit, golds)
        with progress.bar(f"{name}, {edit}", 2 * len(cases)) as bar:
            started = time.perf_counter()
            ours = grade_ours(cases, bar.advance)
            between = time.perf_counter()
            theirs = grade_math_verify(cases, bar.advance)
            seconds["ours"] += between - started
            seconds["math-verify"] += time.perf_counter() - between
        wrong = [case for case, ok in zip(cases, ours, strict=True) if ok != must_accept]
        for case in wrong[:show]:
            print(f"  ours, {edit}: {case.gold!r} | {case.edited!r}")
        their_mistakes = sum(accepted != must_accept for accepted in theirs)
        counts[edit] = Count(len(wrong), their_mistakes, len(cases))
    return counts


def build_cases(edit: str, golds: list[str]) -> list[Case]:
    rng = random.Random(0)
    cases = []
    for gold in golds:
        if edit == "unchanged":
            cases.append(Case(gold, gold))
        elif edit == "reformatted":
            cases.append(Case(gold, reformatted(gold)))
        elif edit == "last digit" and re.search(r"\d", gold):
            cases.append(Case(gold, last_digit_changed(gold)))
        elif edit == "other gold":
            cases.append(Case(gold, rng.choice(golds)))
    if EDITS[edit]:
        return cases
    return [case for case in cases if letters(case.gold) != letters(case.edited)]


def letters(text: str) -> str:
    """Return the letters and digits of an answer, without its unit and the name in front of `=`."""
    text = re.sub(r"^\w+(?:\(\w\))?\s*=|(?<=\d)\s*\\(?:text|mbox)\s?\{[^{}]*\}$", "", text)
    layout = r"\\(?:text|mbox|left|right|circ|[dt]?frac|!|,|\$|%)|[^0-9A-Za-z.\-]"
    return re.sub(layout, "", text).strip(".")


def reformatted(gold: str) -> str:
    r"""Rewrite an answer as another author would have typed it.

    Uses \dfrac, \left( \right), spaces, braces, and \times 10^{n} for e-notation.
    """
    text = re.sub(r"\\[td]?frac(?![A-Za-z])", r"\\dfrac", gold)
    if text.count("(") == text.count(")"):
        text = re.sub(r"(?<![\\A-Za-z])\(", r"\\left( ", text)
    if r"\left(" in text and r"\right)" not in text:
        text = re.sub(r"\)", r" \\right)", text)
    text = text.replace(r"\left\left", r"\left").replace(r"\right\right", r"\right")
    text = re.sub(r"(?<=[\w)}])([+])(?=[\w(\\])", r" \1 ", text)
    text = re.sub(r",(?=[^\d\\!{}])", r",\\, ", text)
    text = re.sub(r"\^(\d)(?!\d)", r"^{\1}", text)
    text = re.sub(r"_(\d)(?![\d}])", r"_{\1}", text)
    text = re.sub(r"(?<=\d)[eE]([-+]?\d+)$", r" \\times 10^{\1}", text)
    return f" {text} "


def last_digit_changed(gold: str) -> str:
    index = max(match.start() for match in re.finditer(r"[0-9]", gold))
    return gold[:index] + str((int(gold[index]) + 1) % 10) + gold[index + 1 :]


def grade_ours(cases: list[Case], progress: Callable[[int], None]) -> list[bool]:
    reward = PooledReward("eepo.rewards.math:grade", RewardConfig())
    prompts = [Prompt("", "", (), case.gold) for case in cases]
    verdicts = reward.grade(prompts, [boxed(case.edited) for case in cases], progress)
    reward.close()
    return [verdict.reward > 0 for verdict in verdicts]


def grade_math_verify(cases: list[Case], progress: Callable[[int], None]) -> list[bool]:
    results = []
    with multiprocessing.get_context("fork").Pool() as pool:
        for accepted in pool.imap(math_verify_accepts, cases, chunksize=50):
            results.append(accepted)
            progress(1)
    return results


def math_verify_accepts(case: Case) -> bool:
    """Parse and verify, as math-verify's README shows.

    The gold answer is put in dollars: math-verify would not find most gold answers without them.
    """
    return verify(parse(f"${case.gold}$"), parse(boxed(case.edited)))


def boxed(answer: str) -> str:
    return rf"The answer is \boxed{{{answer}}}."


def render(counts: dict[str, dict[str, Count]]) -> str:
    """Return the Markdown table, one row per file and a row of sums."""
    headers = [f"{edit} ({'accept' if must else 'reject'})" for edit, must in EDITS.items()]
    lines = ["| golds | " + " | ".join(headers) + " |", "|---|" + "---|" * len(EDITS)]
    files = list(counts.values())
    total = {edit: sum((row[edit] for row in files), Count(0, 0, 0)) for edit in EDITS}
    for name, row in (counts | {"**all**": total}).items():
        lines.append(f"| {name} | " + " | ".join(str(row[edit]) for edit in EDITS) + " |")
    return "\n".join(lines)


def replace_table(text: str, table: str) -> str:
    start, end = "<!-- table -->", "<!-- end of table -->"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n{table}\n{end}{after}"


if __name__ == "__main__":
    main()
