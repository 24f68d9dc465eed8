"""Checks which part of a completion is read as its answer."""

from __future__ import annotations

import time

import pytest

from eepo.rewards.boxed import last_boxed
from eepo.rewards.extraction import final_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1}, no: \boxed{2}", "2"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\text{a}b\}}", r"\text{a}b\}"),
        (r"\boxed 5", "5"),
        (r"\boxed{3} and then \boxed{4", "3"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\fbox{9}", "9"),
        (r"The answer is 3. But \boxed{4} it is", "4"),
        ("The answer is 42.", "42"),
        ("the answer is 3.5", "3.5"),
        ("The final answer is: $x=5$. I hope it is correct.", "x=5"),
        (r"Final Answer: The final answer is $\text{even}$.", r"\text{even}"),
        (r"The answer is therefore \(42\), as said.", "42"),
        ("Answer: **12**", "12"),
        ("**Answer:** 12", "12"),
        ("first the answer is 1. Then the answer is 2.", "2"),
        ("she has 3+4=7\n#### 1,234", "1,234"),
        ("<answer>(3+4)*2</answer>", "(3+4)*2"),
        ("<answer>1</answer> the answer is 2", "2"),
        ("the answer is 2 <answer>1</answer>", "1"),
        ("42", "42"),
        (r"$\frac{1}{2}$", r"$\frac{1}{2}$"),
        ("x = 3", "x = 3"),
        ("Monday", "Monday"),
    ],
)
def test_last_box_else_last_stated_answer_is_returned(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "we add them up and get 42",
        r"\boxed{}",
        r"\boxed{5",
        "I do not know the answer",
        "<answer></answer>",
        "x" * 200,
        r"\boxed{" + "1" * 5000 + "}",
    ],
    ids=lambda text: text[:20],
)
def test_texts_without_a_stated_answer_have_none(text: str) -> None:
    assert final_answer(text) is None


def test_boxes_may_contain_nested_braces() -> None:
    assert last_boxed(r"\boxed{\frac{\sqrt{2}}{\sqrt{3}}} {") == r"\frac{\sqrt{2}}{\sqrt{3}}"


@pytest.mark.parametrize(
    "piece",
    [
        r"\boxed{",
        "answer is ",
        "<answer>",
        "</answer>",
        "#### ",
        "{",
        "\\",
        r"\boxed",
        "**",
        "answer: $",
    ],
)
def test_long_repetitive_texts_are_read_quickly(piece: str) -> None:
    started = time.process_time()
    final_answer((piece * 100_000)[:100_000])
    assert time.process_time() - started < 2  # about 10 ms, plus garbage collection
