"""Tests of evaluation during training, with an engine that returns scripted completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch
from torch import Tensor

from eepo.evaluation.evaluate import Evaluator, ProblemResult, SetResult
from eepo.rewards.countdown import CountdownReward
from eepo.types import Completion, Prompt, Sampling

SAMPLING = Sampling(temperature=0.8, max_new_tokens=16, seed=7, stream="evaluation")


class ScriptedEngine:
    """Returns scripted texts: for each prompt id the greedy one, then the sampled ones."""

    dtype = torch.float32

    def __init__(self, texts: dict[str, list[str]]) -> None:
        self.texts = texts
        self.calls: list[tuple[list[str], int, Sampling]] = []
        self.continuous_rows = 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        raise AssertionError("evaluation uses the weights that the engine holds")

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[list[Completion]]:
        self.calls.append(([prompt.id for prompt in prompts], num_samples, sampling))
        first = 0 if sampling.temperature == 0 else 1
        return [
            [completion(text) for text in self.texts[p.id][first : first + num_samples]]
            for p in prompts
        ]


def completion(text: str) -> Completion:
    """Return a completion of one token per character; a text that ends in "..." is truncated."""
    ids = tuple(range(len(text)))
    return Completion(ids, (0.0,) * len(ids), text, not text.endswith("..."))


def make_prompt(name: str, *numbers: int, target: int) -> Prompt:
    return Prompt(name, "", (1,), {"numbers": list(numbers), "target": target})


PROMPTS = [
    make_prompt("a", 1, 2, 3, target=6),
    make_prompt("b", 2, 4, target=8),
    make_prompt("c", 5, 5, target=1),
]
TEXTS = {
    # Greedy correct; three samples correct, with two different answers.
    "a": ["1+2+3", "3+2+1", "1*2*3", "2*3*1", "1+2"],
    # Greedy wrong; one sample correct, one truncated.
    "b": ["2+4", "4*2", "2+4", "2*4...", "24"],
    # Greedy correct; no sample correct, two truncated.
    "c": ["5/5", "5-5", "5...", "...", ""],
}


def run_evaluation(engine: ScriptedEngine) -> SetResult:
    evaluator = Evaluator(engine, CountdownReward())
    return evaluator.evaluate({"test": PROMPTS}, 4, SAMPLING)["test"]


def test_counts_greedy_correct_distinct_length_and_truncated() -> None:
    assert run_evaluation(ScriptedEngine(TEXTS)).problems == [
        ProblemResult("a", True, correct=3, distinct=2, length=18 / 4, truncated=0, no_answer=0),
        ProblemResult("b", False, correct=1, distinct=1, length=14 / 4, truncated=1, no_answer=1),
        ProblemResult("c", True, correct=0, distinct=0, length=10 / 4, truncated=2, no_answer=3),
    ]


def test_row_averages_over_problems() -> None:
    row = run_evaluation(ScriptedEngine(TEXTS)).row(with_problems=True)
    assert row["num_problems"] == 3
    assert row["num_samples"] == 4
    assert row["greedy"] == pytest.approx(2 / 3)
    assert row["mean"] == pytest.approx((3 + 1 + 0) / 12)
    assert row["distinct"] == pytest.approx(1.0)
    assert row["truncated_share"] == pytest.approx(3 / 12)
    assert row["no_answer_share"] == pytest.approx(4 / 12)
    assert row["length"] == pytest.approx((18 + 14 + 10) / 12)
    assert row["pass@k"] == pytest.approx({"1": 4 / 12, "2": (1 + 1 / 2) / 3, "4": 2 / 3})
    assert row["problems"] == [
        {"id": "a", "greedy": True, "correct": 3, "distinct": 2},
        {"id": "b", "greedy": False, "correct": 1, "distinct": 1},
        {"id": "c", "greedy": True, "correct": 0, "distinct": 0},
    ]


def test_row_without_problems_leaves_them_out() -> None:
    result = SetResult(1, [ProblemResult("a", True, 1, 1, 3.0, 0, 0)], seconds=0.5)
    assert "problems" not in result.row(with_problems=False)


def test_takes_one_greedy_completion_and_samples_with_the_given_sampling() -> None:
    engine = ScriptedEngine(TEXTS)
    run_evaluation(engine)
    (greedy_ids, greedy_number, greedy), (sampled_ids, sampled_number, sampled) = engine.calls
    assert greedy_ids == sampled_ids == ["a", "b", "c"]
    assert (greedy_number, greedy.temperature, greedy.max_new_tokens) == (1, 0.0, 16)
    assert (sampled_number, sampled) == (4, SAMPLING)


def test_each_set_has_its_result() -> None:
    evaluator = Evaluator(ScriptedEngine(TEXTS), CountdownReward())
    results = evaluator.evaluate({"first": PROMPTS[:1], "second": PROMPTS[1:]}, 4, SAMPLING)
    assert list(results) == ["first", "second"]
    assert [p.id for p in results["first"].problems] == ["a"]
    assert [p.id for p in results["second"].problems] == ["b", "c"]


def test_many_prompts_keep_their_order_and_report_progress() -> None:
    prompts = [make_prompt(str(index), index, 1, target=index + 1) for index in range(150)]
    texts = {p.id: ["1+1", f"{p.id}+1" if int(p.id) % 3 else "0", "x"] for p in prompts}
    done: list[int] = []
    evaluator = Evaluator(ScriptedEngine(texts), CountdownReward())
    result = evaluator.evaluate({"test": prompts}, 2, SAMPLING, done.append)["test"]
    expected = [(str(index), int(index % 3 > 0)) for index in range(150)]
    assert [(p.id, p.correct) for p in result.problems] == expected
    assert [p.id for p in result.problems if p.greedy] == ["1"]
    assert len(done) > 1
    assert sum(done) == 150


def test_an_engine_with_large_calls_gets_few() -> None:
    prompts = [make_prompt(str(index), index, 1, target=index + 1) for index in range(150)]
    engine = ScriptedEngine({prompt.id: ["1+1"] * 5 for prompt in prompts})
    engine.continuous_rows = 100
    Evaluator(engine, CountdownReward()).evaluate({"test": prompts}, 4, SAMPLING)
    assert [(len(ids), number) for ids, number, _ in engine.calls] == [
        *((100, 1), (100, 4)),
        *((50, 1), (50, 4)),
    ]
