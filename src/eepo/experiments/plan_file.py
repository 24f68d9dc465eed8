"""Reads plans from TOML. docs/experiments.md describes the format.

A plan is checked completely when it is read: names, types, and every combination of a recipe with
the knobs of a method. So a mistake is found before the first run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eepo.experiments.plan import (
    EQUAL,
    KEEP_WEIGHTS,
    REPORT,
    START_EVALUATIONS,
    TUNE,
    Benchmarks,
    FigureEntry,
    Method,
    Phase,
    Plan,
    Point,
    Regime,
    Selection,
    Start,
    TableEntry,
    grid_points,
    override_value,
    single_points,
)
from eepo.experiments.plan_check import check_plan
from eepo.experiments.toml_tables import Table, shown
from eepo.recipe import read_tables
from eepo.reports.plan_figures import FIGURES
from eepo.types import UserError

ONE_REGIME = ""  # the name of the regime of a plan without [regimes]
PLAN_KEYS = (
    "recipe", "set", "seeds", "grid", "objective", "equal", "keep_weights", "start_evaluation",
    "phases", "regimes", "methods", "starts", "benchmarks", "tables", "figures", "labels",
)  # fmt: skip
METHOD_KEYS = (
    "recipe", "set", "base", "tune", "values", "grid", "every_value", "shares", "weights", "train",
    "recorded", "against", "tuned_in", "objective", "regimes", "phases",
)  # fmt: skip


def read_plan(path: Path) -> Plan:
    """Read and check the plan in a TOML file."""
    return parse_plan(read_tables(path), str(path), path.parent)


def parse_plan(tables: Mapping[str, Any], source: str, folder: Path) -> Plan:
    """Build and check a plan from tables as a TOML file has them.

    `source` names the plan in messages. Recipes may be files in `folder`.
    """
    top = Table(source, "", tables)
    top.allow(*PLAN_KEYS)
    names = top.tables("methods") or {top.text("recipe"): top}
    regimes = top.tables("regimes") or {ONE_REGIME: top}
    known = top.tables("phases") or {REPORT: top}
    methods = {name: _method(name, table, names, regimes, known) for name, table in names.items()}
    phases = _phases(top, methods, regimes)
    plan = Plan(
        source=source,
        folder=folder,
        methods=methods,
        regimes={name: _regime(name, t, top, methods, regimes) for name, t in regimes.items()},
        phases=phases,
        knobs=top.texts("set"),
        objective=top.texts("objective"),
        equal=top.choice("equal", EQUAL, "rollouts"),
        keep_weights=top.choice("keep_weights", KEEP_WEIGHTS, "final"),
        start_evaluation=top.choice("start_evaluation", START_EVALUATIONS, "recipe"),
        benchmarks=_benchmarks(top),
        starts=tuple(_start(folder, table) for folder, table in top.tables("starts").items()),
        tables=tuple(_table_entry(t, methods, regimes, phases) for t in top.table_list("tables")),
        figures=tuple(
            _figure_entry(t, methods, regimes, phases) for t in top.table_list("figures")
        ),
        labels={name: top.table("labels").text(name) for name in top.table("labels").values},
        has_phases="seeds" not in top,
        has_regimes="regimes" in top,
        has_methods="methods" in top,
    )
    check_plan(plan)
    return plan


def _phases(
    top: Table, methods: Mapping[str, Method], regimes: Mapping[str, Table]
) -> dict[str, Phase]:
    if ("seeds" in top) == ("phases" in top):
        raise UserError(
            f"{top.source}: give seeds = [0, 1], or a table [phases.NAME] with seeds for each "
            f"phase, such as [phases.{TUNE}] and [phases.{REPORT}]"
        )
    if "seeds" in top:
        return {REPORT: Phase(REPORT, _seeds(top))}
    return {
        name: _phase(name, table, methods, regimes) for name, table in top.tables("phases").items()
    }


def _phase(
    name: str, table: Table, methods: Mapping[str, Method], regimes: Mapping[str, Table]
) -> Phase:
    table.allow("seeds", "methods", "regimes", "set", "keep_weights", "recorded")
    recorded = table.flag("recorded", False)
    chosen: Any = {}
    if isinstance(table.values.get("methods"), Mapping):
        by_regime = table.table("methods")
        by_regime.allow(*regimes)
        chosen = {regime: by_regime.names(regime, methods, "method") for regime in by_regime.values}
    else:
        chosen = table.names("methods", methods, "method")
    return Phase(
        name=name,
        seeds=table.wholes("seeds") if recorded else _seeds(table),
        methods=chosen,
        regimes=table.names("regimes", regimes, "regime"),
        knobs=table.texts("set"),
        keep_weights=table.choice("keep_weights", ("", *KEEP_WEIGHTS), ""),
        recorded=recorded,
    )


def _seeds(table: Table) -> tuple[int, ...]:
    seeds = table.wholes("seeds")
    if not seeds or len(set(seeds)) < len(seeds):
        raise table.error("seeds", "a list of one or more different seeds")
    return seeds


def _regime(
    name: str,
    table: Table,
    top: Table,
    methods: Mapping[str, Method],
    regimes: Mapping[str, Table],
) -> Regime:
    if table is top:
        return Regime(name, top.text("recipe"))
    table.allow("recipe", "set", "values", "tuned_in", "methods")
    values = table.table("values")
    return Regime(
        name=name,
        recipe=table.text("recipe") or top.text("recipe"),
        knobs=table.texts("set"),
        points={method: _regime_points(values, method, methods) for method in values.values},
        tuned_in=table.optional_name("tuned_in", regimes, "regime"),
        methods=table.names("methods", methods, "method"),
    )


def _regime_points(values: Table, name: str, methods: Mapping[str, Method]) -> tuple[Point, ...]:
    tuned = [method.name for method in methods.values() if method.tuned_knob]
    if name not in tuned:
        raise UserError(
            f"{values.source}: {values.path(name)} = {shown(values.values[name])}: "
            f"{name} is no method with values; allowed: {', '.join(tuned)}"
        )
    texts = [override_value(value) for value in values.scalars(name)]
    return tuple(single_points(methods[name].tuned_knob, texts))


def _method(
    name: str,
    table: Table,
    names: Mapping[str, Table],
    regimes: Mapping[str, Table],
    phases: Mapping[str, Any],
) -> Method:
    if not table.name:  # a plan without [methods] trains its recipe at every point of its grid
        return Method(name, points=_grid(table), every_value=True)
    table.allow(*METHOD_KEYS)
    knob = table.text("tune")
    if ("tune" in table) != ("values" in table):
        raise UserError(
            f"{table.source}: {table.name}: tune and values belong together: "
            'tune = "section.knob", values = [...]'
        )
    if knob and "grid" in table:
        raise UserError(f"{table.source}: {table.name}: give tune and values, or grid, not both")
    values = [override_value(value) for value in table.scalars("values")] if knob else []
    return Method(
        name=name,
        recipe=table.text("recipe"),
        knobs=table.texts("set"),
        base=table.names("base", names, "method"),
        points=tuple(single_points(knob, values)) if knob else _grid(table),
        tuned_knob=knob,
        every_value=table.flag("every_value", False),
        shares=_shares(table, values),
        weights=table.optional_name("weights", names, "method"),
        train=table.flag("train", True),
        recorded=table.flag("recorded", False),
        against=table.optional_name("against", names, "method"),
        tuned_in=table.optional_name("tuned_in", regimes, "regime"),
        objective=table.texts("objective"),
        regimes=table.names("regimes", regimes, "regime"),
        phases=table.names("phases", phases, "phase"),
    )


def _grid(table: Table) -> tuple[Point, ...]:
    grid = table.table("grid")
    values = {knob: [override_value(one) for one in grid.scalars(knob)] for knob in grid.values}
    return tuple(grid_points(values)) if values else ()


def _shares(table: Table, values: list[str]) -> dict[str, int]:
    shares = table.table("shares")
    if shares.values and not all(value.isdecimal() and int(value) > 0 for value in values or [""]):
        raise table.error("shares", "used with values that are whole numbers > 0")
    return {knob: shares.whole(knob, 0, least=1) for knob in shares.values}


def _start(folder: str, table: Table) -> Start:
    table.allow("recipe", "set")
    if not table.text("recipe"):
        raise table.error("recipe", "a recipe of a warm start, such as countdown/warmup")
    return Start(folder, table.text("recipe"), table.texts("set"))


def _benchmarks(top: Table) -> Benchmarks | None:
    if "benchmarks" not in top:
        return None
    table = top.table("benchmarks")
    table.allow(*Benchmarks.__dataclass_fields__)
    names = table.texts("names")
    if not names:
        raise table.error("names", "a list of one or more benchmarks")
    samples, temperature = table.whole("samples", 0), table.number("temperature", 0.0)
    if temperature and not samples:
        raise table.error("temperature", "used with samples: the greedy completion has none")
    sample_limit = table.whole("sample_limit", 0)
    if sample_limit and not samples:
        raise table.error("sample_limit", "used with samples")
    return Benchmarks(
        names=names,
        data_dir=table.text("data_dir"),
        samples=samples,
        temperature=temperature,
        max_new_tokens=table.whole("max_new_tokens", 0),
        limit=table.whole("limit", 0),
        sample_limit=sample_limit,
        max_rows=table.whole("max_rows", 0),
        template=table.text("template"),
        reward=table.text("reward"),
    )


def _selection(
    table: Table,
    methods: Mapping[str, Method],
    regimes: Mapping[str, Table],
    phases: Mapping[str, Phase],
) -> Selection:
    return Selection(
        phases=table.names("phases", phases, "phase"),
        regimes=table.names("regimes", regimes, "regime"),
        methods=table.names("methods", methods, "method"),
    )


def _table_entry(
    table: Table,
    methods: Mapping[str, Method],
    regimes: Mapping[str, Table],
    phases: Mapping[str, Phase],
) -> TableEntry:
    table.allow("heading", "phases", "regimes", "methods", "against", "label", "seconds")
    return TableEntry(
        _selection(table, methods, regimes, phases),
        against=table.text("against"),
        heading=table.text("heading"),
        label=table.text("label"),
        seconds=table.numbers("seconds"),
    )


def _figure_entry(
    table: Table,
    methods: Mapping[str, Method],
    regimes: Mapping[str, Table],
    phases: Mapping[str, Phase],
) -> FigureEntry:
    table.allow("figure", "name", "sets", "phases", "regimes", "methods")
    kind = table.choice("figure", tuple(FIGURES), "")
    name = table.text("name")
    if "/" in name:
        raise table.error("name", "a file name without folder and ending")
    selection = _selection(table, methods, regimes, phases)
    return FigureEntry(kind, selection, name, table.texts("sets"))
