"""Shared by the speed benchmarks: random models of published shapes, lengths, timing, tables."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from eepo.config import ModelConfig, RunConfig
from eepo.model import memory
from eepo.rollout.paged.engine import PagedEngine
from eepo.types import Completion, Prompt, Sampling

NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
SHAPES = {  # Qwen2.5's up to 3B, Qwen3's above, and a tiny one to test the scripts
    "tiny": dict(zip(NAMES, (64, 128, 2, 4, 2), strict=True)),
    "0.5B": dict(zip(NAMES, (896, 4864, 24, 14, 2), strict=True)),
    "1.5B": dict(zip(NAMES, (1536, 8960, 28, 12, 2), strict=True)),
    "3B": dict(zip(NAMES, (2048, 11008, 36, 16, 2), strict=True)),
    "8B": dict(zip(NAMES, (4096, 12288, 36, 32, 8), strict=True)),
    "14B": dict(zip(NAMES, (5120, 17408, 40, 40, 8), strict=True)),
}
UNTIED = ("8B", "14B")  # the head is not the embedding
VOCABULARY = 151936
END = 151643


class NoTokenizer:
    """Stands in for a tokenizer: the text of a random model is not needed."""

    eos_token_id = pad_token_id = END

    def __len__(self) -> int:
        return VOCABULARY

    def batch_decode(self, rows: Sequence[Sequence[int]], **options: Any) -> list[str]:
        return [""] * len(rows)


class FixedLengthEngine(PagedEngine):
    """Samples completions of given lengths, by (prompt id, sample): a random model never ends them.

    The KV cache stays allocated between calls if a run that trains such a model on this GPU would
    keep it. `training` describes that run; by default it uses gradient checkpointing.
    """

    def __init__(
        self,
        model: Any,
        max_rows: int,
        lengths: dict[tuple[str, int], int],
        training: ModelConfig | None = None,
    ) -> None:
        keep = None
        if model.device.type == "cuda":
            shape = memory.shape_of(model.config, num_parameters(model))
            config = RunConfig(model=training or ModelConfig(gradient_checkpointing=True))
            total = torch.cuda.mem_get_info(model.device)[1]
            keep = memory.cache_bytes(shape, config, torch.bfloat16, total)
        super().__init__(model, NoTokenizer(), max_rows, keep_bytes=keep)
        self.end_tokens.fill_(-1)
        self.lengths = lengths

    def completion_limit(self, prompt: Prompt, sample: int, sampling: Sampling) -> int:
        return min(self.lengths[prompt.id, sampling.first_sample + sample], sampling.max_new_tokens)


def config(shape: str) -> Qwen2Config:
    return Qwen2Config(
        **SHAPES[shape],
        vocab_size=VOCABULARY,
        max_position_embeddings=32768,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=shape not in UNTIED,
        eos_token_id=END,
        pad_token_id=END,
        bos_token_id=None,
    )


def new_model(shape: str, dtype: torch.dtype, device: torch.device) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config(shape), dtype=dtype)
    model.generation_config.eos_token_id = END
    return model.eval()


def sharpen(model: Any, std: float = 6.0) -> None:
    """Scale the logits of a random model to a standard deviation like that of a trained one.

    Random weights give all tokens the same probability. Then nothing can be unlearned, and the
    search for the unlearning rate ends at its bounds.
    """
    config = model.config
    with torch.no_grad():
        model.model.norm.weight.fill_(std / (config.initializer_range * config.hidden_size**0.5))


def num_parameters(model: Any) -> int:
    return sum(weight.numel() for weight in model.parameters())


def prompts(count: int, length: int, seed: int = 0) -> list[Prompt]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1000, 150000, (count, length), generator=generator).tolist()
    return [Prompt(f"p{index}", "", tuple(row), None) for index, row in enumerate(ids)]


def long_tail(count: int, mean: float, longest: int, seed: int = 0) -> list[int]:
    """Draw log-normal lengths, cut at `longest`. With sigma 1 a few are ten times the median."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randn(count, generator=generator).exp() * (mean / 1.6487)  # exp(1/2)
    return [max(1, min(longest, round(length))) for length in lengths.tolist()]


def random_completion(length: int, seed: int) -> Completion:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1000, 150000, (length,), generator=generator).tolist()
    return Completion(tuple(ids), (-12.0,) * length, "", True, (11.0,) * length)


def median_seconds(
    work: Callable[[], Any], repeats: int, device: torch.device, warm: int = 1
) -> float:
    seconds = []
    for repeat in range(warm + repeats):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        if repeat >= warm:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matrix_rate(device: torch.device) -> float:
    """Measure bf16 matrix products, in FLOP/s."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = median_seconds(lambda: [a @ b for _ in range(5)], 5, device)
    return 2 * size**3 / seconds * 5


def copy_rate(device: torch.device) -> float:
    """Measure copies on the device, in bytes read and written per second."""
    num_bytes = 1 << (31 if device.type == "cuda" else 24)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: [target.copy_(source) for _ in range(5)], 5, device)
    return 2 * num_bytes / seconds * 5


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
