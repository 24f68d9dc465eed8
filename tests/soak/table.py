"""Counts the tries and the failures of a soak, and prints them as one table."""

from __future__ import annotations

from dataclasses import dataclass, field

COLUMNS = ("differences", "tracebacks", "hangs", "wrong accepts")
MAX_EXAMPLES = 20  # failures of one kind that are printed in full


class Failure(Exception):
    """A check failed: the column of the table, and what happened."""

    def __init__(self, column: str, description: str) -> None:
        super().__init__(description)
        self.column = column


@dataclass
class Findings:
    """The result of one try: how many cases it covered, and (column, description) of failures."""

    tried: int = 1
    failures: list[tuple[str, str]] = field(default_factory=list)
    slowest: float = 0.0  # seconds of the slowest case, where the kind has a limit

    def add(self, column: str, description: str) -> None:
        if column not in COLUMNS:
            raise ValueError(f"{column} is not a column of the table")
        self.failures.append((column, description))


@dataclass
class Row:
    """Sums the findings of one kind of try."""

    kind: str
    tried: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    note: str = ""  # why nothing was tried
    failures: list[tuple[str, str]] = field(default_factory=list)

    def add(self, findings: Findings) -> None:
        self.tried += findings.tried
        self.slowest = max(self.slowest, findings.slowest)
        self.failures += findings.failures

    def count(self, column: str) -> int:
        return sum(name == column for name, _ in self.failures)


@dataclass
class Table:
    seed: int
    rows: list[Row] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return any(row.failures for row in self.rows)

    def markdown(self) -> str:
        """Return the table, in the form that docs/reliability.md has."""
        lines = [f"| kind | tried | {' | '.join(COLUMNS)} | slowest | minutes |"]
        lines.append("|---|" + "---:|" * (len(COLUMNS) + 3))
        for row in self.rows:
            counts = " | ".join(f"{row.count(column):,}" for column in COLUMNS)
            slowest = f"{row.slowest:.2f} s" if row.slowest else ""
            tried = f"{row.tried:,}" if not row.note else row.note
            lines.append(
                f"| {row.kind} | {tried} | {counts} | {slowest} | {row.seconds / 60:.1f} |"
            )
        return "\n".join(lines)

    def examples(self) -> str:
        lines = []
        for row in self.rows:
            for column, description in row.failures[:MAX_EXAMPLES]:
                lines.append(f"{row.kind}: {column}: {description}")
            if len(row.failures) > MAX_EXAMPLES:
                lines.append(f"{row.kind}: {len(row.failures) - MAX_EXAMPLES} more")
        return "\n".join(lines)
