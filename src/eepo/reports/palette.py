"""Assigns one colour and one marker to each method, the same in every figure of every report.

The colours are from the sets of Okabe and Ito and of Tol, which colour-blind readers can
distinguish. Yellow is left out: it is hard to see on white.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

KNOWN_STYLES = {
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
KNOWN_LABELS = {  # the labels that shipped plans give to these methods
    "GRPO": "grpo",
    "EEPO as published": "eepo",
    "higher temperature": "higher_temperature",
    "entropy bonus": "more_entropy",
    "clip-higher": "clip_higher",
    "larger groups": "more_rollouts",
}
SPARE_STYLES = (
    ("#332288", "<"), ("#999933", ">"), ("#44AA99", "h"), ("#AA4499", "d"),
    ("#661100", "8"), ("#6699CC", "H"), ("#117733", "."), ("#BB5566", "o"),
)  # fmt: skip

# The phases of a step. Pale, so that no phase is mistaken for a method.
PHASE_COLOURS = {
    "sync": "#DDDDDD",
    "stage1": "#77AADD",
    "unlearn": "#EE8866",
    "stage2": "#99DDFF",
    "reward": "#EEDD88",
    "reference": "#BBCC33",
    "update": "#44BB99",
    "other": "#F4F4F4",
}

LINE_STYLES = ("solid", (0, (4, 1.6)), (0, (1, 1.2)), "dashdot")  # of stage 1, 2, ...


def method_styles(methods: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return (colour, marker) for each method.

    The style of an unknown method is chosen by a hash of its name, so that it is the same in every
    report. If two unknown methods collide, the alphabetically later one takes the next style.
    """
    styles: dict[str, tuple[str, str]] = {}
    taken: set[int] = set()
    for method in sorted(set(methods)):
        known = KNOWN_LABELS.get(method, method)
        if known in KNOWN_STYLES:
            styles[method] = KNOWN_STYLES[known]
            continue
        index = zlib.crc32(method.encode("utf-8", "replace")) % len(SPARE_STYLES)
        while index in taken and len(taken) < len(SPARE_STYLES):
            index = (index + 1) % len(SPARE_STYLES)
        taken.add(index)
        styles[method] = SPARE_STYLES[index]
    return styles
