"""Tests of the evaluation on benchmarks, with the built-in policy."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from eepo.assemble import build_evaluation
from eepo.evaluation.benchmark_run import BenchmarkEvaluation, weights_digest
from eepo.evaluation.options import BenchmarkOptions
from eepo.evaluation.results import Sizes, average, benchmark_values, results
from eepo.evaluation.sets import PromptSet
from eepo.evaluation.store import Store
from eepo.model import loading
from eepo.reports.benchmark_results import read_results
from eepo.reports.benchmark_tables import comparison_table
from eepo.rewards.countdown import parse_expression
from eepo.rollout.paged.engine import PagedEngine
from eepo.rollout.transformers import TransformersEngine
from eepo.runs import progress
from eepo.runs.lock import RunLock
from eepo.runs.progress import Progress
from eepo.types import Completion, Prompt, Sampling, UserError, Verdict

TEXTS = [
    "1 2 3 4 = 10 :",
    "2 3 4 5 = 14 :",
    "5 5 6 7 = 23 :",
    "1 1 6 7 = 15 :",
    "9 2 3 4 = 18 :",
    "2 2 2 9 = 60 :",
    "1 2 11 3 7 8 = 52 :",
]
SAMPLING = Sampling(temperature=1.5, max_new_tokens=16, seed=3)
# The greedy pass is one chunk of 7 problems, the sampling pass is four chunks.
NUM_SAMPLES, MAX_ROWS = 4, 8
CHUNKS = [([f"amc23/p{index}" for index in range(7)], 1)] + [
    ([f"amc23/p{index}" for index in indices], NUM_SAMPLES)
    for indices in ((0, 1), (2, 3), (4, 5), (6,))
]


class Stopped(Exception):
    """Simulates a kill."""


class SumReward:
    """Compares the value of an expression with the gold answer.

    With `num_chunks`, it raises `Stopped` after so many chunks.
    """

    def __init__(self, num_chunks: int | None = None) -> None:
        self.num_chunks = num_chunks

    def grade(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        if self.num_chunks is not None:
            if self.num_chunks == 0:
                raise Stopped
            self.num_chunks -= 1
        return [self._verdict(*pair) for pair in zip(prompts, texts, strict=True)]

    @staticmethod
    def _verdict(prompt: Prompt, text: str) -> Verdict:
        expression = parse_expression(text)
        if expression is None:
            return Verdict(0.0, None, "none")
        value = str(expression.value)
        return Verdict(float(value == prompt.answer), value)


class RecordingEngine:
    """Records the calls to the real engine."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine, self.dtype = engine, engine.dtype
        self.calls: list[tuple[list[str], int]] = []
        self.continuous_rows = 0  # one chunk per call

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        raise AssertionError("evaluation uses the weights that the engine holds")

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[list[Completion]]:
        self.calls.append(([prompt.id for prompt in prompts], num_samples))
        return self.engine.generate(prompts, num_samples, sampling)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def builtin_engine(demo_model: Any, tokenizer: Any) -> TransformersEngine:
    return TransformersEngine(copy.deepcopy(demo_model), tokenizer, MAX_ROWS)


@pytest.fixture
def engine(builtin_engine: TransformersEngine) -> RecordingEngine:
    return RecordingEngine(builtin_engine)


@pytest.fixture(scope="module")
def problem_set(tokenizer: Any) -> PromptSet:
    prompts = [
        Prompt(f"p{index}", text, tuple(tokenizer(text).input_ids), text.split()[-2])
        for index, text in enumerate(TEXTS)
    ]
    return PromptSet("amc23", "AMC 23", prompts)


def silent_progress() -> Progress:
    return Progress(Console(file=io.StringIO()))


def evaluation(
    folder: Path, engine: Any, reward: Any, *sets: PromptSet, num_samples: int = NUM_SAMPLES
) -> BenchmarkEvaluation:
    store = Store(folder)
    settings = {"model": "builtin:countdown", "num_samples": num_samples}
    benchmarks = {prompt_set.name: prompt_set.settings() for prompt_set in sets}
    store.open(settings | {"benchmarks": benchmarks}, "cpu")
    return BenchmarkEvaluation(
        engine, reward, list(sets), store, num_samples, SAMPLING, MAX_ROWS, silent_progress()
    )


def read_completions(folder: Path, name: str = "amc23") -> list[dict[str, Any]]:
    text = (folder / "completions" / f"{name}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


# --- calls of the engine ---


def test_an_engine_that_replaces_rows_samples_several_benchmarks_in_one_call(
    tmp_path: Path, demo_model: Any, tokenizer: Any, problem_set: PromptSet, uninterrupted: Path
) -> None:
    """Each call waits for its longest completion, so few calls are faster."""
    paged = PagedEngine(copy.deepcopy(demo_model), tokenizer, MAX_ROWS)
    assert paged.unsupported_reason() == ""
    engine = RecordingEngine(paged)
    engine.continuous_rows = paged.continuous_rows
    other = dataclasses.replace(problem_set, name="aime24")
    evaluation(tmp_path, engine, SumReward(), problem_set, other).run()
    sizes = [(len(ids), number) for ids, number in engine.calls]
    # At most 32 rows per call: all greedy ones, then chunks of 8, 8, 8 and 4 rows per benchmark.
    assert sizes == [(14, 1), (7, NUM_SAMPLES), (7, NUM_SAMPLES)]
    assert engine.calls[0][0][6:8] == ["amc23/p6", "aime24/p0"]
    expected = read_completions(uninterrupted)
    assert read_completions(tmp_path) == expected
    ids = [row["id"] for row in read_completions(tmp_path, "aime24")]
    assert ids == [row["id"] for row in expected]


def test_progress_within_a_call_is_shown(
    tmp_path: Path,
    demo_model: Any,
    tokenizer: Any,
    problem_set: PromptSet,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", -1.0)
    engine = PagedEngine(copy.deepcopy(demo_model), tokenizer, MAX_ROWS)
    console = Console(file=io.StringIO(), width=200)
    running = evaluation(tmp_path, engine, SumReward(), problem_set)
    running.progress = Progress(console)
    running.run()
    lines = console.file.getvalue().splitlines()
    assert "greedy completions: 0/7 (7 of the next 7 completions)" in lines
    assert "4 samples per problem: 0/7 (28 of the next 28 completions)" in lines
    assert lines[-1].startswith("4 samples per problem: 7/7 ")


def test_a_stopped_evaluation_samples_missing_chunks_of_several_benchmarks(
    tmp_path: Path, builtin_engine: Any, problem_set: PromptSet, uninterrupted: Path
) -> None:
    engine = RecordingEngine(builtin_engine)
    engine.continuous_rows = 5  # so 20 rows per call
    other = dataclasses.replace(problem_set, name="aime24")
    with pytest.raises(Stopped):
        evaluation(tmp_path, engine, SumReward(2), problem_set, other).run()
    engine.calls.clear()
    evaluation(tmp_path, engine, SumReward(), problem_set, other).run()
    # Chunks of 8, 4 and 8 rows, and of 8, 8 and 4 rows
    assert [ids for ids, _ in engine.calls] == [
        ["amc23/p4", "amc23/p5", "amc23/p6", "aime24/p0", "aime24/p1"],
        ["aime24/p2", "aime24/p3", "aime24/p4", "aime24/p5", "aime24/p6"],
    ]
    first, second = (
        json.loads((each / "results.json").read_text()) for each in (tmp_path, uninterrupted)
    )
    assert first["benchmarks"]["amc23"]["problems"] == second["benchmarks"]["amc23"]["problems"]


# --- records ---


def test_every_completion_is_written_with_its_verdict(
    tmp_path: Path, engine: Any, problem_set: PromptSet
) -> None:
    evaluation(tmp_path, engine, SumReward(), problem_set).run()
    rows = read_completions(tmp_path)
    ids = [prompt.id for prompt in problem_set.prompts]
    greedy = [(row["id"], row["index"]) for row in rows if row["kind"] == "greedy"]
    assert greedy == [(prompt_id, 0) for prompt_id in ids]
    samples = [(row["id"], row["index"]) for row in rows if row["kind"] == "sample"]
    assert samples == [(prompt_id, index) for prompt_id in ids for index in range(NUM_SAMPLES)]
    assert [row["prompt"] for row in rows if "prompt" in row] == TEXTS
    for row in rows:
        (verdict,) = SumReward().grade([problem_set.prompts[ids.index(row["id"])]], [row["text"]])
        assert (row["reward"], row["answer"]) == (verdict.reward, verdict.answer)
        assert 0 < row["num_tokens"] <= 16


def test_results_match_the_written_completions(
    tmp_path: Path, engine: Any, problem_set: PromptSet
) -> None:
    path = evaluation(tmp_path, engine, SumReward(), problem_set).run()
    written = json.loads(path.read_text())
    measures = written["benchmarks"]["amc23"]["measures"]
    rows = read_completions(tmp_path)
    greedy = [row for row in rows if row["kind"] == "greedy"]
    samples = [row for row in rows if row["kind"] == "sample"]
    num_correct = sum(row["reward"] for row in samples)
    assert 0 < num_correct < len(samples), "the test needs both correct and wrong samples"
    greedy_mean = sum(row["reward"] for row in greedy) / 7
    assert measures["greedy/accuracy"]["mean"] == pytest.approx(greedy_mean)
    assert measures["samples/mean@4"]["mean"] == pytest.approx(num_correct / 28)
    assert measures["samples/pass@1"] == measures["samples/mean@4"]
    solved = {row["id"] for row in samples if row["reward"]}
    assert measures["samples/pass@4"]["mean"] == pytest.approx(len(solved) / 7)
    mean_length = sum(row["num_tokens"] for row in samples) / 28
    assert measures["samples/length"]["mean"] == pytest.approx(mean_length)
    assert written["average"] == measures, "there is only one benchmark"


def test_lone_surrogates_are_written_and_read_back(tmp_path: Path, problem_set: PromptSet) -> None:
    text = "\ud800 \u2028 \x00 {"

    class OddEngine:
        dtype = torch.float32

        def generate(
            self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
        ) -> list[list[Completion]]:
            return [[Completion((1,), (0.0,), text, False)] * num_samples for _ in prompts]

    evaluation(tmp_path, OddEngine(), SumReward(), problem_set).run()
    assert {row["text"] for row in Store(tmp_path).rows("amc23") if "text" in row} == set()
    assert read_completions(tmp_path)[0]["text"] == text
    measures = results(tmp_path)["benchmarks"]["amc23"]["measures"]
    assert measures["greedy/format_share"]["mean"] == 0
    assert measures["samples/truncated_share"]["mean"] == 1


# --- continuing a stopped evaluation ---


@pytest.fixture(scope="module")
def uninterrupted(
    tmp_path_factory: pytest.TempPathFactory,
    builtin_engine: TransformersEngine,
    problem_set: PromptSet,
) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    evaluation(folder, builtin_engine, SumReward(), problem_set).run()
    return folder


def same_files(first: Path, second: Path) -> bool:
    names = ("results.json", "completions/amc23.jsonl", "settings.json")
    return all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


@pytest.mark.parametrize("num_chunks", [0, 1, 2, 4])
def test_a_stopped_evaluation_continues_as_if_never_stopped(
    num_chunks: int, tmp_path: Path, engine: Any, problem_set: PromptSet, uninterrupted: Path
) -> None:
    with pytest.raises(Stopped):
        evaluation(tmp_path, engine, SumReward(num_chunks), problem_set).run()
    assert not (tmp_path / "results.json").exists()
    assert len(engine.calls) == num_chunks + 1
    engine.calls.clear()
    evaluation(tmp_path, engine, SumReward(), problem_set).run()
    assert same_files(tmp_path, uninterrupted)
    assert len(engine.calls) == 5 - num_chunks, "only missing chunks are sampled"


@pytest.mark.parametrize("share", [0.02, 0.15, 0.5, 0.6, 0.77, 0.999])
def test_a_kill_while_writing_loses_at_most_one_chunk(
    share: float, tmp_path: Path, engine: Any, problem_set: PromptSet, uninterrupted: Path
) -> None:
    """The file may end inside a line, or between the samples of a problem."""
    shutil.copytree(uninterrupted, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "completions" / "amc23.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    evaluation(tmp_path, engine, SumReward(), problem_set).run()
    assert same_files(tmp_path, uninterrupted)
    assert engine.calls
    # Batches of other shapes would round differently.
    assert [call for call in engine.calls if call not in CHUNKS] == []


def test_temporary_files_of_killed_processes_are_removed(
    tmp_path: Path, engine: Any, problem_set: PromptSet, uninterrupted: Path
) -> None:
    shutil.copytree(uninterrupted, tmp_path, dirs_exist_ok=True)
    for name in (".results.json.31081", ".settings.json.7", ".results.md.7", ".results.tex.7"):
        (tmp_path / name).write_text("{")
    evaluation(tmp_path, engine, SumReward(), problem_set).run()
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_a_second_process_is_refused_and_writes_nothing(
    tmp_path: Path, engine: RecordingEngine, problem_set: PromptSet
) -> None:
    second = evaluation(tmp_path, engine, SumReward(), problem_set)
    first = RunLock(tmp_path)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(UserError, match=f"is in use by process {os.getpid()} on host"):
        second.run()
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    first.release()
    second.run()
    assert not (tmp_path / ".lock").exists()


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ('"num_tokens"', '"num_tokenr"', "a row has no num_tokens; remove the file"),
        ('"answer"', '"anrwer"', "a row has no answer; remove the file"),
        ('"id"', '"ie"', "a row has no id; remove the file"),
        ('"finished": true', '"finished": 7.11', "a row has finished = 7.11; remove the file"),
    ],
)
def test_a_damaged_row_that_is_valid_json_is_one_line(
    before: str, after: str, line: str, uninterrupted: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(uninterrupted, tmp_path / "copy"))
    path = folder / "completions" / "amc23.jsonl"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))
    with pytest.raises(UserError, match=line):
        Store(folder).rows("amc23")


def test_a_finished_evaluation_samples_nothing(
    tmp_path: Path, engine: Any, problem_set: PromptSet, uninterrupted: Path
) -> None:
    shutil.copytree(uninterrupted, tmp_path, dirs_exist_ok=True)
    evaluation(tmp_path, engine, SumReward(0), problem_set).run()
    assert engine.calls == []
    assert same_files(tmp_path, uninterrupted)


def test_samples_may_be_added_to_a_greedy_evaluation(
    tmp_path: Path, engine: Any, problem_set: PromptSet, uninterrupted: Path
) -> None:
    evaluation(tmp_path, engine, SumReward(), problem_set, num_samples=0).run()
    names = ("accuracy", "format_share", "truncated_share", "length")
    assert list(results(tmp_path)["average"]) == [f"greedy/{name}" for name in names]
    engine.calls.clear()
    evaluation(tmp_path, engine, SumReward(), problem_set).run()
    assert {num for _, num in engine.calls} == {NUM_SAMPLES}
    assert same_files(tmp_path, uninterrupted)


def test_benchmarks_may_be_added_and_are_sampled_independently(
    tmp_path: Path, engine: Any, problem_set: PromptSet, uninterrupted: Path
) -> None:
    evaluation(tmp_path, engine, SumReward(), problem_set).run()
    other = dataclasses.replace(problem_set, name="aime24", title="AIME 24")
    engine.calls.clear()
    path = evaluation(tmp_path, engine, SumReward(), other).run()
    written = json.loads(path.read_text())
    assert list(written["benchmarks"]) == ["amc23", "aime24"]
    assert len(engine.calls) == 5, "the first benchmark is not sampled again"
    texts = [
        [row["text"] for row in read_completions(tmp_path, name)] for name in ("amc23", "aime24")
    ]
    assert texts[0][:7] == texts[1][:7], "greedy completions are equal"
    assert texts[0][7:] != texts[1][7:], "the same ids in another benchmark have other draws"
    first, second = (
        benchmark["measures"]["samples/mean@4"]["mean"]
        for benchmark in written["benchmarks"].values()
    )
    average_mean = written["average"]["samples/mean@4"]["mean"]
    assert average_mean == pytest.approx((first + second) / 2)


def test_only_the_first_problems_are_sampled(options: BenchmarkOptions, tmp_path: Path) -> None:
    whole = run(options, tmp_path / "whole")["benchmarks"]["amc23"]
    out = tmp_path / "part"
    part = run(options, out, sample_limit=2)["benchmarks"]["amc23"]
    assert (part["num_problems"], part["num_sampled_problems"]) == (3, 2)
    assert (whole["num_problems"], whole["num_sampled_problems"]) == (3, 3)
    assert part["measures"]["greedy/accuracy"] == whole["measures"]["greedy/accuracy"]
    assert part["problems"][:2] == whole["problems"][:2]
    assert set(part["problems"][2]) == {"id", "greedy"}
    rows = read_completions(out)
    assert rows[3:] == read_completions(tmp_path / "whole")[3:7]
    table = comparison_table(read_results([out], "samples/pass@2"), "samples/pass@2")
    assert "Problems: AMC 23 2." in table.caption
    assert run(options, out, sample_limit=2)["benchmarks"]["amc23"] == part
    assert "--sample-limit 3, but" in error_line(options, out, sample_limit=3)


def test_evaluations_of_seeds_must_sample_the_same_problems(
    options: BenchmarkOptions, tmp_path: Path
) -> None:
    for seed, limit in ((0, 0), (1, 2)):
        run(options, tmp_path / str(seed), sample_limit=limit)
        path = tmp_path / str(seed) / "results.json"
        results = json.loads(path.read_text())
        results["settings"]["run_seed"] = seed
        path.write_text(json.dumps(results))
    folders = [tmp_path / "0", tmp_path / "1"]
    with pytest.raises(UserError, match=r"different sample_limit \(0, 2\)"):
        read_results(folders)
    del results["settings"]["sample_limit"]  # as in older versions: 0
    path.write_text(json.dumps(results))
    assert read_results(folders)[0].num_seeds == 2


def test_folders_without_a_sample_limit_continue(options: BenchmarkOptions, tmp_path: Path) -> None:
    """Versions before `--sample-limit` did not write this setting."""
    before = run(options, tmp_path)
    path = tmp_path / "settings.json"
    settings = json.loads(path.read_text())
    del settings["sample_limit"]
    path.write_text(json.dumps(settings))
    assert run(options, tmp_path) == before


def test_unfinished_samples_are_not_in_the_results(
    tmp_path: Path, engine: Any, problem_set: PromptSet
) -> None:
    other = dataclasses.replace(problem_set, name="aime24")
    # Stop after the five chunks of amc23 and the greedy chunk of aime24.
    stopping = evaluation(tmp_path, engine, SumReward(6), problem_set, other)
    with pytest.raises(Stopped):
        stopping.run()
    partial = results(tmp_path)
    assert "samples/mean@4" in partial["benchmarks"]["amc23"]["measures"]
    assert "samples/mean@4" not in partial["benchmarks"]["aime24"]["measures"]
    # An average over fewer benchmarks could be compared by mistake.
    assert "samples/mean@4" not in partial["average"]
    assert "greedy/accuracy" in partial["average"]


def test_removed_lines_are_an_error(tmp_path: Path, engine: Any, problem_set: PromptSet) -> None:
    evaluation(tmp_path, engine, SumReward(), problem_set).run()
    path = tmp_path / "completions" / "amc23.jsonl"
    kept = path.read_text().splitlines(keepends=True)
    path.write_text("".join(kept[:3] + kept[4:]))
    with pytest.raises(UserError, match=r"amc23\.jsonl: lines are missing"):
        evaluation(tmp_path, engine, SumReward(), problem_set).run()


def test_out_of_memory_is_a_user_error_and_loses_nothing(
    tmp_path: Path, builtin_engine: TransformersEngine, problem_set: PromptSet, uninterrupted: Path
) -> None:
    class SmallMemory(RecordingEngine):
        def generate(
            self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
        ) -> list[list[Completion]]:
            if num_samples > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().generate(prompts, num_samples, sampling)

    with pytest.raises(UserError, match="out of memory; --max-rows is 8, try 4; the evaluation"):
        evaluation(tmp_path, SmallMemory(builtin_engine), SumReward(), problem_set).run()
    evaluation(tmp_path, builtin_engine, SumReward(), problem_set).run()
    assert same_files(tmp_path, uninterrupted)


# --- estimates ---


def row(
    reward: float, answer: str | None, num_tokens: int = 10, finished: bool = True
) -> dict[str, Any]:
    return {"reward": reward, "answer": answer, "num_tokens": num_tokens, "finished": finished}


def test_estimates_of_known_completions() -> None:
    greedy = [row(1, "5"), row(0, None, 30, finished=False)]
    first = [row(1, "5"), row(1, "5"), row(0, "6"), row(0, "6")]  # a tie
    second = [row(0, "1"), row(0, "1"), row(1, "2", 20), row(0, None, 40, finished=False)]
    values = benchmark_values(greedy + first + second, Sizes(2, 4, 2))
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


def test_average_gives_benchmarks_equal_weight() -> None:
    small, large = [1.0, 1.0], [0.0] * 98 + [1.0] * 2
    accuracy = average([{"greedy/accuracy": small}, {"greedy/accuracy": large}])["greedy/accuracy"]
    assert accuracy["mean"] == pytest.approx((1 + 0.02) / 2)
    # The small benchmark has no spread, the large one little.
    assert 0.5 <= accuracy["low"] < 0.51 < accuracy["high"] < 0.53


@pytest.mark.parametrize("num_lines", [0, 1])
def test_incomplete_greedy_rows_give_no_estimate(num_lines: int) -> None:
    assert benchmark_values([row(1, "5")] * num_lines, Sizes(2, 0, 2)) == {}


# --- options and the command ---


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("amc23", "minerva_math"):
        rows = [
            {"id": f"{name}-{index}", "problem": text, "answer": text.split()[-2]}
            for index, text in enumerate(TEXTS)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def options(data: Path) -> BenchmarkOptions:
    return BenchmarkOptions(
        model="builtin:countdown",
        benchmarks=("amc23",),
        data_dir=str(data),
        max_new_tokens=12,
        template="{problem}",
        reward="exact",
        device="cpu",
        num_samples=2,
        limit=3,
    )


def run(options: BenchmarkOptions, out: Path, **changed: Any) -> dict[str, Any]:
    evaluation = build_evaluation(dataclasses.replace(options, **changed), out, silent_progress())
    return dict(json.loads(evaluation.run().read_text()))


def error_line(options: BenchmarkOptions, out: Path, **changed: Any) -> str:
    with pytest.raises(UserError) as caught:
        run(options, out, **changed)
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    return line


@pytest.mark.parametrize(
    ("changed", "fragments"),
    [
        ({"max_new_tokens": 13}, ["--max-new-tokens 13", "has 12"]),
        ({"num_samples": 4}, ["--samples 4", "has 2"]),
        ({"num_samples": 0}, ["--samples 0", "has 2"]),
        ({"temperature": 0.5}, ["--temperature 0.5", "has 1.0"]),
        ({"seed": 1}, ["--seed 1", "has 0"]),
        ({"limit": 2}, ["--limit 2", "has 3"]),
        ({"sample_limit": 2}, ["--sample-limit 2", "has 0"]),
        ({"template": "{problem} "}, ["--template"]),
        ({"reward": "math"}, ["--reward 'math'"]),
    ],
)
def test_other_options_are_refused_in_the_same_folder(
    changed: dict[str, Any], fragments: list[str], options: BenchmarkOptions, tmp_path: Path
) -> None:
    settings = build_evaluation(options, tmp_path / "out", silent_progress()).store.settings()
    line = error_line(options, tmp_path / "out", **changed)
    assert [word for word in [*fragments, "another --out"] if word not in line] == []
    assert Store(tmp_path / "out").settings() == settings


def test_other_problems_are_refused_in_the_same_folder(
    options: BenchmarkOptions, tmp_path: Path, data: Path
) -> None:
    run(options, tmp_path / "out")
    path = data / "amc23.jsonl"
    path.write_text(path.read_text().replace('"answer": "14"', '"answer": "15"'))
    assert "amc23: its problems" in error_line(options, tmp_path / "out")


def test_changed_weights_at_the_same_path_are_refused(
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
    assert "weights = " in error_line(options, tmp_path / "out", model=str(folder))


@pytest.mark.parametrize(
    ("changed", "fragments"),
    [
        ({"benchmarks": ("amc24",)}, ["amc24", "amc23", "gsm8k"]),
        ({"benchmarks": ()}, ["--benchmarks"]),
        ({"benchmarks": ("amc23", "amc23")}, ["amc23", "twice"]),
        ({"benchmarks": ("aime25",)}, ["aime25", "aime25.jsonl"]),
        ({"template": "no field"}, ["--template", "no field", "{problem}"]),
        ({"template": "chat"}, ["chat"]),
        ({"max_prompt_tokens": 2}, ["amc23", "--max-prompt-tokens 2"]),
        ({"max_new_tokens": 4096}, ["--max-new-tokens 4096", "positions", "at most"]),
        ({"model": "./nowhere"}, ["./nowhere"]),
        ({"reward": "abacus"}, ["abacus"]),
        ({"temperature": 0.0}, ["--temperature", "> 0", "0.0"]),
        ({"temperature": 0.7, "num_samples": 0}, ["--temperature 0.7", "--samples"]),
    ],
)
def test_user_errors_are_one_line_and_leave_no_folder(
    changed: dict[str, Any], fragments: list[str], options: BenchmarkOptions, tmp_path: Path
) -> None:
    line = error_line(options, tmp_path / "out", **changed)
    assert [word for word in fragments if word not in line] == []
    assert not (tmp_path / "out").exists()


def test_a_problem_file_is_a_benchmark(
    options: BenchmarkOptions, tmp_path: Path, data: Path
) -> None:
    (data / "amc23.jsonl").rename(data / "mine.jsonl")
    written = run(options, tmp_path / "out", benchmarks=("mine.jsonl", "minerva_math"))
    titles = {name: benchmark["title"] for name, benchmark in written["benchmarks"].items()}
    assert titles == {"mine": "mine", "minerva_math": "Minerva Math"}


def test_problems_with_too_long_prompts_are_counted(
    options: BenchmarkOptions, tmp_path: Path, tokenizer: Any
) -> None:
    longest = max(len(tokenizer(text).input_ids) for text in TEXTS)
    left_out = sum(len(tokenizer(text).input_ids) == longest for text in TEXTS)
    written = run(options, tmp_path / "out", limit=0, max_prompt_tokens=longest - 1)
    assert 0 < left_out < 7
    assert written["benchmarks"]["amc23"]["num_left_out"] == left_out
    assert written["benchmarks"]["amc23"]["num_problems"] == 7 - left_out
