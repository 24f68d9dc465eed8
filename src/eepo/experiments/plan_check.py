"""Checks what a plan means: its methods fit together, and every recipe accepts its knobs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from eepo import recipe
from eepo.experiments.plan import REPORT, TUNE, Method, Plan
from eepo.types import UserError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,99}")  # of folders


def check_plan(plan: Plan) -> None:
    if not plan.methods or not plan.regimes:
        raise UserError(f"{plan.source}: has no methods, or no regimes")
    _check_names(plan)
    for method in plan.methods.values():
        _check_order(plan, method, ())
        _check_method(plan, method)
    _check_phases(plan)
    _check_equal_time(plan)
    _check_starts(plan)
    for regime in plan.regimes:
        for method in plan.methods_in(regime):
            if not method.recorded:
                _check_recipes(plan, regime, method)


def _check_names(plan: Plan) -> None:
    """Names become folders, so they must be safe; phases become files."""
    tables = {
        "phases": plan.phases if plan.has_phases else (),
        "regimes": plan.regimes if plan.has_regimes else (),
        "methods": plan.methods if plan.has_methods else (),
    }
    for table, names in tables.items():
        for name in names:
            if not NAME.fullmatch(name):
                raise UserError(
                    f"{plan.source}: the name {name!r} in [{table}] is used as a folder name: "
                    "only letters, digits, '.', '_', '+' and '-' are allowed"
                )


def _check_order(plan: Plan, method: Method, above: tuple[str, ...]) -> None:
    """Refuse methods that build on themselves."""
    if method.name in above:
        chain = " -> ".join([*above, method.name])
        raise UserError(f"{plan.source}: methods.{method.name} builds on itself: {chain}")
    for other in method.inherits:
        _check_order(plan, plan.methods[other], (*above, method.name))


def _check_method(plan: Plan, method: Method) -> None:
    where = f"{plan.source}: methods.{method.name}"
    if method.against and not (method.every_value and plan.methods[method.against].every_value):
        raise UserError(
            f"{where}.against = {method.against!r} needs every_value = true in both methods"
        )
    if method.weights and not plan.methods[method.weights].trains:
        trained = [other.name for other in plan.methods.values() if other.trains]
        raise UserError(
            f"{where}.weights = {method.weights!r} is no method that trains; "
            f"allowed: {', '.join(trained)}"
        )
    if method.weights and method.base:
        raise UserError(f"{where}: give weights, which brings the knobs of its method, or base")
    for other in method.inherits:
        if plan.methods[other].points and plan.methods[other].every_value:
            raise UserError(
                f"{where} builds on {other!r}, which has every_value = true: "
                "no value of it is chosen"
            )
    if method.is_tuned and not plan.objective_of(method.name):
        raise UserError(
            f'{plan.source}: give objective = ["SET/MEASURE"], such as ["in_range/greedy"]: '
            f"it chooses among the values of methods.{method.name}"
        )


def _check_phases(plan: Plan) -> None:
    tuned = [m.name for m in plan.methods.values() if m.is_tuned and not m.recorded]
    if tuned and TUNE not in plan.phases:
        raise UserError(
            f"{plan.source}: methods.{tuned[0]} has values to choose from, so the plan needs "
            f"seeds in [phases.{TUNE}] and [phases.{REPORT}]"
        )


def _check_equal_time(plan: Plan) -> None:
    first = plan.methods.get(plan.timed_method)
    if plan.equal == "time" and (first is None or first.every_value or first.regimes):
        raise UserError(
            f'{plan.source}: equal = "time": the first method that trains sets the time of the '
            "others, so it needs one value and all regimes"
        )


def _check_starts(plan: Plan) -> None:
    for start in plan.starts:
        try:
            recipe.load_warmup(start.recipe, start.knobs)
        except UserError as error:
            raise UserError(f"{plan.source}: starts.{start.folder!r}: {error}") from error


def _check_recipes(plan: Plan, regime: str, method: Method) -> None:
    """Load every point once. Methods that it builds on have their first value."""
    if not plan.recipe_of(regime, method.name):
        raise UserError(
            f"{plan.source}: methods.{method.name} has no recipe; give recipe in the method, "
            "in its regime or at the top of the plan"
        )
    seen: dict[str, str] = {}  # recipe as text, which unlike a config can always be hashed
    for value, knobs in _points(plan, regime, method):
        title = f"methods.{method.name}" + (f" with {value}" if value else "")
        title += f" in regimes.{regime}" if regime else ""
        own = [*plan.regimes[regime].knobs, *knobs]
        try:
            config = recipe.load_run(plan.recipe_of(regime, method.name), [*plan.knobs, *own])
            for phase in {phase.knobs for phase in plan.phases.values() if phase.knobs}:
                overrides = [*plan.knobs, *phase, *own]
                recipe.load_run(plan.recipe_of(regime, method.name), overrides)
        except UserError as error:
            reason = str(error).removeprefix("--set: ").removeprefix("--set ")
            raise UserError(f"{plan.source}: {title}: {reason}") from error
        text = recipe.dump(config)
        if text in seen:
            raise UserError(f"{plan.source}: {title}: the same as {seen[text]}")
        seen[text] = value


def _points(plan: Plan, regime: str, method: Method) -> Iterator[tuple[str, list[str]]]:
    def first_value(regime: str, name: str) -> str:
        points = plan.points(regime, name)
        return points[0].value if points else ""

    values = [point.value for point in plan.points(regime, method.name)] or [""]
    for value in values:
        yield value, plan.method_knobs(regime, method.name, value, first_value)
