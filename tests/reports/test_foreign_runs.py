"""Tests reports of verl and TRL runs. `foreign_logs/` has logs that these trainers wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from eepo.reports import read_runs, write_report
from eepo.reports.figure_list import draw_figures
from eepo.types import UserError

LOGS = Path(__file__).parent / "foreign_logs"
VERL, TRL = LOGS / "verl_eepo.jsonl", LOGS / "trl_eepo/trainer_state.json"


def verl_rows(path: Path = VERL) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_verl_log_has_our_metric_names() -> None:
    (run,) = read_runs([VERL])
    _, first, second = (row["data"] for row in verl_rows())
    assert (run.name, run.seed, run.last_step) == ("verl_eepo", 0, 2)
    for key, source in {
        "reward": "critic/score/mean",
        "length": "response_length/mean",
        "truncated_share": "response_length/clip_ratio",
        "stage1/reward": "eepo/stage1/reward",
        "stage2/entropy": "eepo/stage2/entropy",
        "stage2/length": "eepo/stage2/length",
        "gate_share": "eepo/gate_share",
        "unlearn/kl": "eepo/unlearn/kl",
        "unlearn/lr": "eepo/unlearn/lr",
        "unlearn/loss_before": "eepo/unlearn/loss",
        "unlearn/weights_changed_share": "eepo/unlearn/weights_changed_share",
        "clip_share": "actor/pg_clipfrac",
        "grad_norm": "actor/grad_norm",
        "policy_entropy": "actor/entropy_loss",
        "seconds/stage1": "timing_s/eepo_stage1",
        "seconds/stage2": "timing_s/gen",
        "seconds/update": "timing_s/update_actor",
    }.items():
        assert run.series(key) == {1: first[source], 2: second[source]}, key
    # Stage 1 has 6 completions of 7.5 tokens, stage 2 has 6 of 7.
    entropies = [first[f"eepo/stage{stage}/entropy"] for stage in (1, 2)]
    mean = (entropies[0] * 7.5 + entropies[1] * 7) / 14.5
    assert run.series("entropy")[1] == pytest.approx(mean)
    saving = second["timing_s/save_checkpoint"]
    assert run.series("seconds/total")[2] == pytest.approx(second["timing_s/step"] - saving)


def test_accuracies_of_verl_are_evaluations() -> None:
    (run,) = read_runs([VERL])
    accuracies = [row["data"]["val-core/unseen/acc/mean@1"] for row in verl_rows()]
    assert [row["greedy"] for row in run.evaluations] == accuracies
    assert [(row["step"], row["kind"]) for row in run.evaluations] == [
        (0, "full"),
        (1, "quick"),
        (2, "full"),
    ]


def test_sampled_accuracies_of_verl_are_means(tmp_path: Path) -> None:
    rows = verl_rows()
    rows[2]["data"] |= {
        "val-core/aime/24/acc/mean@16": 0.25,
        "val-core/aime/24/acc/best@16/mean": 1,
    }
    (run,) = read_runs([write_rows(tmp_path / "log.jsonl", rows)])
    (row,) = [row for row in run.evaluations if row["set"] == "aime/24"]
    assert (row["mean"], row["num_samples"], "greedy" in row) == (0.25, 16, False)


def test_values_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    rows = verl_rows()
    rows[1]["data"] |= {"timing_s/step": None, "eepo/stage1/entropy": None, "actor/grad_norm": "x"}
    (run,) = read_runs([write_rows(tmp_path / "log.jsonl", rows)])
    assert list(run.series("seconds/total")) == list(run.series("grad_norm")) == [2]
    assert list(run.series("stage1/entropy")) == [2]


def test_grpo_in_verl_has_one_stage(tmp_path: Path) -> None:
    rows = verl_rows()[1:]
    for row in rows:
        row["data"] = {key: value for key, value in row["data"].items() if "eepo" not in key}
        row["data"]["actor/entropy"] = 0.5
    (run,) = read_runs([write_rows(tmp_path / "grpo.jsonl", rows)])
    assert run.series("stage1/reward") == run.series("reward")
    assert run.series("stage1/length") == run.series("length") != {}
    assert run.series("stage1/entropy") == run.series("entropy") == {1: 0.5, 2: 0.5}
    assert run.series("stage1/clip_share")[2] == rows[1]["data"]["actor/pg_clipfrac"]
    assert run.series("seconds/stage1")[2] == rows[1]["data"]["timing_s/gen"]
    assert not run.series("stage2/entropy")


def test_a_continued_verl_run_replaces_the_steps_that_it_repeats(tmp_path: Path) -> None:
    """A run is stopped in step 4 after a checkpoint at step 1, and has repeated step 2 so far."""
    rows = verl_rows()
    template = rows[1]["data"]
    before = [rows[0], *({"step": step, "data": template} for step in (1, 2, 3))]
    after = [{"step": 2, "data": template | {"critic/score/mean": 9.0}}]
    (tmp_path / "recipe.toml").write_text('name = "eepo"\n[training]\nseed = 5\n')
    write_rows(tmp_path / "logs/2026-01-01.jsonl", before)
    write_rows(tmp_path / "logs/2026-01-02.jsonl", after)
    (run,) = read_runs([tmp_path])
    assert (run.name, run.seed) == ("eepo", 5)
    assert run.series("reward") == {1: template["critic/score/mean"], 2: 9.0}


def test_a_folder_of_verl_logs_holds_one_run_per_file(tmp_path: Path) -> None:
    for name in ("grpo", "eepo"):
        shutil.copy(VERL, tmp_path / f"{name}.jsonl")
    assert [run.name for run in read_runs([tmp_path])] == ["eepo", "grpo"]


def test_exported_runs_are_found_in_the_folder_of_a_comparison(tmp_path: Path) -> None:
    for seed in (0, 1):
        folder = tmp_path / f"eepo/seed-{seed}"
        write_rows(folder / "logs/start.jsonl", verl_rows())
        (folder / "recipe.toml").write_text(f'name = "eepo"\n[training]\nseed = {seed}\n')
    assert [(run.name, run.seed) for run in read_runs([tmp_path])] == [("eepo", 0), ("eepo", 1)]


def test_a_trl_state_has_our_metric_names() -> None:
    (run,) = read_runs([TRL])
    history = json.loads(TRL.read_text())["log_history"]
    assert (run.name, run.seed, run.last_step) == ("trl_eepo", 0, 3)
    for key, source in {
        "reward": "reward",
        "length": "completions/mean_length",
        "policy_entropy": "entropy",
        "clip_share": "clip_ratio/region_mean",
        "zero_advantage_share": "frac_reward_zero_std",
        "stage1/reward": "eepo/stage1_reward",
        "stage2/entropy": "eepo/stage2_entropy",
        "stage2/length": "eepo/stage2_length",
        "gate_share": "eepo/gated_share",
        "unlearn/kl": "eepo/kl",
        "missed_share": "eepo/missed_share",
        "second_half_recovery": "eepo/second_half_recovery",
        "seconds/total": "step_time",
    }.items():
        expected = {row["step"]: row[source] for row in history if "reward" in row}
        assert run.series(key) == expected, key


@pytest.mark.parametrize("folder", ["run", "run/checkpoint-30"])
def test_the_newest_checkpoint_of_a_trl_folder_is_read(tmp_path: Path, folder: str) -> None:
    state = json.loads(TRL.read_text())
    for step in (4, 30):
        path = tmp_path / f"run/checkpoint-{step}/trainer_state.json"
        path.parent.mkdir(parents=True)
        rows = [row | {"step": step} for row in state["log_history"][:1]]
        path.write_text(json.dumps({"log_history": rows}))
    (run,) = read_runs([tmp_path / folder])
    assert (run.name, run.last_step) == ("run", 30)
    # The row is the mean of 30 steps.
    assert run.seconds() == pytest.approx(30 * state["log_history"][0]["step_time"])


def test_a_report_of_verl_and_trl_runs_has_the_figures_of_our_own(tmp_path: Path) -> None:
    runs = read_runs([VERL, TRL])
    names = {spec.name for spec, _ in draw_figures(runs)}
    assert names == {"exploration", "collapse", "cost", "unlearning", "second_half_recovery"}
    page = write_report([VERL, TRL], tmp_path / "report.html").read_text()
    assert "The share of clipped tokens is over all stages for verl_eepo, trl_eepo." in page


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "folder/notes.txt",
            "x",
            r"folder: not a run folder .* a verl log \(.jsonl\) or its folder",
        ),
        ("notes.jsonl", '{"loss": 1}\n', "notes.jsonl: not a run; give a run folder, a verl log"),
        ("log.jsonl", '{"step": 1, "data": {}}\n{"step": 2}\n', "log.jsonl: not a log of verl"),
        ("log.jsonl", '{"step": 0, "data": {"val-core/a/acc/mean@1": 1}}\n', "no step has been"),
        ("trainer_state.json", '{"epoch": 1}', "trainer_state.json: not the state of a TRL"),
        ("trainer_state.json", '{"log_history": []}', "no step has been logged yet"),
        ("trainer_state.json", "{", "trainer_state.json: not JSON"),
    ],
)
def test_other_files_give_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_runs([path.parent if name.startswith("folder") else path])
