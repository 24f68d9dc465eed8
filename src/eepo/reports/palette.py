"""One colour and one marker for each method, the same in every figure of every report.

From Okabe and Ito's and Tol's sets, which stay apart for colour-blind readers; yellow is left out, it is lost on white.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

KNOWN = {
    "grpo": ("#0072B2", "o"),
    "eepo": ("#D55E00", "s"),
    "higher_temperature": ("#56B4E9", "^"),
    "more_entropy": ("#009E73", "D"),
    "clip_higher": ("#CC79A7", "v"),
    "more_rollouts": ("#222222", "P"),
    "eepo_more_entropy": ("#E69F00", "X"),
    "eepo_clip_higher": ("#882255", "p"),
    "start": ("#808080", "*"),
}
SPARE = (
    ("#332288", "<"), ("#999933", ">"), ("#44AA99", "h"), ("#AA4499", "d"),
    ("#661100", "8"), ("#6699CC", "H"), ("#117733", "."), ("#BB5566", "o"),
)  # fmt: skip

# What a step's time goes to. Pale, so that no phase is taken for a method.
PHASES = {
    "sync": "#DDDDDD",
    "stage1": "#77AADD",
    "unlearn": "#EE8866",
    "stage2": "#99DDFF",
    "reward": "#EEDD88",
    "reference": "#BBCC33",
    "update": "#44BB99",
    "other": "#F4F4F4",
}

STAGE_STYLES = ("solid", (0, (4, 1.6)), (0, (1, 1.2)), "dashdot")


def looks(methods: Iterable[str]) -> dict[str, tuple[str, str]]:
    """(colour, marker) of each method. An unknown name's place follows from the name, so it keeps it between reports;
    only when two unknown names meet on one place does the later one, by alphabet, move on."""
    found: dict[str, tuple[str, str]] = {}
    taken: set[int] = set()
    for method in sorted(set(methods)):
        if method in KNOWN:
            found[method] = KNOWN[method]
            continue
        place = zlib.crc32(method.encode("utf-8", "replace")) % len(SPARE)
        while place in taken and len(taken) < len(SPARE):
            place = (place + 1) % len(SPARE)
        taken.add(place)
        found[method] = SPARE[place]
    return found
