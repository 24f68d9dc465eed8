"""Converts the tokenizer of a GGUF file: byte-level BPE, or the SentencePiece BPE of Llama 2."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from eepo.model.gguf_file import GgufFile

# Types of tokens in the file.
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5
SPACE = "▁"  # stands for a space in SentencePiece vocabularies
MAX_PIECE = 256  # characters of a SentencePiece token
MAX_CHARACTERS = 20_000_000  # of all SentencePiece tokens; that many splits are tried
MAX_VOCABULARY = 2_000_000

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_WORDS_AND_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), _BYTES]
    )


# Value of tokenizer.ggml.pre → how text is split before BPE.
_QWEN2 = _split(_WORDS % r"\p{N}")
_LLAMA3 = _split(_WORDS % r"\p{N}{1,3}")
_DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _WORDS_AND_BYTES])
SPLITS = {
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smollm": _DIGITS,
    "gpt-2": _WORDS_AND_BYTES,
}
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen")
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")


def read_tokenizer(file: GgufFile) -> Any:
    """Return a tokenizer that encodes and decodes as the one that the model was trained with."""
    tokens, types = _vocabulary(file)
    kind = file.text("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer, adds_bos = _sentence_piece(file, tokens), True
    else:
        raise file.error(
            f"tokenizer.ggml.model = {kind[:80]!r} is not supported; supported: gpt2, llama"
        )
    special = {
        f"{name}_token": tokens[token]
        for name, token in special_token_ids(file, len(tokens)).items()
        if token is not None
    }
    tokenizer.add_special_tokens(_added(tokens, types, (CONTROL, UNKNOWN), True))
    tokenizer.add_tokens(_added(tokens, types, (USER_DEFINED,), False))
    if len(tokenizer.get_vocab()) != len(tokens):
        raise file.error("the vocabulary does not fit the types of its tokens")
    bos = special.get("bos_token")
    if bos and file.flag("tokenizer.ggml.add_bos_token", adds_bos):
        tokenizer.post_processor = TemplateProcessing(
            single=[bos, "$A"],
            pair=[bos, "$A", bos, "$B:1"],
            special_tokens=[(bos, tokens.index(bos))],
        )
    template = file.text("tokenizer.chat_template") or None
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **special,
    )


def special_token_ids(file: GgufFile, num_tokens: int) -> dict[str, int | None]:
    """Return the special tokens that the file names. Without a padding token, eos pads."""
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {
        name: file.token_id(f"tokenizer.ggml.{key}_token_id", num_tokens)
        for name, key in keys.items()
    }
    return ids | {"pad": ids["eos"] if ids["pad"] is None else ids["pad"]}


def end_token_ids(file: GgufFile, num_tokens: int) -> list[int]:
    """Return the tokens that end a completion: the end of the text, and the end of a turn."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot")]
    ids = [file.token_id(key, num_tokens) for key in keys]
    return sorted({token for token in ids if token is not None})


def _vocabulary(file: GgufFile) -> tuple[list[str], list[int]]:
    """Return all tokens with their types, without the unused ones that pad the matrix."""
    tokens = file.fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not 0 < len(tokens) <= MAX_VOCABULARY:
        raise file.error("the GGUF file has no vocabulary: tokenizer.ggml.tokens")
    types = _numbers(file, "tokenizer.ggml.token_type", len(tokens))
    size = len(tokens)
    while size and types[size - 1] == UNUSED:
        size -= 1
    if len(set(tokens[:size])) != size:
        raise file.error("tokenizer.ggml.tokens has a token twice")
    rows = file.tensors["token_embd.weight"].shape[0]
    if size > rows:
        raise file.error(f"the vocabulary has {size} tokens, but token_embd.weight has {rows} rows")
    return tokens[:size], [int(kind) for kind in types[:size]]


def _numbers(file: GgufFile, key: str, count: int) -> list[Any]:
    values = file.fields.get(key)
    if values is None or isinstance(values, str | int | float) or len(values) != count:
        raise file.error(f"{key} must have a number for each of the {count} tokens")
    return list(values)


def _added(tokens: list[str], types: list[int], kinds: tuple[int, ...], special: bool) -> Any:
    chosen = [token for token, kind in zip(tokens, types, strict=True) if kind in kinds]
    return [AddedToken(token, normalized=False, special=special) for token in chosen]


def _byte_level(file: GgufFile, tokens: list[str]) -> tuple[Any, bool]:
    """Return the tokenizer, and whether it adds a BOS token if the file does not say."""
    default = "qwen2" if file.text("general.architecture") == "qwen2" else ""
    split = file.text("tokenizer.ggml.pre", default)
    if split not in SPLITS:
        raise file.error(
            f"tokenizer.ggml.pre = {split[:80]!r} is not supported; supported: {', '.join(SPLITS)}"
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = _merges(file, vocabulary)
    is_llama3 = split in _LLAMA3_NAMES
    # Llama 3 encodes a word that is a token as this token, even if no merges lead to it.
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=is_llama3))
    if split in _QWEN2_NAMES:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = SPLITS[split]
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, is_llama3


def _merges(file: GgufFile, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    lines = file.fields.get("tokenizer.ggml.merges")
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise file.error("the GGUF file has no list of texts tokenizer.ggml.merges")
    merges = []
    for line in lines:
        left, space, right = line.partition(" ")
        if not space or any(part not in vocabulary for part in (left, right, left + right)):
            raise file.error(
                f"tokenizer.ggml.merges has {line[:80]!r}, which is not in the vocabulary"
            )
        merges.append((left, right))
    return merges


def _sentence_piece(file: GgufFile, tokens: list[str]) -> Any:
    scores = _numbers(file, "tokenizer.ggml.scores", len(file.fields["tokenizer.ggml.tokens"]))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = file.token_id("tokenizer.ggml.unknown_token_id", len(tokens))
    tokenizer = Tokenizer(
        BPE(
            vocab=vocabulary,
            merges=_merges_by_score(file, vocabulary, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    # As in llama.cpp: a space is put in front of the text, also after a special token.
    prefix = [normalizers.Prepend(SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(
    file: GgufFile, vocabulary: dict[str, int], scores: list[Any]
) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece vocabulary, which stores only a score per token.

    SentencePiece merges the pair whose token has the highest score first.
    """
    if sum(map(len, vocabulary)) > MAX_CHARACTERS:
        raise file.error(f"the tokens have more than {MAX_CHARACTERS} characters together")
    merges: list[tuple[float, int, int, str, str]] = []
    for token, index in vocabulary.items():
        if len(token) > MAX_PIECE:
            raise file.error(f"a token of {len(token)} characters; at most {MAX_PIECE} are read")
        for end in range(1, len(token)):
            left, right = token[:end], token[end:]
            if left in vocabulary and right in vocabulary:
                merges.append((-float(scores[index]), index, -len(left), left, right))
    return [(left, right) for *_, left, right in sorted(merges)]
