"""Trains several recipes over several seeds with the same prompts: a plan with a method per recipe.

At equal rollouts, every recipe trains its number of steps. At equal time, the first recipe does.
The other recipes then train, seed by seed, for the seconds that its steps took. Runs are trained
one after another: parallel runs would slow each other down and distort the times.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eepo import recipe
from eepo.config import RunConfig
from eepo.experiments.draft import Draft
from eepo.experiments.experiment import Run
from eepo.experiments.plan import REPORT, Selection
from eepo.experiments.plan_check import NAME
from eepo.experiments.runner import run_here
from eepo.runs.progress import Progress
from eepo.types import UserError


def compare(
    configs: Sequence[RunConfig],
    num_seeds: int,
    out: Path,
    progress: Progress,
    equal_time: bool = False,
) -> list[Path]:
    """Train every recipe with every seed in `out/name/seed-N`; return the folders by recipe.

    Finished runs are not trained again, and stopped runs continue.
    """
    names = [config.name for config in configs]
    _check_names(names)
    if equal_time and len(configs) < 2:
        raise UserError("--equal-time needs a baseline and at least one more recipe, got 1 recipe")
    seeds = _seeds(configs, num_seeds)
    draft = Draft(
        tables={
            "seeds": seeds,
            "equal": "time" if equal_time else "rollouts",
            "keep_weights": "all",
            # The starting policy is the same in all runs, so only one run evaluates it.
            "start_evaluation": "first",
            "methods": {name: {"recipe": _recipe_file(name)} for name in names},
        },
        recipes={_recipe_file(config.name): recipe.dump(config) for config in configs},
        out=out,
        advice="give the same recipes and --set again, or another --out",
    )
    experiment, _ = draft.check()
    draft.write()
    run_here(experiment, Selection(), progress)
    return [experiment.folder(Run(REPORT, "", name, "", seed)) for name in names for seed in seeds]


def _recipe_file(name: str) -> str:
    return f"recipes/{name}.toml"


def _seeds(configs: Sequence[RunConfig], num_seeds: int) -> list[int]:
    first = {config.training.seed: config.name for config in configs}
    if len(first) > 1:
        seeds = ", ".join(f"{name} {seed}" for seed, name in first.items())
        raise UserError(
            f"the recipes have different seeds, so no runs could be paired: {seeds}; "
            "give --set training.seed=N"
        )
    (seed,) = first
    return list(range(seed, seed + num_seeds))


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if not NAME.fullmatch(name):
            raise UserError(
                f"name = {name!r} is used as a folder name: "
                "only letters, digits, '.', '_', '+' and '-' are allowed"
            )
    if duplicates := {name for name in names if list(names).count(name) > 1}:
        raise UserError(
            f"two recipes have the name {min(duplicates)!r}; give each recipe a different name"
        )
