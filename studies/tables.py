"""A study's tables: what every method did in training, and what came of it, paired by seed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from plan import REPORT, Plan, as_run, final

from eepo.evaluation.estimates import seed_interval
from eepo.reports import records
from eepo.types import UserError

MEASURES = ("mean", "greedy", "pass@8", "pass@32", "distinct")
COLUMNS = {
    "entropy": "entropy",
    "stage1/entropy": "of stage 1",
    "stage2/entropy": "of stage 2",
    "reward": "reward",
    "stage1/reward": "of stage 1",
    "stage2/reward": "of stage 2",
    "unlearn/kl": "KL",
    "unlearn/lr": "η",
    "gate_share": "gated",
    "missed_share": "missed",
    "second_half_recovery": "recovered",
    "seconds": "seconds",
}


def tables(
    plan: Plan,
    regimes: Sequence[str] = (),
    names: Sequence[str] = (),
    against: str = "",
    phases: Sequence[str] = (REPORT,),
) -> str:
    """Return Markdown: for each regime the training of every method, then its evaluations by set.

    Differences are to the plan's first method, or to `against`: a method, or a method with its
    value (grpo_rates 2e-5). A
    regime that does not have it is left out.
    """
    found = plan.done(*phases)
    titles = list(dict.fromkeys(map(title_of, found)))
    if against and against not in {*titles, *(line["method"] for line in found)}:
        raise UserError(f"--against {against!r} is not reported; allowed: {', '.join(titles)}")
    parts = []
    for regime in regimes or plan.tables["regimes"]:
        here = [line for line in found if line["regime"] == regime]
        methods = _by_method(plan, regime, here)
        if not methods:
            continue
        first = next(iter(methods))
        chosen = next(
            (title for title, own in methods.items() if against in (title, own[0]["method"])), ""
        )
        if against and not chosen:
            continue
        shown = {
            title: own for title, own in methods.items() if not names or own[0]["method"] in names
        }
        told = _told(here)
        rows = [
            _training_row(own, told) for own in shown.values() if own[0]["metrics"]
        ]  # which evaluations lack
        if rows:
            parts.append(
                table_of(
                    f"{regime}, training", ["", "seeds", *map(COLUMNS.__getitem__, told)], rows
                )
            )
        for where in records.evaluation_sets([as_run(line) for line in here]):
            rows = []
            for own in shown.values():
                other = chosen or _other(plan, own[0]) or first
                note = "" if other == first else f" (to {other})"
                rows.append(row_of(methods.get(other, []), own, where, note))
            parts.append(table_of(f"{regime}, {where.replace('_', ' ')}", ["", *MEASURES], rows))
    return "\n\n".join(parts) + "\n"


def _by_method(
    plan: Plan, regime: str, here: Sequence[dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """By title, in the plan's order of methods and of their values."""
    reported = {line["method"] for line in here}
    found: dict[str, list[dict[str, Any]]] = {}
    for name in (name for name, _ in plan.methods(regime) if name in reported):
        order = plan.values(REPORT, regime, name)
        for line in sorted(
            (line for line in here if line["method"] == name),
            key=lambda one: order.index(one["value"]),
        ):
            found.setdefault(title_of(line), []).append(line)
    return found


def _other(plan: Plan, line: dict[str, Any]) -> str:
    """Return the method that the plan names in `against`, at the same value."""
    other = plan.tables["methods"][line["method"]].get("against", "")
    return title_of(line | {"method": other}) if other else ""


def table_of(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return f"### {title}\n\n" + "\n".join(
        f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)
    )


def title_of(line: dict[str, Any]) -> str:
    return f"{line['method']} {line['value']}".strip()


def _told(lines: Sequence[dict[str, Any]]) -> list[str]:
    """What some run has; older ones know of less."""
    known = {name for line in lines for row in line["metrics"] for name in row}
    return [name for name in COLUMNS if name in known or name == "seconds"]


def _training_row(own: Sequence[dict[str, Any]], told: Sequence[str]) -> list[str]:
    """Means over seeds; of what varies over the steps, over the last third of them."""
    cells = [title_of(own[0]), str(len(own))]
    for name in told:
        if name == "seconds":
            cells.append(f"{statistics.mean(line['seconds'] for line in own):.0f}")
            continue
        late = [
            row[name]
            for line in own
            for row in line["metrics"][-max(1, len(line["metrics"]) // 3) :]
            if name in row
        ]
        cells.append(f"{statistics.mean(late):.3g}" if late else "")
    return cells


def row_of(
    base: Sequence[dict[str, Any]], own: Sequence[dict[str, Any]], where: str, note: str
) -> list[str]:
    """Return the mean of each measure, and the paired difference to `base`, bold if significant."""
    cells = [title_of(own[0]) + note]
    for measure in MEASURES:
        values = {line["seed"]: final(line, where, measure) for line in own}
        others = {line["seed"]: final(line, where, measure) for line in base}
        gaps = [values[seed] - others[seed] for seed in sorted(values.keys() & others.keys())]
        cell = f"{statistics.mean(values.values()):.3f}"
        if own is not base and (interval := seed_interval(gaps)):
            gap = f"{statistics.mean(gaps):+.3f} [{interval[0]:+.3f}, {interval[1]:+.3f}]"
            cell += f"<br>{f'**{gap}**' if interval[0] > 0 or interval[1] < 0 else gap}"
        cells.append(cell)
    return cells
