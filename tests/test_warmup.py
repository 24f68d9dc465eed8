"""The warm start lowers the loss, resumes exactly, and gives a model for training."""

from __future__ import annotations

import io
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from eepo import recipe
from eepo.assemble import build_trainer, build_warmup
from eepo.config import RunConfig, SupervisedConfig, WarmupConfig
from eepo.runs import checkpoint
from eepo.runs.jsonl import read_records
from eepo.runs.progress import Progress
from eepo.runs.runlog import EVALUATIONS, METRICS
from eepo.types import UserError
from eepo.warmup import Warmup, learning_rate

TINY: dict[str, Any] = {
    "name": "warm",
    "max_new_tokens": 10,
    "scratch": {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2},
    "task": {"num_evaluation": 3},
    "supervised": {
        "num_steps": 12,
        "batch_size": 16,
        "learning_rate": 1e-2,
        "ramp_steps": 3,
        "checkpoint_every": 4,
    },
    "evaluation": {"num_samples": 2},
}


pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(**sections: dict[str, Any]) -> WarmupConfig:
    tables = {key: dict(value) if isinstance(value, dict) else value for key, value in TINY.items()}
    for section, knobs in sections.items():
        tables[section] = tables.get(section, {}) | knobs
    return recipe.parse(WarmupConfig, tables, "test")


def quiet() -> Progress:
    return Progress(Console(file=io.StringIO()))


def run(config: WarmupConfig, out: Path, resume: bool = False) -> Path:
    build_warmup(config, out, resume, quiet()).run()
    return out


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if not key.startswith("seconds")}
        for row in read_records(folder / name)
    ]


def assert_same_run(a: Path, b: Path) -> None:
    assert rows(a, METRICS) == rows(b, METRICS)
    assert rows(a, EVALUATIONS) == rows(b, EVALUATIONS)
    left, right = (load_file(folder / "final" / "model.safetensors") for folder in (a, b))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


class FullRun(NamedTuple):
    """A run that was never stopped, and copies of its folder after each checkpoint."""

    folder: Path
    after_step: dict[int, Path]


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> FullRun:
    folder = tmp_path_factory.mktemp("warm")
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
        run(tiny(), folder / "run")
    return FullRun(folder / "run", copies)


def test_a_run_from_scratch_lowers_the_loss(full_run: FullRun) -> None:
    losses = [row["loss"] for row in rows(full_run.folder, METRICS)]
    assert len(losses) == 12
    assert losses[0] == pytest.approx(5.35, abs=0.3)  # log 211: uniform over the vocabulary
    assert losses[-1] < losses[0] - 1


def test_the_run_is_evaluated_once_at_the_end(full_run: FullRun) -> None:
    seen = [(row["step"], row["kind"], row["set"]) for row in rows(full_run.folder, EVALUATIONS)]
    assert seen == [(12, "full", "in_range"), (12, "full", "out_of_range")]


def test_the_evaluation_can_be_limited_to_the_first_problems(tmp_path: Path) -> None:
    out = run(tiny(supervised={"num_steps": 1}, evaluation={"num_problems": 2}), tmp_path / "run")
    assert {row["num_problems"] for row in rows(out, EVALUATIONS)} == {2}


@pytest.mark.parametrize("step", [4, 8, 12])
def test_a_resumed_run_equals_an_uninterrupted_run(
    step: int, full_run: FullRun, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(full_run.after_step[step], tmp_path / "run"))
    with (folder / METRICS).open("a") as file:
        file.write('{"step": 13, "loss": 0.0}\n{"step"')
    assert_same_run(run(tiny(), folder, resume=True), full_run.folder)


def test_resuming_a_finished_warm_start_changes_nothing(full_run: FullRun, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(full_run.folder, tmp_path / "run"))
    assert_same_run(run(tiny(), folder, resume=True), full_run.folder)


def test_a_damaged_checkpoint_is_skipped(full_run: FullRun, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(full_run.after_step[8], tmp_path / "run"))
    (folder / "checkpoints" / "step-000008" / "model.safetensors").write_bytes(b"")
    screen = io.StringIO()
    build_warmup(tiny(), folder, True, Progress(Console(file=screen, width=500))).run()
    assert "step-000008 is damaged: model.safetensors has 0 bytes" in screen.getvalue()
    assert "continues after step 4" in screen.getvalue()
    assert_same_run(folder, full_run.folder)
    assert (folder / f"{METRICS}.bak-1").exists()


def test_without_an_intact_checkpoint_nothing_is_changed(full_run: FullRun, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(full_run.folder, tmp_path / "run"))
    shutil.rmtree(folder / "checkpoints")
    metrics = (folder / METRICS).read_bytes()
    with pytest.raises(UserError, match=r"eepo warmup .* --resume --force"):
        run(tiny(), folder, resume=True)
    assert (folder / METRICS).read_bytes() == metrics


def test_damaged_final_weights_are_written_again_and_not_evaluated_again(
    full_run: FullRun, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(full_run.folder, tmp_path / "run"))
    (folder / "final" / "model.safetensors").write_bytes(b"")
    assert_same_run(run(tiny(), folder, resume=True), full_run.folder)


def test_a_finished_run_without_its_newest_checkpoint_is_evaluated_again(
    full_run: FullRun, tmp_path: Path
) -> None:
    """Its evaluation belongs to a step that is trained again, so the resumed run drops it."""
    folder = Path(shutil.copytree(full_run.folder, tmp_path / "run"))
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    (newest / "model.safetensors").write_bytes(b"")
    assert_same_run(run(tiny(), folder, resume=True), full_run.folder)


def test_checkpoints_of_a_resumed_run_have_the_same_bytes(
    full_run: FullRun, tmp_path: Path
) -> None:
    """Torch's random state is part of a checkpoint."""
    folder = Path(shutil.copytree(full_run.after_step[4], tmp_path / "run"))
    torch.manual_seed(99)
    run(tiny(), folder, resume=True)
    last = Path("checkpoints") / "step-000012"
    for path in (full_run.folder / last).iterdir():
        assert path.read_bytes() == (folder / last / path.name).read_bytes(), path.name


def test_the_lock_is_released_at_the_end(full_run: FullRun, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(full_run.folder, tmp_path / "run"))
    first = build_warmup(tiny(), folder, True, quiet())
    with pytest.raises(UserError, match="is in use by process"):
        run(tiny(), folder, resume=True)
    first.run()
    run(tiny(), folder, resume=True)


@pytest.mark.parametrize("every", [0, 5])
def test_a_run_stopped_during_its_evaluation_resumes_without_training(
    every: int, full_run: FullRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = tiny(supervised={"checkpoint_every": every}), tmp_path / "run"

    def stop(warmup: Warmup) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Warmup, "_evaluate", stop)
        with pytest.raises(KeyboardInterrupt):
            run(config, folder)
    steps: list[int] = []
    monkeypatch.setattr(Warmup, "_one_step", lambda warmup, pairs: steps.append(warmup.step))
    assert_same_run(run(config, folder, resume=True), full_run.folder)
    assert not steps


def test_resuming_with_a_changed_knob_is_an_error_that_names_it(
    full_run: FullRun, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(full_run.after_step[4], tmp_path / "run"))
    with pytest.raises(UserError, match=r"supervised\.learning_rate"):
        run(tiny(supervised={"learning_rate": 1e-3}), folder, resume=True)
    with pytest.raises(UserError, match="--resume"):
        run(tiny(), folder)


def test_worker_processes_generate_the_same_demonstrations(
    full_run: FullRun, tmp_path: Path
) -> None:
    config = tiny(supervised={"num_workers": 2, "checkpoint_every": 0})
    assert_same_run(run(config, tmp_path / "run"), full_run.folder)


def test_the_seed_selects_the_initial_weights(full_run: FullRun, tmp_path: Path) -> None:
    other = run(
        tiny(supervised={"num_steps": 1, "seed": 1}, task={"num_evaluation": 1}), tmp_path / "run"
    )
    assert rows(other, METRICS)[0]["loss"] != rows(full_run.folder, METRICS)[0]["loss"]


def test_training_can_start_from_the_run_folder(full_run: FullRun, tmp_path: Path) -> None:
    tables = {
        "model": {"path": str(full_run.folder)},
        "task": {"num_evaluation": 1},
        "algorithm": {"group_size": 4, "max_new_tokens": 8},
        "training": {
            "num_steps": 1,
            "prompts_per_step": 2,
            "prompts_per_mini_batch": 2,
            "learning_rate": 0.0,
        },
        "evaluation": {"num_samples": 2},
    }
    trainer = build_trainer(
        recipe.parse(RunConfig, tables, "test"), tmp_path / "rl", False, quiet()
    )
    trainer.run()
    warm, final = (
        load_file(folder / "final" / "model.safetensors")
        for folder in (full_run.folder, tmp_path / "rl")
    )
    assert warm.keys() == final.keys()
    # The learning rate is 0, so the weights do not change.
    assert all(torch.equal(warm[name], final[name]) for name in warm)


def test_a_warm_start_can_start_from_a_base_model(full_run: FullRun, tmp_path: Path) -> None:
    config = tiny(
        model={"path": "builtin:countdown"},
        supervised={
            "num_steps": 2,
            "learning_rate": 1e-4,
            "checkpoint_every": 1,
            "save_dtype": "bfloat16",
        },
        task={"num_evaluation": 2},
    )
    folder = run(config, tmp_path / "run")
    losses = [row["loss"] for row in rows(folder, METRICS)]
    assert max(losses) < 2  # this model was already trained on the task
    tensors = load_file(folder / "final" / "model.safetensors").values()
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(folder / "final").config.hidden_size == 128
    assert AutoTokenizer.from_pretrained(folder / "final").eos_token == "<eos>"


def test_heads_that_do_not_divide_the_width_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"scratch\.hidden_size = 30 must be .* num_heads = 4"):
        run(tiny(scratch={"hidden_size": 30, "num_heads": 4}), tmp_path / "run")


def test_the_learning_rate_rises_linearly_and_falls_to_a_tenth() -> None:
    settings = SupervisedConfig(num_steps=100, ramp_steps=10, learning_rate=1.0)
    rates = [learning_rate(step, settings) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)
    assert all(later < earlier for earlier, later in pairwise(rates[10:]))


def test_the_learning_rate_needs_no_ramp() -> None:
    settings = SupervisedConfig(num_steps=1, ramp_steps=0, learning_rate=2.0)
    assert learning_rate(0, settings) == pytest.approx(2.0)


def test_the_recorded_learning_rate_follows_the_schedule(full_run: FullRun) -> None:
    recorded = [row["lr"] for row in rows(full_run.folder, METRICS)]
    settings = tiny().supervised
    assert recorded == [learning_rate(step, settings) for step in range(12)]


def test_the_optimizer_uses_the_scheduled_learning_rate(tmp_path: Path) -> None:
    """The first step of AdamW moves weights by about the rate, for any gradient."""
    config = tiny(
        supervised={"num_steps": 1, "learning_rate": 1e-2, "ramp_steps": 100},
        task={"num_evaluation": 1},
    )
    warmup = build_warmup(config, tmp_path / "run", False, quiet())
    before = {name: weight.clone() for name, weight in warmup.policy.named_weights()}
    warmup.run()
    after = warmup.policy.named_weights()
    largest = max(float((weight - before[name]).abs().max()) for name, weight in after)
    assert largest == pytest.approx(1e-4, rel=0.1)


def test_a_gradient_that_is_not_finite_ends_the_run_without_final_weights(tmp_path: Path) -> None:
    config = tiny(supervised={"learning_rate": 1e30, "ramp_steps": 0, "checkpoint_every": 0})
    with pytest.raises(UserError, match=r"norm is nan; .* supervised\.learning_rate"):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run" / "final").exists()
