"""Evaluation counts what an engine with a script says, and hands it the right orders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch
from torch import Tensor

from eepo.evaluation.evaluate import Evaluation, ProblemResult, evaluate
from eepo.rewards.countdown import CountdownReward
from eepo.types import Completion, Prompt, Sampling

SAMPLING = Sampling(temperature=0.8, max_new_tokens=16, seed=7, stream="evaluation")


class ScriptedEngine:
    """Says its lines: for each prompt id the greedy text, then the drawn ones."""

    dtype = torch.float32

    def __init__(self, lines: dict[str, list[str]]) -> None:
        self.lines = lines
        self.calls: list[tuple[list[str], int, Sampling]] = []

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        raise AssertionError("evaluation judges the weights that the engine holds")

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[list[Completion]]:
        self.calls.append(([prompt.id for prompt in prompts], num_samples, sampling))
        first = 0 if sampling.temperature == 0 else 1
        return [
            [spoken(text) for text in self.lines[p.id][first : first + num_samples]]
            for p in prompts
        ]


def spoken(text: str) -> Completion:
    """As long as its text; "..." marks one that was cut off."""
    ids = tuple(range(len(text)))
    return Completion(ids, (0.0,) * len(ids), text, not text.endswith("..."))


def ask(name: str, *numbers: int, target: int) -> Prompt:
    return Prompt(name, "", (1,), {"numbers": list(numbers), "target": target})


PROMPTS = [ask("a", 1, 2, 3, target=6), ask("b", 2, 4, target=8), ask("c", 5, 5, target=1)]
LINES = {
    "a": [
        "1+2+3",
        "3+2+1",
        "1*2*3",
        "2*3*1",
        "1+2",
    ],  # greedy right; three right, two different answers
    "b": ["2+4", "4*2", "2+4", "2*4...", "24"],  # greedy wrong; one right, one cut off
    "c": ["5/5", "5-5", "5...", "...", ""],  # greedy right; none right, two cut off
}


def test_counts_greedy_correct_distinct_length_and_truncated() -> None:
    result = evaluate(ScriptedEngine(LINES), CountdownReward(), PROMPTS, 4, SAMPLING)
    assert result.problems == [
        ProblemResult(
            "a",
            greedy=True,
            correct=3,
            distinct=2,
            length=(5 + 5 + 5 + 3) / 4,
            truncated=0,
            no_answer=0,
        ),
        ProblemResult(
            "b",
            greedy=False,
            correct=1,
            distinct=1,
            length=(3 + 3 + 6 + 2) / 4,
            truncated=1,
            no_answer=1,
        ),
        ProblemResult(
            "c",
            greedy=True,
            correct=0,
            distinct=0,
            length=(3 + 4 + 3 + 0) / 4,
            truncated=2,
            no_answer=3,
        ),
    ]


def test_the_row_averages_over_problems() -> None:
    row = evaluate(ScriptedEngine(LINES), CountdownReward(), PROMPTS, 4, SAMPLING).row(
        with_problems=True
    )
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


def test_problems_are_left_out_of_the_row_on_request() -> None:
    assert "problems" not in Evaluation(1, [ProblemResult("a", True, 1, 1, 3.0, 0, 0)], 0.5).row(
        with_problems=False
    )


def test_greedy_takes_one_sample_and_the_rest_follow_the_given_sampling() -> None:
    engine = ScriptedEngine(LINES)
    evaluate(engine, CountdownReward(), PROMPTS, 4, SAMPLING)
    (names, greedy_samples, greedy), (drawn_names, num_samples, drawn) = engine.calls
    assert names == drawn_names == ["a", "b", "c"]
    assert (greedy_samples, greedy.temperature, greedy.max_new_tokens) == (1, 0.0, 16)
    assert (num_samples, drawn) == (4, SAMPLING)


def test_many_prompts_keep_their_order_and_report_progress() -> None:
    prompts = [ask(str(index), index, 1, target=index + 1) for index in range(150)]
    lines = {p.id: ["1+1", f"{p.id}+1" if int(p.id) % 3 else "0", "x"] for p in prompts}
    done: list[int] = []
    result = evaluate(ScriptedEngine(lines), CountdownReward(), prompts, 2, SAMPLING, done.append)
    assert [(p.id, p.correct) for p in result.problems] == [
        (str(i), int(i % 3 > 0)) for i in range(150)
    ]
    assert [p.id for p in result.problems if p.greedy] == ["1"]
    assert len(done) > 1
    assert sum(done) == 150
