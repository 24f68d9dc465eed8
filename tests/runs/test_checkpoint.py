"""Checkpoints: exact, without pickle, and whole or absent whatever moment a kill chooses."""

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

from eepo.runs import checkpoint
from eepo.tasks.countdown import build_tokenizer


def small_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            tie_word_embeddings=True, bos_token_id=None, eos_token_id=1,
        )
    )  # fmt: skip


def adamw(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def train(model: Any, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """On random tokens, so that going on needs torch's random state, too."""
    for _ in range(num_steps):
        ids = torch.randint(0, 32, (2, 6))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


def test_going_on_from_a_checkpoint_is_exactly_never_having_stopped(
    tmp_path: Path, tokenizer: Any
) -> None:
    model = small_model()
    optimizer = adamw(model)
    train(model, optimizer, 3)
    folder = checkpoint.save(
        tmp_path, 3, model, tokenizer, optimizer, {"gate_history": [0.1, 1 / 3], "auto_lr": 1e-3}
    )
    moments = copy.deepcopy(optimizer.state_dict()["state"])
    rng = torch.get_rng_state()
    train(model, optimizer, 3)

    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    again_optimizer = adamw(again)
    torch.manual_seed(99)
    state = checkpoint.load_training(folder, again, again_optimizer)
    assert state == {"step": 3, "gate_history": [0.1, 1 / 3], "auto_lr": 1e-3}
    assert torch.equal(torch.get_rng_state(), rng)
    restored = again_optimizer.state_dict()["state"]
    assert restored.keys() == moments.keys()
    for index, moment in moments.items():
        assert moment.keys() == restored[index].keys()
        assert all(torch.equal(moment[key], restored[index][key]) for key in moment)
    train(again, again_optimizer, 3)
    assert same(weights(model), weights(again))


def test_moments_are_those_of_their_parameter_and_not_of_a_place(
    tmp_path: Path, tokenizer: Any
) -> None:
    model = small_model()
    optimizer = adamw(model)
    train(model, optimizer, 1)
    tensors = load_file(
        checkpoint.save(tmp_path, 1, model, tokenizer, optimizer, {}) / checkpoint.TRAINING
    )
    for name, parameter in model.named_parameters():
        assert torch.equal(tensors[f"exp_avg/{name}"], optimizer.state[parameter]["exp_avg"])
        assert torch.equal(tensors[f"exp_avg_sq/{name}"], optimizer.state[parameter]["exp_avg_sq"])
        assert float(tensors[f"step/{name}"]) == 1.0


def test_loading_keeps_the_learning_rate_of_the_optimizer_it_loads_into(
    tmp_path: Path, tokenizer: Any
) -> None:
    model = small_model()
    optimizer = adamw(model)
    train(model, optimizer, 1)
    folder = checkpoint.save(tmp_path, 1, model, tokenizer, optimizer, {})
    other = torch.optim.AdamW(model.parameters(), lr=0.5)
    checkpoint.load_training(folder, model, other)
    assert other.param_groups[0]["lr"] == 0.5


def test_a_checkpoint_of_an_optimizer_that_never_stepped_loads(
    tmp_path: Path, tokenizer: Any
) -> None:
    model = small_model()
    folder = checkpoint.save(tmp_path, 0, model, tokenizer, adamw(model), {})
    optimizer = adamw(model)
    assert checkpoint.load_training(folder, model, optimizer) == {"step": 0}
    assert not optimizer.state


def test_a_checkpoint_is_a_model_folder_without_pickle(tmp_path: Path, tokenizer: Any) -> None:
    model = small_model()
    folder = checkpoint.save(tmp_path, 7, model, tokenizer, adamw(model), {})
    assert folder == tmp_path / "step-000007"
    assert same(
        weights(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)), weights(model)
    )
    assert AutoTokenizer.from_pretrained(folder)("1 + 2").input_ids == tokenizer("1 + 2").input_ids
    for path in folder.rglob("*"):
        assert path.suffix in {".json", ".safetensors", ".jinja", ".txt"}, path
        start = path.read_bytes()[:4]
        assert not start.startswith((b"\x80", b"PK")), (
            f"{path} looks like a pickle or a zip of pickles"
        )


def test_the_latest_is_the_one_with_the_largest_step_number(tmp_path: Path) -> None:
    for name in (
        "step-000002",
        "step-000010",
        "step-1000000",
        "step-999999",
        ".step-9999999.17",
        "step-99999999x",
    ):
        (tmp_path / name).mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1000000"
    assert checkpoint.step_of(tmp_path / "step-1000000") == 1_000_000


def test_no_folder_has_no_latest(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "nowhere") is None
    assert checkpoint.latest(tmp_path) is None


def test_prune_keeps_the_newest_and_removes_what_killed_saves_left(tmp_path: Path) -> None:
    names = [
        "step-000001",
        "step-000002",
        "step-000003",
        ".step-000004.123",
        ".old-step-000002.123",
    ]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "notes").mkdir()
    checkpoint.prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes",
        "step-000002",
        "step-000003",
    ]


class Killed(BaseException):
    """As sudden as a kill: nothing in the code under test may catch it."""


def _die(*args: object, **kwargs: object) -> None:
    raise Killed


STAGES = {
    "before the weights": ("transformers.PreTrainedModel.save_pretrained", _die),
    "before the tokenizer": ("transformers.PreTrainedTokenizerFast.save_pretrained", _die),
    "before the moments": ("eepo.runs.checkpoint.save_file", _die),
    "before the state": ("eepo.checkpoint.json", SimpleNamespace(dumps=_die)),
    "before the flush": ("eepo.runs.checkpoint._flush", _die),
    "before the rename": ("os.rename", _die),
}


@pytest.mark.parametrize(("place", "death"), STAGES.values(), ids=STAGES)
def test_a_save_that_dies_leaves_the_one_before_and_the_next_cleans_up(
    place: str, death: Any, tmp_path: Path, tokenizer: Any
) -> None:
    model = small_model()
    optimizer = adamw(model)
    train(model, optimizer, 1)
    first = checkpoint.save(tmp_path, 1, model, tokenizer, optimizer, {"mark": "first"})
    kept = weights(model)
    train(model, optimizer, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, death)
        with pytest.raises(Killed):
            checkpoint.save(tmp_path, 2, model, tokenizer, optimizer, {"mark": "second"})
    assert checkpoint.latest(tmp_path) == first
    loaded = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
    assert checkpoint.load_training(first, loaded, adamw(loaded))["mark"] == "first"
    assert same(weights(loaded), kept)

    checkpoint.save(tmp_path, 2, model, tokenizer, optimizer, {"mark": "again"})
    checkpoint.prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]
    assert json.loads((tmp_path / "step-000002" / checkpoint.STATE).read_text())["mark"] == "again"


@pytest.mark.parametrize("survives", [0, 1])
def test_saving_a_step_again_never_leaves_less_than_the_one_before(
    survives: int, tmp_path: Path, tokenizer: Any
) -> None:
    """A folder cannot be replaced in one call, so this takes two renames: die at either."""
    model = small_model()
    for step in (1, 2):
        checkpoint.save(tmp_path, step, model, tokenizer, adamw(model), {})
    rename, calls = os.rename, []

    def dying(*args: Any) -> None:
        if len(calls) == survives:
            raise Killed
        calls.append(args)
        rename(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", dying)
        with pytest.raises(Killed):
            checkpoint.save(tmp_path, 2, model, tokenizer, adamw(model), {})
    latest = checkpoint.latest(tmp_path)
    assert latest is not None
    loaded = AutoModelForCausalLM.from_pretrained(latest)
    assert checkpoint.load_training(latest, loaded, adamw(loaded))["step"] == checkpoint.step_of(
        latest
    )
    checkpoint.prune(tmp_path, keep=2)
    assert not list(tmp_path.glob(".*"))


def test_contents_are_flushed_before_the_name_appears(tmp_path: Path, tokenizer: Any) -> None:
    model = small_model()
    events: list[str] = []
    flush, rename = checkpoint._flush, os.rename
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_flush", lambda path: (events.append(path.name), flush(path)))
        patch.setattr(os, "rename", lambda *args: (events.append("RENAME"), rename(*args)))
        folder = checkpoint.save(tmp_path, 1, model, tokenizer, adamw(model), {})
    renamed = events.index("RENAME")
    assert {path.name for path in folder.iterdir()} <= set(events[:renamed])
    assert tmp_path.name in events[renamed:]


def test_final_weights_replace_the_older_ones_and_leave_nothing_beside(
    tmp_path: Path, tokenizer: Any
) -> None:
    checkpoint.save_final(tmp_path / "final", small_model(0), tokenizer)
    new = small_model(1)
    checkpoint.save_final(tmp_path / "final", new, tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert same(
        weights(AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.float32)),
        weights(new),
    )


# A process that saves without pause, killed again and again. All weights and moments of a save equal its step number,
# so a mixture of two saves would show.
KILLED_SAVER = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging
from eepo.runs import checkpoint
from eepo.tasks.countdown import build_tokenizer

logging.disable_progress_bar()  # its lock is shared with forked processes, and a killed one never gives it back
folder = Path(sys.argv[1])
config = LlamaConfig(vocab_size=1024, hidden_size=256, intermediate_size=768, num_hidden_layers=3,
                     num_attention_heads=4, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1)
model = LlamaForCausalLM(config)
tokenizer = build_tokenizer()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)

def save(step):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": torch.full_like(parameter, step),
                "exp_avg_sq": torch.full_like(parameter, step),
            }
    checkpoint.save(folder, step, model, tokenizer, optimizer, {"mark": step})
    checkpoint.prune(folder, 2)

def check():
    latest = checkpoint.latest(folder)
    step = checkpoint.step_of(latest)
    loaded = AutoModelForCausalLM.from_pretrained(latest, dtype=torch.float32)
    own = torch.optim.AdamW(loaded.parameters(), lr=0.0)
    state = checkpoint.load_training(latest, loaded, own)
    assert state == {"step": step, "mark": step}, (state, step)
    for name, parameter in loaded.named_parameters():
        assert (parameter == step).all(), name
        assert all((moment == step).all() for moment in own.state[parameter].values()), name
    return step

save(0)
started = time.perf_counter()
save(1)
one_save = time.perf_counter() - started
draws, seen = random.Random(7), []

def mid_save():
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
    wanted, deadline = first + draws.randint(-1, 1), time.monotonic() + 60
    while checkpoint.step_of(checkpoint.latest(folder)) < wanted and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(one_save * draws.uniform(0, 1.5))
    stop(saver)
    while turn % 2 and not mid_save() and time.monotonic() < deadline:  # every second kill must hit a save
        os.kill(saver, signal.SIGCONT)
        time.sleep(one_save * draws.uniform(0, 0.3))
        stop(saver)
    os.kill(saver, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(saver, 0)[1]) == -signal.SIGKILL
    leftovers = mid_save()
    seen.append({"step": check(), "leftovers": leftovers})
last = checkpoint.step_of(checkpoint.latest(folder))
save(last + 1)
print(json.dumps({"kills": seen, "names": sorted(path.name for path in folder.iterdir()), "last": last + 1}))
"""


def test_kills_at_random_moments_leave_a_whole_and_consistent_checkpoint(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", KILLED_SAVER, str(tmp_path / "checkpoints")],
        capture_output=True,
        text=True,
        timeout=170,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    steps = [kill["step"] for kill in result["kills"]]
    assert steps == sorted(steps)
    assert steps[-1] > 1, "no save ever finished between two kills"
    assert sum(kill["leftovers"] > 0 for kill in result["kills"]) >= 4, (
        "a kill that should hit a save hit none"
    )
    assert len(result["names"]) == 2
    assert result["names"][-1] == f"step-{result['last']:06d}"
