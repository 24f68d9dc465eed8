"""A run is evaluated as it was trained: sets, prompts, lengths, stop text and dtype."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eepo import cli
from eepo.assemble import build_evaluation, build_trainer
from eepo.config import (
    AlgorithmConfig,
    CountdownConfig,
    EvaluationConfig,
    RolloutConfig,
    RunConfig,
    TrainingConfig,
)
from eepo.evaluation.defaults import DEFAULTS, fill_up
from eepo.evaluation.options import BenchmarkOptions
from eepo.evaluation.trained_run import TrainedRun, evaluation_name, find_run
from eepo.model import loading
from eepo.runs.progress import Progress
from eepo.types import UserError

pytestmark = pytest.mark.usefixtures("one_thread")

DATASET_RECIPE = """name = "eepo"
[task]
name = "dataset"
template = "{problem}"
max_prompt_tokens = 77
data_dir = "data"
[reward]
name = "exact"
[algorithm]
max_new_tokens = 6144
[training]
seed = 3
[rollout]
stop = "="
dtype = "float16"
max_rows = 9
[evaluation]
temperature = 0.7
"""


def silent_progress() -> Progress:
    return Progress(Console(file=io.StringIO()))


def write_run(folder: Path, text: str = DATASET_RECIPE) -> Path:
    for step in (10, 20):
        shutil.copytree(loading.BUILTIN / "countdown", folder / "checkpoints" / f"step-{step:06d}")
    (folder / "recipe.toml").write_text(text)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [{"problem": f"1 2 3 {n} = 10 :", "answer": str(n)} for n in range(1, 8)]
    for name in ("amc23", "minerva_math"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train countdown for one step with a stop text."""
    config = RunConfig(
        name="grpo",
        task=CountdownConfig(num_evaluation=6),
        algorithm=AlgorithmConfig(num_stages=1, group_size=2, max_new_tokens=14, kl_coef=0.0),
        training=TrainingConfig(num_steps=1, prompts_per_step=2, prompts_per_mini_batch=2, seed=5),
        rollout=RolloutConfig(stop="=", max_rows=64),
        evaluation=EvaluationConfig(num_samples=2),
    )
    folder = tmp_path_factory.mktemp("compare") / "grpo" / "seed-5"
    build_trainer(config, folder, resume=False, progress=silent_progress()).run()
    return folder


# --- names


@pytest.mark.parametrize(
    ("folder", "model", "name"),
    [
        ("runs/compare/grpo/seed-3", "runs/compare/grpo/seed-3", "grpo-seed-3"),
        ("runs/compare/eepo/seed-3", "runs/compare/eepo/seed-3/", "eepo-seed-3"),
        ("runs/eepo-3b", "runs/eepo-3b", "eepo-3b-seed-3"),
        ("runs/eepo-3b", "runs/eepo-3b/checkpoints/step-000010", "eepo-3b-seed-3-step-10"),
        ("runs/eepo-3b", ".", "eepo-3b-seed-3"),
    ],
)
def test_an_evaluation_is_named_by_method_and_seed(
    folder: str, model: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several seeds of a comparison must not share a folder."""
    run = write_run(tmp_path / folder)
    monkeypatch.chdir(run if model == "." else tmp_path)
    assert evaluation_name(model) == name


def test_a_model_without_a_run_has_its_own_name(tmp_path: Path) -> None:
    assert evaluation_name("Qwen/Qwen2.5-3B") == "Qwen2.5-3B"
    (tmp_path / "recipe.toml").write_text("name = 'sweep'\n")
    (tmp_path / "model").mkdir()
    assert find_run(str(tmp_path / "model")) is None, "a recipe further up is another run's"


# --- settings


def test_settings_come_from_the_recipe_of_the_run(tmp_path: Path) -> None:
    run = find_run(str(write_run(tmp_path / "run") / "checkpoints" / "step-000010"))
    assert run is not None
    assert (run.method, run.seed, run.step) == ("eepo", 3, 10)
    options = BenchmarkOptions(str(tmp_path / "run"), ("amc23",), num_samples=2)
    assert vars(fill_up(options, run)) == {
        "data_dir": "data",
        "template": "{problem}",
        "max_prompt_tokens": 77,
        "max_new_tokens": 6144,
        "temperature": 0.7,
        "stop": "=",
        "reward": "exact",
        "dtype": "float16",
        "max_rows": 9,
    }


def test_the_command_line_overrides_the_recipe() -> None:
    given: dict[str, Any] = {
        "data_dir": "elsewhere",
        "template": "chat",
        "max_prompt_tokens": 8,
        "max_new_tokens": 16,
        "temperature": 0.1,
        "stop": "",
        "reward": "math",
        "dtype": "float32",
        "max_rows": 1,
    }
    run = TrainedRun(Path("run"), {"rollout": {"stop": ";"}, "algorithm": {"max_new_tokens": 6144}})
    assert vars(fill_up(BenchmarkOptions("run", ("amc23",), num_samples=1, **given), run)) == given


@pytest.mark.parametrize(
    "tables", [None, {"task": {"name": "countdown", "template": "{numbers} = {target}"}}]
)
def test_without_a_data_set_recipe_prompts_and_grader_are_the_defaults(tables: Any) -> None:
    run = TrainedRun(Path("run"), tables) if tables else None
    assert fill_up(BenchmarkOptions("run", ("amc23",)), run) == DEFAULTS


def test_a_warm_start_has_its_length_limit_at_the_top_of_its_recipe() -> None:
    run = TrainedRun(Path("run"), {"max_new_tokens": 64, "task": {"name": "countdown"}})
    assert fill_up(BenchmarkOptions("run", ("amc23",)), run).max_new_tokens == 64


# --- evaluations


def evaluate(options: BenchmarkOptions, out: Path) -> dict[str, Any]:
    return dict(json.loads(build_evaluation(options, out, silent_progress()).run().read_text()))


def test_a_run_is_evaluated_on_the_sets_of_its_recipe(finished: Path, tmp_path: Path) -> None:
    """Its greedy accuracy equals the one that the run has recorded."""
    written = evaluate(BenchmarkOptions(str(finished), num_samples=4), tmp_path / "out")
    settings = written["settings"]
    assert (settings["max_new_tokens"], settings["stop"]) == (14, "=")
    assert (settings["method"], settings["run_seed"], settings["step"]) == ("grpo", 5, 1)
    lines = (finished / "evaluations.jsonl").read_text().splitlines()
    recorded = {row["set"]: row for row in map(json.loads, lines)}
    assert list(written["benchmarks"]) == list(recorded) == ["in_range", "out_of_range"]
    for name, benchmark in written["benchmarks"].items():
        problems = recorded[name]["problems"]
        assert [(p["id"], p["greedy"]) for p in benchmark["problems"]] == [
            (p["id"], p["greedy"]) for p in problems
        ]
        mean = benchmark["measures"]["samples/mean@4"]["mean"]
        assert mean == pytest.approx(sum(p["correct"] for p in benchmark["problems"]) / 24)
        assert benchmark["num_samples"] == 4


def test_the_stop_text_ends_completions(finished: Path, tmp_path: Path) -> None:
    evaluate(BenchmarkOptions(str(finished), stop="+"), tmp_path / "out")
    lines = (tmp_path / "out" / "completions" / "in_range.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"].strip() for line in lines]
    assert any(text.endswith("+") for text in texts)
    assert not [text for text in texts if "+" in text[:-1]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"template": "chat"}, '--template needs --benchmarks: the run has the task "countdown"'),
        ({"reward": "abacus"}, "--reward abacus"),
    ],
)
def test_wrong_options_for_a_run_are_one_line(
    changed: dict[str, Any], message: str, finished: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        evaluate(BenchmarkOptions(str(finished), **changed), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_without_evaluation_sets_needs_benchmarks(tmp_path: Path, data: Path) -> None:
    recipe = f'[task]\nname = "dataset"\ntrain = "{data / "amc23.jsonl"}"\n'
    recipe += "[algorithm]\nmax_new_tokens = 12\n[training]\nseed = 3\n"
    options = BenchmarkOptions(model=str(write_run(tmp_path / "run", recipe)), device="cpu")
    with pytest.raises(UserError, match=r"run: .* no evaluation sets; give --benchmarks"):
        build_evaluation(options, tmp_path / "out", silent_progress())


def test_an_unfinished_run_is_evaluated_at_its_latest_checkpoint(
    data: Path, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", DATASET_RECIPE.replace("6144", "12"))
    options = BenchmarkOptions(
        str(run), ("amc23",), data_dir=str(data), dtype="float32", device="cpu", limit=2
    )
    settings = evaluate(options, tmp_path / "out")["settings"]
    assert settings["path"] == str(run / "checkpoints" / "step-000020")
    assert settings["template"] == "{problem}"
    assert settings["max_new_tokens"] == 12


def run_command(*arguments: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["eepo", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert not ended.value.code


def test_command_writes_all_results_and_may_be_repeated(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "run_50%", DATASET_RECIPE.replace("float16", "float32"))
    command = ["eval", run, "--benchmarks", "amc23, minerva_math", "--data-dir", data]
    command += ["--samples", 2, "--max-new-tokens", 12, "--device", "cpu"]
    run_command(*command)
    folder = tmp_path / "evaluations" / "run_50%-seed-3"
    assert "greedy pass@1" in capsys.readouterr().out
    assert "eepo &" in (folder / "results.tex").read_text()
    assert "| eepo |" in (folder / "results.md").read_text()
    assert len((folder / "completions" / "minerva_math.jsonl").read_text().splitlines()) == 7 * 3
    first = (folder / "results.json").read_bytes()
    run_command(*command)
    assert (folder / "results.json").read_bytes() == first
    run_command("table", f"50_%={folder}", "--out", "tables", "--measure", "pass@2")
    assert "| 50_% |" in (tmp_path / "tables" / "results.md").read_text()
    assert "50\\_\\% &" in (tmp_path / "tables" / "results.tex").read_text()


@pytest.mark.slow
def test_runs_and_evaluations_share_tables_and_reports(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole path: a finished run, its evaluation with more samples, table and report."""
    monkeypatch.chdir(tmp_path)
    run_command("eval", finished, "--samples", 4)
    run_command("eval", "builtin:countdown", "--benchmarks", _problems(tmp_path), "--limit", 2,
                "--max-new-tokens", 12, "--template", "{problem}", "--reward", "exact")  # fmt: skip
    evaluations = tmp_path / "evaluations"
    assert sorted(path.name for path in evaluations.iterdir()) == ["countdown", "grpo-seed-5"]
    for sources in ([finished.parents[1]], [evaluations], [finished, evaluations]):
        run_command("table", *sources, "--out", "tables")
        text = (tmp_path / "tables" / "results.md").read_text()
        assert "| grpo |" in text
        assert ("| countdown |" in text) == (evaluations in sources)
        run_command("report", *sources, "--out", "report.html")
        page = (tmp_path / "report.html").read_text()
        assert ("evaluated only" in page) == (evaluations in sources)
        assert (tmp_path / "report_figures" / "pass_at_k.png").is_file()


def _problems(folder: Path) -> Path:
    path = folder / "own.jsonl"
    rows = [{"problem": f"1 2 3 {n} = 10 :", "answer": str(n)} for n in (1, 2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("template", "num_parts"), [(None, 3), ("{problem}", 1)])
def test_benchmarks_have_the_examples_of_the_runs_prompts(
    template: str | None, num_parts: int, data: Path, tmp_path: Path
) -> None:
    rows = [{"problem": f"{n} {n} = 20 :", "answer": str(n)} for n in range(1, 8)]
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    knobs = f'train = "train.jsonl"\nnum_examples = 2\ndata_dir = "{data}"'
    text = DATASET_RECIPE.replace('data_dir = "data"', knobs)
    options = BenchmarkOptions(
        str(write_run(tmp_path / "run", text)),
        ("amc23",),
        max_new_tokens=4,
        template=template,
        device="cpu",
    )
    evaluation = build_evaluation(options, tmp_path / "out", silent_progress())
    parts = evaluation.sets[0].prompts[0].text.split("\n\n")
    assert len(parts) == num_parts
    assert parts[-1] == "1 2 3 1 = 10 :"
    assert all("= 20 :\\boxed{" in example for example in parts[:-1])
