"""Lists the settings that differ between runs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from eepo.reports.records import Run, by_method

# These differ in every comparison: a name and a seed for each run, and one run evaluates the
# starting policy for all.
EXPECTED = ("name", "training.seed", "evaluation.start")
UNSET = "–"


def differing_settings(runs: Sequence[Run]) -> dict[str, dict[str, list[str]]]:
    """Map setting → method → its values.

    If a method has more than one value, its runs do not share one recipe.
    """
    recipes = {id(run): flatten_recipe(run.recipe) for run in runs}
    keys = dict.fromkeys(key for flat in recipes.values() for key in flat if key not in EXPECTED)
    settings: dict[str, dict[str, list[str]]] = {}
    for key in keys:
        values = {
            method: list(dict.fromkeys(recipes[id(run)].get(key, UNSET) for run in seeds))
            for method, seeds in by_method(runs).items()
        }
        # The evaluation of a model without a run has no recipe.
        distinct = {recipes[id(run)].get(key, UNSET) for run in runs if run.recipe}
        if len(distinct) > 1:
            settings[key] = values
    return settings


def flatten_recipe(recipe: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Turn {"algorithm": {"gate": "token"}} into {"algorithm.gate": "token"}."""
    flat: dict[str, str] = {}
    for key, value in recipe.items():
        if isinstance(value, dict):
            flat |= flatten_recipe(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = str(value)
    return flat


def settings_table(runs: Sequence[Run]) -> str:
    """Return the differing settings as an HTML table."""
    settings = differing_settings(runs)
    if not settings:
        return "<p>None: the recipes differ only in the seed.</p>"
    methods = list(by_method(runs))
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ["setting", *methods])
    body = "\n".join(
        f"<tr><td><code>{escape(key)}</code></td>"
        + "".join(f"<td>{escape(' | '.join(values[method]))}</td>" for method in methods)
        + "</tr>"
        for key, values in settings.items()
    )
    return (
        f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )
