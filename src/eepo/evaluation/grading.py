"""`eepo grade`: a file of (gold, completion) lines, graded in order."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from eepo.protocols import Reward
from eepo.types import Prompt, UserError

CHUNK = 500  # lines in memory at one time, and between two steps of the bar


def count_lines(path: Path) -> int:
    """Also the first look at the file: one that cannot be read is refused before anything is started."""
    try:
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); give a .jsonl file of gold and completion"
        ) from error


@contextlib.contextmanager
def writing(path: Path | None) -> Iterator[TextIO]:
    """The standard output, or a file that is there only when it is whole: the input may be the same file."""
    if path is None:
        yield sys.stdout
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written ({error.strerror})") from error
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            yield file
        os.replace(aside, path)
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written ({error.strerror})") from error
    finally:
        aside.unlink(missing_ok=True)


def grade_file(
    path: Path, out: TextIO, reward: Reward, progress: Callable[[int], None]
) -> tuple[int, int]:
    """Write each line with "correct" and "reason"; returns how many were correct, and how many there are."""
    num_correct = num_lines = 0
    rows = _rows(path)
    while chunk := list(islice(rows, CHUNK)):
        prompts = [Prompt(id="", text="", token_ids=(), answer=row["gold"]) for row in chunk]
        verdicts = reward.grade(prompts, [row["completion"] for row in chunk])
        for row, verdict in zip(chunk, verdicts, strict=True):
            row |= {"correct": verdict.correct, "reason": verdict.reason}
            out.write(
                json.dumps(row) + "\n"
            )  # ASCII: a lone surrogate in a completion must not stop the file
        out.flush()
        num_correct += sum(verdict.correct for verdict in verdicts)
        num_lines += len(chunk)
        progress(len(chunk))
    return num_correct, num_lines


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _row(line, f"{path}:{number}")


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also a number of too many digits
        raise UserError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise UserError(
            f'{where}: must be an object {{"gold": ..., "completion": ...}}, got {type(row).__name__}'
        )
    for key in ("gold", "completion"):
        if key not in row:
            raise UserError(f'{where}: has no "{key}"; its keys are {", ".join(row) or "none"}')
    if not isinstance(row["completion"], str):
        raise UserError(
            f'{where}: "completion" must be a string, got {json.dumps(row["completion"])[:60]}'
        )
    gold = row["gold"]
    number = isinstance(gold, int | float) and not isinstance(gold, bool) and math.isfinite(gold)
    if not number and not (isinstance(gold, str) and gold.strip()):
        raise UserError(
            f'{where}: "gold" must be a string that is not empty, or a number, got {json.dumps(gold)[:60]}'
        )
    return row
