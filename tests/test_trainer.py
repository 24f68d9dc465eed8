"""The loop: what a run writes, a shut gate that is GRPO, and resuming as if never stopped."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from eepo import recipe
from eepo.assemble import build_trainer
from eepo.config import RunConfig
from eepo.reports.records import read_runs
from eepo.rollout.transformers import TransformersEngine
from eepo.runs import checkpoint
from eepo.runs.jsonl import read_records
from eepo.runs.progress import Progress
from eepo.runs.runlog import COMPLETIONS, EVALUATIONS, METRICS
from eepo.types import UserError

TINY: dict[str, Any] = {
    "name": "eepo",
    "task": {"num_evaluation": 3},
    "algorithm": {"group_size": 4, "max_new_tokens": 14, "kl_coef": 0.0},
    "training": {
        "num_steps": 5,
        "prompts_per_step": 4,
        "prompts_per_mini_batch": 2,
        "learning_rate": 3e-4,
        "checkpoint_every": 1,
        "keep_checkpoints": 2,
    },
    "evaluation": {"num_samples": 2, "quick_problems": 2, "quick_samples": 2},
}

# The gate of a step depends on the steps before it; `auto` starts its search where the last step ended.
HISTORY = {
    "step gate": {"algorithm": {"gate": "step", "gate_window": 2}, "evaluation": {"every": 2}},
    "auto rate": {
        "algorithm": {"gate": "always", "unlearn_lr": "auto", "kl_coef": 0.01},
        "evaluation": {"start": True},
    },
}


pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(**sections: dict[str, Any]) -> RunConfig:
    tables = {key: dict(value) if isinstance(value, dict) else value for key, value in TINY.items()}
    for section, knobs in sections.items():
        tables[section] = tables.get(section, {}) | knobs
    return recipe.parse(RunConfig, tables, "test")


def run(config: RunConfig, out: Path, resume: bool = False) -> Path:
    build_trainer(config, out, resume, Progress(Console(file=io.StringIO()))).run()
    return out


def with_steps(config: RunConfig, num_steps: int) -> RunConfig:
    return dataclasses.replace(
        config, training=dataclasses.replace(config.training, num_steps=num_steps)
    )


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return list(read_records(folder / name))


def repeatable(folder: Path, name: str = METRICS) -> list[dict[str, Any]]:
    """Rows without what the clock says."""
    clock = ("seconds", "tokens_per_second")
    return [
        {key: value for key, value in row.items() if not key.startswith(clock)}
        for row in rows(folder, name)
    ]


def assert_same_tensors(a: Path, b: Path) -> None:
    left, right = load_file(a), load_file(b)
    assert left.keys() == right.keys()
    for name in left.keys() - {checkpoint.RNG}:
        assert torch.equal(left[name], right[name]), name


def assert_same_run(a: Path, b: Path) -> None:
    """Bit for bit: every record, the final weights, and what the last checkpoint would go on with.

    But not torch's random state: nothing in a run draws from it, so it is whatever the process had.
    """
    assert repeatable(a) == repeatable(b)
    assert repeatable(a, EVALUATIONS) == repeatable(b, EVALUATIONS)
    assert (a / COMPLETIONS).read_bytes() == (b / COMPLETIONS).read_bytes()
    assert_same_tensors(a / "final" / "model.safetensors", b / "final" / "model.safetensors")
    last_a, last_b = checkpoint.latest(a / "checkpoints"), checkpoint.latest(b / "checkpoints")
    assert last_a is not None
    assert last_b is not None
    assert_same_tensors(last_a / checkpoint.TRAINING, last_b / checkpoint.TRAINING)
    assert (last_a / checkpoint.STATE).read_text() == (last_b / checkpoint.STATE).read_text()


@dataclasses.dataclass
class Whole:
    """A run that was never stopped, and its folder as it was after each step's checkpoint."""

    config: RunConfig
    folder: Path
    after_step: dict[int, Path]

    def copy_of_step(self, step: int, to: Path) -> Path:
        return Path(shutil.copytree(self.after_step[step], to))


def run_with_copies(config: RunConfig, folder: Path) -> Whole:
    copies: dict[int, Path] = {}
    prune = checkpoint.prune

    def prune_and_copy(checkpoints: Path, keep: int) -> None:
        prune(checkpoints, keep)
        latest = checkpoint.latest(checkpoints)
        assert latest is not None
        step = checkpoint.step_of(latest)
        copies[step] = Path(shutil.copytree(folder / "run", folder / f"after-{step}"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "prune", prune_and_copy)
        run(config, folder / "run")
    return Whole(config, folder / "run", copies)


def threshold_that_needs_history(entropies: list[float]) -> float | None:
    """For a window of 2: shut, then open, and at some step shut only because of the step before it; None if none is.

    Up to the opening a run is the one with the gate shut, so these entropies are those that it will see.
    """
    means = [
        sum(entropies[max(0, end - 2) : end]) / len(entropies[max(0, end - 2) : end])
        for end in range(1, 6)
    ]
    for opening in range(1, 4):
        shut = means[:opening]
        threshold = (means[opening] + min(shut)) / 2
        if means[opening] < min(shut) and any(
            entropies[step] < threshold for step in range(opening)
        ):
            return threshold
    return None


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Whole]:
    for seed in range(5):
        pilot = tiny(algorithm={"gate": "never"}, training={"seed": seed})
        metrics = rows(run(pilot, tmp_path_factory.mktemp("pilot") / "run"), METRICS)
        threshold = threshold_that_needs_history([row["stage1/entropy"] for row in metrics])
        if threshold is not None:
            break
    else:
        pytest.fail("no seed gives entropies on which the gate's history decides")
    runs = {}
    for name, sections in HISTORY.items():
        algorithm = sections["algorithm"] | {"gate_threshold": threshold}
        config = tiny(**sections | {"algorithm": algorithm, "training": {"seed": seed}})
        runs[name] = run_with_copies(config, tmp_path_factory.mktemp("whole"))
    return runs


@pytest.fixture(scope="module")
def whole(whole_runs: dict[str, Whole]) -> Whole:
    return whole_runs["step gate"]


# --- what a run writes ------------------------------------------------------------------------------------------------


def test_a_run_folder_holds_its_records_weights_and_checkpoints(whole: Whole) -> None:
    names = {path.name for path in whole.folder.iterdir()}
    files = {
        "recipe.toml",
        "environment.json",
        METRICS,
        EVALUATIONS,
        COMPLETIONS,
        "final",
        "checkpoints",
    }
    assert names == files
    assert sorted(path.name for path in (whole.folder / "checkpoints").iterdir()) == [
        "step-000004",
        "step-000005",
    ]


def test_the_recipe_in_the_folder_is_the_whole_config(whole: Whole) -> None:
    assert (whole.folder / "recipe.toml").read_text(encoding="utf-8") == recipe.dump(whole.config)
    assert recipe.load_run(whole.folder / "recipe.toml") == whole.config


def test_the_environment_names_versions_and_device(whole: Whole) -> None:
    environment = json.loads((whole.folder / "environment.json").read_text())
    keys = {"eepo", "commit", "python", "platform", "num_cores", "device", "packages", "command"}
    assert keys <= environment.keys()
    assert environment["device"].startswith("cpu")
    assert environment["packages"]["torch"] == torch.__version__


def test_metrics_have_one_row_a_step_with_every_promised_key(whole_runs: dict[str, Whole]) -> None:
    per_stage = (
        "reward",
        "entropy",
        "length",
        "truncated_share",
        "ratio_mean",
        "ratio_max",
        "clip_share",
    )
    expected = {f"stage{stage}/{key}" for stage in (1, 2) for key in per_stage}
    expected |= {
        f"unlearn/{key}"
        for key in ("loss_before", "loss_after", "kl", "lr", "weights_changed_share")
    }
    expected |= {"step", "reward", "entropy", "length", "truncated_share"}
    expected |= {"missed_share", "second_half_recovery", "mismatch_kl"}
    expected |= {"gate_share", "zero_advantage_share", "grad_norm", "tokens_per_second"}
    phases = ("sync", "stage1", "stage2", "reward", "unlearn", "reference", "update", "total")
    expected |= {f"seconds/{phase}" for phase in phases}
    metrics = rows(whole_runs["auto rate"].folder, METRICS)
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5]
    for row in metrics:
        assert expected <= row.keys(), expected - row.keys()
        assert all(isinstance(row[key], int | float) for key in expected)
        phase_sum = sum(row[f"seconds/{phase}"] for phase in phases if phase != "total")
        assert 0 < phase_sum <= row["seconds/total"]


def test_metrics_agree_with_each_other(whole_runs: dict[str, Whole]) -> None:
    for row in rows(whole_runs["auto rate"].folder, METRICS):
        assert row["gate_share"] == 1.0
        assert row["unlearn/loss_after"] < row["unlearn/loss_before"]
        assert row["unlearn/kl"] > 0
        assert row["mismatch_kl"] < 1e-10  # engine and policy are both in fp32 here
        assert 0.5 < row["unlearn/weights_changed_share"] <= 1
        assert row["reward"] == pytest.approx((row["stage1/reward"] + row["stage2/reward"]) / 2)
        assert row["length"] == pytest.approx((row["stage1/length"] + row["stage2/length"]) / 2)
        assert row["tokens_per_second"] == pytest.approx(row["length"] * 16 / row["seconds/total"])


def test_completions_are_written_with_prompt_stage_reward_and_advantage(whole: Whole) -> None:
    completions = rows(whole.folder, COMPLETIONS)
    assert len(completions) == 5 * 4 * 4
    group = completions[:4]
    assert [row["stage"] for row in group] == [1, 1, 2, 2]
    assert len({row["prompt_id"] for row in group}) == 1
    keys = {
        "step",
        "prompt_id",
        "prompt",
        "stage",
        "reward",
        "reason",
        "advantage",
        "text",
        "finished",
        "logprob",
    }
    assert all(row.keys() - {"logprob_after"} == keys for row in completions)
    forgotten = [row for row in completions if "logprob_after" in row]
    assert forgotten
    assert {row["stage"] for row in forgotten} == {1}
    assert any(row["logprob_after"] != pytest.approx(row["logprob"], rel=1e-6) for row in forgotten)
    mixed = [row for row in completions if row["advantage"]]
    assert mixed
    assert all((row["advantage"] > 0) == (row["reward"] > 0) for row in mixed)


def test_log_completions_bounds_the_prompts_written_down(tmp_path: Path) -> None:
    config = tiny(training={"num_steps": 1, "log_completions": 1})
    assert len(rows(run(config, tmp_path / "run"), COMPLETIONS)) == 4


def test_evaluations_come_at_the_start_on_the_way_and_at_the_end(
    whole_runs: dict[str, Whole],
) -> None:
    seen = {
        name: [(row["step"], row["kind"], row["set"]) for row in rows(run.folder, EVALUATIONS)]
        for name, run in whole_runs.items()
    }
    sets = ("in_range", "out_of_range")
    every = [(0, "quick"), (2, "quick"), (4, "quick"), (5, "full")]
    assert seen["step gate"] == [(*when, name) for when in every for name in sets]
    assert seen["auto rate"] == [
        (*when, name) for when in [(0, "full"), (5, "full")] for name in sets
    ]


def test_the_engine_rests_when_it_has_sampled_and_not_within_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then training has the card; but what it gave back it would have to build again for every chunk of problems."""
    calls: list[str] = []
    generate = TransformersEngine.generate
    monkeypatch.setattr(TransformersEngine, "rest", lambda self: calls.append("rest"))

    def counted(self: Any, *given: Any) -> Any:
        calls.append("generate")
        return generate(self, *given)

    monkeypatch.setattr(TransformersEngine, "generate", counted)
    run(with_steps(tiny(algorithm={"num_stages": 2}), 1), tmp_path / "run")
    stages, evaluation = calls[:4], calls[4:]
    assert stages == ["generate", "rest"] * 2
    assert evaluation[-1] == "rest"
    assert len(evaluation) > 3
    assert set(evaluation[:-1]) == {"generate"}


def test_the_final_weights_load_elsewhere_and_generate(whole: Whole) -> None:
    model = AutoModelForCausalLM.from_pretrained(whole.folder / "final")
    tokenizer = AutoTokenizer.from_pretrained(whole.folder / "final")
    inputs = tokenizer("3 4 5 6 = 18 :", return_tensors="pt")
    output = model.generate(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=12,
        do_sample=False,
    )
    written = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    assert any(sign in written for sign in "+-*/")


def test_training_moves_the_weights_and_final_is_the_last_checkpoint(whole: Whole) -> None:
    final = load_file(whole.folder / "final" / "model.safetensors")
    first = load_file(whole.after_step[1] / "checkpoints" / "step-000001" / "model.safetensors")
    assert any(not torch.equal(final[name], first[name]) for name in final)
    last = whole.folder / "checkpoints" / "step-000005" / "model.safetensors"
    assert_same_tensors(whole.folder / "final" / "model.safetensors", last)


def test_no_steps_means_no_training_but_a_full_evaluation(tmp_path: Path) -> None:
    config = tiny(training={"num_steps": 0}, evaluation={"every": 2})
    folder = run(config, tmp_path / "run")
    assert "full" in {row["kind"] for row in rows(folder, EVALUATIONS)}
    assert (folder / "final" / "config.json").is_file()
    [found] = read_runs([folder])  # as a report does
    assert (found.metrics, found.last_step) == ([], 0)


def test_an_engine_in_bfloat16_rounds_part_of_the_unlearning_away_and_says_so(
    tmp_path: Path,
) -> None:
    """Two steps: the built-in weights are bfloat16 numbers to begin with, those of the second step are not."""
    config = tiny(
        algorithm={"gate": "always", "unlearn_lr": 1e-4},
        training={"num_steps": 2, "prompts_per_step": 2},
        rollout={"dtype": "bfloat16"},
        task={"num_evaluation": 1},
    )
    shares = [
        row["unlearn/weights_changed_share"] for row in rows(run(config, tmp_path / "run"), METRICS)
    ]
    assert len(shares) == 2
    assert all(0 < share < 0.9 for share in shares), shares
    final = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert {tensor.dtype for tensor in final.values()} == {torch.float32}


# --- a shut gate is GRPO ----------------------------------------------------------------------------------------------

SHUT = {
    "never": {"gate": "never", "kl_coef": 0.0},
    "threshold of zero, with a reference": {"gate": "token", "gate_threshold": 0.0, "kl_coef": 0.1},
    "step gate that never opens": {"gate": "step", "gate_threshold": 0.0, "kl_coef": 0.0},
}


def drawn(folder: Path) -> list[tuple[Any, ...]]:
    keys = ("step", "prompt_id", "text", "finished", "reward", "advantage")
    return [tuple(row[key] for key in keys) for row in rows(folder, COMPLETIONS)]


@pytest.mark.parametrize("shut", SHUT.values(), ids=SHUT)
def test_a_shut_gate_is_grpo_bit_for_bit(shut: dict[str, Any], tmp_path: Path) -> None:
    """With rows sampled in batches of the same shape: matrix products of other shapes round differently."""
    training = {
        "prompts_per_step": 6,
        "prompts_per_mini_batch": 3,
        "log_completions": 6,
        "checkpoint_every": 0,
    }
    same = {"training": training, "rollout": {"max_rows": 12}, "task": {"num_evaluation": 1}}
    eepo = run(tiny(algorithm={"num_stages": 2} | shut, **same), tmp_path / "eepo")
    grpo = run(tiny(algorithm={"num_stages": 1} | shut, **same), tmp_path / "grpo")
    assert drawn(eepo) == drawn(grpo)
    assert [row["stage"] for row in rows(eepo, COMPLETIONS)[:4]] == [1, 1, 2, 2]
    for ours, theirs in zip(repeatable(eepo), repeatable(grpo), strict=True):
        of_stage_1 = {"mismatch_kl", *(key for key in theirs if key.startswith("stage1/"))}
        shared = {key: value for key, value in theirs.items() if key not in of_stage_1}
        assert {key: ours[key] for key in shared} == shared
        assert ours["gate_share"] == 0.0
        assert not any(key.startswith("unlearn/") for key in ours)
        assert theirs["grad_norm"] > 0
    assert_same_tensors(eepo / "final" / "model.safetensors", grpo / "final" / "model.safetensors")
    last = Path("checkpoints") / "step-000005" / checkpoint.TRAINING
    assert_same_tensors(eepo / last, grpo / last)
    assert repeatable(eepo, EVALUATIONS) == repeatable(grpo, EVALUATIONS)


def test_a_shut_gate_draws_the_same_completions_whatever_the_shape_of_batches(
    tmp_path: Path,
) -> None:
    short = {"training": {"num_steps": 3}, "task": {"num_evaluation": 1}}
    eepo = run(tiny(algorithm={"gate": "never"}, **short), tmp_path / "eepo")
    grpo = run(tiny(algorithm={"num_stages": 1}, **short), tmp_path / "grpo")
    assert [row[:4] for row in drawn(eepo)] == [row[:4] for row in drawn(grpo)]


def test_an_open_gate_is_not_grpo(tmp_path: Path) -> None:
    """Stage 1 of the first step is drawn from the same weights with the same draws; stage 2 is not."""
    short = {
        "training": {"num_steps": 1},
        "task": {"num_evaluation": 1},
        "rollout": {"max_rows": 8},
    }
    eepo = run(tiny(algorithm={"gate": "always", "unlearn_lr": 0.03}, **short), tmp_path / "eepo")
    grpo = run(tiny(algorithm={"num_stages": 1}, **short), tmp_path / "grpo")
    pairs = list(zip(rows(eepo, COMPLETIONS), rows(grpo, COMPLETIONS), strict=True))
    assert all(ours["text"] == theirs["text"] for ours, theirs in pairs if ours["stage"] == 1)
    assert any(ours["text"] != theirs["text"] for ours, theirs in pairs if ours["stage"] == 2)


# --- resuming ---------------------------------------------------------------------------------------------------------


def test_the_runs_to_resume_have_a_history_that_matters(whole_runs: dict[str, Whole]) -> None:
    metrics = rows(whole_runs["step gate"].folder, METRICS)
    threshold = whole_runs["step gate"].config.algorithm.gate_threshold
    opened = [row["gate_share"] == 1.0 for row in metrics]
    alone = [row["stage1/entropy"] < threshold for row in metrics]
    assert set(opened) == {True, False}
    assert opened != alone, "no step's gate depends on the step before it"
    rates = [row["unlearn/lr"] for row in rows(whole_runs["auto rate"].folder, METRICS)]
    assert len(set(rates)) > 1


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", HISTORY)
def test_resuming_after_any_step_is_never_having_stopped(
    name: str, step: int, whole_runs: dict[str, Whole], tmp_path: Path
) -> None:
    whole = whole_runs[name]
    folder = whole.copy_of_step(step, tmp_path / "run")
    assert not (folder / "final").exists()
    torch.manual_seed(12345)
    assert_same_run(run(whole.config, folder, resume=True), whole.folder)


def test_resuming_a_run_killed_before_its_first_checkpoint_starts_over(
    whole: Whole, tmp_path: Path
) -> None:
    folder = whole.copy_of_step(2, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    assert_same_run(run(whole.config, folder, resume=True), whole.folder)


def test_resuming_drops_a_torn_last_line_and_steps_after_the_checkpoint(
    whole: Whole, tmp_path: Path
) -> None:
    folder = whole.copy_of_step(3, tmp_path / "run")
    for name in (METRICS, COMPLETIONS, EVALUATIONS):
        with (folder / name).open("a") as file:
            file.write('{"step": 4, "kind": "full", "reward": 0.5}\n{"step": 5, "rew')
    assert_same_run(run(whole.config, folder, resume=True), whole.folder)


def test_resuming_ignores_and_removes_what_a_killed_save_left(whole: Whole, tmp_path: Path) -> None:
    folder = whole.copy_of_step(3, tmp_path / "run")
    half = folder / "checkpoints" / ".step-000004.4242"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert_same_run(run(whole.config, folder, resume=True), whole.folder)
    assert not half.exists()


def test_a_finished_run_may_be_given_more_steps(whole: Whole, tmp_path: Path) -> None:
    folder = run(with_steps(whole.config, 3), tmp_path / "run")
    run(whole.config, folder, resume=True)
    assert repeatable(folder) == repeatable(whole.folder)
    assert_same_tensors(
        folder / "final" / "model.safetensors", whole.folder / "final" / "model.safetensors"
    )


def test_resuming_a_finished_run_changes_no_record_and_no_weight(
    whole: Whole, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(whole.folder, tmp_path / "run"))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    run(whole.config, folder, resume=True)
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert before.keys() == after.keys()
    assert [
        str(path)
        for path in before
        if before[path] != after[path] and path.name != "environment.json"
    ] == []


def test_resuming_a_finished_run_writes_no_record_again(whole: Whole, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole.folder, tmp_path / "run"))
    before = {
        name: (folder / name).stat().st_mtime_ns for name in (METRICS, EVALUATIONS, COMPLETIONS)
    }
    run(whole.config, folder, resume=True)
    assert {name: (folder / name).stat().st_mtime_ns for name in before} == before


def command(config: RunConfig, folder: Path) -> subprocess.Popen[str]:
    written = folder / "recipe-to-run.toml"
    written.write_text(recipe.dump(config), encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, "-m", "eepo", "train", str(written), "--out", str(folder / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"},
    )


def wait_for_lines(
    process: subprocess.Popen[str], path: Path, number: int, seconds: float = 120
) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists() or path.read_bytes().count(b"\n") < number:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"{path} never had {number} lines"
        time.sleep(0.005)


def test_a_run_that_was_killed_resumes_as_if_never_stopped(whole: Whole, tmp_path: Path) -> None:
    endless = dataclasses.replace(
        whole.config,
        training=dataclasses.replace(whole.config.training, num_steps=10_000, checkpoint_every=2),
    )
    process = command(endless, tmp_path)
    try:
        wait_for_lines(process, tmp_path / "run" / METRICS, 3)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    killed_at = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert killed_at is not None
    assert checkpoint.step_of(killed_at) < 5
    assert_same_run(run(whole.config, tmp_path / "run", resume=True), whole.folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_an_interrupted_run_saves_its_last_whole_step_and_resumes(
    number: signal.Signals, whole: Whole, tmp_path: Path
) -> None:
    endless = dataclasses.replace(
        whole.config,
        training=dataclasses.replace(whole.config.training, num_steps=10_000, checkpoint_every=0),
    )
    process = command(endless, tmp_path)
    try:
        wait_for_lines(process, tmp_path / "run" / METRICS, 1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    done = rows(tmp_path / "run", METRICS)[-1]["step"]
    assert process.returncode not in (0, -number)
    assert len(errors.splitlines()) == 1, errors
    assert errors.startswith("eepo: ")
    assert f"step {done}" in errors
    assert "--resume" in errors
    saved = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert saved is not None
    assert checkpoint.step_of(saved) == done < 5
    assert_same_run(run(whole.config, tmp_path / "run", resume=True), whole.folder)


# --- refusals ---------------------------------------------------------------------------------------------------------


def refusal(config: RunConfig, out: Path, resume: bool) -> str:
    with pytest.raises(UserError) as caught:
        run(config, out, resume)
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    return line


def test_a_folder_that_holds_a_run_is_refused_without_resume(whole: Whole, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole.folder, tmp_path / "run"))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    line = refusal(whole.config, folder, resume=False)
    assert str(folder) in line
    assert "--resume" in line
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("section", "knob", "value", "fragments"),
    [
        ("algorithm", "unlearn_lr", 0.5, ["algorithm.unlearn_lr", "0.5", "0.003"]),
        ("algorithm", "gate", "never", ["algorithm.gate", "never", "step"]),
        ("training", "seed", 77, ["training.seed", "77"]),
        ("training", "learning_rate", 0.5, ["training.learning_rate", "0.5", "0.0003"]),
        ("evaluation", "num_samples", 4, ["evaluation.num_samples", "4", "2"]),
        ("task", "seed", 3, ["task.seed", "3", "0"]),
    ],
)
def test_resuming_with_a_changed_knob_is_refused_by_its_name_and_touches_nothing(
    section: str, knob: str, value: Any, fragments: list[str], whole: Whole, tmp_path: Path
) -> None:
    folder = whole.copy_of_step(2, tmp_path / "run")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    changed = dataclasses.replace(getattr(whole.config, section), **{knob: value})
    line = refusal(dataclasses.replace(whole.config, **{section: changed}), folder, resume=True)
    assert all(fragment in line for fragment in fragments)
    assert "the same --set again" in line
    assert line.endswith(f"eepo train {folder}/recipe.toml --out {folder} --resume")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_file_as_the_run_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert str(tmp_path / "file") in refusal(tiny(), tmp_path / "file", resume=False)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_that_could_not_begin_does_not_occupy_its_folder(tmp_path: Path) -> None:
    """The user mends the recipe and runs the same command again."""
    refusal(tiny(model={"path": "builtin:nothing"}), tmp_path / "run", resume=False)
    good = tiny(training={"num_steps": 0}, task={"num_evaluation": 1})
    assert (run(good, tmp_path / "run") / "final" / "config.json").is_file()
