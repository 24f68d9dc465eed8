"""Checks that the same problem is found in any layout, and that similar problems are not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from eepo.tasks.overlap import MAX_CANDIDATES, find_overlap, normalise_problem
from eepo.tasks.problems import Problem, read_problems

DATA = Path(os.environ.get("EEPO_DATA_DIR") or "no-such-folder")


def same(left: str, right: str, answers: tuple[str, str] = ("7", "7")) -> bool:
    train, evaluation = Problem("train", left, answers[0]), Problem("test", right, answers[1])
    return find_overlap([train], [evaluation]) == [("test", "train")]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("Compute $x^2 + 1$.", "compute  $$x^{2}+1$$"),
        (r"Compute \[\cos^3 \dfrac{2 \pi}{7}.\]", r"Compute $\cos ^{3} \frac{2 \pi}{7}$ ."),
        (r"Let $a_1,$ $a_2,$ $\dots$ be", r"Let $a_{1}, a_{2}, \ldots$ be"),
        (r"\left| z \right| \quad \text{and} b", r"|z| \text { and } b"),
        ("the ﬁrst “one”", 'The first "one"'),
    ],
)
def test_layout_does_not_matter(left: str, right: str) -> None:
    assert normalise_problem(left) == normalise_problem(right)
    assert same(left, right, ("7", "eight"))  # equal texts match even if the answers differ


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (r"Find all roots of $z^4 + z^2 + 1 = 0$.", r"Find all roots of $z^4 - z^2 + 1 = 0$."),
        ("How many are $< 5$?", "How many are $> 5$?"),
        ("What is $12$ plus $3$?", "What is $1$ plus $23$?"),
        (r"Find $\sin x$ for this $x$.", r"Find $\cos x$ for this $x$."),
    ],
)
def test_signs_and_numbers_matter(left: str, right: str) -> None:
    assert normalise_problem(left) != normalise_problem(right)
    assert not same(left, right, ("7", "8"))


def test_rewordings_with_the_same_answer_and_digits_are_found() -> None:
    original = "How many integers are in the solution set of $|x-2| \\leq 5.6$?"
    reworded = "How many integers are there in the solution set of $|x-2|\\leq5.6$ ?"
    assert same(original, reworded)
    assert not same(original, reworded, ("7", "8"))
    assert not same(original, reworded.replace("5.6", "5.7"))
    assert not same(original, "In the end, name 2 and 5.6 for me")


def test_each_evaluation_problem_is_reported_once() -> None:
    train = [Problem(f"train/{index}", "What is 1+1?", "2") for index in range(3)]
    evaluation = [Problem("a", "What is 1 + 1", "2"), Problem("b", "What is 1+2?", "3")]
    assert find_overlap(train, evaluation) == [("a", "train/0")]


def test_number_of_comparisons_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[str] = []
    monkeypatch.setattr(
        "eepo.tasks.overlap.similarity", lambda left, right: compared.append(right) or 0.0
    )
    num_problems = MAX_CANDIDATES + 50
    train = [Problem(str(i), f"Is it {'so ' * i}?", "yes") for i in range(num_problems)]
    pairs = find_overlap(train, [Problem("a", "Is this?", "yes"), train[-1]])
    assert pairs == [(train[-1].id, train[-1].id)]  # equal texts are found without a comparison
    assert len(compared) == MAX_CANDIDATES


@pytest.mark.skipif(
    not (DATA / "contamination_pairs.jsonl").is_file(), reason="no maths data (EEPO_DATA_DIR)"
)
def test_known_overlaps_of_real_data_are_found() -> None:
    known = {
        (row["id"], row["train_id"])
        for row in map(json.loads, (DATA / "contamination_pairs.jsonl").open())
    }
    train = read_problems("math_lvl3to5_train.jsonl", data_dir=str(DATA))
    pairs = set()
    for name in ("math500", "olympiadbench_math_en", "aime24", "amc23", "minerva_math"):
        pairs |= set(find_overlap(train, read_problems(f"{name}.jsonl", data_dir=str(DATA))))
    assert known <= pairs
    assert len(pairs - known) <= 2  # false positives must be rare among 1,500 problems
