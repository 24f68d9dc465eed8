"""Where the policy comes from: built-in, a folder, a run; and one line where it cannot."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from eepo.config import ModelConfig, RolloutConfig, RunConfig
from eepo.model import loading
from eepo.tasks.countdown import build_tokenizer
from eepo.types import UserError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with HF_HUB_OFFLINE=1: a name that is no folder is not looked for anywhere else."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def refusal(call: Any, *args: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*args)
    line = str(caught.value)
    assert len(line.splitlines()) == 1, line
    return line


def builtin_copy(to: Path) -> Path:
    return Path(shutil.copytree(loading.BUILTIN / "countdown", to))


def test_a_name_that_might_be_a_misspelt_folder_is_said_to_be_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert [loading.resolve(name) for name in ("runs/warn", "runs/warn", "owner/name")] == [
        "runs/warn",
        "runs/warn",
        "owner/name",
    ]
    assert (
        capsys.readouterr().err
        == 'model.path = "runs/warn" is no folder here: looking for it on the hub\n'
    )


def test_the_builtin_policy_loads_in_fp32_ready_to_sample() -> None:
    model = loading.load_model(ModelConfig(), CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training
    assert loading.load_tokenizer(ModelConfig()).eos_token == "<eos>"


def test_the_builtin_policy_has_the_vocabulary_of_its_tokenizer() -> None:
    model = loading.load_model(ModelConfig(), CPU)
    assert len(loading.load_tokenizer(ModelConfig())) == model.get_input_embeddings().num_embeddings


def test_an_unknown_builtin_is_refused_with_the_ones_there_are() -> None:
    line = refusal(loading.resolve, "builtin:chess")
    assert "model.path" in line
    assert "builtin:chess" in line
    assert "builtin:countdown" in line


def test_a_run_folder_means_its_final_weights(tmp_path: Path) -> None:
    builtin_copy(tmp_path / "run" / "final")
    assert loading.resolve(str(tmp_path / "run")) == str(tmp_path / "run" / "final")


def test_a_model_folder_means_itself(tmp_path: Path) -> None:
    folder = builtin_copy(tmp_path / "model")
    assert loading.resolve(str(folder)) == str(folder)
    assert loading.load_model(ModelConfig(path=str(folder)), CPU) is not None


def test_a_folder_given_with_a_single_slash_is_taken_before_a_hub_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builtin_copy(tmp_path / "runs" / "warm")
    monkeypatch.chdir(tmp_path)
    assert loading.load_model(ModelConfig(path="runs/warm"), CPU) is not None


def test_the_home_folder_may_be_written_as_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builtin_copy(tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert loading.load_model(ModelConfig(path="~/model"), CPU) is not None


@pytest.mark.parametrize(
    "path", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c", "~/nowhere", ""]
)
def test_a_path_without_a_model_is_refused(path: str) -> None:
    line = refusal(loading.load_model, ModelConfig(path=path), CPU)
    assert f'model.path = "{path}"' in line


def test_a_hub_name_that_cannot_be_reached_is_refused() -> None:
    line = refusal(loading.load_model, ModelConfig(path="no-such-owner/no-such-model"), CPU)
    assert (
        '"no-such-owner/no-such-model" could not be loaded: there is no such folder here, and of the hub'
        in line
    )


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    folder = builtin_copy(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert str(folder) in refusal(loading.load_model, ModelConfig(path=str(folder)), CPU)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    folder = builtin_copy(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    assert str(folder) in refusal(loading.load_model, ModelConfig(path=str(folder)), CPU)


def test_a_damaged_config_is_refused(tmp_path: Path) -> None:
    folder = builtin_copy(tmp_path / "model")
    (folder / "config.json").write_text("{not json")
    assert str(folder) in refusal(loading.load_model, ModelConfig(path=str(folder)), CPU)


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    folder = builtin_copy(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    assert str(folder) in refusal(loading.load_model, ModelConfig(path=str(folder)), CPU)


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = builtin_copy(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert str(folder) in refusal(loading.load_tokenizer, ModelConfig(path=str(folder)))


def test_dropout_is_off_even_where_gradient_checkpointing_needs_training_mode(
    tmp_path: Path,
) -> None:
    config = GPT2Config(
        vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16,
        resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    model = loading.load_model(ModelConfig(path=str(tmp_path), gradient_checkpointing=True), CPU)
    assert model.training
    assert model.is_gradient_checkpointing
    ids = torch.arange(1, 9).unsqueeze(0)
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "", "tpu", "meta", "cpu:nonsense"])
def test_a_device_that_cannot_be_used_is_refused_with_those_allowed(name: str) -> None:
    line = refusal(loading.pick_device, name)
    assert f'model.device = "{name}"' in line
    assert "auto, cpu, cuda" in line


def test_cpu_is_always_there_and_auto_picks_something_usable() -> None:
    assert loading.pick_device("cpu") == CPU
    assert torch.zeros(1, device=loading.pick_device("auto")).sum() == 0


def test_the_engine_samples_in_bfloat16_on_a_gpu_and_in_float32_elsewhere() -> None:
    assert loading.pick_dtype("auto", CPU) is torch.float32
    assert loading.pick_dtype("auto", torch.device("cuda")) is torch.bfloat16
    assert loading.pick_dtype("float16", CPU) is torch.float16


def test_sampling_and_training_in_two_types_is_said() -> None:
    run, gpu = RunConfig(), torch.device("cuda")
    exact = dataclasses.replace(run, rollout=RolloutConfig(dtype="float32"))
    assert not loading.two_types(run, gpu)
    assert not loading.two_types(exact, CPU)
    assert "sampled in float32, trained with products in bfloat16" in loading.two_types(exact, gpu)
    assert not loading.two_types(
        dataclasses.replace(exact, model=ModelConfig(compute_dtype="float32")), gpu
    )


def test_a_run_that_is_not_finished_means_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (8, 40, 16):
        builtin_copy(tmp_path / "run" / "checkpoints" / f"step-{step:06d}")
    assert loading.resolve(str(tmp_path / "run")) == str(
        tmp_path / "run" / "checkpoints" / "step-000040"
    )
    builtin_copy(tmp_path / "run" / "final")
    assert loading.resolve(str(tmp_path / "run")) == str(tmp_path / "run" / "final")


def test_a_model_loaded_in_bfloat16_keeps_its_rotary_frequencies() -> None:
    model = loading.load_model(ModelConfig(), CPU, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    exact = loading.load_model(ModelConfig(), CPU).model.rotary_emb.inv_freq
    assert torch.equal(model.model.rotary_emb.inv_freq, exact)
