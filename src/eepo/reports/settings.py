"""Settings that differ between runs: what the comparison is a comparison of."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from eepo.reports.records import Run, by_method

# What makes runs different runs, and who of them judged the starting policy for all; everything else is a setting.
EXPECTED = ("name", "training.seed", "evaluation.start")
UNSET = "–"


def differing_settings(runs: Sequence[Run]) -> dict[str, dict[str, list[str]]]:
    """Setting → method → its values. More than one value: the runs of that method are not seeds of one recipe."""
    flat = {id(run): flat_recipe(run.recipe) for run in runs}
    keys = dict.fromkeys(key for recipe in flat.values() for key in recipe if key not in EXPECTED)
    settings: dict[str, dict[str, list[str]]] = {}
    for key in keys:
        values = {
            method: list(dict.fromkeys(flat[id(run)].get(key, UNSET) for run in seeds))
            for method, seeds in by_method(runs).items()
        }
        if len({value for found in values.values() for value in found}) > 1:
            settings[key] = values
    return settings


def flat_recipe(recipe: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """{"algorithm": {"gate": "token"}} → {"algorithm.gate": "token"}."""
    flat: dict[str, str] = {}
    for key, value in recipe.items():
        if isinstance(value, dict):
            flat |= flat_recipe(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = str(value)
    return flat


def settings_table(runs: Sequence[Run]) -> str:
    """As HTML."""
    settings = differing_settings(runs)
    if not settings:
        return "<p>None: the recipes are the same but for the seed.</p>"
    methods = list(by_method(runs))
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ["setting", *methods])
    body = "\n".join(
        f"<tr><td><code>{escape(key)}</code></td>"
        + "".join(f"<td>{escape(' | '.join(values[method]))}</td>" for method in methods)
        + "</tr>"
        for key, values in settings.items()
    )
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'
