"""A few of the completions that a run wrote down. What a model wrote is hostile until it is escaped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from eepo.reports.records import Row, Run, by_method

MOST_SHOWN, MOST_CHARACTERS = 8, 600

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True)
class Group:
    """Completions of one prompt in one step."""

    step: int
    prompt: str
    completions: list[Row]


def sampled_groups(run: Run) -> list[Group]:
    """One group from the first, a middle and the last step there is."""
    steps = sorted({row["step"] for row in run.completions})
    chosen = dict.fromkeys(steps[place] for place in (0, len(steps) // 2, -1)) if steps else {}
    return [_fullest_group(run.completions, step) for step in chosen]


def samples_section(runs: Sequence[Run]) -> str:
    """As HTML: for each method the groups of its first seed, folded so that the page stays short."""
    parts = [
        f"<details><summary>{escape(method)} (seed {seeds[0].seed}), step {group.step}</summary>\n"
        f"{_group(group)}\n</details>"
        for method, seeds in by_method(runs).items()
        for group in sampled_groups(seeds[0])
    ]
    return "\n".join(parts) or "<p>The runs kept no completions.</p>"


def printable(text: str) -> str:
    """Control and direction-changing characters become a visible mark: a terminal or a reader would be misled."""
    return _UNPRINTABLE.sub("\ufffd", text)


def written(text: str) -> str:
    """Text from a model, cut and escaped."""
    cut = text[:MOST_CHARACTERS]
    rest = (
        f" … ({len(text) - MOST_CHARACTERS} more characters)" if len(text) > MOST_CHARACTERS else ""
    )
    return escape(printable(cut)) + rest


def _fullest_group(rows: Sequence[Row], step: int) -> Group:
    """The kept rows may begin or end inside a group; the fullest one is whole, if any is."""
    own = [row for row in rows if row["step"] == step]
    prompt_id = Counter(row["prompt_id"] for row in own).most_common(1)[0][0]
    group = [row for row in own if row["prompt_id"] == prompt_id]
    return Group(step, str(group[0]["prompt"]), group)


def _group(group: Group) -> str:
    rows = sorted(group.completions, key=lambda row: int(row["stage"]))
    shown = _some_of_each_stage(rows)
    left_out = (
        f'<p class="caption">{len(rows) - len(shown)} more not shown.</p>'
        if len(rows) > len(shown)
        else ""
    )
    body = "\n".join(
        f"<tr><td>{row['stage']:d}</td><td>{row['reward']:g}</td><td>{'yes' if row['finished'] else 'cut off'}</td>"
        f"<td><pre>{written(str(row['text']))}</pre></td></tr>"
        for row in shown
    )
    return (
        f"<p>Prompt:</p><pre>{written(group.prompt)}</pre>\n"
        '<div class="wide"><table class="samples"><thead><tr><th scope="col">stage</th><th scope="col">reward</th>'
        '<th scope="col">finished</th><th scope="col">completion</th></tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>{left_out}"
    )


def _some_of_each_stage(rows: Sequence[Row]) -> list[Row]:
    """At most MOST_SHOWN, shared out evenly, so that a large group does not hide its second stage."""
    stages = sorted({row["stage"] for row in rows})
    share = max(1, MOST_SHOWN // len(stages))
    return [
        row for stage in stages for row in [row for row in rows if row["stage"] == stage][:share]
    ]
