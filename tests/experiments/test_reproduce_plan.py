"""Tests of the plans of `eepo reproduce`: targets, methods, values, seeds and wrong options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eepo import recipe
from eepo.experiments.experiment import Run
from eepo.experiments.plan_file import parse_plan, read_plan
from eepo.experiments.reproduce import command_line
from eepo.experiments.reproduce_options import ReproduceOptions
from eepo.experiments.reproduce_plan import Reproduction, plan_reproductions
from eepo.experiments.reproduce_targets import BASELINES, TARGETS, find_targets
from eepo.experiments.toml_tables import dump_tables
from eepo.reports.paper_numbers import TABLES
from eepo.types import UserError


def plan(target: str, out: Path = Path("out"), **options: Any) -> Reproduction:
    chosen: dict[str, Any] = {"methods": ()} | options
    (reproduction,) = plan_reproductions(ReproduceOptions(target, **chosen), out)
    return reproduction


def seeds(reproduction: Reproduction) -> dict[str, Sequence[int]]:
    return {name: phase.seeds for name, phase in reproduction.plan.phases.items()}


@pytest.fixture(scope="module")
def table1() -> Reproduction:
    return plan("paper/table1")


def test_table1_has_the_papers_rows_and_tunes_over_the_papers_values(table1: Reproduction) -> None:
    assert [*table1.plan.methods] == [*TABLES["table1"].labels]
    values = {
        name: [point.value for point in method.points]
        for name, method in table1.plan.methods.items()
        if method.points
    }
    assert values == {
        "higher_temperature": ["1.2", "1.5"],
        "more_entropy": ["1e-4", "1e-3"],
        "clip_higher": ["0.24", "0.28", "0.32"],
    }
    assert table1.plan.objective == (
        "minerva_math/greedy", "olympiadbench/greedy", "amc23/greedy", "aime24/greedy",
    )  # fmt: skip
    assert seeds(table1) == {"tune": (100,), "report": (0,)}, "other seeds choose the values"
    assert not table1.plan.methods["base"].train


def test_the_runs_of_table1_have_the_papers_settings(table1: Reproduction) -> None:
    experiment = table1.experiment()
    for name in ("grpo", "more_rollouts", "eepo"):
        config = experiment.config(Run("report", "", name, "", 0))
        same = recipe.load_run(f"paper/qwen2.5-3b+{name}")
        assert (config.algorithm, config.training, config.task, config.model) == (
            same.algorithm, same.training, same.task, same.model,
        )  # fmt: skip
        assert config.evaluation.num_samples == 32
        assert not config.evaluation.start, "the base model is a run of its own"
    tuned = experiment.config(Run("tune", "", "higher_temperature", "1.5", 100))
    assert tuned.algorithm.temperature == 1.5
    assert tuned.evaluation.num_samples == 1, "greedy accuracy chooses: samples would be wasted"
    base = experiment.config(Run("report", "", "base", "", 0))
    assert (base.training.num_steps, base.evaluation.start) == (0, True)


def test_only_the_weights_of_the_report_are_kept(table1: Reproduction) -> None:
    assert table1.plan.keep_weights_in("report") == "final"
    assert table1.plan.keep_weights_in("tune") == "none"


@pytest.mark.parametrize(
    ("phase", "error"),
    [
        ({"set": ["evaluation.nope=1"]}, "unknown key evaluation.nope"),
        ({"keep_weights": "some"}, 'phases.tune.keep_weights = "some" must be one of'),
    ],
)
def test_wrong_keys_of_a_phase_are_one_line(
    table1: Reproduction, phase: dict[str, Any], error: str
) -> None:
    phases = dict(table1.tables["phases"]) | {"tune": {"seeds": [100]} | phase}
    with pytest.raises(UserError, match=error):
        parse_plan(dict(table1.tables) | {"phases": phases}, "plan.toml", Path())


def test_the_plan_file_reads_back_to_the_same_plan(table1: Reproduction, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(dump_tables(table1.tables))
    read = read_plan(file)
    again = parse_plan(table1.tables, read.source, read.folder)
    assert read == again


def test_on_variants_puts_eepo_on_the_chosen_value() -> None:
    reproduction = plan("paper/on_variants")
    knobs = reproduction.plan.method_knobs(
        "", "eepo_clip_higher", "", lambda regime, name: "0.32" if name == "clip_higher" else ""
    )
    assert knobs == ["algorithm.clip_high=0.32"]
    assert reproduction.plan.recipe_of("", "eepo_clip_higher") == "paper/qwen2.5-3b+paper/eepo"


def test_hyperparameters_reports_every_value_without_tuning() -> None:
    reproduction = plan("paper/hyperparameters", seeds=2)
    assert seeds(reproduction) == {"report": (0, 1)}
    points = reproduction.plan.methods["more_rollouts"].points
    assert [point.value for point in points] == ["4", "16", "32"]
    assert all(reproduction.plan.methods[name].every_value for name in BASELINES)


def test_without_tuning_baselines_have_the_values_of_their_recipes() -> None:
    methods = plan("table1", tune_seeds=0, seeds=3).plan.methods
    assert methods["higher_temperature"].knobs == ("algorithm.temperature=1.2",)
    assert methods["more_entropy"].knobs == ("algorithm.entropy_coef=0.001",)
    assert methods["clip_higher"].knobs == ("algorithm.clip_high=0.28",)


def test_all_has_an_experiment_for_each_model_and_shares_runs(tmp_path: Path) -> None:
    targets = find_targets("paper/all")
    assert [target.name for target in targets] == [
        "qwen2.5-3b", "llama-3.2-3b-instruct", "qwen3-8b-base", "qwen3-14b-base",
    ]  # fmt: skip
    shown = [table for target in targets for table in target.tables]
    assert shown == ["table1", "on_variants", "table2", "table3", "table4"]
    assert set(targets[0].methods) == {*TARGETS["table1"].methods, *TARGETS["on_variants"].methods}
    with pytest.raises(UserError, match="paper/all has a model for each table"):
        plan_reproductions(ReproduceOptions("paper/all", model="x", methods=()), tmp_path)


def test_chosen_methods_bring_the_base_model_and_what_they_need() -> None:
    reproduction = plan("on_variants", methods=("eepo_more_entropy",))
    assert [*reproduction.plan.methods] == ["base", "more_entropy", "eepo_more_entropy"]
    assert [*plan("table4", methods=("eepo",)).plan.methods] == ["base", "eepo"]


def test_another_recipe_and_model_keep_the_methods(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    source = recipe.find("countdown/grpo").read_text()
    own.write_text(source)
    reproduction = plan("table1", recipe=str(own), model=str(tmp_path), methods=("eepo",))
    assert reproduction.plan.objective == ("greedy",)
    config = reproduction.experiment().config(Run("report", "", "eepo", "", 0))
    assert config.algorithm.num_stages == 2
    assert config.model.path == str(tmp_path)
    assert config.task.name == "countdown"
    words = command_line(reproduction)
    assert f"--recipe {own} --model {tmp_path} --methods eepo --out out" in words


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    row = {"problem": "What is $1+1$?", "answer": "2"}
    for name in ("math_lvl3to5_train", "minerva_math", "olympiadbench", "amc23", "aime24"):
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def test_data_come_from_a_folder(data: Path) -> None:
    task: Any = plan("table1", data_dir=str(data), methods=("grpo",)).config.task
    assert task.data_dir == str(data)
    assert (task.train, task.problem_column) == ("math_lvl3to5_train.jsonl", "problem")


def test_a_training_file_may_have_the_columns_of_the_hub(data: Path) -> None:
    row = {"question": "What is $1+1$?", "gt_answer": "2"}
    (data / "math_lvl3to5_train.jsonl").write_text(json.dumps(row) + "\n")
    task: Any = plan("table1", data_dir=str(data), methods=("grpo",)).config.task
    assert (task.problem_column, task.answer_column) == ("question", "gt_answer")


def test_a_recipe_with_its_own_training_set_keeps_it(data: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    paper = recipe.find("paper/qwen2.5-3b")
    own.write_text(f'extends = "{paper}"\n[task]\ntrain = "amc23.jsonl"\n')
    task: Any = plan("table1", recipe=str(own), data_dir=str(data), methods=("grpo",)).config.task
    assert task.train == "amc23.jsonl"


def test_missing_data_are_one_line(data: Path) -> None:
    (data / "amc23.jsonl").unlink()
    with pytest.raises(UserError, match=r"benchmark amc23: no file in .*; looked for amc23.jsonl"):
        plan("table1", data_dir=str(data), methods=("grpo",))
    with pytest.raises(UserError, match=r"task.train = 'own.jsonl': no such file in "):
        plan("table1", data_dir=str(data), overrides=["task.train=own.jsonl"])


def test_without_a_training_file_the_training_set_stays_on_the_hub(data: Path) -> None:
    (data / "math_lvl3to5_train.jsonl").unlink()
    task: Any = plan("table1", data_dir=str(data), methods=("grpo",)).config.task
    assert task.train.startswith("hkust-nlp/")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"target": "paper/table9"}, "unknown target 'paper/table9'; allowed: paper/table1, "),
        ({"methods": ("ppo",)}, "--methods ppo is no method of paper/table1; allowed: base, grpo"),
        ({"data_dir": "/no/such"}, "--data-dir /no/such is no folder"),
        ({"recipe": "no/such"}, "no/such: no such recipe"),
        ({"overrides": ["algorithm.nope=1"]}, "unknown key algorithm.nope"),
    ],
)
def test_wrong_options_are_one_line(options: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError, match=error.replace("(", r"\(")) as caught:
        plan(**({"target": "paper/table1"} | options))
    assert "\n" not in str(caught.value)
