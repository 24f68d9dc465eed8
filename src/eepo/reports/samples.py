"""Shows a few of the logged completions as HTML. Model output is untrusted until it is escaped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from eepo.reports.records import Row, Run, by_method

MAX_SHOWN, MAX_CHARACTERS = 8, 600  # completions of a group, characters of a text

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True)
class Group:
    """Holds the completions of one prompt in one step."""

    step: int
    prompt: str
    completions: list[Row]


def sampled_groups(run: Run) -> list[Group]:
    """Return one group from the first, one from a middle and one from the last logged step."""
    steps = sorted({row["step"] for row in run.completions})
    if not steps:
        return []
    chosen = dict.fromkeys(steps[index] for index in (0, len(steps) // 2, -1))
    return [_largest_group(run.completions, step) for step in chosen]


def samples_section(runs: Sequence[Run]) -> str:
    """Return HTML with the groups of each method's first seed, folded to keep the page short."""
    parts = [
        f"<details><summary>{escape(method)} (seed {seeds[0].seed}), step {group.step}</summary>\n"
        f"{_group_html(group)}\n</details>"
        for method, seeds in by_method(runs).items()
        for group in sampled_groups(seeds[0])
    ]
    return "\n".join(parts) or "<p>No completions were logged.</p>"


def replace_unprintable(text: str) -> str:
    """Replace control characters and characters that change the text direction by U+FFFD."""
    return _UNPRINTABLE.sub("\ufffd", text)


def escape_text(text: str) -> str:
    """Cut and escape a text from a model."""
    num_hidden = len(text) - MAX_CHARACTERS
    ending = f" … ({num_hidden} more characters)" if num_hidden > 0 else ""
    return escape(replace_unprintable(text[:MAX_CHARACTERS])) + ending


def _largest_group(rows: Sequence[Row], step: int) -> Group:
    """Return the largest group of a step.

    The logged rows may begin or end inside a group. The largest group is complete if any is.
    """
    step_rows = [row for row in rows if row["step"] == step]
    prompt_id = Counter(row["prompt_id"] for row in step_rows).most_common(1)[0][0]
    group = [row for row in step_rows if row["prompt_id"] == prompt_id]
    return Group(step, str(group[0]["prompt"]), group)


def _group_html(group: Group) -> str:
    rows = sorted(group.completions, key=lambda row: int(row["stage"]))
    shown = _some_of_each_stage(rows)
    num_hidden = len(rows) - len(shown)
    hidden = f'<p class="caption">{num_hidden} more not shown.</p>' if num_hidden else ""
    body = "\n".join(map(_row_html, shown))
    headings = ("stage", "reward", "finished", "completion")
    head = "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    return (
        f"<p>Prompt:</p><pre>{escape_text(group.prompt)}</pre>\n"
        f'<div class="wide"><table class="samples"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>{hidden}"
    )


def _row_html(row: Row) -> str:
    finished = "yes" if row["finished"] else "cut off"
    return (
        f"<tr><td>{row['stage']:d}</td><td>{row['reward']:g}</td><td>{finished}</td>"
        f"<td><pre>{escape_text(str(row['text']))}</pre></td></tr>"
    )


def _some_of_each_stage(rows: Sequence[Row]) -> list[Row]:
    """Keep about MAX_SHOWN rows, divided evenly, so that a large group shows its second stage."""
    stages = sorted({row["stage"] for row in rows})
    num_each = max(1, MAX_SHOWN // len(stages))
    return [
        row for stage in stages for row in [row for row in rows if row["stage"] == stage][:num_each]
    ]
