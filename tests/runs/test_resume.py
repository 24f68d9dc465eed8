"""A resumed run survives damage: it uses the newest intact checkpoint and never loses records."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from eepo import assemble, recipe
from eepo.algorithm import StepMetrics
from eepo.assemble import build_trainer
from eepo.config import ModelConfig, RunConfig
from eepo.evaluation.trained_run import find_run
from eepo.model import loading
from eepo.runs import checkpoint
from eepo.runs.checksums import CHECKSUMS
from eepo.runs.jsonl import read_records
from eepo.runs.progress import Progress
from eepo.runs.runlog import COMPLETIONS, EVALUATIONS, FINISHED, LAST_CHECKPOINT, METRICS
from eepo.tasks.countdown import build_tokenizer
from eepo.trainer import is_finished
from eepo.types import Completion, Prompt, Rollout, Sampling, UserError, Verdict

pytestmark = pytest.mark.usefixtures("one_thread")


class Descent:
    """A cheap algorithm: each step pulls all weights to the number of prompts, with momentum."""

    def __init__(self, policy: Any, optimizer: torch.optim.Optimizer, **_: Any) -> None:
        self.policy, self.optimizer, self.count = policy, optimizer, 0

    def step(self, prompts: list[Prompt], sampling: Sampling, metrics: StepMetrics) -> Rollout:
        self.count += len(prompts)
        for weight in self.policy.model.parameters():
            weight.grad = weight.detach() - self.count
        self.optimizer.step()
        self.optimizer.zero_grad()
        verdicts: Future[list[Verdict]] = Future()
        verdicts.set_result([Verdict(float(self.count), "1")] * len(prompts))
        rollout = Rollout(prompts)
        completion = Completion((3, 1), (-0.5, -0.5), "1", finished=True)
        rollout.add_stage(1, [[completion] for _ in prompts], verdicts)
        rollout.wait_for_rewards()
        rollout.advantages = [[0.0] for _ in prompts]
        metrics.record_rollout(rollout)
        return rollout

    def state(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


@dataclass
class Finished:
    """A finished run of four steps that was never stopped. Its last two checkpoints exist."""

    config: RunConfig
    folder: Path


@pytest.fixture(scope="module", autouse=True)
def cheap_steps() -> Iterator[None]:
    """Replace EEPO, and do not wait for the disk: one flush takes about 16 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "EEPO", Descent)
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("finished")
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(shape).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    tables = {
        "model": {"path": str(folder / "model")},
        "task": {"num_evaluation": 1},
        "algorithm": {"group_size": 2, "max_new_tokens": 4, "kl_coef": 0.0},
        "training": {
            "num_steps": 4,
            "prompts_per_step": 2,
            "prompts_per_mini_batch": 2,
            "learning_rate": 0.01,
            "checkpoint_every": 1,
        },
        "evaluation": {"num_samples": 1, "every": 2, "quick_problems": 1, "quick_samples": 1},
    }
    config = recipe.parse(RunConfig, tables, "test")
    run(config, folder / "run", resume=False)
    return Finished(config, folder / "run")


@pytest.fixture
def copy(finished: Finished, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished.folder, tmp_path / "run"))


@pytest.fixture(scope="module")
def final_after_5_steps(
    finished: Finished, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("longer") / "run"
    run(with_training(finished.config, num_steps=5), folder, resume=False)
    return contents(folder / "final")


def with_training(config: RunConfig, **knobs: Any) -> RunConfig:
    return replace(config, training=replace(config.training, **knobs))


def run(config: RunConfig, out: Path, resume: bool = True, force: bool = False) -> str:
    """Train, and return what was printed."""
    screen = io.StringIO()
    build_trainer(config, out, resume, Progress(Console(file=screen, width=500)), force).run()
    return screen.getvalue()


def notes(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("note: ")]


def error_line(config: RunConfig, out: Path, resume: bool = True) -> str:
    with pytest.raises(UserError) as caught:
        run(config, out, resume)
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    return line


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def rows(folder: Path, name: str = METRICS) -> list[dict[str, Any]]:
    """Return the rows without times."""
    clock = ("seconds", "tokens_per_second")
    return [
        {key: value for key, value in row.items() if not key.startswith(clock)}
        for row in read_records(folder / name)
    ]


def assert_same_weights(a: Path, b: Path) -> None:
    assert contents(a / "final") == contents(b / "final")
    last = Path("checkpoints") / "step-000004"
    names = ("model.safetensors", checkpoint.TRAINING)
    assert all((a / last / name).read_bytes() == (b / last / name).read_bytes() for name in names)


def assert_same_run(a: Path, b: Path) -> None:
    assert all(rows(a, name) == rows(b, name) for name in (METRICS, EVALUATIONS, COMPLETIONS))
    assert_same_weights(a, b)
    last = Path("checkpoints") / "step-000004"
    assert contents(a / last) == contents(b / last)


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
    "one bit flipped": flip_bit,
}
FILES = ("model.safetensors", checkpoint.TRAINING, checkpoint.STATE, "config.json")
# The fast tests use two ways to damage a file.
DAMAGE = pytest.mark.parametrize(
    "damage",
    [
        pytest.param(
            damage,
            id=name,
            marks=() if name in ("missing", "one bit flipped") else pytest.mark.slow,
        )
        for name, damage in DAMAGES.items()
    ],
)


# --- damaged checkpoints


def assert_falls_back(finished: Finished, folder: Path, name: str) -> None:
    """Resume a run whose step 4 is damaged. It must use step 3 and give the same run."""
    metrics, damaged = (folder / METRICS).read_bytes(), folder / "checkpoints" / "step-000004"
    before = contents(damaged)
    printed = notes(run(finished.config, folder))
    [line] = [line for line in printed if "is damaged" in line]
    assert line.startswith(f"note: {damaged} is damaged: {name}"), line
    assert "note: continues after step 3" in printed
    assert_same_run(folder, finished.folder)
    assert (folder / f"{METRICS}.bak-1").read_bytes() == metrics
    assert contents(damaged.with_name("damaged-step-000004-1")) == before


@DAMAGE
@pytest.mark.parametrize("name", FILES)
def test_a_run_falls_back_to_the_newest_intact_checkpoint(
    name: str, damage: Callable[[Path], Any], finished: Finished, copy: Path
) -> None:
    damage(copy / "checkpoints" / "step-000004" / name)
    assert_falls_back(finished, copy, name)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", CHECKSUMS])
def test_damage_of_the_other_files_of_a_checkpoint_is_noticed(
    name: str, finished: Finished, copy: Path
) -> None:
    DAMAGES["truncated"](copy / "checkpoints" / "step-000004" / name)
    assert_falls_back(finished, copy, name)


def test_two_damaged_checkpoints_are_both_skipped(finished: Finished, tmp_path: Path) -> None:
    training = {"keep_checkpoints": 3}
    config = with_training(finished.config, **training)
    folder = tmp_path / "run"
    run(config, folder, resume=False)
    for step in (3, 4):
        flip_bit(folder / "checkpoints" / f"step-00000{step}" / "model.safetensors")
    printed = notes(run(config, folder))
    assert sum("is damaged: model.safetensors" in line for line in printed) == 2
    assert "note: continues after step 2" in printed
    assert_same_run(folder, finished.folder)


def test_with_one_checkpoint_to_keep_a_fallback_does_not_remove_the_new_checkpoint(
    finished: Finished, copy: Path
) -> None:
    """A damaged checkpoint has a larger step number than the checkpoints that are saved next."""
    config = with_training(finished.config, num_steps=6, keep_checkpoints=1)
    run(config, copy)
    os.rename(copy / "checkpoints" / "step-000006", copy / "checkpoints" / "step-000009")
    shutil.copytree(finished.folder / "checkpoints/step-000004", copy / "checkpoints/step-000004")
    printed = run(with_training(finished.config, num_steps=5, keep_checkpoints=1), copy)
    assert "state.json has step = 6 instead of 9" in printed
    names = sorted(path.name for path in (copy / "checkpoints").iterdir())
    assert names == ["damaged-step-000009-1", "step-000005"]


STATES = {
    "the step of another checkpoint": {"step": 3},
    "a step that is NaN": {"step": float("nan")},
    "a step that is text": {"step": "4"},
    "a step that is true": {"step": True},
    "a position that is a fraction": {"num_prompts_seen": 7.5},
    "a negative position": {"num_prompts_seen": -8},
    "an infinite number": {"count": float("inf")},
}


@pytest.mark.parametrize("has_checksums", [True, False], ids=["checksums", "older version"])
@pytest.mark.parametrize("values", STATES.values(), ids=STATES)
def test_a_state_with_impossible_values_is_damage(
    values: dict[str, Any], has_checksums: bool, finished: Finished, copy: Path
) -> None:
    folder = copy / "checkpoints" / "step-000004"
    path = folder / checkpoint.STATE
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    if not has_checksums:
        (folder / CHECKSUMS).unlink()
    assert "state.json has " in checkpoint.checkpoint_damage(folder)
    assert checkpoint.checkpoint_damage(copy / "checkpoints" / "step-000003") == ""


def test_no_intact_checkpoint_is_one_line_and_changes_nothing(
    finished: Finished, copy: Path
) -> None:
    for step in (3, 4):
        flip_bit(copy / "checkpoints" / f"step-00000{step}" / "model.safetensors")
    before = contents(copy)
    line = error_line(finished.config, copy)
    assert "step-000003 is damaged: model.safetensors" in line
    assert "step-000004 is damaged: model.safetensors" in line
    assert line.endswith(f"eepo train {copy}/recipe.toml --out {copy} --resume --force")
    assert contents(copy) == before


def test_with_force_a_run_without_checkpoints_starts_again_and_keeps_copies(
    finished: Finished, copy: Path
) -> None:
    for step in (3, 4):
        flip_bit(copy / "checkpoints" / f"step-00000{step}" / "model.safetensors")
    before = contents(copy)
    printed = notes(run(finished.config, copy, force=True))
    assert "note: continues after step 0" in printed
    names = (METRICS, EVALUATIONS, COMPLETIONS)
    for name in names:
        assert (copy / f"{name}.bak-1").read_bytes() == before[name]
    copies = ", ".join(f"{name}.bak-1" for name in names)
    assert f"note: the rows after step 0 are dropped; copies: {copies}" in printed
    assert_same_run(copy, finished.folder)


def hide(folder: Path, step: int) -> Path:
    """Rename a checkpoint as `publish` and `prune` do before they replace or remove it."""
    path = folder / "checkpoints" / f"step-{step:06d}"
    return path.rename(path.with_name(f".old-{path.name}.4242"))


def test_a_checkpoint_whose_replacement_was_killed_is_recovered(
    finished: Finished, copy: Path
) -> None:
    hide(copy, 4)
    assert notes(run(finished.config, copy)) == []
    assert contents(copy) == contents(finished.folder)


def test_a_damaged_checkpoint_whose_replacement_was_killed_is_not_recovered(
    finished: Finished, copy: Path
) -> None:
    flip_bit(hide(copy, 4) / "model.safetensors")
    assert "note: continues after step 3" in run(finished.config, copy)
    assert_same_run(copy, finished.folder)
    assert not list((copy / "checkpoints").glob(".*"))


def test_a_removed_checkpoint_is_recovered_only_if_newer_ones_are_damaged(
    finished: Finished, copy: Path
) -> None:
    hide(copy, 3)
    run(finished.config, copy)
    names = [path.name for path in (copy / "checkpoints").iterdir()]
    assert names == ["step-000004"]
    copy_3 = finished.folder / "checkpoints" / "step-000003"
    shutil.copytree(copy_3, copy / "checkpoints" / copy_3.name)
    hide(copy, 3)
    flip_bit(copy / "checkpoints" / "step-000004" / "model.safetensors")
    assert "note: continues after step 3" in run(finished.config, copy)
    assert_same_run(copy, finished.folder)


# --- missing checkpoints


def remove_checkpoints(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")


def empty_checkpoints(folder: Path) -> None:
    remove_checkpoints(folder)
    (folder / "checkpoints").mkdir()


def unmount_checkpoints(folder: Path) -> None:
    remove_checkpoints(folder)
    (folder / "checkpoints").symlink_to("/nonexistent/disk")


def replace_checkpoints(folder: Path) -> None:
    remove_checkpoints(folder)
    (folder / "checkpoints").write_text("a file")


LOSSES = {
    "removed": (remove_checkpoints, "--force"),
    "empty": (empty_checkpoints, "--force"),
    "link to a disk that is gone": (unmount_checkpoints, "cannot be read: No such file"),
    "a file": (replace_checkpoints, "cannot be read: Not a directory"),
}


@pytest.mark.parametrize(("lose", "fragment"), LOSSES.values(), ids=LOSSES)
def test_lost_checkpoints_are_one_line_and_change_nothing(
    lose: Callable[[Path], None], fragment: str, finished: Finished, copy: Path
) -> None:
    lose(copy)
    before = contents(copy)
    line = error_line(finished.config, copy)
    assert str(copy / "checkpoints") in line
    assert fragment in line
    assert contents(copy) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read every folder")
def test_an_unreadable_folder_of_checkpoints_is_one_line(finished: Finished, copy: Path) -> None:
    (copy / "checkpoints").chmod(0)
    try:
        assert "cannot be read: Permission denied" in error_line(finished.config, copy)
    finally:
        (copy / "checkpoints").chmod(0o755)


def test_a_missing_newest_checkpoint_is_a_fallback(finished: Finished, copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints" / "step-000004")
    metrics = (copy / METRICS).read_bytes()
    printed = notes(run(finished.config, copy))
    folder = copy / "checkpoints"
    assert f"note: the checkpoints up to step 4 are missing in {folder}" in printed
    assert (copy / f"{METRICS}.bak-1").read_bytes() == metrics
    assert_same_run(copy, finished.folder)


def test_a_second_loss_does_not_overwrite_the_first_copy(finished: Finished, copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints" / "step-000004")
    (copy / f"{METRICS}.bak-1").write_text("mine")
    run(finished.config, copy)
    assert (copy / f"{METRICS}.bak-1").read_text() == "mine"
    assert (copy / f"{METRICS}.bak-2").exists()


def test_after_a_fallback_an_ordinary_resume_prints_nothing(finished: Finished, copy: Path) -> None:
    flip_bit(copy / "checkpoints" / "step-000004" / "model.safetensors")
    run(finished.config, copy)
    assert notes(run(finished.config, copy)) == []


def as_older_version(folder: Path) -> None:
    """Remove what older versions did not write."""
    for path in [*folder.rglob(CHECKSUMS), folder / LAST_CHECKPOINT, folder / FINISHED]:
        path.unlink(missing_ok=True)
    for path in folder.rglob(checkpoint.STATE):
        state = json.loads(path.read_text())
        del state["num_rows"]
        path.write_text(json.dumps(state))


def test_a_run_of_an_older_version_resumes_without_a_note(finished: Finished, copy: Path) -> None:
    as_older_version(copy)
    longer = with_training(finished.config, num_steps=5)
    assert notes(run(longer, copy)) == []
    assert [row["step"] for row in rows(copy)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_of_an_older_version_is_noticed(
    name: str, finished: Finished, copy: Path
) -> None:
    as_older_version(copy)
    DAMAGES["truncated"](copy / "checkpoints" / "step-000004" / name)
    printed = run(finished.config, copy)
    assert f"step-000004 is damaged: {name}" in printed
    assert rows(copy) == rows(finished.folder)


def test_lost_checkpoints_of_an_older_version_are_noticed_by_the_interval(
    finished: Finished, copy: Path
) -> None:
    """Checkpoints are saved in every step. Records of four steps are not explained by a kill."""
    as_older_version(copy)
    remove_checkpoints(copy)
    assert "--force" in error_line(finished.config, copy)
    for name in (METRICS, EVALUATIONS, COMPLETIONS):
        kept = [
            line
            for line in (copy / name).read_text().splitlines(keepends=True)
            if json.loads(line)["step"] <= 1
        ]
        (copy / name).write_text("".join(kept))
    shutil.rmtree(copy / "final")
    assert notes(run(finished.config, copy)) == []
    assert_same_run(copy, finished.folder)


# --- folders without a recipe


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_with_records_but_no_recipe_is_refused_and_not_changed(
    resume: bool, finished: Finished, copy: Path
) -> None:
    (copy / "recipe.toml").unlink()
    before = contents(copy)
    line = error_line(finished.config, copy, resume)
    assert METRICS in line
    assert "no recipe.toml" in line
    assert "--resume --force" in line
    assert contents(copy) == before


def test_with_force_a_folder_without_a_recipe_is_continued(finished: Finished, copy: Path) -> None:
    (copy / "recipe.toml").unlink()
    run(finished.config, copy, force=True)
    assert_same_run(copy, finished.folder)
    assert (copy / "recipe.toml").exists()


# --- damaged records


def lose_bytes(path: Path) -> None:
    """Lose a line break and the braces around it, so that no JSON is left."""
    data = path.read_bytes()
    middle = data.index(b"}\n{", len(data) // 2)
    path.write_bytes(data[:middle] + data[middle + 3 :])


def invalid_utf8(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"step"', b'"st\xffp"')
    path.write_bytes(b"".join(lines))


RECORD_DAMAGES = {
    **{name: damage for name, damage in DAMAGES.items() if name != "one bit flipped"},
    "bytes lost in the middle": lose_bytes,
    "invalid UTF-8": invalid_utf8,
}


@pytest.mark.parametrize("damage", RECORD_DAMAGES.values(), ids=RECORD_DAMAGES)
@pytest.mark.parametrize("name", [METRICS, pytest.param(COMPLETIONS, marks=pytest.mark.slow)])
def test_damaged_records_are_one_line_and_training_continues(
    name: str,
    damage: Callable[[Path], Any],
    finished: Finished,
    final_after_5_steps: dict[str, bytes],
    copy: Path,
) -> None:
    path, original = copy / name, rows(copy, name)
    damage(path)
    damaged = path.read_bytes() if path.exists() else b""
    longer = with_training(finished.config, num_steps=5)
    [line] = notes(run(longer, copy))
    assert line.startswith(f"note: {path} is damaged: ")
    assert "rows up to step 4" in line
    if (copy / f"{name}.bak-1").exists():
        assert (copy / f"{name}.bak-1").read_bytes() == damaged
    else:
        assert path.read_bytes().startswith(damaged)
    readable = rows(copy, name)
    assert readable[-1]["step"] == 5
    assert [row for row in readable if row["step"] <= 4] == [
        row for row in original if row in readable
    ]
    assert contents(copy / "final") == final_after_5_steps
    assert notes(run(longer, copy)) == [], "damage is reported once"


def test_rows_that_repeat_a_step_are_dropped(finished: Finished, copy: Path) -> None:
    """Two processes that wrote to one folder left two rows per step."""
    lines = (copy / METRICS).read_bytes().splitlines(keepends=True)
    (copy / METRICS).write_bytes(b"".join(line * 2 for line in lines))
    [line] = notes(run(finished.config, copy))
    assert "is damaged: 4 rows repeat a step; it is kept as metrics.jsonl.bak-1" in line
    assert rows(copy) == rows(finished.folder)


def test_records_are_on_the_disk_before_their_checkpoint_is_published(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    publish = checkpoint.publish

    def recorded_fsync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def recorded_publish(temporary: Path, final: Path) -> Path:
        events.append(f"publish {final.name}")
        return publish(temporary, final)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(checkpoint, "publish", recorded_publish)
    run(with_training(finished.config, num_steps=1), tmp_path / "run", resume=False)
    before = events[: events.index("publish step-000001")]
    assert {METRICS, COMPLETIONS, EVALUATIONS, "run"} <= set(before)


# --- leftovers, final weights, equal bytes


def test_leftovers_of_a_kill_are_removed_at_the_next_start(finished: Finished, copy: Path) -> None:
    leftovers = [
        copy / "checkpoints" / ".step-000004.4242",
        copy / "checkpoints" / ".old-step-000002.4242",
        copy / ".final.4242",
        copy / ".old-final.4242",
    ]
    for leftover in leftovers:
        leftover.mkdir()
        (leftover / "model.safetensors").write_bytes(b"half")
    files = ("recipe.toml", "environment.json", LAST_CHECKPOINT, METRICS, f"{METRICS}.bak-1")
    for name in files:
        (copy / f".{name}.4242").write_bytes(b"half")
    run(finished.config, copy)
    assert contents(copy) == contents(finished.folder)
    assert not any(leftover.exists() for leftover in leftovers)


class Killed(BaseException):
    """Simulates a kill."""


def die(*args: Any) -> Any:
    raise Killed


@pytest.mark.parametrize("step", [4, 5])
def test_final_weights_of_an_extended_run_are_not_used_until_it_is_complete(
    step: int, finished: Finished, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer, old = with_training(finished.config, num_steps=6), contents(copy / "final")
    with monkeypatch.context() as patch:
        train = Descent.step

        def train_or_die(self: Descent, *args: Any) -> Rollout:
            if self.count == 2 * step:
                raise Killed
            return train(self, *args)

        patch.setattr(Descent, "step", train_or_die)
        with pytest.raises(Killed):
            run(longer, copy)
    assert loading.resolve(str(copy)) == str(copy / "checkpoints" / f"step-00000{step}")
    found = find_run(str(copy))
    assert found is not None
    assert found.step == step
    assert not is_finished(finished.config, copy)
    assert contents(copy / "old-final") == old
    run(longer, copy)
    full = tmp_path / "full"
    run(longer, full, resume=False)
    assert contents(copy / "final") == contents(full / "final")
    assert contents(copy).keys() == contents(full).keys()


def test_final_weights_without_checkpoints_are_kept_until_there_are_new_ones(
    finished: Finished, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_checkpoints(copy)
    old = contents(copy / "final")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpointer, "save_final", die)
        for _ in range(2):
            with pytest.raises(Killed):
                run(finished.config, copy, force=True)
            assert contents(copy / "old-final") == old
    run(finished.config, copy)
    assert not (copy / "old-final").exists()
    assert_same_weights(copy, finished.folder)


@DAMAGE
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_damaged_final_weights_are_noticed_and_written_again(
    name: str, damage: Callable[[Path], Any], finished: Finished, copy: Path
) -> None:
    assert is_finished(finished.config, copy)
    damage(copy / "final" / name)
    assert not is_finished(finished.config, copy)
    with pytest.raises(UserError, match="is damaged: "):
        loading.load_model(ModelConfig(path=str(copy)), torch.device("cpu"))
    [line] = notes(run(finished.config, copy))
    assert line.startswith(f"note: {copy / 'final'} is damaged: {name} ")
    assert contents(copy) == contents(finished.folder)
    assert is_finished(finished.config, copy)


def test_weights_without_checksums_load(finished: Finished, copy: Path) -> None:
    """Older versions and other programs write none."""
    (copy / "final" / CHECKSUMS).unlink()
    assert is_finished(finished.config, copy)
    loading.load_model(ModelConfig(path=str(copy)), torch.device("cpu"))


@pytest.mark.parametrize("name", [METRICS, EVALUATIONS])
def test_a_run_without_its_records_is_not_finished(
    name: str, finished: Finished, copy: Path
) -> None:
    for lose in (lambda path: path.write_bytes(b""), Path.unlink):
        assert is_finished(finished.config, copy)
        lose(copy / name)
        assert not is_finished(finished.config, copy)
        shutil.rmtree(copy)
        shutil.copytree(finished.folder, copy)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_mark_of_a_finished_run_is_written_again(
    damage: Callable[[Path], Any], finished: Finished, copy: Path
) -> None:
    """The evaluations tell that the run is finished, as in an older version."""
    damage(copy / FINISHED)
    assert is_finished(finished.config, copy)
    run(finished.config, copy)
    assert contents(copy) == contents(finished.folder)


@pytest.mark.parametrize("name", [METRICS, EVALUATIONS])
def test_a_run_with_unreadable_records_is_not_finished(
    name: str, finished: Finished, copy: Path
) -> None:
    invalid_utf8(copy / name)
    assert not is_finished(finished.config, copy)
    run(finished.config, copy)


def test_two_equal_runs_have_equal_bytes(finished: Finished, tmp_path: Path) -> None:
    """Torch's random state is part of a checkpoint, so it must be seeded."""
    torch.manual_seed(4321)
    run(finished.config, tmp_path / "run", resume=False)
    assert_same_run(tmp_path / "run", finished.folder)
