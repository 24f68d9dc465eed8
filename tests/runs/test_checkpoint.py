"""Checkpoints are exact and contain no pickle. A kill at any moment leaves only complete ones."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from eepo.runs import checkpoint
from eepo.runs.checkpoint import Checkpointer


def small_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=1,
        )
    )


def adamw(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def train(model: Any, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """Train on random tokens, so that a resumed run also needs torch's random state."""
    for _ in range(num_steps):
        ids = torch.randint(0, 32, (2, 6))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def load(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load a checkpoint into this model and optimizer. Loading does not use the tokenizer."""
    return Checkpointer(folder.parent, model, None, optimizer, keep=2).load(folder)


def test_training_continues_bit_for_bit_from_a_checkpoint(tmp_path: Path, tokenizer: Any) -> None:
    model = small_model()
    optimizer = adamw(model)
    train(model, optimizer, 3)
    saved_state = {"gate_history": [0.1, 1 / 3], "auto_lr": 1e-3}
    folder = Checkpointer(tmp_path, model, tokenizer, optimizer, keep=2).save(3, saved_state)
    moments = copy.deepcopy(optimizer.state_dict()["state"])
    rng = torch.get_rng_state()
    train(model, optimizer, 3)

    resumed = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    resumed_optimizer = adamw(resumed)
    torch.manual_seed(99)
    state = load(folder, resumed, resumed_optimizer)
    assert state == saved_state | {"step": 3}
    assert torch.equal(torch.get_rng_state(), rng)
    restored = resumed_optimizer.state_dict()["state"]
    assert restored.keys() == moments.keys()
    for index, moment in moments.items():
        assert moment.keys() == restored[index].keys()
        assert all(torch.equal(moment[key], restored[index][key]) for key in moment)
    train(resumed, resumed_optimizer, 3)
    assert same(weights(model), weights(resumed))


def test_moments_are_saved_by_parameter_name(tmp_path: Path, tokenizer: Any) -> None:
    model = small_model()
    optimizer = adamw(model)
    train(model, optimizer, 1)
    folder = Checkpointer(tmp_path, model, tokenizer, optimizer, keep=2).save(1, {})
    tensors = load_file(folder / checkpoint.TRAINING)
    for name, parameter in model.named_parameters():
        assert torch.equal(tensors[f"exp_avg/{name}"], optimizer.state[parameter]["exp_avg"])
        assert torch.equal(tensors[f"exp_avg_sq/{name}"], optimizer.state[parameter]["exp_avg_sq"])
        assert float(tensors[f"step/{name}"]) == 1.0


def test_loading_keeps_the_learning_rate_of_the_optimizer(tmp_path: Path, tokenizer: Any) -> None:
    model = small_model()
    optimizer = adamw(model)
    train(model, optimizer, 1)
    folder = Checkpointer(tmp_path, model, tokenizer, optimizer, keep=2).save(1, {})
    other = torch.optim.AdamW(model.parameters(), lr=0.5)
    load(folder, model, other)
    assert other.param_groups[0]["lr"] == 0.5


def test_an_optimizer_without_state_can_be_saved_and_loaded(tmp_path: Path, tokenizer: Any) -> None:
    model = small_model()
    folder = Checkpointer(tmp_path, model, tokenizer, adamw(model), keep=2).save(0, {})
    optimizer = adamw(model)
    assert load(folder, model, optimizer) == {"step": 0}
    assert not optimizer.state


def test_a_checkpoint_is_a_model_folder_without_pickle(tmp_path: Path, tokenizer: Any) -> None:
    model = small_model()
    folder = Checkpointer(tmp_path, model, tokenizer, adamw(model), keep=2).save(7, {})
    assert folder == tmp_path / "step-000007"
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert same(weights(loaded), weights(model))
    assert AutoTokenizer.from_pretrained(folder)("1 + 2").input_ids == tokenizer("1 + 2").input_ids
    for path in folder.rglob("*"):
        assert path.suffix in {".json", ".safetensors", ".jinja", ".txt"}, path
        # A pickle starts with 0x80, a zip of pickles with PK.
        assert not path.read_bytes().startswith((b"\x80", b"PK")), path


def test_saving_prints_nothing(
    tmp_path: Path, tokenizer: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    logging.enable_progress_bar()  # the default of transformers
    model = small_model()
    Checkpointer(tmp_path, model, tokenizer, adamw(model), keep=2).save(1, {})
    assert capfd.readouterr() == ("", "")


def test_the_latest_checkpoint_has_the_largest_step_number(tmp_path: Path) -> None:
    names = ["step-000002", "step-000010", "step-1000000", "step-999999"]
    for name in [*names, ".step-9999999.17", "step-99999999x"]:
        (tmp_path / name).mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1000000"
    assert checkpoint.step_of(tmp_path / "step-1000000") == 1_000_000


def test_a_missing_or_empty_folder_has_no_latest_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "nowhere") is None
    assert checkpoint.latest(tmp_path) is None


def test_prune_keeps_the_newest_and_removes_leftovers_of_killed_saves(tmp_path: Path) -> None:
    names = ["step-000001", "step-000002", "step-000003"]
    for name in [*names, ".step-000004.123", ".old-step-000002.123"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "notes").mkdir()
    checkpoint.prune(tmp_path, keep=2)
    remaining = sorted(path.name for path in tmp_path.iterdir())
    assert remaining == ["notes", "step-000002", "step-000003"]


def test_saving_keeps_the_newest_checkpoints(tmp_path: Path, tokenizer: Any) -> None:
    model = small_model()
    checkpointer = Checkpointer(tmp_path, model, tokenizer, adamw(model), keep=2)
    for step in (1, 2, 3):
        checkpointer.save(step, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]


class Killed(BaseException):
    """Simulates a kill: no `except Exception` in the code under test catches it."""


def _die(*args: object, **kwargs: object) -> None:
    raise Killed


KILL_POINTS = {
    "before the weights": ("transformers.PreTrainedModel.save_pretrained", _die),
    "before the tokenizer": ("transformers.PreTrainedTokenizerFast.save_pretrained", _die),
    "before the moments": ("eepo.runs.checkpoint.save_file", _die),
    "before the state": ("eepo.runs.checkpoint.json", SimpleNamespace(dumps=_die)),
    "before the checksums": ("eepo.runs.checkpoint.write_checksums", _die),
    "before the flush to disk": ("eepo.runs.checkpoint.flush_to_disk", _die),
    "before the rename": ("os.rename", _die),
}


@pytest.mark.parametrize(("target", "replacement"), KILL_POINTS.values(), ids=KILL_POINTS)
def test_a_killed_save_leaves_the_previous_checkpoint_and_the_next_save_cleans_up(
    target: str, replacement: Any, tmp_path: Path, tokenizer: Any
) -> None:
    model = small_model()
    optimizer = adamw(model)
    checkpointer = Checkpointer(tmp_path, model, tokenizer, optimizer, keep=2)
    train(model, optimizer, 1)
    first, first_weights = checkpointer.save(1, {"mark": "first"}), weights(model)
    train(model, optimizer, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, replacement)
        with pytest.raises(Killed):
            checkpointer.save(2, {"mark": "killed"})
    assert checkpoint.latest(tmp_path) == first
    loaded = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
    assert load(first, loaded, adamw(loaded))["mark"] == "first"
    assert same(weights(loaded), first_weights)

    checkpointer.save(2, {"mark": "second"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]
    assert json.loads((tmp_path / "step-000002" / checkpoint.STATE).read_text())["mark"] == "second"


@pytest.mark.parametrize("num_renames", [0, 1])
def test_a_kill_while_a_step_is_saved_again_leaves_a_complete_checkpoint(
    num_renames: int, tmp_path: Path, tokenizer: Any
) -> None:
    """A folder cannot be replaced in one call. The save renames twice, and is killed at either."""
    model = small_model()
    checkpointer = Checkpointer(tmp_path, model, tokenizer, adamw(model), keep=2)
    for step in (1, 2):
        checkpointer.save(step, {})
    rename, calls = os.rename, []

    def rename_or_die(*args: Any) -> None:
        if len(calls) == num_renames:
            raise Killed
        calls.append(args)
        rename(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", rename_or_die)
        with pytest.raises(Killed):
            checkpointer.save(2, {})
    latest = checkpoint.latest(tmp_path)
    assert latest is not None
    loaded = AutoModelForCausalLM.from_pretrained(latest)
    assert load(latest, loaded, adamw(loaded))["step"] == checkpoint.step_of(latest)
    checkpoint.prune(tmp_path, keep=2)
    assert not list(tmp_path.glob(".*"))


def test_contents_are_flushed_before_the_rename(tmp_path: Path, tokenizer: Any) -> None:
    model = small_model()
    events: list[str] = []
    flush, rename = checkpoint.flush_to_disk, os.rename
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            checkpoint, "flush_to_disk", lambda path: (events.append(path.name), flush(path))
        )
        patch.setattr(os, "rename", lambda *args: (events.append("RENAME"), rename(*args)))
        folder = Checkpointer(tmp_path, model, tokenizer, adamw(model), keep=2).save(1, {})
    renamed = events.index("RENAME")
    assert {path.name for path in folder.iterdir()} <= set(events[:renamed])
    assert tmp_path.name in events[renamed:]


def test_final_weights_replace_older_ones_and_leftovers(tmp_path: Path, tokenizer: Any) -> None:
    final = tmp_path / "final"
    (tmp_path / ".final.123").mkdir()  # of a killed save
    for seed in (0, 1):
        model = small_model(seed)
        Checkpointer(tmp_path, model, tokenizer, adamw(model), keep=2).save_final(final)
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    loaded = AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32)
    assert same(weights(loaded), weights(small_model(1)))


# A process that saves without pause is killed again and again. All weights and moments of a save
# equal its step number, so a mixture of two saves is noticed.
KILLED_SAVER = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging
from eepo.runs import checkpoint
from eepo.runs.checkpoint import Checkpointer
from eepo.tasks.countdown import build_tokenizer

# Forked processes share the lock of the progress bar, and a killed process never releases it.
logging.disable_progress_bar()
folder = Path(sys.argv[1])
config = LlamaConfig(
    vocab_size=1024, hidden_size=256, intermediate_size=768, num_hidden_layers=3,
    num_attention_heads=4, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1,
)
model = LlamaForCausalLM(config)
tokenizer = build_tokenizer()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
checkpointer = Checkpointer(folder, model, tokenizer, optimizer, keep=2)

def save(step):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": torch.full_like(parameter, step),
                "exp_avg_sq": torch.full_like(parameter, step),
            }
    checkpointer.save(step, {"mark": step})

def check():
    latest = checkpoint.latest(folder)
    step = checkpoint.step_of(latest)
    loaded = AutoModelForCausalLM.from_pretrained(latest, dtype=torch.float32)
    loaded_optimizer = torch.optim.AdamW(loaded.parameters(), lr=0.0)
    state = Checkpointer(folder, loaded, tokenizer, loaded_optimizer, keep=2).load(latest)
    assert state == {"step": step, "mark": step}, (state, step)
    for name, parameter in loaded.named_parameters():
        assert (parameter == step).all(), name
        moments = loaded_optimizer.state[parameter].values()
        assert all((moment == step).all() for moment in moments), name
    return step

save(0)
started = time.perf_counter()
save(1)
save_seconds = time.perf_counter() - started
rng, kills = random.Random(7), []

def num_leftovers():
    return len(list(folder.glob(".*")))

def stop(process):
    os.kill(process, signal.SIGSTOP)
    os.waitpid(process, os.WUNTRACED)

for turn in range(8):
    first = checkpoint.step_of(checkpoint.latest(folder)) + 1
    saver = os.fork()
    if saver == 0:
        step = first
        while True:
            save(step)
            step += 1
    target, deadline = first + rng.randint(-1, 1), time.monotonic() + 60
    while checkpoint.step_of(checkpoint.latest(folder)) < target and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(save_seconds * rng.uniform(0, 1.5))
    stop(saver)
    # Every second kill must hit a save.
    while turn % 2 and not num_leftovers() and time.monotonic() < deadline:
        os.kill(saver, signal.SIGCONT)
        time.sleep(save_seconds * rng.uniform(0, 0.3))
        stop(saver)
    os.kill(saver, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(saver, 0)[1]) == -signal.SIGKILL
    leftovers = num_leftovers()
    kills.append({"step": check(), "leftovers": leftovers})
last = checkpoint.step_of(checkpoint.latest(folder)) + 1
save(last)
names = sorted(path.name for path in folder.iterdir())
print(json.dumps({"kills": kills, "names": names, "last": last}))
"""


@pytest.mark.slow
def test_kills_at_random_moments_leave_a_complete_checkpoint(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", KILLED_SAVER, str(tmp_path / "checkpoints")],
        capture_output=True,
        text=True,
        timeout=170,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    steps = [kill["step"] for kill in result["kills"]]
    assert steps == sorted(steps)
    assert steps[-1] > 1, "no save finished between two kills"
    num_hits = sum(kill["leftovers"] > 0 for kill in result["kills"])
    assert num_hits >= 4, "a kill that must hit a save hit none"
    assert len(result["names"]) == 2
    assert result["names"][-1] == f"step-{result['last']:06d}"
