"""Grades completions: rows with "gold" and "completion", from a file or from Python."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from eepo.protocols import Reward
from eepo.runs.jsonl import read_rows
from eepo.types import Prompt, UserError, Verdict

LINES_PER_CHUNK = 500  # kept in memory at one time; progress is reported after each chunk


def count_lines(path: Path) -> int:
    """Count the lines that are not blank. Fail early if the file cannot be read."""
    try:
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    except OSError as error:
        raise UserError(
            f'{path}: cannot be read ({error.strerror}); give a .jsonl file with "gold" and '
            '"completion" in each line'
        ) from error


@contextlib.contextmanager
def open_output(path: Path | None) -> Iterator[Callable[[str], None]]:
    """Return a function that writes text to a file, or to the standard output if `path` is None.

    The file appears under its name only when it is complete, because it may also be the input.
    """
    if path is None:
        yield lambda text: print(text, end="", flush=True)
        return
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with _errors_of(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = unfinished.open("w", encoding="utf-8")

    def write(text: str) -> None:
        with _errors_of(path):
            file.write(text)
            file.flush()

    try:
        yield write
        with _errors_of(path):
            file.close()
            os.replace(unfinished, path)
    finally:
        with contextlib.suppress(OSError):
            file.close()
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Name the output in errors. Errors of the grader happen elsewhere and keep their text."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written ({error.strerror})") from error


def grade_file(
    path: Path,
    write: Callable[[str], None],
    reward: Reward,
    advance: Callable[[int], None],
    needs_gold: bool = True,
) -> tuple[int, int]:
    """Write each line with "correct" and "reason" added.

    Return the number of correct lines and of all lines. `advance` is called with the number of
    lines that were graded since its last call.
    """
    num_correct = num_lines = 0
    rows = _read(path, needs_gold)
    while chunk := list(islice(rows, LINES_PER_CHUNK)):
        verdicts = grade_rows(chunk, reward)
        for row, verdict in zip(chunk, verdicts, strict=True):
            row |= {"correct": verdict.correct, "reason": verdict.reason}
        # ASCII, because a lone surrogate in a completion cannot be written as UTF-8.
        write("".join(json.dumps(row) + "\n" for row in chunk))
        num_correct += sum(verdict.correct for verdict in verdicts)
        num_lines += len(chunk)
        advance(len(chunk))
    return num_correct, num_lines


def grade_rows(rows: Sequence[Mapping[str, Any]], reward: Reward) -> list[Verdict]:
    """Grade the "completion" of each row against its "gold".

    A user's function may also receive its "prompt" and its other columns.
    """
    prompts = [_prompt(row) for row in rows]
    return reward.grade(prompts, [row["completion"] for row in rows])


def _prompt(row: Mapping[str, Any]) -> Prompt:
    text = row.get("prompt", "")
    if not isinstance(text, str):  # such as a list of chat messages
        text = json.dumps(text)
    columns = {name: value for name, value in row.items() if name not in ("gold", "completion")}
    return Prompt(id="", text=text, token_ids=(), answer=row.get("gold"), columns=columns)


def _read(path: Path, needs_gold: bool) -> Iterator[dict[str, Any]]:
    for where, row in read_rows(path):
        check_row(row, where, needs_gold)
        yield row


def check_row(row: Any, where: str, needs_gold: bool = True) -> None:
    """Raise a UserError if a row has no completion, or no gold answer although it needs one."""
    if not isinstance(row, dict):
        raise UserError(
            f'{where}: must be an object {{"gold": ..., "completion": ...}}, '
            f"got {type(row).__name__}"
        )
    for key in ("gold", "completion") if needs_gold else ("completion",):
        if key not in row:
            raise UserError(f'{where}: has no "{key}"; its keys are {", ".join(row) or "none"}')
    completion, gold = row["completion"], row.get("gold")
    if not isinstance(completion, str):
        raise UserError(
            f'{where}: "completion" must be a string, got {json.dumps(completion)[:60]}'
        )
    is_text = isinstance(gold, str) and gold.strip()
    if needs_gold and not is_text and not _is_number(gold):
        raise UserError(
            f'{where}: "gold" must be a non-empty string or a number, got {json.dumps(gold)[:60]}'
        )


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)
