"""Gives the metrics of other trainers our names, and derives those that they do not log."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]

STAGED = ("reward", "entropy", "length", "truncated_share")  # also logged for each stage


def only_numbers(values: Mapping[str, Any]) -> Row:
    """Drop texts and missing values: loggers write null for NaN."""
    return {key: value for key, value in values.items() if isinstance(value, int | float)}


def rename(values: Mapping[str, Any], names: Mapping[str, str], prefix: str) -> Row:
    """Return the metrics in `names` under our names, and those with `prefix` without it."""
    row = {}
    for key, value in values.items():
        if key in names:
            row[names[key]] = value
        elif key.startswith(prefix):
            row[key.removeprefix(prefix)] = value
    return row


def complete_stages(row: Row) -> Row:
    """Add the metrics that follow from others.

    With stages, the entropy of a step is the mean over the tokens of all stages. Without stages,
    all completions are stage 1, and the entropy is that of the policy.
    """
    stages = sorted(key.split("/")[0] for key in row if re.fullmatch(r"stage\d+/entropy", key))
    if stages:
        row = row | _mean_entropy(row, stages)
    else:
        row = row | ({"entropy": row["policy_entropy"]} if "policy_entropy" in row else {})
        row |= {f"stage1/{name}": row[name] for name in STAGED if name in row}
    if len(stages) < 2 and "clip_share" in row:
        row["stage1/clip_share"] = row.pop("clip_share")
    return row


def _mean_entropy(row: Row, stages: Sequence[str]) -> Row:
    """Weight each stage by its tokens. Trainers that log no counts have stages of equal size."""
    tokens = [row.get(f"{s}/completions", 1) * row.get(f"{s}/length", 1) for s in stages]
    products = [number * row[f"{s}/entropy"] for number, s in zip(tokens, stages, strict=True)]
    return {"entropy": sum(products) / sum(tokens)} if sum(tokens) else {}
