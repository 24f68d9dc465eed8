"""Checks that right expressions earn 1, that other texts earn 0, and that keys are canonical."""

from __future__ import annotations

import operator
import random
import time
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eepo.rewards.countdown import CountdownReward, answer_text
from eepo.types import Prompt

REWARD = CountdownReward()


def prompt_for(*numbers: int, target: Any) -> Prompt:
    return Prompt("", "", (), {"numbers": list(numbers), "target": target})


def grade(text: str, *numbers: int, target: Any) -> float:
    return REWARD.grade([prompt_for(*numbers, target=target)], [text])[0].reward


def key(text: str) -> str | None:
    return REWARD.grade([prompt_for(1, target=1)], [text])[0].answer


@pytest.mark.parametrize(
    ("text", "numbers", "target"),
    [
        ("2+3*4", (2, 3, 4), 14),
        ("(2+3)*4", (4, 3, 2), 20),
        ("9-4-1", (9, 4, 1), 4),
        ("9-(4-1)", (9, 4, 1), 6),
        ("8/4/2", (8, 4, 2), 1),
        ("8/(4/2)", (8, 4, 2), 4),
        ("1/3*6", (1, 3, 6), 2),  # through a fraction
        ("(1/3+1/6)*2", (1, 1, 2, 3, 6), 1),
        ("3-5+4", (3, 4, 5), 2),  # through a negative number
        ("4/(2/3-1)", (1, 2, 3, 4), -12),
        (" ( 5 )\n+ 7\t", (5, 7), 12),
        ("((((5))))", (5,), 5),
        ("1234+1", (1, 1234), 1235),
        ("5*5-5", (5, 5, 5), 20),
        ("0*7+3", (0, 3, 7), 3),
        ("I think <answer>2+3</answer>", (2, 3), 5),
        ("<answer>1+1</answer> no: <answer>2*3</answer>.", (2, 3), 6),
        ("<answer>\n2*3\n</answer>", (2, 3), 6),
        ("x" * 100_000 + "<answer>2*3</answer>", (2, 3), 6),
    ],
)
def test_right_expressions_earn_one(text: str, numbers: tuple[int, ...], target: int) -> None:
    assert grade(text, *numbers, target=target) == 1.0


@pytest.mark.parametrize(
    ("text", "numbers", "target"),
    [
        ("2+3", (2, 3), 6),  # wrong value
        ("2+3", (2, 3, 5), 5),  # an unused number
        ("2+2", (2, 3), 4),  # a number twice
        ("2+3+0", (2, 3), 5),  # an extra number
        ("5", (2, 3), 5),
        ("23", (2, 3), 23),  # numbers may not be joined
        ("2 3", (2, 3), 23),
        ("7/2", (7, 2), 3),  # division is exact
        ("2+3=5", (2, 3), 5),
        ("2+3 because", (2, 3), 5),
        ("the answer is 2+3", (2, 3), 5),
        ("2+", (2,), 2),
        ("+2+3", (2, 3), 5),
        ("-2+3", (2, 3), 1),
        ("3+-2", (2, 3), 1),
        ("3--2", (2, 3), 5),
        ("3*(-2)", (2, 3), -6),
        ("2**3", (2, 3), 8),
        ("8//3", (8, 3), 2),
        ("8%3", (8, 3), 2),
        ("2(3)", (2, 3), 6),
        ("(2)(3)", (2, 3), 6),
        ("(2+3", (2, 3), 5),
        ("2+3)", (2, 3), 5),
        ("()", (), 0),
        ("2+3()", (2, 3), 5),
        ("2.0+3", (2, 3), 5),
        ("2e0+3", (2, 3), 5),
        ("1_0+3", (10, 3), 13),
        ("0x2+3", (2, 3), 5),
        ("2×3", (2, 3), 6),
        ("2−3", (2, 3), -1),
        ("2+3 <answer>9</answer>", (2, 3), 5),  # the tag counts
        ("<answer>2+3</answer> <answer>2-3</answer>", (2, 3), 5),  # the last tag counts
        ("", (), 0),
        ("   ", (), 0),
    ],
)
def test_other_texts_earn_nothing(text: str, numbers: tuple[int, ...], target: int) -> None:
    assert grade(text, *numbers, target=target) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "1+2" + " " * 200_000 + "x",
        "(" * 200_000,
        "1" + "+1" * 100_000,
        "(" * 100_000 + "1" + ")" * 100_000,
        "(" * 21 + "1+2" + ")" * 21,
        "9" * 200_000,
        "9" * 199,
        "9999*" * 39 + "9999",
        "9" * 5 + "+1",
        "<answer>" * 25_000,
        "<answer>" + "(" * 900 + "</answer>",
        "<answer>" + "1+2" * 60_000 + "</answer>",
        "</answer>" * 20_000,
        "9**9**9**9**9",
        "1/0",
        "3/(2-2)",
        "1/(1-1/(2/2))",
        "１+２",
        "1+²",
        "١+٢",
        "१+२",
        "1\u200b+2",
        "1\x00+2",
        "\x071+2",
        "1+2\x1b[0m",
        "1\ufeff+2",
        "\ud800",
        "1+2\udfff",
        "__import__('os').system('true')",
        "1 if 1+2 else 3",
        "1+2#",
        "1+2;",
        "1,2",
    ],
    ids=lambda text: ascii(text[:12]),
)
def test_hostile_completions_earn_nothing_and_cost_little(text: str) -> None:
    prompt = prompt_for(1, 2, target=3)
    started = time.process_time()
    assert REWARD.grade([prompt], [text])[0].reward == 0.0
    assert time.process_time() - started < 0.5


def test_twenty_nested_brackets_are_accepted() -> None:
    assert grade("(" * 20 + "1+2" + ")" * 20, 1, 2, target=3) == 1.0


def test_verdicts_are_in_order() -> None:
    prompts = [prompt_for(1, 2, target=3), prompt_for(1, 2, target=2), prompt_for(1, 2, target=3)]
    verdicts = REWARD.grade(prompts, ["1+2", "1+2", "2+1"])
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, 1.0]


def test_texts_and_prompts_must_have_equal_length() -> None:
    with pytest.raises(ValueError):
        REWARD.grade([prompt_for(1, target=1)], ["1", "1"])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("2+3*4", "4*3+2"),
        ("9-(4-1)", "9-4+1"),
        ("9-(4-1)", "1+9-4"),
        ("8/(4/2)", "8*2/4"),
        ("(1+2)*(3+4)", "(4+3)*(2+1)"),
        ("((2*3))+4", "4+3*2"),
        ("2*(3*4)", "(4*2)*3"),
        ("1+(2+3)", "(1+3)+2"),
        (" 1 + 2 ", "2+1"),
        ("so <answer>1+2</answer>", "2+1"),
        ("6/(2*3)", "6/2/3"),
        ("5-((2-1))", "5+1-2"),
    ],
)
def test_reordered_expressions_have_one_key(left: str, right: str) -> None:
    assert key(left) == key(right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("2+3*4", "(2+3)*4"),
        ("9-4-1", "9-(4-1)"),
        ("8/4/2", "8/(4/2)"),
        ("12+3", "1+23"),
        ("2*6", "3*4"),  # same value, another way
        ("2+2", "2*2"),
        ("3*(2+1)", "3*2+3*1"),
        ("1*5", "5"),
    ],
)
def test_different_expressions_have_different_keys(left: str, right: str) -> None:
    assert key(left) != key(right)


Tree = Any  # a number, or (sign, [parts])
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}

trees = st.recursive(
    st.integers(1, 20),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from("+*"), st.lists(inner, min_size=2, max_size=3)),
        st.tuples(st.sampled_from("-/"), st.lists(inner, min_size=2, max_size=2)),
    ),
    max_leaves=7,
)


def as_text(tree: Tree, rng: random.Random | None = None) -> str:
    """Write a tree with brackets around every part; `rng` shuffles the operands of + and *."""
    if isinstance(tree, int):
        return str(tree)
    sign, parts = tree
    texts = [f"({as_text(part, rng)})" for part in parts]
    if rng and sign in "+*":
        rng.shuffle(texts)
    return sign.join(texts)


def value(tree: Tree) -> Fraction:
    if isinstance(tree, int):
        return Fraction(tree)
    sign, (first, *rest) = tree[0], [value(part) for part in tree[1]]
    for part in rest:
        first = OPERATORS[sign](first, part)
    return first


def numbers_in(tree: Tree) -> list[int]:
    if isinstance(tree, int):
        return [tree]
    return [number for part in tree[1] for number in numbers_in(part)]


@given(trees)
def test_values_are_exact(tree: Tree) -> None:
    try:
        expected = value(tree)
    except ZeroDivisionError:
        assert grade(as_text(tree), *numbers_in(tree), target=0) == 0.0
        return
    assert grade(as_text(tree), *numbers_in(tree), target=expected) == 1.0
    assert grade(as_text(tree), *numbers_in(tree), target=expected + 1) == 0.0


@given(trees, st.randoms(use_true_random=False))
def test_shuffling_operands_keeps_the_key(tree: Tree, rng: random.Random) -> None:
    try:
        value(tree)
    except ZeroDivisionError:
        return
    assert key(as_text(tree, rng)) == key(as_text(tree))


@given(trees, trees)
def test_expressions_with_different_values_have_different_keys(left: Tree, right: Tree) -> None:
    try:
        differ = value(left) != value(right)
    except ZeroDivisionError:
        return
    if differ:
        assert key(as_text(left)) != key(as_text(right))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so <answer>9</answer> or <answer>1+2</answer> it is", "1+2"),
        ("<answer>9<answer>1+2</answer>", "1+2"),
        ("<answer>1+2", "<answer>1+2"),
        ("1+2</answer>", "1+2</answer>"),
        ("1+2", "1+2"),
    ],
)
def test_the_last_closed_answer_tag_counts(text: str, expected: str) -> None:
    assert answer_text(text) == expected
