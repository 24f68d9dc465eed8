"""Tokenizers from GGUF files encode and decode as the originals do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, trainers
from transformers import AutoTokenizer, Qwen2Tokenizer

from eepo.model import gguf_tokenizer
from eepo.model.gguf_file import GgufFile, StoredTensor
from eepo.model.gguf_tokenizer import end_token_ids, read_tokenizer
from eepo.types import UserError

pytest.importorskip("gguf", reason="the package gguf is not installed")

from .gguf_files import (
    SPECIAL,
    TEXT,
    byte_level_tokenizer,
    tokenizer_fields,
)

TEXTS = [
    "1234567 + 89 = 42",
    "I'll  go,\tnow\r\n\n  x  ",
    "Zürich — ½ 日本語 😀 e\u0301 \u00a0x",
    "<|im_start|>user\nthe answer<|im_end|>\n",
    " 12  345",
    "",
]


def file_with(fields: dict[str, Any], architecture: str = "qwen2") -> GgufFile:
    embedding = StoredTensor(Path("x"), "token_embd.weight", 0, (384, 8), 0, 0)
    numeric = {
        key: np.array(value) if key.endswith(("token_type", "scores")) else value
        for key, value in fields.items()
    }
    all_fields = {"general.architecture": architecture} | numeric
    return GgufFile(Path("x.gguf"), all_fields, {"token_embd.weight": embedding})


def saved(file: GgufFile, folder: Path) -> Any:
    """Return the tokenizer as AutoTokenizer loads it after saving."""
    read_tokenizer(file).save_pretrained(folder)
    (folder / "config.json").write_text(
        json.dumps({"model_type": file.text("general.architecture")})
    )
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_qwen2_text_is_encoded_as_by_transformers(text: str, tmp_path: Path) -> None:
    original = byte_level_tokenizer(digits=1, normalize=True)
    data = json.loads(original.to_str())["model"]
    merges = [tuple(pair) for pair in data["merges"]]
    reference = Qwen2Tokenizer(vocab=data["vocab"], merges=merges)
    reference.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer = saved(file_with(tokenizer_fields(original, 384)), tmp_path)
    ids = tokenizer(text).input_ids
    assert ids == reference(text).input_ids
    assert tokenizer.decode(ids) == reference.decode(ids)
    assert len(tokenizer) == len(data["vocab"])


@pytest.mark.parametrize("text", TEXTS)
def test_llama3_text_is_encoded_as_by_the_original(text: str, tmp_path: Path) -> None:
    original = byte_level_tokenizer(digits=3, normalize=False)
    changes = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": True}
    file = file_with(tokenizer_fields(original, 384, **changes), "llama")
    tokenizer = saved(file, tmp_path)
    ids = tokenizer(text).input_ids
    assert ids == [0, *original.encode(text).ids]
    assert tokenizer.decode(ids, skip_special_tokens=False) == SPECIAL[0] + text
    assert tokenizer(text, add_special_tokens=False).input_ids == ids[1:]


def test_llama3_encodes_a_word_that_is_a_token_although_no_merges_lead_to_it() -> None:
    fields = tokenizer_fields(byte_level_tokenizer(digits=3, normalize=False), 380)
    tokens = [*fields["tokenizer.ggml.tokens"], "xylophone"]
    types = [kind if kind != 5 else 1 for kind in fields["tokenizer.ggml.token_type"]] + [1]
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    llama3 = fields | changes | {"tokenizer.ggml.pre": "llama-bpe"}
    assert read_tokenizer(file_with(llama3, "llama"))("xylophone").input_ids == [380]
    assert len(read_tokenizer(file_with(fields | changes))("xylophone").input_ids) > 1


@pytest.mark.parametrize(
    ("split", "text", "pieces"),
    [
        ("qwen2", "a  123", ["a", " ", " ", "1", "2", "3"]),
        ("smollm", "a  123", ["a", "  ", "1", "2", "3"]),
        ("llama-bpe", "a 1234", ["a", " ", "123", "4"]),
        ("gpt-2", "a 1234", ["a", " 1234"]),
    ],
)
def test_digits_are_split_as_in_the_training_of_each_model(
    split: str, text: str, pieces: list[str]
) -> None:
    fields = tokenizer_fields(byte_level_tokenizer(digits=1, normalize=True), 384)
    tokenizer = read_tokenizer(file_with(fields | {"tokenizer.ggml.pre": split}))
    spans = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [piece.replace("Ġ", " ") for piece, _ in spans] == pieces


def test_special_tokens_and_chat_template_are_kept(tmp_path: Path) -> None:
    fields = tokenizer_fields(byte_level_tokenizer(digits=1, normalize=True), 384)
    fields["tokenizer.ggml.token_type"][10] = 4  # user-defined: kept in decoded text
    tokenizer = saved(file_with(fields), tmp_path)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text).input_ids
    assert ids.count(1) == 2
    assert ids.count(2) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhi\nassistant\n"
    assert tokenizer.decode([10], skip_special_tokens=True)


def test_the_end_of_a_turn_also_ends_a_completion() -> None:
    fields = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 2}
    assert end_token_ids(file_with(fields), 3) == [0, 2]
    assert end_token_ids(file_with({}), 3) == []


def sentence_piece(add_prefix: bool) -> tuple[Tokenizer, dict[str, Any]]:
    """Train a BPE with bytes as Llama 2's, whose merges become scores in the file."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    prefix = [normalizers.Prepend("▁")] if add_prefix else []
    trained.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=tokens, show_progress=False)
    trained.train_from_iterator(TEXT * 3, trainer)
    data = json.loads(trained.to_str())["model"]
    ranks = {"".join(pair): rank for rank, pair in reversed(list(enumerate(data["merges"])))}
    vocabulary = sorted(data["vocab"], key=data["vocab"].__getitem__)
    types = [{0: 2, 1: 3, 2: 3}.get(index, 6 if index < 259 else 1) for index in range(360)]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.scores": [-float(ranks.get(token, 1000)) for token in vocabulary],
        "tokenizer.ggml.token_type": types[: len(vocabulary)],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": add_prefix,
    }
    return trained, fields


@pytest.mark.parametrize("add_prefix", [True, False])
@pytest.mark.parametrize("text", [*TEXTS, "the answer is 1234", "  two  spaces", "schön 日本 ☃"])
def test_sentencepiece_text_is_encoded_as_by_the_original(
    text: str, add_prefix: bool, tmp_path: Path
) -> None:
    trained, fields = sentence_piece(add_prefix)
    tokenizer = saved(file_with(fields, "llama"), tmp_path)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids == trained.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert tokenizer(text).input_ids == [1, *ids]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not supported; supported: gpt2, llama"),
        ({"tokenizer.ggml.pre": "tekken"}, "'tekken' is not supported; supported: qwen2, "),
        ({"tokenizer.ggml.tokens": None}, "has no vocabulary"),
        ({"tokenizer.ggml.tokens": ["a"] * 384}, "has a token twice"),
        ({"tokenizer.ggml.token_type": [1]}, "a number for each of the 384 tokens"),
        ({"tokenizer.ggml.merges": None}, "has no list of texts tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["a zzz"]}, "has 'a zzz', which is not in the vocabulary"),
        ({"tokenizer.ggml.merges": ["ab"]}, "has 'ab', which is not in the vocabulary"),
        ({"tokenizer.ggml.eos_token_id": 400}, "= 400 is not a token"),
        ({"tokenizer.chat_template": 7}, "must be a text, got int"),
        ({"tokenizer.ggml.model": "llama"}, "scores must have a number for each"),
    ],
)
def test_damaged_tokenizers_are_one_line_errors(changes: dict[str, Any], message: str) -> None:
    fields = tokenizer_fields(byte_level_tokenizer(digits=1, normalize=True), 384) | changes
    kept = {key: value for key, value in fields.items() if value is not None}
    with pytest.raises(UserError, match=message):
        read_tokenizer(file_with(kept))


def test_more_tokens_than_embeddings_are_a_one_line_error() -> None:
    fields = tokenizer_fields(byte_level_tokenizer(digits=1, normalize=True), 400)
    fields["tokenizer.ggml.token_type"] = [1] * 400
    with pytest.raises(UserError, match=r"has 400 tokens, but token_embd\.weight has 384 rows"):
        read_tokenizer(file_with(fields))


def test_absurd_sentencepiece_tokens_are_one_line_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fields = sentence_piece(add_prefix=True)
    fields["tokenizer.ggml.tokens"][-1] = "a" * 300
    with pytest.raises(UserError, match="a token of 300 characters; at most 256 are read"):
        read_tokenizer(file_with(fields, "llama"))
    monkeypatch.setattr(gguf_tokenizer, "MAX_CHARACTERS", 100)
    with pytest.raises(UserError, match="more than 100 characters together"):
        read_tokenizer(file_with(fields, "llama"))
