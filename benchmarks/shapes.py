"""What the speed benchmarks share: models by their published shapes with random weights, lengths, timing, tables."""

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
SHAPES = {  # Qwen2.5, and one to try the scripts with
    "tiny": dict(zip(NAMES, (64, 128, 2, 4, 2), strict=True)),
    "0.5B": dict(zip(NAMES, (896, 4864, 24, 14, 2), strict=True)),
    "1.5B": dict(zip(NAMES, (1536, 8960, 28, 12, 2), strict=True)),
    "3B": dict(zip(NAMES, (2048, 11008, 36, 16, 2), strict=True)),
}
VOCABULARY = 151936
END = 151643


class NoTokenizer:
    """Random weights write nothing that is worth reading."""

    eos_token_id = pad_token_id = END

    def __len__(self) -> int:
        return VOCABULARY

    def batch_decode(self, rows: Sequence[Sequence[int]], **options: Any) -> list[str]:
        return [""] * len(rows)


class Forced(PagedEngine):
    """With a length for each (prompt, sample), and no end before it: random weights never end.

    Its cache stays between calls if it would in a run that trains such a model on this card: with checkpointing, if
    nothing else is said.
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
            keep = memory.spare(
                shape, config, torch.bfloat16, torch.cuda.mem_get_info(model.device)[1]
            )
        super().__init__(model, NoTokenizer(), max_rows, keep_bytes=keep)
        self.ends.fill_(-1)
        self.lengths = lengths

    def limit(self, prompt: Prompt, sample: int, sampling: Sampling) -> int:
        return min(self.lengths[prompt.id, sampling.first_sample + sample], sampling.max_new_tokens)


def config(shape: str) -> Qwen2Config:
    return Qwen2Config(
        **SHAPES[shape],
        vocab_size=VOCABULARY,
        max_position_embeddings=32768,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
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


def num_parameters(model: Any) -> int:
    return sum(weight.numel() for weight in model.parameters())


def prompts(count: int, length: int, seed: int = 0) -> list[Prompt]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1000, 150000, (count, length), generator=generator).tolist()
    return [Prompt(f"p{place}", "", tuple(row), None) for place, row in enumerate(ids)]


def long_tail(count: int, mean: float, longest: int, seed: int = 0) -> list[int]:
    """Log-normal lengths, cut at `longest`: sigma 1, so that a few are ten times the median."""
    generator = torch.Generator().manual_seed(seed)
    raw = (torch.randn(count, generator=generator)).exp()
    return [max(1, min(longest, round(length))) for length in (raw * (mean / 1.6487)).tolist()]


def completion_of(length: int, seed: int) -> Completion:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1000, 150000, (length,), generator=generator).tolist()
    return Completion(tuple(ids), (-12.0,) * length, "", True, (11.0,) * length)


def median_seconds(
    work: Callable[[], Any], repeats: int, device: torch.device, warm: int = 1
) -> float:
    seconds = []
    for turn in range(warm + repeats):
        wait(device)
        started = time.perf_counter()
        work()
        wait(device)
        if turn >= warm:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matrix_rate(device: torch.device) -> float:
    """bf16 products, FLOP/s, measured."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / median_seconds(lambda: [a @ b for _ in range(5)], 5, device) * 5


def copy_rate(device: torch.device) -> float:
    """Bytes read and written a second, measured."""
    source = torch.empty(
        (1 << 31) if device.type == "cuda" else (1 << 24), dtype=torch.uint8, device=device
    )
    target = torch.empty_like(source)
    return (
        2
        * source.numel()
        / median_seconds(lambda: [target.copy_(source) for _ in range(5)], 5, device)
        * 5
    )


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [
        list(map(str, head)),
        ["---"] * len(head),
        *([str(cell) for cell in row] for row in rows),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
