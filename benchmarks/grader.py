r"""False accepts and false rejects of our grader against math-verify as it is, over the golds of data files.

    python benchmarks/grader.py DATA_DIR [--out docs/grader.md]

Each gold answer is graded against itself under four edits: unchanged and lightly reformatted (both must be
accepted), its last digit changed and another gold of the same file (both must be rejected). Both graders see the
same completion, `\boxed{edited}`; math-verify runs with its defaults (LaTeX and expressions, 5 s time-outs), one
process a core, as its users run it. Where an edit to be rejected leaves the same answer behind (another gold that
reads the same but for a unit or a name), the pair is left out.
"""

from __future__ import annotations

import argparse
import json
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
from eepo.runs.progress import Progress
from eepo.types import Prompt, Verdict

EDITS = {
    "unchanged": True,
    "reformatted": True,
    "last digit": False,
    "other gold": False,
}  # edit: must be accepted


@dataclass(frozen=True)
class Case:
    gold: str
    edited: str


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "data_dir", type=Path, help="folder of .jsonl files whose lines have an answer"
    )
    parser.add_argument(
        "--out", type=Path, help="write the table between its marks in this Markdown file"
    )
    parser.add_argument("--show", type=int, default=0, help="print this many mistakes of each kind")
    parser.add_argument("--limit", type=int, help="golds for each file")
    options = parser.parse_args()
    progress = Progress()
    rows, seconds = [], {"ours": 0.0, "math-verify": 0.0}
    for path in sorted(options.data_dir.glob("*.jsonl")):
        golds = read_golds(path)[: options.limit]
        if golds:
            rows.append(measure(path.stem, golds, progress, seconds, options.show))
    table = render(rows)
    print(table)
    for name, spent in seconds.items():
        print(f"{name}: {spent:.1f} s")
    if options.out:
        options.out.write_text(
            between_marks(options.out.read_text(encoding="utf-8"), table), encoding="utf-8"
        )


def read_golds(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as file:
        return [str(row["answer"]) for row in map(json.loads, file) if "answer" in row]


def measure(
    name: str, golds: list[str], progress: Progress, seconds: dict[str, float], show: int
) -> dict[str, tuple[int, int, int] | str]:
    """For each edit: mistakes of ours, of math-verify, and how many cases there are."""
    row: dict[str, tuple[int, int, int] | str] = {"file": name}
    for edit, accept in EDITS.items():
        cases = build(edit, golds)
        with progress.bar(f"{name}, {edit}", 2 * len(cases)) as bar:
            ours, spent = timed(lambda cases=cases, bar=bar: grade_ours(cases, bar.advance))
            seconds["ours"] += spent
            theirs, spent = timed(lambda cases=cases, bar=bar: grade_theirs(cases, bar.advance))
            seconds["math-verify"] += spent
        wrong = [
            case
            for case, verdict in zip(cases, ours, strict=True)
            if (verdict.reward > 0) != accept
        ]
        for case in wrong[:show]:
            print(f"  ours, {edit}: {case.gold!r} | {case.edited!r}")
        row[edit] = (len(wrong), sum(verdict != accept for verdict in theirs), len(cases))
    return row


def build(edit: str, golds: list[str]) -> list[Case]:
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
    return [case for case in cases if EDITS[edit] or letters(case.gold) != letters(case.edited)]


def letters(text: str) -> str:
    """What an answer says, spelling aside: other golds that only look different are not other answers."""
    text = re.sub(r"^\w+(?:\(\w\))?\s*=|(?<=\d)\s*\\(?:text|mbox)\s?\{[^{}]*\}$", "", text)
    return re.sub(
        r"\\(?:text|mbox|left|right|circ|[dt]?frac|!|,|\$|%)|[^0-9A-Za-z.\-]", "", text
    ).strip(".")


def reformatted(gold: str) -> str:
    r"""What another author would have typed: \dfrac, \left( \right), spaces, braces, \times 10^{n} for e-notation."""
    text = re.sub(r"\\[td]?frac(?![A-Za-z])", r"\\dfrac", gold)
    text = (
        re.sub(r"(?<![\\A-Za-z])\(", r"\\left( ", text)
        if text.count("(") == text.count(")")
        else text
    )
    text = (
        re.sub(r"\)", r" \\right)", text) if r"\left(" in text and r"\right)" not in text else text
    )
    text = text.replace(r"\left\left", r"\left").replace(r"\right\right", r"\right")
    text = re.sub(r"(?<=[\w)}])([+])(?=[\w(\\])", r" \1 ", text)
    text = re.sub(r",(?=[^\d\\!{}])", r",\\, ", text)
    text = re.sub(r"\^(\d)(?!\d)", r"^{\1}", text)
    text = re.sub(r"_(\d)(?![\d}])", r"_{\1}", text)
    text = re.sub(r"(?<=\d)[eE]([-+]?\d+)$", r" \\times 10^{\1}", text)
    return f" {text} "


def last_digit_changed(gold: str) -> str:
    place = max(match.start() for match in re.finditer(r"[0-9]", gold))
    return gold[:place] + str((int(gold[place]) + 1) % 10) + gold[place + 1 :]


def grade_ours(cases: list[Case], progress: Callable[[int], None]) -> list[Verdict]:
    reward = PooledReward("eepo.rewards.math:judge", RewardConfig())
    prompts = [Prompt("", "", (), case.gold) for case in cases]
    verdicts = reward.grade(prompts, [boxed(case.edited) for case in cases], progress)
    reward.close()
    return verdicts


def grade_theirs(cases: list[Case], progress: Callable[[int], None]) -> list[bool]:
    with multiprocessing.get_context("fork").Pool() as pool:
        verdicts = []
        for verdict in pool.imap(accepts, cases, chunksize=50):
            verdicts.append(verdict)
            progress(1)
    return verdicts


def accepts(case: Case) -> bool:
    """As its README shows: parse both, then verify. The gold is framed, or most would not be found at all."""
    return verify(parse(f"${case.gold}$"), parse(boxed(case.edited)))


def boxed(answer: str) -> str:
    return rf"The answer is \boxed{{{answer}}}."


def timed(work: Callable[[], list]) -> tuple[list, float]:
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


def render(rows: list[dict]) -> str:
    lines = [
        "| golds | "
        + " | ".join(
            f"{edit} ({'accept' if accept else 'reject'})" for edit, accept in EDITS.items()
        )
        + " |",
        "|---|" + "---|" * len(EDITS),
    ]
    total = {
        edit: tuple(sum(row[edit][place] for row in rows) for place in range(3)) for edit in EDITS
    }
    for row in [*rows, {"file": "**all**"} | total]:
        cells = [f"{row[edit][0]} : {row[edit][1]} of {row[edit][2]:,}" for edit in EDITS]
        lines.append(f"| {row['file']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def between_marks(text: str, table: str) -> str:
    start, end = "<!-- table -->", "<!-- end of table -->"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n{table}\n{end}{after}"


if __name__ == "__main__":
    main()
