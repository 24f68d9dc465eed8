"""The training loop: records of a run, the limit of GRPO, and resumed runs that are bit-equal."""

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
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from eepo import assemble, recipe
from eepo.algorithm import StepMetrics
from eepo.assemble import build_trainer
from eepo.config import RunConfig
from eepo.model import loading
from eepo.model.policy import Policy
from eepo.reports.records import read_runs
from eepo.rollout.transformers import TransformersEngine
from eepo.runs import checkpoint
from eepo.runs.jsonl import read_records
from eepo.runs.lock import LOCK
from eepo.runs.progress import Progress
from eepo.runs.runlog import ALARMS, COMPLETIONS, EVALUATIONS, METRICS
from eepo.types import Completion, Prompt, Rollout, Sampling, UserError, Verdict

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

# Runs whose steps depend on earlier steps: the step gate averages over steps, and the search of
# `auto` starts at the rate of the last step.
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
    """Return the rows without times."""
    clock = ("seconds", "tokens_per_second")
    return [
        {key: value for key, value in row.items() if not key.startswith(clock)}
        for row in rows(folder, name)
    ]


def assert_same_tensors(a: Path, b: Path) -> None:
    left, right = load_file(a), load_file(b)
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def assert_same_run(a: Path, b: Path) -> None:
    """Compare all records, the final weights and the last checkpoint, bit for bit."""
    assert repeatable(a) == repeatable(b)
    assert repeatable(a, EVALUATIONS) == repeatable(b, EVALUATIONS)
    assert (a / COMPLETIONS).read_bytes() == (b / COMPLETIONS).read_bytes()
    assert_same_tensors(a / "final" / "model.safetensors", b / "final" / "model.safetensors")
    last_a, last_b = checkpoint.latest(a / "checkpoints"), checkpoint.latest(b / "checkpoints")
    assert last_a is not None
    assert last_b is not None
    assert_same_tensors(last_a / checkpoint.TRAINING, last_b / checkpoint.TRAINING)
    assert contents(last_a) == contents(last_b)


def contents(folder: Path) -> dict[Path, bytes]:
    """Read all files but the lock. Copies of a running run have one, as after a kill."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK)
    return {path.relative_to(folder): path.read_bytes() for path in files}


@dataclasses.dataclass
class FullRun:
    """A run that was never stopped, and copies of its folder after each step's checkpoint."""

    config: RunConfig
    folder: Path
    after_step: dict[int, Path]

    def copy_of_step(self, step: int, to: Path) -> Path:
        return Path(shutil.copytree(self.after_step[step], to))


def run_with_copies(config: RunConfig, folder: Path) -> FullRun:
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
    return FullRun(config, folder / "run", copies)


def threshold_that_needs_history(entropies: list[float]) -> float | None:
    """Return a threshold where the step gate of some step depends on the step before it, or None.

    The window is 2. `entropies` are those of a run with the gate shut: until the gate opens, the
    run with the threshold has the same entropies.
    """
    windows = [entropies[max(0, end - 2) : end] for end in range(1, 6)]
    means = [sum(window) / len(window) for window in windows]
    for opening in range(1, 4):
        lowest_shut = min(means[:opening])
        threshold = (means[opening] + lowest_shut) / 2
        would_open_earlier = any(entropy < threshold for entropy in entropies[:opening])
        if means[opening] < lowest_shut and would_open_earlier:
            return threshold
    return None


@pytest.fixture(scope="module")
def full_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FullRun]:
    for seed in range(5):
        pilot = tiny(algorithm={"gate": "never"}, training={"seed": seed})
        metrics = rows(run(pilot, tmp_path_factory.mktemp("pilot") / "run"), METRICS)
        threshold = threshold_that_needs_history([row["stage1/entropy"] for row in metrics])
        if threshold is not None:
            break
    else:
        pytest.fail("no seed has a step whose gate depends on the step before it")
    runs = {}
    for name, sections in HISTORY.items():
        algorithm = sections["algorithm"] | {"gate_threshold": threshold}
        config = tiny(**sections | {"algorithm": algorithm, "training": {"seed": seed}})
        runs[name] = run_with_copies(config, tmp_path_factory.mktemp("full"))
    return runs


@pytest.fixture(scope="module")
def full_run(full_runs: dict[str, FullRun]) -> FullRun:
    return full_runs["step gate"]


# --- records


def test_a_run_folder_has_records_weights_and_checkpoints(full_run: FullRun) -> None:
    names = {path.name for path in full_run.folder.iterdir()}
    records = {METRICS, EVALUATIONS, COMPLETIONS}
    others = {"recipe.toml", "environment.json", "last_checkpoint.json", "final", "checkpoints"}
    assert names == records | others | {"finished.json"}
    finished = json.loads((full_run.folder / "finished.json").read_text())
    assert finished == {"step": 5, "num_sets": 2}
    checkpoints = sorted(path.name for path in (full_run.folder / "checkpoints").iterdir())
    assert checkpoints == ["step-000004", "step-000005"]


def test_the_recipe_in_the_folder_has_every_knob(full_run: FullRun) -> None:
    path = full_run.folder / "recipe.toml"
    assert path.read_text(encoding="utf-8") == recipe.dump(full_run.config)
    assert recipe.load_run(path) == full_run.config


def test_the_environment_has_versions_and_device(full_run: FullRun) -> None:
    environment = json.loads((full_run.folder / "environment.json").read_text())
    keys = {"eepo", "commit", "python", "platform", "num_cores", "device", "packages", "command"}
    assert keys <= environment.keys()
    assert environment["device"].startswith("cpu")
    assert environment["packages"]["torch"] == torch.__version__


def test_metrics_have_one_row_per_step_with_every_documented_key(
    full_runs: dict[str, FullRun],
) -> None:
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
    metrics = rows(full_runs["auto rate"].folder, METRICS)
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5]
    for row in metrics:
        assert expected <= row.keys(), expected - row.keys()
        assert all(isinstance(row[key], int | float) for key in expected)
        phase_sum = sum(row[f"seconds/{phase}"] for phase in phases if phase != "total")
        assert 0 < phase_sum <= row["seconds/total"]


def test_metrics_are_consistent_with_each_other(full_runs: dict[str, FullRun]) -> None:
    for row in rows(full_runs["auto rate"].folder, METRICS):
        assert row["gate_share"] == 1.0
        assert row["unlearn/loss_after"] < row["unlearn/loss_before"]
        assert row["unlearn/kl"] > 0
        assert row["mismatch_kl"] < 1e-10  # engine and policy are both in fp32 here
        assert 0.5 < row["unlearn/weights_changed_share"] <= 1
        assert row["reward"] == pytest.approx((row["stage1/reward"] + row["stage2/reward"]) / 2)
        assert row["length"] == pytest.approx((row["stage1/length"] + row["stage2/length"]) / 2)
        assert row["tokens_per_second"] == pytest.approx(row["length"] * 16 / row["seconds/total"])


def test_logged_completions_have_prompt_stage_reward_and_advantage(full_run: FullRun) -> None:
    completions = rows(full_run.folder, COMPLETIONS)
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
    probed = [row for row in completions if "logprob_after" in row]
    assert probed
    assert {row["stage"] for row in probed} == {1}
    assert any(row["logprob_after"] != pytest.approx(row["logprob"], rel=1e-6) for row in probed)
    with_advantage = [row for row in completions if row["advantage"]]
    assert with_advantage
    assert all((row["advantage"] > 0) == (row["reward"] > 0) for row in with_advantage)


def test_log_completions_limits_the_logged_prompts(tmp_path: Path) -> None:
    config = tiny(training={"num_steps": 1, "log_completions": 1})
    assert len(rows(run(config, tmp_path / "run"), COMPLETIONS)) == 4


def test_evaluations_run_at_the_start_during_training_and_at_the_end(
    full_runs: dict[str, FullRun],
) -> None:
    seen = {
        name: [(row["step"], row["kind"], row["set"]) for row in rows(run.folder, EVALUATIONS)]
        for name, run in full_runs.items()
    }
    sets = ("in_range", "out_of_range")
    every = [(0, "quick"), (2, "quick"), (4, "quick"), (5, "full")]
    assert seen["step gate"] == [(*when, name) for when in every for name in sets]
    assert seen["auto rate"] == [
        (*when, name) for when in [(0, "full"), (5, "full")] for name in sets
    ]


@pytest.mark.parametrize("kind", ["quick", "full"])
@pytest.mark.parametrize(("limit", "num_problems"), [(2, 2), (0, 3)])
def test_an_evaluation_uses_the_first_problems_or_all(
    kind: str, limit: int, num_problems: int, tmp_path: Path
) -> None:
    name = "quick_problems" if kind == "quick" else "num_problems"
    evaluation = {"every": 1, name: limit, "num_samples": 1}
    config = tiny(training={"num_steps": 2}, evaluation=evaluation)
    found = [row for row in rows(run(config, tmp_path / "run"), EVALUATIONS) if row["kind"] == kind]
    assert {row["step"] for row in found} == ({0, 1} if kind == "quick" else {2})
    assert {row["num_problems"] for row in found} == {num_problems}


def test_the_engine_releases_memory_after_each_stage_and_after_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training needs the memory. Within an evaluation, the engine would only allocate it again."""
    calls: list[str] = []
    generate = TransformersEngine.generate

    def recorded_generate(self: Any, *args: Any) -> Any:
        calls.append("generate")
        return generate(self, *args)

    monkeypatch.setattr(TransformersEngine, "generate", recorded_generate)
    monkeypatch.setattr(TransformersEngine, "release_memory", lambda self: calls.append("release"))
    run(with_steps(tiny(algorithm={"num_stages": 2}), 1), tmp_path / "run")
    stages, evaluation = calls[:4], calls[4:]
    assert stages == ["generate", "release"] * 2
    assert evaluation[-1] == "release"
    assert len(evaluation) > 3
    assert set(evaluation[:-1]) == {"generate"}


def test_final_weights_load_in_transformers_and_generate(full_run: FullRun) -> None:
    model = AutoModelForCausalLM.from_pretrained(full_run.folder / "final")
    tokenizer = AutoTokenizer.from_pretrained(full_run.folder / "final")
    inputs = tokenizer("3 4 5 6 = 18 :", return_tensors="pt")
    output = model.generate(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=12,
        do_sample=False,
    )
    text = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    assert any(sign in text for sign in "+-*/")


def test_training_changes_the_weights_and_final_equals_the_last_checkpoint(
    full_run: FullRun,
) -> None:
    final = load_file(full_run.folder / "final" / "model.safetensors")
    first = load_file(full_run.after_step[1] / "checkpoints" / "step-000001" / "model.safetensors")
    assert any(not torch.equal(final[name], first[name]) for name in final)
    last = full_run.folder / "checkpoints" / "step-000005" / "model.safetensors"
    assert_same_tensors(full_run.folder / "final" / "model.safetensors", last)


def test_a_run_of_0_steps_has_a_full_evaluation_and_can_be_reported(tmp_path: Path) -> None:
    config = tiny(training={"num_steps": 0}, evaluation={"every": 2})
    folder = run(config, tmp_path / "run")
    assert "full" in {row["kind"] for row in rows(folder, EVALUATIONS)}
    assert (folder / "final" / "config.json").is_file()
    [reported] = read_runs([folder])
    assert (reported.metrics, reported.last_step) == ([], 0)


def test_a_bf16_engine_reports_the_share_of_weights_that_unlearning_changed(
    tmp_path: Path,
) -> None:
    """Two steps: the built-in weights are bf16 numbers, but not those after an update."""
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


# --- with the gate shut, EEPO is GRPO

SHUT = {
    "never": {"gate": "never", "kl_coef": 0.0},
    "threshold 0 with a reference": {"gate": "token", "gate_threshold": 0.0, "kl_coef": 0.1},
    "step gate with threshold 0": {"gate": "step", "gate_threshold": 0.0, "kl_coef": 0.0},
}


def sampled(folder: Path) -> list[tuple[Any, ...]]:
    keys = ("step", "prompt_id", "text", "finished", "reward", "advantage")
    return [tuple(row[key] for key in keys) for row in rows(folder, COMPLETIONS)]


@pytest.mark.parametrize("shut", SHUT.values(), ids=SHUT)
def test_with_the_gate_shut_a_run_equals_grpo_bit_for_bit(
    shut: dict[str, Any], tmp_path: Path
) -> None:
    """Both sample batches of the same shape: products of other shapes are rounded differently."""
    training = {
        "prompts_per_step": 6,
        "prompts_per_mini_batch": 3,
        "log_completions": 6,
        "checkpoint_every": 0,
    }
    same = {"training": training, "rollout": {"max_rows": 12}, "task": {"num_evaluation": 1}}
    eepo = run(tiny(algorithm={"num_stages": 2} | shut, **same), tmp_path / "eepo")
    grpo = run(tiny(algorithm={"num_stages": 1} | shut, **same), tmp_path / "grpo")
    assert sampled(eepo) == sampled(grpo)
    assert [row["stage"] for row in rows(eepo, COMPLETIONS)[:4]] == [1, 1, 2, 2]
    for eepo_row, grpo_row in zip(repeatable(eepo), repeatable(grpo), strict=True):
        of_stage_1 = {"mismatch_kl", *(key for key in grpo_row if key.startswith("stage1/"))}
        shared = {key: value for key, value in grpo_row.items() if key not in of_stage_1}
        assert {key: eepo_row[key] for key in shared} == shared
        assert eepo_row["gate_share"] == 0.0
        assert not any(key.startswith("unlearn/") for key in eepo_row)
        assert grpo_row["grad_norm"] > 0
    assert_same_tensors(eepo / "final" / "model.safetensors", grpo / "final" / "model.safetensors")
    last = Path("checkpoints") / "step-000005" / checkpoint.TRAINING
    assert_same_tensors(eepo / last, grpo / last)
    assert repeatable(eepo, EVALUATIONS) == repeatable(grpo, EVALUATIONS)


@pytest.mark.slow
def test_with_the_gate_shut_completions_do_not_depend_on_batch_shapes(tmp_path: Path) -> None:
    short = {"training": {"num_steps": 3}, "task": {"num_evaluation": 1}}
    eepo = run(tiny(algorithm={"gate": "never"}, **short), tmp_path / "eepo")
    grpo = run(tiny(algorithm={"num_stages": 1}, **short), tmp_path / "grpo")
    assert [row[:4] for row in sampled(eepo)] == [row[:4] for row in sampled(grpo)]


def test_with_the_gate_open_only_stage_1_of_the_first_step_equals_grpo(tmp_path: Path) -> None:
    short = {
        "training": {"num_steps": 1},
        "task": {"num_evaluation": 1},
        "rollout": {"max_rows": 8},
    }
    eepo = run(tiny(algorithm={"gate": "always", "unlearn_lr": 0.03}, **short), tmp_path / "eepo")
    grpo = run(tiny(algorithm={"num_stages": 1}, **short), tmp_path / "grpo")
    pairs = list(zip(rows(eepo, COMPLETIONS), rows(grpo, COMPLETIONS), strict=True))
    assert all(a["text"] == b["text"] for a, b in pairs if a["stage"] == 1)
    assert any(a["text"] != b["text"] for a, b in pairs if a["stage"] == 2)


# --- resuming


def test_steps_of_the_runs_to_resume_depend_on_earlier_steps(full_runs: dict[str, FullRun]) -> None:
    metrics = rows(full_runs["step gate"].folder, METRICS)
    threshold = full_runs["step gate"].config.algorithm.gate_threshold
    opened = [row["gate_share"] == 1.0 for row in metrics]
    alone = [row["stage1/entropy"] < threshold for row in metrics]
    assert set(opened) == {True, False}
    assert opened != alone, "no step's gate depends on the step before it"
    rates = [row["unlearn/lr"] for row in rows(full_runs["auto rate"].folder, METRICS)]
    assert len(set(rates)) > 1


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", HISTORY)
def test_a_run_resumed_after_any_step_equals_an_uninterrupted_run(
    name: str, step: int, full_runs: dict[str, FullRun], tmp_path: Path
) -> None:
    full_run = full_runs[name]
    folder = full_run.copy_of_step(step, tmp_path / "run")
    assert not (folder / "final").exists()
    torch.manual_seed(12345)
    assert_same_run(run(full_run.config, folder, resume=True), full_run.folder)


def test_a_run_killed_before_its_first_checkpoint_starts_over(
    full_run: FullRun, tmp_path: Path
) -> None:
    folder = full_run.copy_of_step(1, tmp_path / "run")
    assert not (folder / "last_checkpoint.json").exists()
    shutil.rmtree(folder / "checkpoints")
    assert_same_run(run(full_run.config, folder, resume=True), full_run.folder)


def test_resuming_drops_unfinished_lines_and_steps_after_the_checkpoint(
    full_run: FullRun, tmp_path: Path
) -> None:
    folder = full_run.copy_of_step(3, tmp_path / "run")
    for name in (METRICS, COMPLETIONS, EVALUATIONS):
        with (folder / name).open("a") as file:
            file.write('{"step": 4, "kind": "full", "reward": 0.5}\n{"step": 5, "rew')
    assert_same_run(run(full_run.config, folder, resume=True), full_run.folder)


def test_resuming_removes_leftovers_of_a_killed_save(full_run: FullRun, tmp_path: Path) -> None:
    folder = full_run.copy_of_step(3, tmp_path / "run")
    leftover = folder / "checkpoints" / ".step-000004.4242"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    assert_same_run(run(full_run.config, folder, resume=True), full_run.folder)
    assert not leftover.exists()


def test_a_finished_run_can_be_resumed_with_more_steps(full_run: FullRun, tmp_path: Path) -> None:
    folder = run(with_steps(full_run.config, 3), tmp_path / "run")
    run(full_run.config, folder, resume=True)
    assert repeatable(folder) == repeatable(full_run.folder)
    assert_same_tensors(
        folder / "final" / "model.safetensors", full_run.folder / "final" / "model.safetensors"
    )


def test_resuming_a_finished_run_changes_no_file(full_run: FullRun, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(full_run.folder, tmp_path / "run"))
    before = contents(folder)
    run(full_run.config, folder, resume=True)
    after = contents(folder)
    assert before.keys() == after.keys()
    changed = [path.name for path in before if before[path] != after[path]]
    assert set(changed) <= {"environment.json"}


def test_resuming_a_finished_run_does_not_write_its_records(
    full_run: FullRun, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(full_run.folder, tmp_path / "run"))
    records = [folder / name for name in (METRICS, EVALUATIONS, COMPLETIONS)]
    before = [path.stat().st_mtime_ns for path in records]
    run(full_run.config, folder, resume=True)
    assert [path.stat().st_mtime_ns for path in records] == before


def start_process(config: RunConfig, folder: Path, *options: str) -> subprocess.Popen[str]:
    recipe_file = folder / "recipe-to-run.toml"
    recipe_file.write_text(recipe.dump(config), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "eepo",
        "train",
        str(recipe_file),
        "--out",
        str(folder / "run"),
    ]
    return subprocess.Popen(
        [*command, *options],
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
        assert time.monotonic() < deadline, (
            f"{path} has fewer than {number} lines after {seconds} s"
        )
        time.sleep(0.005)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_uninterrupted_run(full_run: FullRun, tmp_path: Path) -> None:
    endless = dataclasses.replace(
        full_run.config,
        training=dataclasses.replace(
            full_run.config.training, num_steps=10_000, checkpoint_every=2
        ),
    )
    process = start_process(endless, tmp_path)
    try:
        wait_for_lines(process, tmp_path / "run" / METRICS, 3)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    killed_at = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert killed_at is not None
    assert checkpoint.step_of(killed_at) < 5
    assert_same_run(run(full_run.config, tmp_path / "run", resume=True), full_run.folder)


@pytest.mark.slow
def test_a_second_process_is_refused_and_a_killed_one_is_not_in_the_way(
    full_run: FullRun, tmp_path: Path
) -> None:
    endless = with_steps(full_run.config, 10_000)
    first = start_process(endless, tmp_path)
    try:
        wait_for_lines(first, tmp_path / "run" / METRICS, 1)
        second = start_process(endless, tmp_path)
        _, errors = second.communicate(timeout=170)
        assert second.returncode == 2
        assert len(errors.splitlines()) == 1, errors
        assert f"is in use by process {first.pid} on host " in errors
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
    steps = [row["step"] for row in rows(tmp_path / "run", METRICS)]
    assert steps == list(range(1, len(steps) + 1))
    third = start_process(with_steps(full_run.config, 1), tmp_path, "--resume")
    assert third.communicate(timeout=170)[1] == ""
    assert third.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_stopped_run_saves_its_last_complete_step_and_resumes(
    number: signal.Signals, full_run: FullRun, tmp_path: Path
) -> None:
    endless = dataclasses.replace(
        full_run.config,
        training=dataclasses.replace(
            full_run.config.training, num_steps=10_000, checkpoint_every=0
        ),
    )
    process = start_process(endless, tmp_path)
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
    assert_same_run(run(full_run.config, tmp_path / "run", resume=True), full_run.folder)


# --- a damaged checkpoint, with EEPO (tests/runs/test_resume.py damages every file)


@pytest.mark.parametrize("name", HISTORY)
def test_a_run_that_falls_back_to_an_older_checkpoint_equals_an_uninterrupted_run(
    name: str, full_runs: dict[str, FullRun], tmp_path: Path
) -> None:
    full_run = full_runs[name]
    folder = full_run.copy_of_step(4, tmp_path / "run")
    weights = folder / "checkpoints" / "step-000004" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert_same_run(run(full_run.config, folder, resume=True), full_run.folder)


def test_a_trainer_holds_the_lock_until_its_run_ends(full_run: FullRun, tmp_path: Path) -> None:
    config = with_steps(full_run.config, 0)
    first = build_trainer(config, tmp_path / "run", False, Progress(Console(file=io.StringIO())))
    assert f"process {os.getpid()} on host" in error_line(config, tmp_path / "run", resume=True)
    first.run()
    assert not (tmp_path / "run" / ".lock").exists()
    run(config, tmp_path / "run", resume=True)


# --- the interface of an algorithm


class CountingAlgorithm:
    """Has only the three methods that the trainer may use. Adds 1 to all weights in every step."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._count = policy, 0

    def step(self, prompts: list[Prompt], sampling: Sampling, metrics: StepMetrics) -> Rollout:
        self._count += 1
        with torch.no_grad():
            for weight in self._policy.model.parameters():
                weight.add_(1.0)
        verdicts: Future[list[Verdict]] = Future()
        verdicts.set_result([Verdict(float(self._count), "1")] * len(prompts))
        rollout = Rollout(prompts)
        completion = Completion((3, 1), (-0.5, -0.5), "1", finished=True)
        rollout.add_stage(1, [[completion] for _ in prompts], verdicts)
        rollout.wait_for_rewards()
        rollout.advantages = [[0.0] for _ in prompts]
        metrics.record_rollout(rollout)
        return rollout

    def state(self) -> dict[str, Any]:
        return {"count": self._count}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._count = state["count"]


def test_the_trainer_uses_only_step_state_and_load_state_of_an_algorithm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains, logs, evaluates, saves and resumes with any object that has these methods."""
    monkeypatch.setattr(assemble, "EEPO", lambda policy, **_: CountingAlgorithm(policy))
    config = tiny(training={"num_steps": 4}, evaluation={"every": 2})
    folder = run(with_steps(config, 2), tmp_path / "resumed")
    state = json.loads((folder / "checkpoints" / "step-000002" / checkpoint.STATE).read_text())
    num_rows = {METRICS: 2, EVALUATIONS: 2, COMPLETIONS: 8, ALARMS: 0}
    assert state == {"num_prompts_seen": 8, "count": 2, "num_rows": num_rows, "step": 2}
    run(config, folder, resume=True)
    assert [row["reward"] for row in rows(folder, METRICS)] == [1.0, 2.0, 3.0, 4.0]
    assert [row["step"] for row in rows(folder, COMPLETIONS)] == [1] * 4 + [2] * 4 + [3] * 4 + [
        4
    ] * 4
    full = run(config, tmp_path / "full")
    assert repeatable(folder) == repeatable(full)
    final = Path("final") / "model.safetensors"
    assert_same_tensors(folder / final, full / final)
    start = dict(loading.load_model(config.model, torch.device("cpu")).named_parameters())
    for name, weight in load_file(full / final).items():
        torch.testing.assert_close(weight, start[name].detach() + 4)


# --- errors


def error_line(config: RunConfig, out: Path, resume: bool) -> str:
    with pytest.raises(UserError) as caught:
        run(config, out, resume)
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    return line


def test_a_folder_with_a_run_is_an_error_without_resume(full_run: FullRun, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(full_run.folder, tmp_path / "run"))
    before = contents(folder)
    line = error_line(full_run.config, folder, resume=False)
    assert str(folder) in line
    assert "--resume" in line
    assert contents(folder) == before


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
def test_resuming_with_a_changed_knob_is_an_error_and_changes_no_file(
    section: str, knob: str, value: Any, fragments: list[str], full_run: FullRun, tmp_path: Path
) -> None:
    folder = full_run.copy_of_step(2, tmp_path / "run")
    before = contents(folder)
    changed = dataclasses.replace(getattr(full_run.config, section), **{knob: value})
    line = error_line(
        dataclasses.replace(full_run.config, **{section: changed}), folder, resume=True
    )
    assert all(fragment in line for fragment in fragments)
    assert "repeat the same --set" in line
    assert line.endswith(f"eepo train {folder}/recipe.toml --out {folder} --resume")
    assert contents(folder) == before


def test_a_file_instead_of_the_run_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert str(tmp_path / "file") in error_line(tiny(), tmp_path / "file", resume=False)
    assert (tmp_path / "file").read_text() == "mine"


def test_after_an_error_at_the_start_the_same_command_works_again(tmp_path: Path) -> None:
    error_line(tiny(model={"path": "builtin:nothing"}), tmp_path / "run", resume=False)
    good = tiny(training={"num_steps": 0}, task={"num_evaluation": 1})
    assert (run(good, tmp_path / "run") / "final" / "config.json").is_file()
