"""A run that is short of memory: one line, the knob to change, and nothing lost."""

from __future__ import annotations

import dataclasses
import errno
import gc
import io
import json
import shlex
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from eepo import recipe
from eepo.assemble import build_trainer
from eepo.config import RunConfig
from eepo.model import step_backup
from eepo.runs import checkpoint
from eepo.runs.progress import Progress
from eepo.runs.runlog import COMPLETIONS, EVALUATIONS, METRICS
from eepo.trainer import Trainer
from eepo.types import UserError

TINY: dict[str, Any] = {
    "name": "eepo",
    "task": {"num_evaluation": 2},
    "algorithm": {
        "group_size": 4,
        "max_new_tokens": 10,
        "gate": "always",
        "unlearn_lr": "auto",
        "kl_coef": 0.01,
    },
    "training": {
        "num_steps": 3,
        "prompts_per_step": 4,
        "prompts_per_mini_batch": 2,
        "learning_rate": 3e-4,
        "checkpoint_every": 0,
    },
    "evaluation": {"num_samples": 1, "every": 2, "quick_problems": 1, "quick_samples": 1},
}
GPU_MESSAGE = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def config(
    new_model: Callable[..., Any], tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> RunConfig:
    folder = tmp_path_factory.mktemp("policy")
    new_model("llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return recipe.parse(RunConfig, TINY | {"model": {"path": str(folder)}}, "test")


def trainer_of(out: Path, run: RunConfig, resume: bool = False) -> Trainer:
    return build_trainer(run, out, resume, Progress(Console(file=io.StringIO())))


def repeatable(folder: Path, name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    clock = ("seconds", "tokens_per_second")
    return [{key: row[key] for key in row if not key.startswith(clock)} for row in rows]


NO_MEMORY = torch.cuda.OutOfMemoryError(GPU_MESSAGE)


def fail_at_call(owner: Any, method: str, number: int, error: Exception = NO_MEMORY) -> None:
    """Let a method fail at its call `number`, from 1 on; without `error`, it lacks GPU memory."""
    original, calls = getattr(owner, method), 0

    def call(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise error
        return original(*args, **options)

    setattr(owner, method, call)


@pytest.fixture(scope="module")
def full_run(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full") / "run"
    trainer_of(folder, config).run()
    return folder


def assert_equals(folder: Path, full_run: Path) -> None:
    for name in (METRICS, EVALUATIONS, COMPLETIONS):
        assert repeatable(folder, name) == repeatable(full_run, name)
    weights = [load_file(run / "final" / "model.safetensors") for run in (folder, full_run)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


# The third step, in its phases: what fails, at which of its calls in that step, what the line says
BEFORE_THE_UPDATE = {
    "stage 1": ("engine", "generate", 1, "in the sampling", "--set rollout.max_rows=4"),
    "stage 2": ("engine", "generate", 2, "in the sampling", "--set rollout.max_rows=4"),
    "unlearning": (
        "policy",
        "gradient",
        1,
        "in the unlearning",
        "--set model.gradient_checkpointing=true",
    ),
    "reference": (
        "reference",
        "score",
        1,
        "in the update",
        "--set model.gradient_checkpointing=true",
    ),
}


def failed_third_step(
    trainer: Trainer, call: tuple[str, str, int], saved: int = 0, error: Exception = NO_MEMORY
) -> str:
    """Train two steps, and fail in the third; return the error's line.

    `call` is (part of the algorithm, method, number of the call that fails). The run has a
    checkpoint of the step `saved`.
    """
    owner, method, number = call
    trainer._checkpoint_due = lambda: trainer.step == saved  # type: ignore[method-assign]
    part = getattr(trainer.algorithm, owner)
    step = trainer.algorithm.step

    def third(*args: Any) -> Any:
        if trainer.step == 2:
            fail_at_call(part, method, number, error)
        return step(*args)

    trainer.algorithm.step = third  # type: ignore[method-assign]
    with pytest.raises(UserError) as caught:
        trainer.run()
    return str(caught.value)


@pytest.mark.parametrize("phase", BEFORE_THE_UPDATE)
def test_before_the_update_the_last_step_is_saved_and_the_run_resumes_exactly(
    phase: str, config: RunConfig, full_run: Path, tmp_path: Path
) -> None:
    *call, where, option = BEFORE_THE_UPDATE[phase]
    line = failed_third_step(trainer_of(tmp_path / "run", config), tuple(call))
    assert where in line
    assert "after step 2" in line
    assert "tried to allocate 2.50 GiB" in line
    assert "step 2 is saved" in line
    assert line.endswith(option)
    assert len(repeatable(tmp_path / "run", METRICS)) == 2
    trainer_of(tmp_path / "run", config, resume=True).run()
    assert_equals(tmp_path / "run", full_run)


AFTER_AN_UPDATE = pytest.mark.parametrize(
    "call",
    [("optimizer", "_init_group", 1), ("reference", "score", 2), ("optimizer", "_init_group", 2)],
    ids=["in the first update", "in the second mini-batch", "in the second update"],
)


@AFTER_AN_UPDATE
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_after_an_update_the_step_is_undone_and_the_run_resumes_exactly(
    call: tuple[str, str, int],
    optimizer: str,
    config: RunConfig,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if optimizer == "adamw":
        full_run = request.getfixturevalue("full_run")
    else:
        training = dataclasses.replace(config.training, optimizer=optimizer)
        config = dataclasses.replace(config, training=training)
        full_run = tmp_path / "full"
        trainer_of(full_run, config).run()
        call = (call[0], call[1].replace("_init_group", "_update"), call[2])
    out = tmp_path / "run"
    line = failed_third_step(trainer_of(out, config), call, saved=1)
    assert "in the update after step 2" in line
    assert "step 2 is saved" in line
    assert len(repeatable(out, METRICS)) == 2
    trainer_of(out, config, resume=True).run()
    assert_equals(out, full_run)


@AFTER_AN_UPDATE
def test_without_a_copy_nothing_is_saved_after_an_update(
    call: tuple[str, str, int],
    config: RunConfig,
    full_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """θ has begun to change, so the run continues from its last checkpoint: that of step 1."""
    monkeypatch.setattr(step_backup, "free_memory", lambda device: 1000)
    out, printed = tmp_path / "run", io.StringIO()
    trainer = build_trainer(config, out, False, Progress(Console(file=printed, width=300)))
    line = failed_third_step(trainer, call, saved=1)
    assert "in the update after step 2" in line
    assert "step 1 is saved" in line
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000001"]
    assert printed.getvalue().count("note: no copy of weights and optimizer in host memory") == 1
    trainer_of(out, config, resume=True).run()
    assert_equals(out, full_run)


def test_a_reward_that_fails_loses_no_step(
    config: RunConfig, full_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    error = UserError("reward: it failed")
    line = failed_third_step(trainer_of(out, config), ("reward", "grade", 1), error=error)
    assert line == str(error)
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000002"]
    trainer_of(out, config, resume=True).run()
    assert_equals(out, full_run)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_step_that_is_saved_already_is_saved_again_only_if_damaged(
    is_damaged: bool, config: RunConfig, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path / "run", config)
    save, steps = trainer.checkpointer.save, []

    def count(step: int, state: dict[str, Any]) -> Path:
        steps.append(step)
        path = save(step, state)
        if is_damaged:
            (path / "model.safetensors").write_bytes(b"")
        return path

    trainer.checkpointer.save = count  # type: ignore[method-assign]
    line = failed_third_step(trainer, ("engine", "generate", 1), saved=2)
    assert "step 2 is saved" in line
    assert steps == ([2, 2] if is_damaged else [2])


FAILURES = {
    "out of memory": (NO_MEMORY, "out of memory (tried to allocate 2.50 GiB) in the sampling"),
    "a reward": (UserError("reward: it failed"), "reward: it failed"),
}


@pytest.mark.parametrize(("error", "fragment"), FAILURES.values(), ids=FAILURES)
def test_an_error_while_a_step_is_undone_does_not_hide_its_cause(
    error: Exception,
    fragment: str,
    config: RunConfig,
    full_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device", "model.safetensors")
        trainer = trainer_of(out, config)
        save = trainer.checkpointer.save

        def fail_at_step_2(step: int, state: dict[str, Any]) -> Path:
            if step == 2:
                raise full
            return save(step, state)

        patch.setattr(trainer.checkpointer, "save", fail_at_step_2)
        line = failed_third_step(trainer, ("engine", "generate", 1), saved=1, error=error)
    assert "step 2 could not be restored or saved ([Errno 28] No space left on device: " in line
    assert f"after this error: {fragment}" in line
    trainer_of(out, config, resume=True).run()
    assert_equals(out, full_run)


def test_without_a_finished_step_nothing_is_saved(config: RunConfig, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run", config)
    fail_at_call(trainer.algorithm.policy, "gradient", 1)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="no step is saved yet"):
        trainer.run()
    assert checkpoint.latest(tmp_path / "run" / "checkpoints") is None


def test_an_evaluation_names_its_knob(config: RunConfig, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run", config)
    fail_at_call(trainer.evaluator.engine, "generate", 1)
    with pytest.raises(UserError, match=r"in the evaluation after step 0; rollout\.max_rows is"):
        trainer.run()
    assert not (tmp_path / "run" / METRICS).exists()


def test_the_printed_command_resumes_with_the_new_knob(config: RunConfig, tmp_path: Path) -> None:
    line = failed_third_step(trainer_of(tmp_path / "run", config), ("policy", "gradient", 1))
    words = shlex.split(line.rpartition("continue with: ")[2])
    assert words[:2] == ["eepo", "train"]
    changed = recipe.load_run(words[2], [words[words.index("--set") + 1]])
    assert changed.model.gradient_checkpointing
    trainer = trainer_of(tmp_path / "run", changed, resume="--resume" in words)
    assert trainer.step == 2
    trainer.run()
    assert [row["step"] for row in repeatable(tmp_path / "run", METRICS)] == [1, 2, 3]


def test_the_state_of_the_algorithm_is_that_of_the_last_step(
    config: RunConfig, tmp_path: Path
) -> None:
    """The search for the unlearning rate of the failed step must not reach the checkpoint."""
    out = tmp_path / "run"
    failed_third_step(trainer_of(out, config), ("engine", "generate", 2))
    saved = checkpoint.latest(out / "checkpoints")
    assert saved is not None
    state = json.loads((saved / checkpoint.STATE).read_text())
    assert state["lr_search"]["lr"] == repeatable(out, METRICS)[-1]["unlearn/lr"]


def test_a_run_that_has_ended_frees_its_weights_without_garbage_collection(
    config: RunConfig, tmp_path: Path
) -> None:
    """Several runs may follow one another in a process. Cycles would fill the memory."""
    trainer = trainer_of(tmp_path / "run", config)
    trainer.run()
    parts = (trainer.backup, trainer.checkpointer.optimizer, trainer.backup.weights[0])
    alive = [weakref.ref(part) for part in parts]
    gc.collect()
    gc.disable()
    try:
        del parts, trainer
        assert [ref() for ref in alive if ref() is not None] == []
    finally:
        gc.enable()


def test_a_run_that_has_failed_frees_the_copy_of_its_weights(
    config: RunConfig, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path / "run", config)
    failed_third_step(trainer, ("engine", "generate", 1))
    assert not trainer.backup._copies


def test_other_errors_keep_their_traceback(config: RunConfig, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run", config)

    def fail(*args: Any) -> Any:
        raise RuntimeError("a bug")

    trainer.algorithm.step = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="a bug"):
        trainer.run()
