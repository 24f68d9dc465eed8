"""Evaluation on benchmarks with the built-in policy: the numbers, what is kept, and going on as if never stopped."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from eepo import cli
from eepo.assemble import build_evaluation
from eepo.evaluation.benchmark_run import BenchmarkEvaluation, BenchmarkOptions, weights_digest
from eepo.evaluation.results import average, benchmark_values, results
from eepo.evaluation.sets import PromptSet, pick_template, run_tables
from eepo.evaluation.store import Store
from eepo.model import loading
from eepo.rewards.countdown import parse_expression
from eepo.rollout.transformers import TransformersEngine
from eepo.runs.progress import Progress
from eepo.types import Completion, Prompt, Sampling, UserError, Verdict

TEXTS = ["1 2 3 4 = 10 :", "2 3 4 5 = 14 :", "5 5 6 7 = 23 :", "1 1 6 7 = 15 :", "9 2 3 4 = 18 :", "2 2 2 9 = 60 :",
         "1 2 11 3 7 8 = 52 :"]  # fmt: skip
SAMPLING = Sampling(temperature=1.5, max_new_tokens=16, seed=3)
NUM_SAMPLES, MAX_ROWS = 4, 8  # so greedy is one part of 7 problems, and the samples are four parts
PARTS = [([f"p{place}" for place in range(7)], 1)] + [
    (ids, NUM_SAMPLES) for ids in (["p0", "p1"], ["p2", "p3"], ["p4", "p5"], ["p6"])
]


class Stopped(Exception):
    """What a kill is in these tests."""


class SumReward:
    """The value of an expression must be the gold; with `parts`, the process dies when as many have been graded."""

    def __init__(self, parts: int | None = None) -> None:
        self.parts = parts

    def grade(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        if self.parts == 0:
            raise Stopped
        self.parts = None if self.parts is None else self.parts - 1
        found = [parse_expression(text) for text in texts]
        return [
            Verdict(float(str(one.value) == prompt.answer), str(one.value))
            if one
            else Verdict(0.0, None, "none")
            for prompt, one in zip(prompts, found, strict=True)
        ]


class CountingEngine:
    """The real engine, with a count of what was asked of it."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine, self.dtype = engine, engine.dtype
        self.calls: list[tuple[list[str], int]] = []

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        raise AssertionError("evaluation judges the weights that the engine holds")

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[list[Completion]]:
        self.calls.append(([prompt.id for prompt in prompts], num_samples))
        return self.engine.generate(prompts, num_samples, sampling)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def embedded(demo_model: Any, tokenizer: Any) -> TransformersEngine:
    return TransformersEngine(copy.deepcopy(demo_model), tokenizer, MAX_ROWS)


@pytest.fixture
def engine(embedded: TransformersEngine) -> CountingEngine:
    return CountingEngine(embedded)


@pytest.fixture(scope="module")
def problem_set(tokenizer: Any) -> PromptSet:
    prompts = [
        Prompt(f"p{place}", text, tuple(tokenizer(text).input_ids), text.split()[-2])
        for place, text in enumerate(TEXTS)
    ]
    return PromptSet("amc23", "AMC 23", prompts)


def quiet() -> Progress:
    return Progress(Console(file=io.StringIO()))


def evaluation(
    folder: Path, engine: Any, reward: Any, *sets: PromptSet, num_samples: int = NUM_SAMPLES
) -> BenchmarkEvaluation:
    store = Store(folder)
    settings = {"model": "builtin:countdown", "num_samples": num_samples}
    store.open(settings | {"benchmarks": {one.name: one.settings() for one in sets}}, "cpu")
    return BenchmarkEvaluation(
        engine, reward, list(sets), store, num_samples, SAMPLING, MAX_ROWS, quiet()
    )


def lines(folder: Path, name: str = "amc23") -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (folder / "completions" / f"{name}.jsonl").read_text().splitlines()
    ]


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_every_completion_is_kept_with_its_verdict(
    tmp_path: Path, engine: Any, problem_set: PromptSet
) -> None:
    evaluation(tmp_path, engine, SumReward(), problem_set).run()
    rows = lines(tmp_path)
    ids = [prompt.id for prompt in problem_set.prompts]
    assert [(row["id"], row["index"]) for row in rows if row["kind"] == "greedy"] == [
        (one, 0) for one in ids
    ]
    drawn = [(row["id"], row["index"]) for row in rows if row["kind"] == "sample"]
    assert drawn == [(one, index) for one in ids for index in range(NUM_SAMPLES)]
    assert [row["prompt"] for row in rows if "prompt" in row] == TEXTS
    for row in rows:
        (verdict,) = SumReward().grade([problem_set.prompts[ids.index(row["id"])]], [row["text"]])
        assert (row["reward"], row["answer"]) == (verdict.reward, verdict.answer)
        assert 0 < row["num_tokens"] <= 16


def test_results_are_those_of_the_kept_lines(
    tmp_path: Path, engine: Any, problem_set: PromptSet
) -> None:
    told = json.loads(evaluation(tmp_path, engine, SumReward(), problem_set).run().read_text())
    measures = told["benchmarks"]["amc23"]["measures"]
    greedy = [row for row in lines(tmp_path) if row["kind"] == "greedy"]
    drawn = [row for row in lines(tmp_path) if row["kind"] == "sample"]
    assert 0 < sum(row["reward"] for row in drawn) < len(drawn), (
        "the policy must be neither perfect nor hopeless here"
    )
    assert measures["greedy/accuracy"]["mean"] == pytest.approx(
        sum(row["reward"] for row in greedy) / 7
    )
    assert measures["samples/mean@4"]["mean"] == pytest.approx(
        sum(row["reward"] for row in drawn) / 28
    )
    assert measures["samples/pass@1"] == measures["samples/mean@4"]
    solved = {row["id"] for row in drawn if row["reward"]}
    assert measures["samples/pass@4"]["mean"] == pytest.approx(len(solved) / 7)
    assert measures["samples/length"]["mean"] == pytest.approx(
        sum(row["num_tokens"] for row in drawn) / 28
    )
    assert told["average"] == measures, "of one benchmark"


def test_half_characters_are_kept_and_read_back(tmp_path: Path, problem_set: PromptSet) -> None:
    class Odd:
        dtype = torch.float32

        def generate(
            self, prompts: Sequence[Prompt], num: int, sampling: Sampling
        ) -> list[list[Completion]]:
            return [
                [Completion((1,), (0.0,), "\ud800 \u2028 \x00 {", False)] * num for _ in prompts
            ]

    evaluation(tmp_path, Odd(), SumReward(), problem_set).run()
    assert {row["text"] for row in Store(tmp_path).rows("amc23") if "text" in row} == set()
    assert lines(tmp_path)[0]["text"] == "\ud800 \u2028 \x00 {"
    measures = results(tmp_path)["benchmarks"]["amc23"]["measures"]
    assert measures["greedy/format_share"]["mean"] == 0
    assert measures["samples/truncated_share"]["mean"] == 1


# --- going on ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def never_stopped(
    tmp_path_factory: pytest.TempPathFactory, embedded: TransformersEngine, problem_set: PromptSet
) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    evaluation(folder, embedded, SumReward(), problem_set).run()
    return folder


def same(one: Path, other: Path) -> bool:
    names = ("results.json", "completions/amc23.jsonl", "settings.json")
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


@pytest.mark.parametrize("parts", [0, 1, 2, 4])
def test_a_stopped_evaluation_goes_on_as_if_never_stopped(
    parts: int, tmp_path: Path, engine: Any, problem_set: PromptSet, never_stopped: Path
) -> None:
    with pytest.raises(Stopped):
        evaluation(tmp_path, engine, SumReward(parts), problem_set).run()
    assert not (tmp_path / "results.json").exists()
    assert len(engine.calls) == parts + 1
    engine.calls.clear()
    evaluation(tmp_path, engine, SumReward(), problem_set).run()
    assert same(tmp_path, never_stopped)
    assert len(engine.calls) == 5 - parts, "only what is missing is sampled"


@pytest.mark.parametrize("share", [0.02, 0.15, 0.5, 0.6, 0.77, 0.999])
def test_a_kill_while_writing_costs_no_more_than_the_part(
    share: float, tmp_path: Path, engine: Any, problem_set: PromptSet, never_stopped: Path
) -> None:
    """Cut anywhere, in the middle of a line or of a problem's samples."""
    shutil.copytree(never_stopped, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "completions" / "amc23.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    evaluation(tmp_path, engine, SumReward(), problem_set).run()
    assert same(tmp_path, never_stopped)
    assert engine.calls
    assert [call for call in engine.calls if call not in PARTS] == [], (
        "batches of other shapes round otherwise"
    )


def test_a_finished_evaluation_samples_nothing(
    tmp_path: Path, engine: Any, problem_set: PromptSet, never_stopped: Path
) -> None:
    shutil.copytree(never_stopped, tmp_path, dirs_exist_ok=True)
    evaluation(tmp_path, engine, SumReward(0), problem_set).run()
    assert engine.calls == []
    assert same(tmp_path, never_stopped)


def test_samples_may_be_added_to_a_greedy_evaluation(
    tmp_path: Path, engine: Any, problem_set: PromptSet, never_stopped: Path
) -> None:
    evaluation(tmp_path, engine, SumReward(), problem_set, num_samples=0).run()
    assert list(results(tmp_path)["average"]) == [
        "greedy/accuracy", "greedy/format_share", "greedy/truncated_share", "greedy/length"
    ]  # fmt: skip
    engine.calls.clear()
    evaluation(tmp_path, engine, SumReward(), problem_set).run()
    assert {num for _, num in engine.calls} == {NUM_SAMPLES}
    assert same(tmp_path, never_stopped)


def test_benchmarks_may_be_added_and_draw_for_themselves(
    tmp_path: Path, engine: Any, problem_set: PromptSet, never_stopped: Path
) -> None:
    evaluation(tmp_path, engine, SumReward(), problem_set).run()
    other = dataclasses.replace(problem_set, name="aime24", title="AIME 24")
    engine.calls.clear()
    told = json.loads(evaluation(tmp_path, engine, SumReward(), other).run().read_text())
    assert list(told["benchmarks"]) == ["amc23", "aime24"]
    assert len(engine.calls) == 5, "the first one is not touched"
    texts = [[row["text"] for row in lines(tmp_path, name)] for name in ("amc23", "aime24")]
    assert texts[0][:7] == texts[1][:7], "greedy is greedy"
    assert texts[0][7:] != texts[1][7:], "the same ids in another benchmark have other draws"
    one, two = (
        told["benchmarks"][name]["measures"]["samples/mean@4"]["mean"]
        for name in told["benchmarks"]
    )
    assert told["average"]["samples/mean@4"]["mean"] == pytest.approx((one + two) / 2)


def test_a_benchmark_that_is_not_finished_is_not_in_the_results(
    tmp_path: Path, engine: Any, problem_set: PromptSet
) -> None:
    other = dataclasses.replace(problem_set, name="aime24")
    with pytest.raises(Stopped):
        evaluation(
            tmp_path, engine, SumReward(6), problem_set, other
        ).run()  # five parts, then aime24's greedy one
    told = results(tmp_path)
    assert "samples/mean@4" in told["benchmarks"]["amc23"]["measures"]
    assert "samples/mean@4" not in told["benchmarks"]["aime24"]["measures"]
    assert "samples/mean@4" not in told["average"], (
        "an average over fewer benchmarks would be compared"
    )
    assert "greedy/accuracy" in told["average"]


def test_lines_that_were_taken_out_are_noticed(
    tmp_path: Path, engine: Any, problem_set: PromptSet
) -> None:
    evaluation(tmp_path, engine, SumReward(), problem_set).run()
    path = tmp_path / "completions" / "amc23.jsonl"
    kept = path.read_text().splitlines(keepends=True)
    path.write_text("".join(kept[:3] + kept[4:]))
    with pytest.raises(UserError, match=r"amc23\.jsonl: lines are missing"):
        evaluation(tmp_path, engine, SumReward(), problem_set).run()


def test_no_memory_is_said_in_one_line_and_costs_nothing_that_was_done(
    tmp_path: Path, embedded: TransformersEngine, problem_set: PromptSet, never_stopped: Path
) -> None:
    class Small(CountingEngine):
        def generate(
            self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
        ) -> list[list[Completion]]:
            if num_samples > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().generate(prompts, num_samples, sampling)

    with pytest.raises(UserError, match="--max-rows 8"):
        evaluation(tmp_path, Small(embedded), SumReward(), problem_set).run()
    evaluation(tmp_path, embedded, SumReward(), problem_set).run()
    assert same(tmp_path, never_stopped)


# --- estimates from known lines ---------------------------------------------------------------------------------------


def row(
    right: int, answer: str | None, num_tokens: int = 10, finished: bool = True
) -> dict[str, Any]:
    return {
        "reward": float(right),
        "answer": answer,
        "num_tokens": num_tokens,
        "finished": finished,
    }


def test_estimates_of_known_lines() -> None:
    greedy = [row(1, "5"), row(0, None, 30, finished=False)]
    first = [row(1, "5"), row(1, "5"), row(0, "6"), row(0, "6")]  # a tie
    second = [row(0, "1"), row(0, "1"), row(1, "2", 20), row(0, None, 40, finished=False)]
    values = benchmark_values(greedy + first + second, 2, 4)
    assert values == {
        "greedy/accuracy": [1, 0],
        "greedy/format_share": [1, 0],
        "greedy/truncated_share": [0, 1],
        "greedy/length": [10, 30],
        "samples/mean@4": [0.5, 0.25],
        "samples/majority@4": [0.5, 0],
        "samples/pass@1": [pytest.approx(0.5), pytest.approx(0.25)],
        "samples/pass@2": [pytest.approx(5 / 6), pytest.approx(1 / 2)],
        "samples/pass@4": [1, 1],
        "samples/format_share": [1, 0.75],
        "samples/truncated_share": [0, 0.25],
        "samples/length": [10, 20],
    }


def test_the_average_gives_benchmarks_equal_weight() -> None:
    found = average([{"greedy/accuracy": [1.0, 1.0]}, {"greedy/accuracy": [0.0] * 98 + [1.0] * 2}])
    assert found["greedy/accuracy"]["mean"] == pytest.approx((1 + 0.02) / 2)
    low, high = found["greedy/accuracy"]["low"], found["greedy/accuracy"]["high"]
    assert 0.5 <= low < 0.51 < high < 0.53, (
        "the small benchmark has no spread, the large one little"
    )


@pytest.mark.parametrize("num_lines", [0, 1])
def test_too_few_lines_are_no_estimate(num_lines: int) -> None:
    assert benchmark_values([row(1, "5")] * num_lines, 2, 0) == {}


# --- from the command line --------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("amc23", "minerva_math"):
        rows = [
            {"id": f"{name}-{place}", "problem": text, "answer": text.split()[-2]}
            for place, text in enumerate(TEXTS)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def options(data: Path) -> BenchmarkOptions:
    return BenchmarkOptions(
        "builtin:countdown", ("amc23",), str(data), max_new_tokens=12, template="{problem}", reward="exact",
        device="cpu", num_samples=2, limit=3,
    )  # fmt: skip


def run(options: BenchmarkOptions, out: Path, **changed: Any) -> dict[str, Any]:
    evaluation = build_evaluation(dataclasses.replace(options, **changed), out, quiet())
    return dict(json.loads(evaluation.run().read_text()))


def refusal(options: BenchmarkOptions, out: Path, **changed: Any) -> str:
    with pytest.raises(UserError) as caught:
        run(options, out, **changed)
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    return line


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"max_new_tokens": 13}, ["--max-new-tokens 13", "has 12"]),
        ({"num_samples": 4}, ["--samples 4", "has 2"]),
        ({"num_samples": 0}, ["--samples 0", "has 2"]),
        ({"temperature": 0.5}, ["--temperature 0.5", "has 1.0"]),
        ({"seed": 1}, ["--seed 1", "has 0"]),
        ({"limit": 2}, ["--limit 2", "has 3"]),
        ({"template": "{problem} "}, ["--template"]),
        ({"reward": "math"}, ["--reward 'math'"]),
    ],
)
def test_another_evaluation_is_refused_in_the_same_folder(
    changed: dict[str, Any], named: list[str], options: BenchmarkOptions, tmp_path: Path
) -> None:
    settings = build_evaluation(options, tmp_path / "out", quiet()).store.settings()
    line = refusal(options, tmp_path / "out", **changed)
    assert [word for word in [*named, "another --out"] if word not in line] == []
    assert Store(tmp_path / "out").settings() == settings


def test_other_problems_are_refused_in_the_same_folder(
    options: BenchmarkOptions, tmp_path: Path, data: Path
) -> None:
    run(options, tmp_path / "out")
    path = data / "amc23.jsonl"
    path.write_text(path.read_text().replace('"answer": "14"', '"answer": "15"'))
    assert "amc23: its problems" in refusal(options, tmp_path / "out")


def test_trained_weights_at_the_same_path_are_refused(
    options: BenchmarkOptions, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(loading.BUILTIN / "countdown", folder)
    run(options, tmp_path / "out", model=str(folder))
    model = loading.load_model(loading.ModelConfig(path=str(folder)), torch.device("cpu"))
    before = weights_digest(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 1e-3)
    assert weights_digest(model) != before
    model.save_pretrained(folder)
    assert "weights = " in refusal(options, tmp_path / "out", model=str(folder))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"benchmarks": ("amc24",)}, ["amc24", "amc23", "gsm8k"]),
        ({"benchmarks": ()}, ["--benchmarks"]),
        ({"benchmarks": ("amc23", "amc23")}, ["amc23", "twice"]),
        ({"benchmarks": ("aime25",)}, ["aime25", "aime25.jsonl"]),
        ({"template": "no place"}, ["--template", "no place", "{problem}"]),
        ({"template": "chat"}, ["chat"]),
        ({"max_prompt_tokens": 2}, ["amc23", "--max-prompt-tokens 2"]),
        ({"max_new_tokens": 4096}, ["--max-new-tokens 4096", "positions", "at most"]),
        ({"model": "./nowhere"}, ["./nowhere"]),
        ({"reward": "abacus"}, ["abacus"]),
    ],
)
def test_mistakes_are_one_line_and_leave_no_folder(
    changed: dict[str, Any], named: list[str], options: BenchmarkOptions, tmp_path: Path
) -> None:
    line = refusal(options, tmp_path / "out", **changed)
    assert [word for word in named if word not in line] == []
    assert not (tmp_path / "out").exists()


def test_a_file_of_problems_is_a_benchmark_too(
    options: BenchmarkOptions, tmp_path: Path, data: Path
) -> None:
    (data / "amc23.jsonl").rename(data / "mine.jsonl")
    told = run(options, tmp_path / "out", benchmarks=("mine.jsonl", "minerva_math"))
    assert {name: one["title"] for name, one in told["benchmarks"].items()} == {
        "mine": "mine",
        "minerva_math": "Minerva Math",
    }


def test_problems_left_out_are_counted(
    options: BenchmarkOptions, tmp_path: Path, tokenizer: Any
) -> None:
    longest = max(len(tokenizer(text).input_ids) for text in TEXTS)
    left_out = sum(len(tokenizer(text).input_ids) == longest for text in TEXTS)
    told = run(options, tmp_path / "out", limit=0, max_prompt_tokens=longest - 1)
    assert 0 < left_out < 7
    assert told["benchmarks"]["amc23"]["num_left_out"] == left_out
    assert told["benchmarks"]["amc23"]["num_problems"] == 7 - left_out


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """A run on a data set that was stopped after two checkpoints."""
    folder = tmp_path / "run_50%"
    for step in (10, 20):
        shutil.copytree(loading.BUILTIN / "countdown", folder / "checkpoints" / f"step-{step:06d}")
    (folder / "recipe.toml").write_text('[task]\nname = "dataset"\ntemplate = "{problem}"\n')
    return folder


def test_a_run_that_is_not_finished_is_evaluated_at_its_newest_checkpoint_in_its_own_template(
    options: BenchmarkOptions, tmp_path: Path, unfinished: Path
) -> None:
    settings = run(options, tmp_path / "out", model=str(unfinished), template=None)["settings"]
    assert settings["path"] == str(unfinished / "checkpoints" / "step-000020")
    assert settings["template"] == "{problem}"


def test_which_template(unfinished: Path, tmp_path: Path) -> None:
    tables = run_tables(str(unfinished / "checkpoints" / "step-000010"))
    assert pick_template(None, tables) == "{problem}"
    assert pick_template("chat", tables) == "chat"
    assert (
        pick_template(None, {"task": {"name": "countdown", "template": "{numbers} = {target}"}})
        == "boxed"
    )
    assert pick_template(None, run_tables("acme/model")) == "boxed"


def test_the_command_writes_all_results_and_goes_on(
    data: Path,
    unfinished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["eval", unfinished, "--benchmarks", "amc23, minerva_math", "--data-dir", data, "--samples", 2,
                 "--temperature", 0.7, "--max-new-tokens", 12, "--reward", "exact", "--device", "cpu"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["eepo", *map(str, arguments)])
    _called()
    folder = tmp_path / "evaluations" / "run_50%"
    assert "greedy pass@1" in capsys.readouterr().out
    assert "run\\_50\\%" in (folder / "results.tex").read_text()
    assert "| run_50% |" in (folder / "results.md").read_text()
    assert len((folder / "completions" / "minerva_math.jsonl").read_text().splitlines()) == 7 * 3
    first = (folder / "results.json").read_bytes()
    _called()
    assert (folder / "results.json").read_bytes() == first
    monkeypatch.setattr(
        sys, "argv", ["eepo", "table", f"EEPO={folder}", str(folder), "--out", "tables"]
    )
    _called()
    assert "| EEPO |" in (tmp_path / "tables" / "results.md").read_text()


def _called() -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
