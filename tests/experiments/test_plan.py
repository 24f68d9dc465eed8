"""Tests of plans: which runs they have, which values are chosen, and what is recorded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eepo.experiments.experiment import Experiment, Run
from eepo.experiments.lines import append_line, read_lines, summarize_run
from eepo.experiments.plan import Selection, override_value
from eepo.experiments.plan_file import parse_plan, read_plan
from eepo.experiments.runner import train_command
from eepo.experiments.schedule import Schedule
from eepo.experiments.status import command_lines, status_lines
from eepo.experiments.toml_tables import dump_tables
from eepo.experiments.tuning import best_value
from eepo.runs.runlog import EVALUATIONS, METRICS
from eepo.types import UserError

ROOT = Path(__file__).parents[2]
STUDIES = sorted((ROOT / "studies").glob("*.toml"))
EVERY_RATE = {"tune": "training.learning_rate", "values": ["1e-5"], "every_value": True}


def runs(experiment: Experiment, **selected: Any) -> list[Run]:
    schedule = Schedule(experiment, Selection(**selected))
    schedule.check()
    return schedule.known_runs()


# --- runs and values


@pytest.mark.parametrize(
    ("selected", "message"),
    [
        ({"regimes": ("dence",)}, "--regime dence is not in plan.toml; allowed: dense, finite"),
        ({"methods": ("eppo",)}, "--method eppo is not in plan.toml; allowed: grpo, wide, eepo"),
        ({"seeds": (7,)}, "--seed 7 is not in plan.toml; allowed: 0, 1, 2, 100, 101"),
        (
            {"phases": ("report",), "seeds": (100, 101)},
            "plan.toml has no runs with --phase report --seed 100 --seed 101; use fewer",
        ),
        ({"phases": ("stale",)}, "--phase stale is not in plan.toml; allowed: tune, report"),
    ],
)
def test_a_selection_that_the_plan_does_not_have_is_an_error(
    selected: dict[str, Any], message: str, plans: SimpleNamespace, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        runs(plans.tuned(tmp_path), **selected)


def test_runs_of_some_seeds_can_be_selected(plans: SimpleNamespace, tmp_path: Path) -> None:
    chosen = runs(plans.tuned(tmp_path), regimes=("dense",), seeds=(1, 101))
    assert {(run.phase, run.seed) for run in chosen} == {("report", 1), ("tune", 101)}


def test_tuning_runs_every_value_of_a_tuned_knob(plans: SimpleNamespace, tmp_path: Path) -> None:
    experiment = plans.tuned(tmp_path)
    tune = runs(experiment, phases=("tune",), regimes=("dense",))
    assert len(tune) == len(set(tune)) == 2 * (2 + 2), "seeds, values of grpo and of wide"
    assert {run.method for run in tune} == {"grpo", "wide"}


def test_methods_wait_for_the_tuning_of_the_methods_they_build_on(
    plans: SimpleNamespace, tmp_path: Path
) -> None:
    schedule = Schedule(Experiment(plans.parse(), tmp_path), Selection(regimes=("dense",)))
    first = schedule.ready()
    assert {(run.phase, run.method) for run in first} == {("tune", "grpo")}
    assert schedule.num_runs == 2 * (2 + 2) + 3 * 3
    for run in first:
        assert schedule.ready() == []
        score = 0.9 if run.value == "1e-4" else 0.1
        append_line(tmp_path / "tune.jsonl", plans.line("grpo", run.value, run.seed, score))
        schedule.experiment._lines.clear()
        schedule.finish(run)
    now = schedule.ready()
    assert {(run.phase, run.method, run.value) for run in now} == {
        ("tune", "wide", "16"),
        ("tune", "wide", "32"),
        ("report", "grpo", "1e-4"),
        ("report", "eepo", ""),
    }
    assert "training.learning_rate=1e-4" in schedule.experiment.knobs(now[0])
    ordered = sorted(now, key=schedule.position)
    assert [run.phase for run in ordered] == ["tune"] * 4 + ["report"] * 6
    assert [run.seed for run in ordered[4:]] == [0, 0, 1, 1, 2, 2], "complete seeds first"


def test_a_failed_tuning_run_holds_back_what_depends_on_it(
    plans: SimpleNamespace, tmp_path: Path
) -> None:
    schedule = Schedule(Experiment(plans.parse(), tmp_path), Selection(regimes=("dense",)))
    failing, *others = schedule.ready()
    for run in others:
        append_line(tmp_path / "tune.jsonl", plans.line("grpo", run.value, run.seed, 0.5))
        schedule.experiment._lines.clear()
        schedule.finish(run)
    assert schedule.ready() == [], f"{failing} is not done"


def test_the_value_with_the_best_mean_over_seeds_is_reported_and_inherited(
    plans: SimpleNamespace, tmp_path: Path
) -> None:
    experiment = plans.tuned(tmp_path)
    assert experiment.chosen("dense", "grpo") == "1e-5", ".55 against .50"
    assert experiment.chosen("dense", "eepo") == ""
    report = runs(experiment, phases=("report",), regimes=("dense",))
    assert [run.key for run in report[:3]] == [
        ("dense", "grpo", "1e-5", 0),
        ("dense", "wide", "32", 0),
        ("dense", "eepo", "", 0),
    ]
    words = " ".join(train_command(experiment, Run("report", "dense", "wide", "32", 7)))
    folder = tmp_path / "report" / "dense" / "wide=32" / "seed-7"
    for part in (
        "training.learning_rate=1e-5",
        "algorithm.group_size=32",
        "training.prompts_per_step=32",
        "training.seed=7",
        f"eepo train countdown/grpo --out {folder} --resume",
    ):
        assert part in words
    with pytest.raises(UserError, match="finite, grpo: no tuning run has finished"):
        runs(experiment, phases=("report",), regimes=("finite",))


def test_a_method_with_every_value_is_reported_with_all_and_never_tuned(
    plans: SimpleNamespace, tmp_path: Path
) -> None:
    rates = EVERY_RATE | {"values": ["1e-5", "1e-4"]}
    experiment = plans.tuned(tmp_path, methods__rates=rates)
    assert "rates" not in {run.method for run in runs(experiment, phases=("tune",))}
    report = runs(experiment, phases=("report",), regimes=("dense",), methods=("rates",))
    assert [run.value for run in report] == ["1e-5", "1e-4"] * 3


def test_a_regime_may_have_other_values_and_be_tuned_in_another(
    plans: SimpleNamespace, tmp_path: Path
) -> None:
    plan = plans.parse(regimes__finite__values={"grpo": ["1e-3"]})
    tune = runs(Experiment(plan, tmp_path), phases=("tune",), methods=("grpo",))
    assert {(run.regime, run.value) for run in tune} == {
        ("dense", "1e-5"),
        ("dense", "1e-4"),
        ("finite", "1e-3"),
    }
    experiment = plans.tuned(tmp_path, regimes__finite__tuned_in="dense")
    assert experiment.chosen("finite", "grpo") == "1e-5"
    tune = runs(experiment, phases=("tune",), methods=("grpo",))
    assert {run.regime for run in tune} == {"dense"}, "no tuning runs that decide nothing"


def test_phases_and_regimes_may_limit_methods(plans: SimpleNamespace, tmp_path: Path) -> None:
    fresh = {"seeds": [7], "methods": {"dense": ["grpo"], "finite": []}}
    experiment = plans.tuned(
        tmp_path, phases__fresh=fresh, methods__late={"base": ["grpo"], "phases": ["fresh"]}
    )
    assert [run.key for run in runs(experiment, phases=("fresh",))] == [
        ("dense", "grpo", "1e-5", 7)
    ]
    report = runs(experiment, phases=("report",), regimes=("dense",))
    assert "late" not in {run.method for run in report}
    experiment = plans.tuned(tmp_path, regimes__finite__methods=["wide"])
    assert {run.regime for run in runs(experiment, phases=("report",))} == {"dense"}


def test_a_grid_has_every_combination_of_values(plans: SimpleNamespace, tmp_path: Path) -> None:
    grid = {"algorithm.temperature": [1.2, 1.0], "algorithm.gate": ["token"]}
    wide = {"grid": grid, "every_value": True, "set": ["algorithm.num_stages=2"]}
    experiment = Experiment(plans.parse(methods={"wide": wide}), tmp_path)
    (run, other) = runs(experiment, regimes=("dense",))[:2]
    assert run.value == "algorithm.gate=token,algorithm.temperature=1.2"
    assert other.value == "algorithm.gate=token,algorithm.temperature=1.0"
    assert experiment.config(run).algorithm.temperature == 1.2
    assert experiment.config(run).name == f"wide {run.value}"


def test_a_method_may_name_a_recipe_or_add_one_to_that_of_its_regime(
    plans: SimpleNamespace, tmp_path: Path
) -> None:
    methods = {
        "eepo": {"recipe": "countdown/eepo"},
        "downweight": {"recipe": "+explore/downweight_failures"},
    }
    experiment = Experiment(plans.parse(methods=methods), tmp_path)
    eepo, downweight = runs(experiment, regimes=("dense",))[:2]
    assert experiment.config(eepo).algorithm.num_stages == 2
    assert experiment.config(downweight).algorithm.failure_weight == 0.25
    assert experiment.config(downweight).algorithm.num_stages == 1


def test_an_untrained_model_is_evaluated_once(plans: SimpleNamespace, tmp_path: Path) -> None:
    base = {"train": False}
    experiment = plans.tuned(tmp_path, methods__base=base)
    found = runs(experiment, phases=("report",), regimes=("dense",), methods=("base",))
    assert [run.seed for run in found] == [0]
    assert experiment.config(found[0]).training.num_steps == 0


def test_a_recorded_phase_cannot_be_run(plans: SimpleNamespace, tmp_path: Path) -> None:
    experiment = plans.tuned(tmp_path, phases__pilots={"recorded": True})
    assert "pilots" not in {run.phase for run in runs(experiment, regimes=("dense",))}
    with pytest.raises(UserError, match="--phase pilots: its runs are recorded"):
        runs(experiment, phases=("pilots",))


@pytest.mark.parametrize(
    ("objective", "best"),
    [
        (["in_range/greedy"], "1e-5"),
        (["greedy"], "1e-5"),
        (["in_range/mean"], "1e-4"),
        (["speed"], "1e-4"),
    ],
)
def test_the_objective_decides_which_value_is_best(
    objective: list[str], best: str, plans: SimpleNamespace
) -> None:
    lines = [
        plans.line("grpo", "1e-5", 0, 0.5, mean=0.1) | {"steps_to_90": None, "num_steps": 50},
        plans.line("grpo", "1e-4", 0, 0.4, mean=0.2) | {"steps_to_90": 99, "num_steps": 100},
    ]
    assert best_value(lines, objective) == best


def test_a_measure_that_was_not_evaluated_is_an_error(plans: SimpleNamespace) -> None:
    with pytest.raises(UserError, match=r"no pass@64 on 'in_range'; sets: in_range$"):
        best_value([plans.line("grpo", "1e-5", 0, 0.5)], ["in_range/pass@64"])


# --- lines and files


def test_metrics_of_a_long_run_are_averaged_over_steps(
    plans: SimpleNamespace, tmp_path: Path
) -> None:
    rows = [{"step": step, "reward": float(step), "seconds/total": 1.0} for step in range(1, 62)]
    rows[1]["unlearn/kl"] = 0.5  # not in every step
    plans.write(tmp_path / METRICS, rows)
    (tmp_path / EVALUATIONS).write_text("")
    found = summarize_run(tmp_path)["metrics"]
    assert [row["step"] for row in found] == [*range(3, 61, 3), 61]
    assert [row["reward"] for row in found] == [*range(2, 60, 3), 61]
    assert [row.get("unlearn/kl") for row in found] == [0.5] + [None] * 20


def test_a_line_that_was_cut_off_is_replaced(plans: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    first, third = (plans.line("grpo", "1e-5", seed, 0.5) for seed in (1, 3))
    append_line(path, first)
    with path.open("a") as file:
        file.write('{"seed": 2, "met')
    append_line(path, third)
    assert read_lines(path) == [first, third]


def test_a_file_without_lines_of_runs_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "report.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=r"report.jsonl: a line is no summary of a run"):
        read_lines(tmp_path / "report.jsonl")


def test_tables_are_written_as_toml_that_reads_back(tmp_path: Path) -> None:
    tables = {
        "recipe": "countdown/grpo",
        "seeds": [0, 1],
        "objective": ["greedy"],
        "set": ["name=\"a 'ü'\""],
        "grid": {"algorithm.temperature": [1.0, 1.2]},
        "tables": [{"heading": "a"}, {"heading": "b"}],
        "labels": {"a b": "A"},
    }
    (tmp_path / "plan.toml").write_text(dump_tables(tables))
    assert read_plan(tmp_path / "plan.toml") == parse_plan(
        tables, str(tmp_path / "plan.toml"), tmp_path
    )
    assert override_value(True) == "true"


# --- what is shown


def test_show_counts_runs_and_names_chosen_values(plans: SimpleNamespace, tmp_path: Path) -> None:
    experiment = plans.tuned(tmp_path)
    plans.write(tmp_path / "report.jsonl", [plans.line("grpo", "1e-5", 0, 0.5)])
    failed = tmp_path / "report" / "dense" / "eepo" / "seed-1"
    failed.mkdir(parents=True)
    (failed / "failed.txt").write_text("out of memory\n")
    selection = Selection(phases=("report",), regimes=("dense",))
    lines = list(status_lines(experiment, selection))
    assert lines[0] == "plan.toml: 9 runs: 1 done, 0 running, 1 failed, 7 left"
    assert "  report, dense: 1 of 9 done" in lines
    assert "failed: report/dense/eepo seed 1: out of memory" in lines
    assert "chosen: grpo, training.learning_rate: 1e-5 (dense)" in lines
    assert len(list(command_lines(experiment, selection))) == 8


# --- shipped plans


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_shipped_plans_are_valid_and_fair(path: Path, tmp_path: Path) -> None:
    plan = read_plan(path)
    experiment = Experiment(plan, tmp_path)
    first = next(name for name, method in plan.methods.items() if method.trains)
    assert runs(experiment, phases=("tune",), methods=(first,)), "the baseline is tuned, too"
    tuning = set(plan.phases["tune"].seeds)
    others = [phase for name, phase in plan.phases.items() if name != "tune"]
    assert not any(tuning & set(phase.seeds) for phase in others), "tuning seeds are no evidence"
    fewest = 3 if path.stem == "maths" else 5  # its runs take hours
    assert len(plan.phases["report"].seeds) >= fewest
    tuned = [m for m in plan.methods.values() if m.is_tuned and m.name != first]
    assert len({len(method.points) for method in tuned}) == 1, "as many values for each"


RECORDED = (
    *("countdown", "methods", "shortcut", "shortcut_lora", "shortcut_rates"),
    *("smollm2", "smollm2_shortcut", "smollm2_two_dtypes"),
)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_recorded_lines_match_the_shipped_plan(path: Path) -> None:
    """Only the tuning runs of values and methods that were removed are left out."""
    plan = read_plan(path)
    experiment = Experiment(plan, ROOT / "docs" / "results" / path.stem)
    assert path.stem not in RECORDED or len(experiment.lines("report")) >= 20
    for phase in plan.phases:
        lines = experiment.lines(phase)
        if phase != "tune":
            assert len(experiment.done(phase)) == len(lines), phase


def test_there_are_shipped_plans_and_no_code_next_to_them() -> None:
    assert len(STUDIES) >= 4
    assert [path.suffix for path in (ROOT / "studies").iterdir() if path.is_file()] == [
        ".toml"
    ] * len(STUDIES)
