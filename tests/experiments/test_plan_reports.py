"""The runner of studies: what is tuned and inherited, and its tables, computed by hand."""

from __future__ import annotations

import copy
import importlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eepo.runs.jsonl import read_records
from eepo.runs.runlog import EVALUATIONS, METRICS
from eepo.types import UserError

ROOT = Path(__file__).parents[2]
PLAN: dict[str, Any] = {
    "objective": ["in_range/greedy", "in_range/pass@8"],
    "set": ["training.num_steps=2"],
    "seeds": {"tune": [100, 101], "report": [0, 1, 2]},
    "regimes": {
        "dense": {"recipe": "countdown/grpo"},
        "finite": {"recipe": "countdown/grpo", "set": ["task.seed=1"]},
    },
    "methods": {
        "grpo": {"tune": "training.learning_rate", "values": ["1e-5", "1e-4"]},
        "wide": {
            "base": ["grpo"], "tune": "algorithm.group_size", "values": [16, 32],
            "shares": {"training.prompts_per_step": 1024}, "regimes": ["dense"],
        },
        "eepo": {"base": ["grpo"], "set": ["algorithm.num_stages=2"]},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def study() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "studies")  # the processes of its runs import it by its name
        yield importlib.import_module("study")


def line(
    method: str,
    value: str,
    seed: int,
    greedy: float,
    regime: str = "dense",
    mean: float = 0.0,
    inherited: str = "1e-5",
) -> dict[str, Any]:
    knobs = [f"training.learning_rate={value if method == 'grpo' else inherited}"]
    if method == "eepo":
        knobs += ["algorithm.num_stages=2"]
    if method == "wide":
        knobs += [
            f"algorithm.group_size={value}",
            f"training.prompts_per_step={1024 // int(value)}",
        ]
    curve = {str(k): min(1.0, greedy + 0.1 * k / 32) for k in (1, 2, 4, 8, 16, 32)}
    row = {"step": 2, "kind": "full", "set": "in_range", "num_problems": 4, "num_samples": 32}
    row |= {"greedy": greedy, "mean": mean or greedy / 2, "pass@k": curve, "distinct": 10 * greedy}
    metrics = [
        {"step": step, "stage1/entropy": 0.5 / step, "stage1/reward": greedy} for step in (1, 2)
    ]
    run = {"regime": regime, "method": method, "value": value, "seed": seed, "seconds": 1.0}
    return run | {"evaluations": [row], "metrics": metrics, "knobs": knobs}


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))


@pytest.fixture
def plan(study: Any, tmp_path: Path) -> Any:
    tuned = [
        line("grpo", "1e-5", 100, 0.5),
        line("grpo", "1e-5", 101, 0.6),
        line("grpo", "1e-4", 100, 0.7),
    ]
    tuned += [
        line("grpo", "1e-4", 101, 0.3),
        line("wide", "16", 100, 0.1),
        line("wide", "32", 100, 0.2),
    ]
    write(tmp_path / "tune.jsonl", tuned)
    return study.Plan(copy.deepcopy(PLAN), tmp_path)


def test_tuning_runs_every_value_of_a_tuned_knob(study: Any, plan: Any) -> None:
    runs = [one.key for one in plan.runs("tune", [], [])]
    assert (
        len(runs) == len(set(runs)) == 2 * (2 + 2 + 2)
    )  # seeds; both of grpo in two regimes, both of wide in one
    assert not any(method == "eepo" for _, method, _, _ in runs)
    assert {key[0] for key in (one.key for one in plan.runs("tune", ["finite"], []))} == {"finite"}


def test_a_regime_may_override_the_values_of_a_method(plan: Any) -> None:
    plan.tables["regimes"]["finite"]["values"] = {"grpo": ["1e-3"]}
    tried = {(one.regime, one.method, one.value) for one in plan.runs("tune", [], ["grpo"])}
    assert tried == {
        ("dense", "grpo", "1e-5"),
        ("dense", "grpo", "1e-4"),
        ("finite", "grpo", "1e-3"),
    }


@pytest.mark.parametrize("name", ["grop", "eepo"])
def test_values_for_a_method_that_is_not_tuned_are_an_error(
    study: Any, tmp_path: Path, name: str
) -> None:
    tables = copy.deepcopy(PLAN)
    tables["regimes"]["finite"]["values"] = {name: [1]}
    with pytest.raises(
        UserError, match=f"finite: values.{name} is not a tuned method; allowed: grpo, wide$"
    ):
        study.Plan(tables, tmp_path)


def test_the_value_with_the_best_mean_over_seeds_is_reported_and_inherited(
    study: Any, plan: Any
) -> None:
    assert plan.value("dense", "grpo") == "1e-5"  # .55 against .50
    assert plan.value("dense", "eepo") == ""
    reported = [one.key for one in plan.runs("report", ["dense"], [])]
    assert reported[:3] == [
        ("dense", "grpo", "1e-5", 0),
        ("dense", "wide", "32", 0),
        ("dense", "eepo", "", 0),
    ]
    command = " ".join(plan.command(study.Run("dense", "wide", "32", 7), Path("there")))
    for part in (
        "training.learning_rate=1e-5",
        "algorithm.group_size=32",
        "training.prompts_per_step=32",
        "training.seed=7",
        "train countdown/grpo --out there",
    ):
        assert part in command
    plan.tables["methods"]["rates"] = PLAN["methods"]["grpo"] | {"every_value": True}
    assert not plan.runs("tune", [], ["rates"])
    assert [one.value for one in plan.runs("report", ["dense"], ["rates"])] == ["1e-5", "1e-4"] * 3
    with pytest.raises(UserError, match="finite, grpo: nothing is tuned yet"):
        plan.runs("report", ["finite"], [])
    with pytest.raises(UserError, match="dence is not in the plan; allowed: dense, finite"):
        plan.runs("tune", ["dence"], [])
    with pytest.raises(UserError, match="eppo is not in the plan; allowed: grpo, wide, eepo"):
        plan.check([], ["eppo"])


def test_another_phase_reports_the_tuned_values_on_other_seeds(
    study: Any, plan: Any, tmp_path: Path
) -> None:
    plan.tables["seeds"]["fresh"] = [7, 8]
    runs = plan.runs("fresh", ["dense"], ["grpo"])
    assert [one.key for one in runs] == [("dense", "grpo", "1e-5", seed) for seed in (7, 8)]
    write(tmp_path / "report.jsonl", [line("grpo", "1e-5", 0, 0.5)])
    write(tmp_path / "fresh.jsonl", [line("grpo", "1e-5", seed, 0.9) for seed in (7, 8)])
    assert "| grpo 1e-5 | 0.450 | 0.900 |" in study.tables(plan, phases=["fresh"])
    assert "| grpo 1e-5 | 0.250 | 0.500 |" in study.tables(plan)
    both = study.tables(plan, phases=["report", "fresh"])
    assert "| grpo 1e-5 | 3 |" in both
    assert "| grpo 1e-5 | 0.383 | 0.767 |" in both
    with pytest.raises(UserError, match="stale is not in the plan; allowed: tune, report, fresh"):
        plan.check([], [], "stale")


def test_a_method_may_override_the_objective(study: Any, tmp_path: Path) -> None:
    write(
        tmp_path / "tune.jsonl",
        [line("grpo", "1e-5", 100, 0.5, mean=0.1), line("grpo", "1e-4", 100, 0.4, mean=0.2)],
    )
    tables = copy.deepcopy(PLAN)
    assert study.Plan(tables, tmp_path).value("dense", "grpo") == "1e-5"
    tables["methods"]["grpo"]["objective"] = ["in_range/mean"]
    assert study.Plan(tables, tmp_path).value("dense", "grpo") == "1e-4"


def test_tables_are_paired_by_seed(study: Any, plan: Any, tmp_path: Path) -> None:
    base, other = [0.5, 0.7, 0.9], [0.6, 0.8, 0.7]
    reported = [line("grpo", "1e-5", seed, greedy) for seed, greedy in enumerate(base)]
    reported += [line("eepo", "", seed, greedy) for seed, greedy in enumerate(other)]
    write(tmp_path / "report.jsonl", reported[::-1])
    text = study.tables(plan)
    assert "### dense, in range" in text
    training, row = [row for row in text.splitlines() if row.startswith("| eepo |")]
    # gaps .1, .1, -.2: mean 0, standard error .1, and 4.303 of these; means are half of it
    assert row.startswith(
        "| eepo | 0.350<br>+0.000 [-0.215, +0.215] | 0.700<br>+0.000 [-0.430, +0.430] |"
    )
    assert (
        training == "| eepo | 3 | 0.25 | 0.7 | 1 |"
    )  # stage 1's entropy at the last step; columns that somebody has
    assert "|  | seeds | of stage 1 | of stage 1 | seconds |" in text
    study.figures(plan, tmp_path / "figures", "small")
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {f"small_dense_{name}.png" for name in ("exploration", "pass_at_k", "frontier")}


def test_a_significant_difference_is_bold(study: Any, plan: Any, tmp_path: Path) -> None:
    reported = [line("grpo", "1e-5", seed, greedy) for seed, greedy in enumerate((0.3, 0.5, 0.4))]
    reported += [line("eepo", "", seed, greedy) for seed, greedy in enumerate((0.5, 0.71, 0.6))]
    write(tmp_path / "report.jsonl", reported)
    assert "0.603<br>**+0.203 [+0.189, +0.218]**" in study.tables(plan)


def test_differences_to_another_method(study: Any, plan: Any, tmp_path: Path) -> None:
    reported = [line("grpo", "1e-5", seed, 0.3) for seed in range(3)] + [
        line("eepo", "", seed, 0.5) for seed in range(3)
    ]
    write(tmp_path / "report.jsonl", reported)
    (row,) = [
        row
        for row in study.tables(plan, names=["grpo"], against="eepo").splitlines()
        if "(to eepo)" in row
    ]
    assert row.startswith("| grpo 1e-5 (to eepo) |")
    assert "0.300<br>**-0.200 [-0.200, -0.200]**" in row
    write(tmp_path / "report.jsonl", [*reported, line("grpo", "1e-5", 0, 0.3, regime="finite")])
    write(
        tmp_path / "tune.jsonl",
        [line("grpo", "1e-5", 100, 0.3, regime=name) for name in ("dense", "finite")],
    )
    plan.chosen.clear()
    assert "### finite" in study.tables(plan)
    assert "### finite" not in study.tables(plan, against="eepo")  # which nobody has run there
    with pytest.raises(UserError, match="--against 'wide' is not reported"):
        study.tables(plan, against="wide")


def test_differences_to_one_value_of_a_method(study: Any, plan: Any, tmp_path: Path) -> None:
    plan.tables["methods"]["grpo"] |= {"every_value": True}
    write(tmp_path / "report.jsonl", [line("grpo", "1e-5", 0, 0.3), line("grpo", "1e-4", 0, 0.5)])
    text = study.tables(plan, against="grpo 1e-4")
    assert "| grpo 1e-5 (to grpo 1e-4) |" in text
    with pytest.raises(
        UserError, match="--against 'grpo 1e-3' is not reported; allowed: grpo 1e-5, grpo 1e-4"
    ):
        study.tables(plan, against="grpo 1e-3")


def test_runs_with_outdated_tuned_values_are_ignored(study: Any, plan: Any, tmp_path: Path) -> None:
    stale = [line("grpo", "1e-4", seed, 0.1) for seed in range(3)]
    reported = [line("grpo", "1e-5", seed, 0.5) for seed in range(3)] + [
        line("eepo", "", seed, 0.5) for seed in range(3)
    ]
    write(
        tmp_path / "report.jsonl", [*stale, *reported, line("eepo", "", 0, 0.9, inherited="1e-4")]
    )
    text = study.tables(plan)
    assert "grpo 1e-4" not in text
    assert "0.500<br>+0.000 [+0.000, +0.000]" in text
    plan.tables["methods"]["grpo"] |= {
        "every_value": True
    }  # then each value is a line of its own, and the first the base
    assert "grpo 1e-4" in study.tables(plan)
    study.figures(plan, tmp_path / "figures", "small")
    assert (tmp_path / "figures" / "small_dense_frontier.png").exists()


def test_against_compares_methods_at_the_same_value(study: Any, plan: Any, tmp_path: Path) -> None:
    """As grpo is the first, all its values would be compared with 1e-5 otherwise."""
    knob = {"tune": "training.learning_rate", "values": ["1e-5", "1e-4"], "every_value": True}
    plan.tables["methods"] = {"grpo": knob, "other": knob | {"against": "grpo"}}
    reported = [line("grpo", "1e-4", seed, 0.1) for seed in range(3)]
    reported += [line("grpo", "1e-5", seed, 0.5) for seed in range(3)]
    reported += [line("grpo", "1e-4", seed, 0.3) | {"method": "other"} for seed in range(3)]
    write(tmp_path / "report.jsonl", reported)
    rows = [
        row for row in study.tables(plan).splitlines() if row.startswith(("| grpo", "| other"))
    ][-3:]
    assert [row.split(" | ")[0] for row in rows] == [
        "| grpo 1e-5",
        "| grpo 1e-4",
        "| other 1e-4 (to grpo 1e-4)",
    ]
    assert "| 0.300<br>**+0.200 [+0.200, +0.200]** |" in rows[-1]  # greedy
    lines, others = study._frontiers(plan, plan.done("report"), reported)["in_range"]
    assert list(lines) == ["grpo", "other"]
    figure = study.frontier_figure({"in_range": (lines, others)}, "pass@32")
    assert [axes.get_title() for axes in figure.axes] == ["in range"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "grpo",
        "other",
        "grpo",
        "other",
    ]
    plan.tables["methods"]["other"]["against"] = "grop"
    with pytest.raises(
        UserError, match="other: against = grop is not a method; allowed: grpo, other"
    ):
        study.Plan(plan.tables, tmp_path)
    plan.tables["methods"]["other"] |= {"against": "grpo", "every_value": False}
    with pytest.raises(UserError, match="other: against = grpo needs every_value in both"):
        study.Plan(plan.tables, tmp_path)


def test_methods_that_differ_only_in_steps_are_one_line(
    study: Any, plan: Any, tmp_path: Path
) -> None:
    five = "training.num_steps=5"
    plan.tables["methods"] |= {
        f"{name}_5": {"base": [name], "set": [five]} for name in ("grpo", "eepo")
    }

    def longer(name: str, *rest: Any) -> dict[str, Any]:
        found = line(name, *rest)
        return found | {"method": f"{name}_5", "value": "", "knobs": [*found["knobs"], five]}

    short = [line("grpo", "1e-5", 0, 0.4), line("eepo", "", 0, 0.6), line("wide", "32", 0, 0.6)]
    grown = [longer("grpo", "1e-5", seed, 0.8) for seed in (0, 1)]
    write(tmp_path / "report.jsonl", [*short, *grown])
    assert not study._lengths(plan, plan.done("report"))  # of one method: nothing to compare
    write(tmp_path / "report.jsonl", [*short, *grown, longer("eepo", "", 1, 0.2)])
    measured = study._lengths(plan, plan.done("report"))
    assert list(measured) == ["mean, in range", "pass@32, in range"]
    assert measured["mean, in range"] == {
        "grpo": {2: [0.2], 5: [0.4, 0.4]},
        "eepo": {2: [0.3], 5: [0.1]},
    }
    study.figures(plan, tmp_path / "figures", "small", ["lengths"])
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["small_dense_lengths.png"]


def test_a_run_command_takes_one_phase(study: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "plan.toml").write_text((ROOT / "studies" / "smollm2.toml").read_text())
    asked = [
        "list",
        f"{tmp_path}/plan.toml",
        "--out",
        str(tmp_path),
        "--phase",
        "report",
        "--phase",
        "fresh",
    ]
    monkeypatch.setattr("sys.argv", ["study.py", *asked])
    with pytest.raises(SystemExit, match="--phase report --phase fresh: list takes one"):
        study.main()


@pytest.mark.slow
def test_a_crashed_run_does_not_affect_others(
    study: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """The first one kills itself as the kernel would; the second one trains."""
    knobs = [
        "training.num_steps=1",
        "training.prompts_per_step=2",
        "training.prompts_per_mini_batch=2",
    ]
    knobs += [
        "algorithm.group_size=2",
        "task.num_evaluation=1",
        "evaluation.num_samples=2",
        "model.device=cpu",
    ]
    tables = PLAN | {"set": knobs, "seeds": {"report": [0, 1]}, "methods": {"grpo": {}}}
    start = study.WarmStarter.__call__

    def dying(self: Any, job: Any, *given: Any) -> Any:
        process = start(self, job, *given)
        if "seed-0" in job.title:
            os.kill(process.pid, signal.SIGKILL)
        return process

    monkeypatch.setattr(study.WarmStarter, "__call__", dying)
    with pytest.raises(SystemExit, match="1 of 2 runs failed"):
        study.run(study.Plan(tables, tmp_path), "report", 2, ["dense"], [])
    assert "SIGKILL" in capsys.readouterr().out
    assert [one["seed"] for one in list(read_records(tmp_path / "report.jsonl"))] == [1]


@pytest.mark.slow
def test_a_finished_run_is_recorded_once(study: Any, tmp_path: Path) -> None:
    knobs = [
        "training.num_steps=2",
        "training.prompts_per_step=2",
        "training.prompts_per_mini_batch=2",
    ]
    knobs += [
        "algorithm.group_size=2",
        "task.num_evaluation=2",
        "evaluation.num_samples=2",
        "model.device=cpu",
    ]
    tables = PLAN | {"set": knobs, "seeds": {"tune": [0], "report": [0]}, "methods": {"grpo": {}}}
    plan = study.Plan(tables, tmp_path)
    for _ in range(2):
        study.run(plan, "report", 1, ["dense"], [])
    [found] = list(read_records(tmp_path / "report.jsonl"))
    assert found["seconds"] > 0
    assert [row["step"] for row in found["metrics"]] == [1, 2]
    assert {row["set"] for row in found["evaluations"]} == {"in_range", "out_of_range"}
    assert "problems" not in found["evaluations"][0]
    folder = tmp_path / "report/dense/grpo=as-is/seed-0"
    assert "weights:" in (folder / "log.txt").read_text()
    assert not list(folder.rglob("*.safetensors"))


@pytest.mark.slow
def test_weights_are_kept_for_evaluations_at_other_temperatures(study: Any, tmp_path: Path) -> None:
    knobs = [
        "training.num_steps=2",
        "training.prompts_per_step=4",
        "training.prompts_per_mini_batch=4",
    ]
    knobs += ["training.learning_rate=1e-4", "algorithm.group_size=4", "task.num_evaluation=4"]
    knobs += ["evaluation.num_samples=32", "evaluation.start=false", "model.device=cpu"]
    heated = {
        "weights": "grpo",
        "tune": "evaluation.temperature",
        "values": [1.0, 3.0],
        "every_value": True,
    }
    tables = PLAN | {
        "set": knobs,
        "seeds": {"tune": [0], "report": [0]},
        "methods": {"heated": heated, "grpo": {}},
    }
    plan = study.Plan(tables, tmp_path)
    assert not plan.runs("tune", ["dense"], ["heated"])
    study.run(plan, "report", 2, ["dense"], [])
    found = {(one["method"], one["value"]): one for one in plan.done("report")}
    assert next(iter(found)) == ("grpo", "")  # its weights come before what is measured with them
    trained, same, hot = (
        found[key]["evaluations"] for key in (("grpo", ""), ("heated", "1.0"), ("heated", "3.0"))
    )
    for row, other, hotter in zip(trained, same, hot, strict=True):
        assert other | {"step": 2, "seconds": 0} == row | {
            "seconds": 0
        }  # no step further, and the same draws
        assert hotter["mean"] < row["mean"]
    assert found["heated", "3.0"]["metrics"] == []
    assert [path.parent.name for path in tmp_path.rglob("*.safetensors")] == ["final"]
    training, *evaluations = study.tables(plan).split("### ")[1:]
    assert "heated" not in training
    assert all("| heated 3.0 | 0." in table for table in evaluations)
    assert "training" not in study.tables(plan, names=["heated"])  # no table without rows
    study.figures(plan, tmp_path, "study")
    assert (tmp_path / "study_dense_temperatures.png").exists()
    for wrong in ("gpro", "heated"):
        heated["weights"] = wrong
        with pytest.raises(
            UserError, match=f"heated: weights = {wrong} is not a method that trains; allowed: grpo"
        ):
            study.Plan(tables, tmp_path)


def test_values_are_labelled_once_and_at_the_ends_of_coloured_lines(study: Any) -> None:
    lines = {
        one: {value: [(place, place)] for place, value in enumerate("abc")}
        for one in ("first", "second")
    }
    lines["other"] = {"d": [(3, 3)]}
    for points, named in (({}, [*"abc", *"ac", "d"]), ({"grpo": [(1, 1)]}, [*"abc", "d"])):
        drawn = importlib.import_module("frontier").frontier_figure(
            {"dense": (lines, points)}, "pass@32"
        )
        assert [text.get_text() for text in drawn.axes[0].texts] == named


def test_metrics_of_a_long_run_are_averaged_over_steps(study: Any, tmp_path: Path) -> None:
    rows = [{"step": step, "reward": float(step), "seconds/total": 1.0} for step in range(1, 62)]
    rows[1]["unlearn/kl"] = 0.5  # not in every step
    write(tmp_path / METRICS, rows)
    (tmp_path / EVALUATIONS).write_text("")
    found = study.line_of(study.Run("dense", "grpo", "as-is", 0), tmp_path)["metrics"]
    assert [row["step"] for row in found] == [*range(3, 61, 3), 61]
    assert [row["reward"] for row in found] == [*range(2, 60, 3), 61]
    assert [row.get("unlearn/kl") for row in found] == [0.5] + [None] * 20


@pytest.mark.slow
def test_a_failed_run_is_reported_and_run_again(study: Any, tmp_path: Path, capsys: Any) -> None:
    tables = PLAN | {
        "set": ["algorithm.group_size=none"],
        "seeds": {"report": [0]},
        "methods": {"grpo": {}},
    }
    for _ in range(2):
        with pytest.raises(SystemExit, match="1 of 1 runs failed"):
            study.run(study.Plan(tables, tmp_path), "report", 1, ["dense"], [])
        assert "algorithm.group_size" in capsys.readouterr().out
    assert not (tmp_path / "report.jsonl").exists()


def test_shipped_plans_can_be_loaded(study: Any, tmp_path: Path) -> None:
    plans = sorted((ROOT / "studies").glob("*.toml"))
    assert plans
    for path in plans:
        tables = study.read_toml(path)
        plan = study.Plan(tables, tmp_path)
        first = next(iter(tables["methods"]))
        assert plan.runs("tune", [], [first])
        seeds = [seed for phase in tables["seeds"].values() for seed in phase]
        assert len(seeds) == len(set(seeds))  # what one phase has seen is no evidence in another
        assert len(tables["seeds"]["report"]) >= 5
        tuned = [
            method
            for method in tables["methods"].values()
            if "values" in method and not method.get("every_value")
        ]
        assert {len(method["values"]) for method in tuned} == {4}  # as many for each


def test_the_dtype_figure_has_all_its_runs(study: Any, tmp_path: Path, monkeypatch: Any) -> None:
    types = importlib.import_module("types_of_products")
    for name, (plan, regime) in types.TYPES.items():
        there = {rate: types.rewards(plan, regime, rate) for rate in types.RATES}
        assert all(len(rows) > 20 and rows[-1][0] == 50 for rows in there.values() if rows), name
        assert len([rows for rows in there.values() if rows]) >= 2, name
    assert not types.rewards("smollm2", "sums", "7e-6")
    monkeypatch.setattr("sys.argv", ["types_of_products.py", "--into", str(tmp_path / "figures")])
    types.main()
    assert (tmp_path / "figures" / "smollm2_types.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("study_name", "beside", "against", "methods"),
    [
        ("countdown", [], "grpo", {"one", "answers", "shared"}),
        ("countdown", ["cool"], "grpo_mild_cool", {"phantom_cool 8", "phantom_cool 16"}),
        ("smollm2", ["sampled"], "grpo_mild_160_sampled 1.0", {"mild_phantom_160_sampled 1.0"}),
    ],
)
def test_pilots_are_compared_on_common_seeds(
    study: Any,
    capsys: Any,
    monkeypatch: Any,
    study_name: str,
    beside: list[str],
    against: str,
    methods: set[str],
) -> None:
    pilots, results = importlib.import_module("pilots"), ROOT / "docs" / "results" / study_name
    files = [part for name in beside for part in ("--beside", str(results / f"{name}.jsonl"))]
    monkeypatch.setattr(
        "sys.argv", ["pilots.py", str(results / "pilots.jsonl"), *files, "--against", against]
    )
    pilots.main()
    rows = [row.split(" | ") for row in capsys.readouterr().out.splitlines() if "<br>" in row]
    assert methods <= {row[0].removeprefix("| ") for row in rows}
    assert against not in {row[0].removeprefix("| ") for row in rows}


def test_a_pilot_compared_with_an_unknown_method_is_an_error(study: Any) -> None:
    pilots = importlib.import_module("pilots")
    with pytest.raises(UserError, match=r"--against 'grpo 1.0' is in no line; allowed: grpo$"):
        pilots.pilots(
            [{"regime": "sums", "method": "grpo", "value": "", "seed": 0}], [], "grpo 1.0"
        )
