from __future__ import annotations

import json
from pathlib import Path

import pytest

from eepo.reports.records import (
    MAX_COMPLETIONS,
    by_method,
    read_run,
    read_runs,
    thin_steps,
)
from eepo.runs.runlog import ALARMS, COMPLETIONS, EVALUATIONS, METRICS
from eepo.types import UserError


def test_reads_a_complete_run(write_run):
    run = read_run(write_run("eepo", seed=3))
    assert (run.name, run.seed, run.last_step, len(run.metrics)) == ("eepo", 3, 30, 30)
    assert run.seconds() == 60.0
    assert run.num_completions() == 30 * 4 * 8
    assert run.full_evaluation("in_range")["step"] == 30
    assert run.start_evaluation("in_range")["step"] == 0
    assert run.full_evaluation("elsewhere") is None


@pytest.mark.parametrize("unfinished", ['{"step": 31, "rewa', '{"step": 31, "text": "\\u00', "{"])
def test_an_unfinished_last_line_is_skipped(write_run, unfinished):
    folder = write_run()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(unfinished)
    assert read_run(folder).last_step == 30


def test_a_last_line_cut_inside_a_character_is_skipped(write_run):
    folder = write_run()
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write('{"step": 31, "text": "é'.encode()[:-1])
    assert read_run(folder).last_step == 30


DAMAGED_LINES = {
    "half a line": b'{"step": 2, "re\n',
    "invalid UTF-8": b'{"step": 2, "text": "\xff"}\n',
    "zero bytes": bytes(50) + b"\n",
    "no object": b"[2]\n",
    "no step": b'{"stap": 2}\n',
    "integer of 5,000 digits": b'{"step": ' + b"9" * 5000 + b"}\n",
    "2,000 levels": b"[" * 2000 + b"\n",
}


@pytest.mark.parametrize("name", [METRICS, EVALUATIONS, COMPLETIONS, ALARMS])
@pytest.mark.parametrize("damaged", DAMAGED_LINES.values(), ids=DAMAGED_LINES)
def test_a_damaged_line_is_skipped_and_counted(write_run, name, damaged):
    folder = write_run("eepo")
    path = folder / name
    path.touch()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:1], damaged, damaged, *lines[1:]]))
    run = read_run(folder)
    assert list(run.notes) == [f"{name}: 2 damaged lines skipped"]
    assert (len(run.metrics), len(run.evaluations), run.num_logged) == (30, 8, 480)


@pytest.mark.parametrize("column", ["kind", "set", "num_samples", "pass@k"])
def test_a_row_without_a_column_that_the_report_needs_is_damaged(write_run, column):
    folder = write_run()
    path = folder / EVALUATIONS
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0].pop(column)
    rows[1][column] = None
    rows[-1]["problems"][0] = {"id": "p0"}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(folder)
    assert list(run.notes) == ["evaluations.jsonl: 3 damaged lines skipped"]
    assert len(run.evaluations) == len(rows) - 3


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("greedy", "x"),
        ("mean", []),
        ("mean", 10**400),
        ("pass@k", {"1": 10**400}),
        ("pass@k", {"x": 0.5}),
        ("pass@k", {"1": None}),
        ("num_samples", 10**20),
        ("num_problems", -1),
        ("step", 10**400),
        ("step", -1),
        ("problems", None),
    ],
)
def test_an_evaluation_with_an_impossible_value_is_damaged(write_run, column, value):
    folder = write_run()
    path = folder / EVALUATIONS
    row = json.loads(path.read_text().splitlines()[-1]) | {column: value}
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    assert list(read_run(folder).notes) == ["evaluations.jsonl: 1 damaged line skipped"]


def test_a_metric_of_400_digits_is_not_drawn(write_run):
    folder = write_run()
    (folder / METRICS).write_text(f'{{"step": 1, "entropy": {10**400}}}\n')
    assert read_run(folder).series("entropy") == {}


def test_a_complete_run_has_no_notes(write_run):
    assert list(read_run(write_run("eepo")).notes) == []


@pytest.mark.parametrize(
    "recipe", ["training = 5", "[training]\nseed = 'x'", "evaluation = []", "a = 99" + "9" * 5000]
)
def test_a_damaged_recipe_is_named_in_one_line(write_run, recipe):
    folder = write_run()
    (folder / "recipe.toml").write_text(recipe)
    with pytest.raises(UserError, match=r"recipe\.toml: "):
        read_runs([folder])


@pytest.mark.parametrize("name", ["recipe.toml", "metrics.jsonl"])
def test_a_missing_required_file_is_named_in_one_line(write_run, name):
    folder = write_run()
    (folder / name).unlink()
    with pytest.raises(UserError) as caught:
        read_run(folder)
    message = str(caught.value)
    assert str(folder) in message
    assert name in message
    assert "\n" not in message


@pytest.mark.parametrize("is_sweep", [False, True])
def test_a_folder_of_runs_is_read_as_its_runs_with_steps(write_run, tmp_path, is_sweep):
    """The baseline (with evaluation.start) is first, out of alphabetical order.

    The folder of a sweep also has a recipe.
    """
    outer, runs = tmp_path / "outer", [("eepo", 0), ("grpo", 0), ("grpo", 1), ("late", 0)]
    for name, seed in runs:
        start = "[evaluation]\nstart = true\n" if (name, seed) == ("grpo", 0) else ""
        (outer / name).mkdir(parents=True, exist_ok=True)
        write_run(name, seed, settings=start).rename(outer / name / f"seed-{seed}")
    (outer / "late" / "seed-0" / "metrics.jsonl").unlink()
    if is_sweep:
        (outer / "recipe.toml").write_text('name = "base"\n')
    assert [(run.name, run.seed) for run in read_runs([outer])] == [
        ("grpo", 0),
        ("grpo", 1),
        ("eepo", 0),
    ]
    assert [run.seed for run in read_runs([outer / "grpo"])] == [0, 1]
    with pytest.raises(UserError, match="late: none of its 1 runs has finished a step yet"):
        read_runs([outer / "late"])


def test_a_folder_without_runs_is_refused_with_advice(tmp_path):
    with pytest.raises(
        UserError,
        match=r"\(no recipe\.toml\); give run folders, the folder of a comparison or a sweep, "
        "folders of eepo eval, ",
    ):
        read_runs([tmp_path])


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere: no such run folder"):
        read_run(tmp_path / "nowhere")


def test_optional_files_may_be_missing(write_run):
    folder = write_run()
    for name in ("environment.json", "evaluations.jsonl", "completions.jsonl"):
        (folder / name).unlink()
    run = read_run(folder)
    assert (run.environment, run.evaluations, run.completions) == ({}, [], [])


def test_the_number_of_kept_completions_is_limited_and_all_are_counted(write_run):
    folder = write_run()
    row = json.loads((folder / "completions.jsonl").read_text().splitlines()[0])
    rows = [row | {"step": 1 + number // 4} for number in range(4 * MAX_COMPLETIONS)]
    (folder / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(folder)
    assert MAX_COMPLETIONS / 2 < len(run.completions) <= MAX_COMPLETIONS + 4
    assert run.num_logged == 4 * MAX_COMPLETIONS


def test_steps_are_kept_whole_and_evenly_spread():
    rows = [{"step": step, "index": index} for step in range(1, 101) for index in range(3)]
    kept = thin_steps(rows, 60)
    steps = sorted({row["step"] for row in kept})
    assert steps == [*range(1, 101, 8), 100]
    assert [row for row in rows if row["step"] in steps] == kept
    assert thin_steps(rows, 300) == rows


def test_a_step_larger_than_the_limit_is_cut():
    rows = [{"step": step} for step in (1, 2, 3) for _ in range(50)]
    assert [row["step"] for row in thin_steps(rows, 10)] == [1] * 10 + [3] * 10


def test_the_last_step_with_unlearning_is_kept():
    rows = [{"step": step, "logprob": -1.0} for step in range(1, 101)]
    rows[89]["logprob_after"] = rows[29]["logprob_after"] = -2.0
    steps = [row["step"] for row in thin_steps(rows, 4)]
    assert steps[0] == 1
    assert {90, 100} <= set(steps)
    assert 30 not in steps


def test_series_omit_values_that_are_not_finite(write_run):
    folder = write_run()
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "entropy": NaN}\n{"step": 2, "entropy": 0.5}\n{"step": 3}\n'
    )
    assert read_run(folder).series("entropy") == {2: 0.5}


def test_methods_keep_their_order_and_seeds_are_sorted(write_run):
    runs = [
        read_run(write_run(name, seed)) for name, seed in (("grpo", 1), ("eepo", 0), ("grpo", 0))
    ]
    assert {name: [run.seed for run in seeds] for name, seeds in by_method(runs).items()} == {
        "grpo": [0, 1],
        "eepo": [0],
    }
    assert list(by_method(runs)) == ["grpo", "eepo"]


def test_a_duplicate_seed_is_refused(write_run):
    run = read_run(write_run())
    with pytest.raises(UserError, match="both grpo with seed 0"):
        by_method([run, run])


def test_reports_do_not_import_torch():
    import subprocess
    import sys

    unwanted = ["torch", "matplotlib.pyplot"]
    code = f"import sys, eepo.reports; sys.exit(any(name in sys.modules for name in {unwanted}))"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path("/")).returncode == 0
