"""Holds the numbers that the paper reports: greedy pass@1 in percent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BASE, GRPO, EEPO = "base", "grpo", "eepo"
FOUR = ("minerva_math", "olympiadbench", "amc23", "aime24")
FIVE = (*FOUR, "aime25")

# How the paper names methods in its tables.
LABELS = {
    BASE: "Base model",
    GRPO: "GRPO",
    "higher_temperature": "- Higher Temp.",
    "more_entropy": "- Increased Ent.",
    "clip_higher": "- DAPO Clip High.",
    "more_rollouts": "- More rollouts.",
    EEPO: "EEPO",
}
VARIANT_LABELS = {
    GRPO: "GRPO",
    EEPO: "EEPO",
    "more_entropy": "GRPO + Increased Entropy",
    "eepo_more_entropy": "EEPO + Increased Entropy",
    "clip_higher": "GRPO + Clip High",
    "eepo_clip_higher": "EEPO + Clip High",
}


@dataclass(frozen=True)
class PaperTable:
    """Holds one table of the paper."""

    name: str  # of the file
    title: str
    model: str  # as the paper writes it
    sets: tuple[str, ...]  # columns; empty: the table has only averages
    labels: Mapping[str, str]  # method -> name of the row, in the order of the rows
    numbers: Mapping[str, tuple[float, ...]]  # method -> one per set, then the average
    # method -> the method that its relative gain is to
    gains: Mapping[str, str]

    def average(self, method: str) -> float | None:
        numbers = self.numbers.get(method)
        return numbers[-1] if numbers else None

    def number(self, method: str, eval_set: str) -> float | None:
        numbers = self.numbers.get(method)
        return numbers[self.sets.index(eval_set)] if numbers and eval_set in self.sets else None

    def gain(self, method: str) -> float | None:
        """Return the relative gain of the average in percent."""
        return relative_gain(self.average(method), self.average(self.gains.get(method, "")))


def relative_gain(value: float | None, reference: float | None) -> float | None:
    """Return how much `value` is above `reference`, in percent of `reference`."""
    if value is None or not reference:
        return None
    return 100 * (value - reference) / reference


_TO_GRPO = {name: GRPO for name in LABELS if name not in (BASE, GRPO)}

TABLES: dict[str, PaperTable] = {
    table.name: table
    for table in (
        PaperTable(
            name="table1",
            title="Table 1",
            model="Qwen2.5-3B",
            sets=FOUR,
            labels=LABELS,
            gains=_TO_GRPO,
            numbers={
                BASE: (11.8, 7.9, 20.0, 0.0, 9.9),
                GRPO: (22.4, 27.9, 30.3, 3.3, 21.0),
                "higher_temperature": (25.0, 25.2, 32.5, 3.3, 21.5),
                "more_entropy": (25.0, 29.6, 37.5, 3.3, 23.9),
                "clip_higher": (22.1, 26.1, 40.0, 3.3, 22.9),
                "more_rollouts": (21.7, 26.8, 37.5, 6.7, 23.2),
                EEPO: (23.5, 29.3, 45.0, 6.7, 26.1),
            },
        ),
        PaperTable(
            name="table2",
            title="Table 2",
            model="Llama-3.2-3B-Instruct",
            sets=FOUR,
            labels=LABELS,
            gains=_TO_GRPO,
            numbers={
                BASE: (14.3, 12.1, 20.0, 10.0, 14.1),
                GRPO: (19.5, 17.5, 20.0, 13.3, 17.6),
                "higher_temperature": (20.6, 19.1, 22.5, 10.0, 18.1),
                "more_entropy": (20.2, 18.1, 30.0, 10.0, 19.6),
                "clip_higher": (19.1, 17.3, 25.0, 16.7, 19.5),
                "more_rollouts": (19.1, 17.2, 22.5, 16.7, 18.9),
                EEPO: (20.6, 18.1, 35.0, 20.0, 23.4),
            },
        ),
        PaperTable(
            name="table3",
            title="Table 3",
            model="Qwen3-8B-Base",
            sets=FIVE,
            labels=LABELS,
            gains=_TO_GRPO,
            numbers={
                BASE: (33.1, 36.0, 52.5, 10.0, 13.3, 29.0),
                GRPO: (41.2, 45.5, 50.0, 20.0, 16.6, 34.7),
                "higher_temperature": (40.1, 44.3, 55.0, 16.7, 20.0, 35.2),
                "more_entropy": (40.4, 42.8, 60.0, 16.7, 20.0, 35.9),
                "clip_higher": (40.1, 41.6, 55.0, 16.7, 10.0, 32.7),
                "more_rollouts": (40.8, 44.0, 57.5, 16.7, 16.7, 35.1),
                EEPO: (41.5, 44.3, 62.5, 20.0, 23.3, 38.3),
            },
        ),
        PaperTable(
            name="table4",
            title="Table 4",
            model="Qwen3-14B-Base",
            sets=FIVE,
            labels={name: LABELS[name] for name in (BASE, GRPO, EEPO)},
            gains=_TO_GRPO,
            numbers={
                GRPO: (36.8, 48.6, 67.5, 23.3, 26.7, 40.6),
                EEPO: (39.3, 50.1, 67.5, 36.7, 30.0, 44.7),
            },
        ),
        PaperTable(
            name="on_variants",
            title="Table 5",
            model="Qwen2.5-3B",
            sets=(),
            labels=VARIANT_LABELS,
            gains={
                EEPO: GRPO,
                "eepo_more_entropy": "more_entropy",
                "eepo_clip_higher": "clip_higher",
            },
            numbers={
                GRPO: (21.0,),
                EEPO: (26.1,),
                "more_entropy": (23.9,),
                "eepo_more_entropy": (27.9,),
                "clip_higher": (22.9,),
                "eepo_clip_higher": (26.6,),
            },
        ),
    )
}
