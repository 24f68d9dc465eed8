"""Fixtures: small models, ragged completions, and references that share no code with eepo."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

# Matplotlib writes a cache of fonts. It must not be in the user's home directory.
os.environ.setdefault("MPLCONFIGDIR", str(Path(tempfile.gettempdir()) / "eepo-tests-matplotlib"))

# isort: split
# Before torch: eepo sets how torch's threads wait. On a busy machine tests otherwise take three
# times as long.
import eepo  # noqa: F401

# isort: split
import copy
import hashlib
import random
import resource
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from eepo.config import CountdownConfig, ModelConfig
from eepo.model import loading
from eepo.tasks.countdown import Countdown, build_tokenizer
from eepo.types import Completion, Prompt

settings.register_profile("eepo", deadline=None)  # a slow machine is not a failure
settings.load_profile("eepo")

CPU = torch.device("cpu")
TIED = {"qwen3", "gemma2", "cohere"}  # tied heads; the other families have separate ones
CHAT = (
    "{{ bos_token }}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class PlainScores(NamedTuple):
    """Scores of one completion's T tokens, in float64, with gradient."""

    logprobs: Tensor  # [T]
    entropies: Tensor  # [T]
    complements: Tensor  # [T] log(1 − p)


@pytest.fixture
def run_eepo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., SimpleNamespace]:
    """Return a function that runs a command in this process, in an empty folder, without a hub."""
    from eepo import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # undone after the test
    monkeypatch.delenv("EEPO_DEBUG", raising=False)

    def call(*arguments: object) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["eepo", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capsys.readouterr()
        return SimpleNamespace(code=end.value.code or 0, out=printed.out, err=printed.err)

    return call


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Point eepo's cache to a temporary folder: tests neither read nor write the user's cache.

    pytest-xdist workers share the folder, so that SmolLM2 is converted once.
    """
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if is_worker else base) / "eepo-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EEPO_CACHE", str(folder))
        yield
    if not is_worker:
        shutil.rmtree(folder, ignore_errors=True)  # the converted model takes 0.5 GB


@pytest.fixture
def file_size_limit() -> Callable[[int], AbstractContextManager[None]]:
    """Return a context manager in which no file can grow beyond some bytes, as on a full disk."""

    @contextmanager
    def limit(num_bytes: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limit


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return build_tokenizer()


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[..., Any]:
    """Build a byte-level tokenizer with an optional BOS token and a chat template."""

    def build(*, bos: bool = True, chat: str | None = CHAT) -> Any:
        special = ["<bos>", "<eos>", "<user>", "<assistant>"]
        words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
        tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        if bos:
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<bos> $A", special_tokens=[("<bos>", 0)]
            )
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="<bos>" if bos else None,
            eos_token="<eos>",
            extra_special_tokens=["<user>", "<assistant>"],
            chat_template=chat if chat is None or bos else chat.replace("{{ bos_token }}", ""),
        )

    return build


@pytest.fixture(scope="session")
def new_model(tokenizer: Any) -> Callable[..., Any]:
    """Build a tiny decoder of a family. Large weights keep its distributions far from uniform."""

    def build(family: str, *, seed: int = 0, **shape: Any) -> Any:
        config = AutoConfig.for_model(
            family,
            **{
                "vocab_size": len(tokenizer),
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 16,
                "max_position_embeddings": 128,
                "tie_word_embeddings": family in TIED,
                "bos_token_id": None,
                "eos_token_id": tokenizer.eos_token_id,
                "pad_token_id": tokenizer.pad_token_id,
            }
            | shape,
        )
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config).float().eval()
            for weight in model.parameters():
                spread = 0.1 if weight.dim() == 1 else 0.35
                weight.add_(torch.randn_like(weight) * spread)
        return model

    return build


@pytest.fixture(scope="session")
def chat_model(byte_tokenizer: Any, new_model: Any) -> Callable[[Path], None]:
    """Write a tiny chat model with its tokenizer into a folder."""

    def write(folder: Path) -> None:
        tokenizer = byte_tokenizer()
        end = tokenizer.eos_token_id
        sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
        model = new_model("llama", **sizes, eos_token_id=end, pad_token_id=end)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return write


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Train with one thread: faster for small models, and the same sums in every process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def demo_model() -> Any:
    """Load the built-in policy once. Tests that change it must copy it first."""
    return loading.load_model(ModelConfig(), CPU)


@pytest.fixture
def demo_copy(demo_model: Any) -> Any:
    return copy.deepcopy(demo_model)


@pytest.fixture(scope="session")
def demo_prompts(tokenizer: Any) -> list[Prompt]:
    return Countdown(CountdownConfig(num_evaluation=1), tokenizer).training_prompts(0, 32)


@pytest.fixture(scope="session")
def ragged_pairs(tokenizer: Any) -> Callable[..., list[tuple[Prompt, Completion]]]:
    """Build random prompts of 1 to 7 tokens, with `group` completions of 1 to 10 tokens each."""

    def build(number: int, seed: int = 0, group: int = 1) -> list[tuple[Prompt, Completion]]:
        rng = random.Random(seed)
        pairs = []
        for index in range(number):
            if index % group == 0:
                prompt = tuple(rng.randrange(2, len(tokenizer)) for _ in range(rng.randint(1, 7)))
            ids = tuple(rng.randrange(2, len(tokenizer)) for _ in range(rng.randint(1, 10)))
            completion = Completion(ids, tuple(-rng.random() for _ in ids), "", True)
            pairs.append((Prompt(f"random/{index // group}", "", prompt), completion))
        return pairs

    return build


@pytest.fixture(scope="session")
def plain_scores() -> Callable[..., PlainScores]:
    """Score one row from full logits without padding: the reference for all other ways to score."""

    def score(
        model: Any, prompt: Prompt, completion: Completion, temperature: float = 1.0
    ) -> PlainScores:
        ids = torch.tensor([prompt.token_ids + completion.token_ids])
        mask = torch.ones_like(ids)
        output = model(input_ids=ids, attention_mask=mask, use_cache=False)
        logits = output.logits[0].double()
        logits = logits[len(prompt.token_ids) - 1 : -1] / temperature
        columns: list[list[Tensor]] = [[], [], []]
        for row, token in zip(logits, completion.token_ids, strict=True):
            log_p = row - row.logsumexp(0)
            columns[0].append(log_p[token])
            columns[1].append(-(log_p.exp() * log_p).sum())
            columns[2].append(torch.cat([log_p[:token], log_p[token + 1 :]]).logsumexp(0))
        return PlainScores(*(torch.stack(column) for column in columns))

    return score


@pytest.fixture(scope="session")
def fingerprint() -> Callable[[Any], str]:
    """Hash all bits of the tensors in nested lists and dictionaries, and the plain values."""

    def flat(value: Any) -> Iterable[bytes]:
        if isinstance(value, Tensor):
            yield f"{value.dtype}{tuple(value.shape)}".encode()
            yield (
                value.detach().contiguous().view(torch.uint8).numpy().tobytes()
                if value.dim()
                else repr(value.item()).encode()
            )
        elif isinstance(value, dict):
            for key in value:
                yield repr(key).encode()
                yield from flat(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                yield from flat(item)
        else:
            yield repr(value).encode()

    def digest(value: Any) -> str:
        total = hashlib.sha256()
        for part in flat(value):
            total.update(part)
        return total.hexdigest()

    return digest
