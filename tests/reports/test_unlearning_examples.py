from __future__ import annotations

import json
import math
import warnings

import pytest

from eepo.reports.figure_list import image_bytes
from eepo.reports.labels import (
    fitting_end,
    name_label,
    replace_missing_glyphs,
    shorten_middle,
    text_width,
)
from eepo.reports.records import read_run
from eepo.reports.unlearning_examples import (
    strip_shared_lines,
    unlearned_problems,
    unlearning_examples_figure,
)


def completion(step=1, prompt="1 2 = 3 :", text="1+2", logprob=-1.0, after=-2.0, reward=1.0):
    row = {"step": step, "prompt_id": prompt, "prompt": prompt, "stage": 1, "reward": reward,
           "reason": "", "advantage": 0.0, "text": text, "finished": True,
           "logprob": logprob}  # fmt: skip
    return row if after is None else row | {"logprob_after": after}


@pytest.fixture
def read_rows(write_run):
    """Return a function that reads a run of eepo with the given completions."""

    def read(*rows):
        folder = write_run("eepo")
        (folder / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read_run(folder)

    return read


def bars(axes):
    """Return (probability under θ, under θ′) of each completion, from the top."""
    before, after = ([bar.get_width() for bar in container] for container in axes.containers)
    return list(zip(before, after, strict=True))


def test_bars_are_the_probabilities_of_the_latest_unlearning_step(read_rows):
    run = read_rows(
        completion(step=1, text="old"),
        completion(step=2, text="less", logprob=math.log(0.2), after=math.log(0.1), reward=0.5),
        completion(step=2, text="most", logprob=math.log(0.4), after=math.log(0.05)),
        completion(step=2, text="not asked", after=None),
        completion(step=3, text="gate shut", after=None),
    )
    figure = unlearning_examples_figure([run])
    (axes,) = figure.axes
    assert bars(axes) == [pytest.approx((0.4, 0.05)), pytest.approx((0.2, 0.1))]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["most  ✓", "less  ✗"]
    assert axes.yaxis_inverted()
    assert figure.get_suptitle() == "eepo, seed 0, step 2"


def test_a_repeated_completion_is_shown_once(read_rows):
    _, problems = unlearned_problems(read_rows(completion(), completion(), completion(text="2+1")))
    assert [row["text"] for row in problems[0]] == ["1+2", "2+1"]


def test_at_most_four_problems_and_five_completions(read_rows):
    rows = [
        completion(prompt=f"p{p}", text=f"t{t}", logprob=-1.0 - t)
        for p in range(6)
        for t in range(7)
    ]
    _, problems = unlearned_problems(read_rows(*rows))
    assert [[row["text"] for row in rows] for rows in problems] == [
        ["t0", "t1", "t2", "t3", "t4"]
    ] * 4


def test_probabilities_that_underflow_have_bars(read_rows):
    """10^-1000 is 0 in floating point, but has a position on the log axis."""
    run = read_rows(completion(logprob=-900 * math.log(10), after=-1000 * math.log(10)))
    (axes,) = unlearning_examples_figure([run]).axes
    (container, after) = axes.containers
    assert container[0].get_x() + container[0].get_width() == pytest.approx(-900)
    assert after[0].get_x() + after[0].get_width() == pytest.approx(-1000)
    assert after[0].get_width() > 0


def test_no_figure_without_unlearning(write_run, read_rows):
    assert unlearning_examples_figure([read_run(write_run("grpo"))]) is None
    assert (
        unlearning_examples_figure([read_rows(completion(after=None), completion(after=math.nan))])
        is None
    )


def test_model_output_is_not_parsed_as_a_formula_and_has_no_missing_glyphs(read_rows):
    hostile = "$\\frac{$ \\$ _^{ \x1b[31m \ud800 \u202e 漢字 " + "x" * 5000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = unlearning_examples_figure(
            [read_rows(completion(prompt=hostile, text=hostile), completion(text="$x$"))]
        )
        assert image_bytes(figure, "png")
        assert image_bytes(figure, "svg")
    assert "\\$x\\$  ✓" in [
        label.get_text() for axes in figure.axes for label in axes.get_yticklabels()
    ]


def test_shortened_texts_keep_their_end():
    assert shorten_middle("So\n the  answer is 42", 100) == "So the answer is 42"
    assert shorten_middle("abcdefghij", 5) == "ab…ij"
    assert shorten_middle(" \n", 9) == "(empty)"
    assert replace_missing_glyphs("a\x00漢b") == "a\ufffd\ufffdb"
    assert len(name_label("a_name_of_a_hundred" * 5)) == 28


def with_template(problem):
    return f"Solve it.\n\nProblem:\n{problem}\n\nSolution:\n"


def test_titles_and_labels_do_not_overlap_or_leave_the_figure(read_rows):
    """Uses long problems and wide letters."""
    problems = [
        "What is $1+4$?",
        "W" * 200,
        "so\nmany lines " * 20 + "and what is 2 + 2?",
        "i" * 300,
    ]
    rows = [
        completion(prompt=with_template(p), text=t * 40) for p in problems for t in ("W", "-", "M")
    ]
    figure = unlearning_examples_figure([read_rows(*rows)])
    figure.set_dpi(300)  # as in the saved file: at a lower resolution, letter widths are rounded
    figure.canvas.draw()
    titles = [axes.get_title(loc="right") for axes in figure.axes]
    assert titles[0] == r"What is \$1+4\$?"
    assert titles[2].startswith("…")
    assert titles[2].endswith("and what is 2 + 2?")
    boxes = [axes._right_title.get_window_extent() for axes in figure.axes]
    labels = [label.get_window_extent() for axes in figure.axes for label in axes.get_yticklabels()]
    assert min(box.x0 for box in boxes + labels) > 0.01 * figure.bbox.x1
    assert max(box.x1 for box in boxes) < figure.bbox.x1
    assert not any(
        box.overlaps(other) for index, box in enumerate(boxes) for other in boxes[index + 1 :]
    )
    assert all(axes.get_position().width > 0.15 for axes in figure.axes), (
        "labels leave space for the bars"
    )


def test_lines_that_all_prompts_share_are_stripped():
    sums = ["What is 1 + 4?", "What is 1 + 5?\n\nMind the sign."]
    assert [*strip_shared_lines(map(with_template, sums)).values()] == sums
    single, countdown = with_template("What is 1 + 4?"), ["1 2 = 3 :", "1 5 = 6 :"]
    assert strip_shared_lines([single, single]) == {single: single}
    assert [*strip_shared_lines(countdown).values()] == countdown
    assert strip_shared_lines(["a", "a\nb"]) == {"a": "a", "a\nb": "b"}


def test_a_fitted_text_uses_the_whole_width():
    assert fitting_end("a $b$", 100, 7) == r"a \$b\$"
    fitted = fitting_end("W" * 99, 100, 7)
    assert fitted == "…" + "W" * (len(fitted) - 1)
    assert 100 - text_width("W", 7) < text_width(fitted, 7) <= 100
