"""Models load from built-ins, folders and runs; every failure is a one-line error."""

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
    """Set HF_HUB_OFFLINE, so that hub names are not looked up."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def error_line(call: Any, *args: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*args)
    line = str(caught.value)
    assert len(line.splitlines()) == 1, line
    return line


def builtin_copy(to: Path) -> Path:
    return Path(shutil.copytree(loading.BUILTIN / "countdown", to))


def test_a_hub_lookup_is_announced_once_if_the_name_may_be_a_misspelt_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("runs/warn", "runs/warn", "owner/name"):
        assert loading.resolve(name) == name
    line = 'model.path = "runs/warn" is not a local folder: looking it up on the hub\n'
    assert capsys.readouterr().err == line


def test_the_builtin_policy_loads_in_fp32_and_in_eval_mode() -> None:
    model = loading.load_model(ModelConfig(), CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training
    assert loading.load_tokenizer(ModelConfig()).eos_token == "<eos>"


def test_the_builtin_policy_has_one_embedding_per_token() -> None:
    model = loading.load_model(ModelConfig(), CPU)
    assert len(loading.load_tokenizer(ModelConfig())) == model.get_input_embeddings().num_embeddings


def test_an_unknown_builtin_is_refused_with_the_allowed_names() -> None:
    line = error_line(loading.resolve, "builtin:chess")
    assert "model.path" in line
    assert "builtin:chess" in line
    assert "builtin:countdown" in line


def test_a_run_folder_stands_for_its_final_weights(tmp_path: Path) -> None:
    builtin_copy(tmp_path / "run" / "final")
    assert loading.resolve(str(tmp_path / "run")) == str(tmp_path / "run" / "final")


def test_a_model_folder_resolves_to_itself(tmp_path: Path) -> None:
    folder = builtin_copy(tmp_path / "model")
    assert loading.resolve(str(folder)) == str(folder)
    assert loading.load_model(ModelConfig(path=str(folder)), CPU) is not None


def test_a_folder_has_precedence_over_a_hub_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builtin_copy(tmp_path / "runs" / "warm")
    monkeypatch.chdir(tmp_path)
    assert loading.load_model(ModelConfig(path="runs/warm"), CPU) is not None


def test_a_tilde_is_expanded_to_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builtin_copy(tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert loading.load_model(ModelConfig(path="~/model"), CPU) is not None


@pytest.mark.parametrize(
    "path", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c", "~/nowhere", ""]
)
def test_a_path_without_a_model_is_refused(path: str) -> None:
    line = error_line(loading.load_model, ModelConfig(path=path), CPU)
    assert f'model.path = "{path}"' in line


def test_a_hub_name_that_cannot_be_reached_is_refused() -> None:
    line = error_line(loading.load_model, ModelConfig(path="no-such-owner/no-such-model"), CPU)
    name = '"no-such-owner/no-such-model"'
    assert f"{name} could not be loaded: no such local folder, and from the hub: " in line


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    folder = builtin_copy(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert str(folder) in error_line(loading.load_model, ModelConfig(path=str(folder)), CPU)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    folder = builtin_copy(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    assert str(folder) in error_line(loading.load_model, ModelConfig(path=str(folder)), CPU)


def test_a_damaged_config_is_refused(tmp_path: Path) -> None:
    folder = builtin_copy(tmp_path / "model")
    (folder / "config.json").write_text("{not json")
    assert str(folder) in error_line(loading.load_model, ModelConfig(path=str(folder)), CPU)


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    folder = builtin_copy(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    assert str(folder) in error_line(loading.load_model, ModelConfig(path=str(folder)), CPU)


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = builtin_copy(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert str(folder) in error_line(loading.load_tokenizer, ModelConfig(path=str(folder)))


def test_dropout_is_off_in_training_mode_for_gradient_checkpointing(
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
def test_an_unavailable_device_is_refused_with_the_allowed_names(name: str) -> None:
    line = error_line(loading.pick_device, name)
    assert f'model.device = "{name}"' in line
    assert "auto, cpu, cuda" in line


@pytest.mark.parametrize(("name", "current"), [("cuda:3", ["cuda:3"]), ("cuda", []), ("cpu:0", [])])
def test_a_numbered_gpu_becomes_the_current_gpu(
    name: str, current: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)  # it would need the GPU
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(str(device)))
    assert loading.pick_device(name) == torch.device(name)
    assert chosen == current


def test_cpu_is_always_available_and_auto_picks_a_usable_device() -> None:
    assert loading.pick_device("cpu") == CPU
    assert torch.zeros(1, device=loading.pick_device("auto")).sum() == 0


def test_auto_dtype_is_bfloat16_on_a_gpu_and_float32_elsewhere() -> None:
    assert loading.pick_dtype("auto", CPU) is torch.float32
    assert loading.pick_dtype("auto", torch.device("cuda")) is torch.bfloat16
    assert loading.pick_dtype("float16", CPU) is torch.float16


def test_different_dtypes_of_rollout_and_training_give_a_warning() -> None:
    run, gpu = RunConfig(), torch.device("cuda")
    fp32_rollout = dataclasses.replace(run, rollout=RolloutConfig(dtype="float32"))
    all_fp32 = dataclasses.replace(fp32_rollout, model=ModelConfig(compute_dtype="float32"))
    assert not loading.dtype_mismatch(run, gpu)
    assert not loading.dtype_mismatch(fp32_rollout, CPU)
    assert not loading.dtype_mismatch(all_fp32, gpu)
    text = loading.dtype_mismatch(fp32_rollout, gpu)
    assert "sampled in float32 but training computes in bfloat16" in text


def test_an_unfinished_run_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (8, 40, 16):
        builtin_copy(run / "checkpoints" / f"step-{step:06d}")
    assert loading.resolve(str(run)) == str(run / "checkpoints" / "step-000040")
    builtin_copy(run / "final")
    assert loading.resolve(str(run)) == str(run / "final")


def test_a_model_loaded_in_bfloat16_keeps_its_rotary_frequencies() -> None:
    model = loading.load_model(ModelConfig(), CPU, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    exact = loading.load_model(ModelConfig(), CPU).model.rotary_emb.inv_freq
    assert torch.equal(model.model.rotary_emb.inv_freq, exact)
