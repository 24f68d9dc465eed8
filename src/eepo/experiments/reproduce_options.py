"""Defines the options of `eepo reproduce`. Imports no torch, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eepo.evaluation.options import option, split_names


@dataclass(frozen=True)
class ReproduceOptions:
    target: str = option(
        argument=True,
        metavar="TARGET",
        help="`paper/table1` to `paper/table4`, `paper/on_variants`, `paper/hyperparameters` or "
        "`paper/all`.",
    )
    recipe: str = option(
        "", help="Another recipe than the paper's, such as `countdown/grpo`; default: the paper's."
    )
    model: str = option("", help="Another model: a hub name or a folder.")
    methods: tuple[str, ...] = option(
        "",
        parse=split_names,
        help="Only these methods, separated by commas, and those that they need; default: all.",
    )
    seeds: int = option(1, min=1, max=100, help="Seeds of every reported method.")
    tune_seeds: int = option(
        1,
        min=0,
        max=1000,
        help="Other seeds, on which the values of baselines are chosen; 0: use the values of the "
        "recipes.",
    )
    samples: int = option(
        32, min=1, help="Samples per problem, for pass@k, besides the greedy completion."
    )
    data_dir: str = option("", help="Folder with training set and benchmarks; default: the hub.")
    keep_weights: Literal["none", "final"] = option(
        "final", help="Whether the final weights of finished runs stay on the disk."
    )
    overrides: list[str] | None = option(  # noqa: RUF009 (it returns a dataclass field)
        None, name="set", metavar="A.B=VALUE", help="Change one knob of all runs; repeatable."
    )
