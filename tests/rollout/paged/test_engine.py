"""The paged engine samples the same tokens as `TransformersEngine`, even when memory is short.

The kernels run in plain torch here.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from eepo.model import compilation
from eepo.model.compilation import decoder_layers
from eepo.rollout import builtin, fused_linear
from eepo.rollout.builtin import builtin_engine
from eepo.rollout.paged import engine as paged
from eepo.rollout.paged.cuda_graphs import graph_sizes
from eepo.rollout.paged.engine import PagedEngine
from eepo.rollout.paged.scheduler import PAGE_SIZE, Scheduler
from eepo.rollout.transformers import TransformersEngine
from eepo.types import Completion, Prompt, Sampling

SAMPLING = Sampling(temperature=1.0, max_new_tokens=10, seed=5, stream="train/3")
LONG = replace(SAMPLING, max_new_tokens=PAGE_SIZE + 9)
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("qwen2", {"num_attention_heads": 6, "num_key_value_heads": 2}),
    ("qwen3", {}),
    ("mistral", {"sliding_window": 5}),
    ("mistral", {"sliding_window": 200}),
    ("phi", {"num_key_value_heads": 2}),
    ("phi3", {}),
    ("gemma3_text", {"sliding_window": 7, "query_pre_attn_scalar": 16}),
    ("granite", {"logits_scaling": 3.0, "attention_multiplier": 0.3}),
    ("cohere", {"logit_scale": 0.2}),
]


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[Prompt]:
    """Prompts of a few tokens, and of one page: exactly, one token less, one token more."""
    generator = torch.Generator().manual_seed(0)
    lengths = [1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 7, 3]
    return [
        Prompt(
            f"p{index}",
            "",
            tuple(torch.randint(2, len(tokenizer), (length,), generator=generator).tolist()),
        )
        for index, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def ending_model(new_model: Any) -> Callable[..., Any]:
    """Builds a tiny model that ends at every `every`-th token, so rows end at different times."""

    def build(family: str, every: int = 16, **shape: Any) -> Any:
        model = new_model(family, **({"max_position_embeddings": 512} | shape))
        model.generation_config.eos_token_id = list(range(1, model.config.vocab_size, every))
        return model

    return build


def flat(groups: list[list[Completion]]) -> list[Completion]:
    return [completion for group in groups for completion in group]


def assert_same(got: list[list[Completion]], expected: list[list[Completion]]) -> None:
    assert [len(group) for group in got] == [len(group) for group in expected]
    for actual, reference in zip(flat(got), flat(expected), strict=True):
        assert actual.token_ids == reference.token_ids
        assert actual.logprobs == pytest.approx(reference.logprobs, rel=5e-5, abs=5e-5)
        assert actual.entropies == pytest.approx(reference.entropies, rel=5e-5, abs=5e-5)
        assert (actual.text, actual.finished) == (reference.text, reference.finished)


def both(model: Any, tokenizer: Any, **options: Any) -> tuple[PagedEngine, TransformersEngine]:
    stop = options.get("stop", "")
    return PagedEngine(copy.deepcopy(model), tokenizer, **options), TransformersEngine(
        model, tokenizer, 1000, stop
    )


@pytest.mark.parametrize(
    ("family", "shape"), FAMILIES, ids=[f"{f}-{s.get('sliding_window', '')}" for f, s in FAMILIES]
)
def test_every_family_samples_the_same_tokens_as_the_plain_engine(
    family: str, shape: dict[str, Any], ending_model: Any, tokenizer: Any, prompts: list[Prompt]
) -> None:
    paged_engine, plain_engine = both(ending_model(family, **shape), tokenizer)
    assert paged_engine.unsupported_reason() == ""
    expected = plain_engine.generate(prompts, 3, SAMPLING)
    assert len({len(completion.token_ids) for completion in flat(expected)}) > 4
    assert_same(paged_engine.generate(prompts, 3, SAMPLING), expected)


@pytest.mark.parametrize("max_rows", [1, 3, 8, 11])
def test_rows_share_fewer_slots(
    max_rows: int, ending_model: Any, tokenizer: Any, prompts: list[Prompt]
) -> None:
    paged_engine, plain_engine = both(ending_model("qwen3"), tokenizer, max_rows=max_rows)
    assert_same(
        paged_engine.generate(prompts, 4, SAMPLING), plain_engine.generate(prompts, 4, SAMPLING)
    )


def test_long_rows_cross_pages_and_are_compacted(
    ending_model: Any, tokenizer: Any, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    moves: list[list[int]] = []
    compact = Scheduler.compact
    monkeypatch.setattr(
        Scheduler, "compact", lambda scheduler: moves.append(compact(scheduler)) or moves[-1]
    )
    paged_engine, plain_engine = both(ending_model("llama", every=40), tokenizer)
    expected = plain_engine.generate(prompts, 4, LONG)
    assert max(len(completion.token_ids) for completion in flat(expected)) > PAGE_SIZE
    assert_same(paged_engine.generate(prompts, 4, LONG), expected)
    assert any(move != list(range(len(move))) for move in moves)


@pytest.mark.parametrize("max_rows", [5, 16])
def test_rows_restart_with_the_same_tokens_when_memory_is_short(
    max_rows: int,
    ending_model: Any,
    tokenizer: Any,
    prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    paged_engine, plain_engine = both(
        ending_model("llama", every=1000), tokenizer, max_rows=max_rows
    )
    monkeypatch.setattr(paged, "_free_bytes", lambda device: 8 * paged_engine.cache.page_bytes)
    short = [prompts[0], prompts[4]]
    # One more page is kept free for each running row, so each row must need two.
    longer = replace(SAMPLING, max_new_tokens=2 * PAGE_SIZE + 9)
    expected = plain_engine.generate(short, 3, longer)
    with caplog.at_level(logging.WARNING, "eepo.rollout.paged.engine"):
        for _ in range(2):
            assert_same(paged_engine.generate(short, 3, longer), expected)
    lines = [record.getMessage() for record in caplog.records]
    assert sum("the KV cache holds" in line for line in lines) == 1  # warned once
    assert sum("completions restarted" in line for line in lines) == 2
    assert paged_engine._buffers is not None
    assert paged_engine._buffers.num_pages < 12


def test_buffers_are_reused_for_smaller_calls_and_grow_for_larger_ones(
    ending_model: Any, tokenizer: Any, prompts: list[Prompt]
) -> None:
    paged_engine, plain_engine = both(ending_model("qwen2"), tokenizer)
    kept = []
    for some_prompts, num_samples, sampling in [
        (prompts[4:], 2, SAMPLING),
        (prompts[5:], 1, replace(SAMPLING, max_new_tokens=3)),  # smaller: the buffers are reused
        (prompts, 5, SAMPLING),
        (prompts[:3], 2, LONG),
        (prompts, 5, replace(SAMPLING, stream="train/4")),
        (prompts[4:], 2, SAMPLING),
    ]:
        assert_same(
            paged_engine.generate(some_prompts, num_samples, sampling),
            plain_engine.generate(some_prompts, num_samples, sampling),
        )
        kept.append(paged_engine._buffers)
    assert kept[0] is kept[1]
    assert kept[1] is not kept[2]


def test_release_memory_frees_a_large_cache_that_generate_keeps(
    ending_model: Any, tokenizer: Any, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation is many calls, and capturing its graphs for each of them would be slow."""
    monkeypatch.setattr(paged, "_gpu_bytes", lambda device: 1)
    paged_engine, plain_engine = both(ending_model("llama"), tokenizer)
    for _ in range(2):
        kept = []
        for _ in range(2):
            assert_same(
                paged_engine.generate(prompts, 2, SAMPLING),
                plain_engine.generate(prompts, 2, SAMPLING),
            )
            kept.append(paged_engine._buffers)
        assert kept[0] is kept[1] is not None
        paged_engine.release_memory()
        assert paged_engine._buffers is None
        assert paged_engine.cache.pages is None


def test_second_call_allocates_what_the_first_call_needed_and_keeps_it(
    ending_model: Any, tokenizer: Any, prompts: list[Prompt]
) -> None:
    paged_engine, plain_engine = both(ending_model("llama"), tokenizer)
    # Rows end long before the limit: every sixteenth token is an end token.
    far = replace(SAMPLING, max_new_tokens=6 * PAGE_SIZE)
    paged_engine.keep_bytes = 90 * paged_engine.cache.page_bytes
    expected = plain_engine.generate(prompts, 4, far)
    assert_same(paged_engine.generate(prompts, 4, far), expected)
    paged_engine.release_memory()
    assert paged_engine._buffers is None  # it held all rows at full length
    assert 0 < 24 * paged_engine._pages_per_slot < 70
    kept = []
    for _ in range(2):
        assert_same(paged_engine.generate(prompts, 4, far), expected)
        paged_engine.release_memory()
        kept.append(paged_engine._buffers)
    assert kept[0] is kept[1] is not None
    assert (
        24 * paged_engine._pages_per_slot
        < kept[0].num_pages
        <= 1 + paged.PAGE_MARGIN * 24 * paged_engine._pages_per_slot
    )


@pytest.mark.slow
def test_next_call_allocates_all_pages_again_when_the_estimate_was_too_low(
    ending_model: Any, tokenizer: Any, prompts: list[Prompt]
) -> None:
    """The first call has fewer and shorter rows than the later ones."""
    paged_engine, plain_engine = both(ending_model("llama"), tokenizer)
    for engine in (paged_engine, plain_engine):
        engine.end_tokens.fill_(-1)  # rows end at the length limit only
    long = replace(SAMPLING, max_new_tokens=5 * PAGE_SIZE)
    paged_engine.generate(prompts[4:5], 2, replace(SAMPLING, max_new_tokens=4))
    assert (per_slot := paged_engine._pages_per_slot) > 0
    expected = plain_engine.generate(prompts[4:5], 16, long)
    sizes = []
    for _ in range(3):
        paged_engine._free_buffers()
        assert_same(paged_engine.generate(prompts[4:5], 16, long), expected)
        sizes.append(paged_engine._buffers.num_pages)  # type: ignore[union-attr]
    assert 16 * per_slot < sizes[0] < sizes[1]
    assert sizes[1] == sizes[2] > 16 * 5


def test_many_prompts_are_prefilled_and_sampled_in_parts(
    ending_model: Any, tokenizer: Any, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged, "PREFILL_TOKENS", 70)
    monkeypatch.setattr(paged, "MAX_OUTPUT_TOKENS", 2 * 3 * SAMPLING.max_new_tokens)
    paged_engine, plain_engine = both(ending_model("llama"), tokenizer)
    assert_same(
        paged_engine.generate(prompts, 3, SAMPLING), plain_engine.generate(prompts, 3, SAMPLING)
    )


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.7])
def test_temperatures_match_the_plain_engine(
    temperature: float, ending_model: Any, tokenizer: Any, prompts: list[Prompt]
) -> None:
    paged_engine, plain_engine = both(ending_model("qwen3"), tokenizer)
    sampling = replace(SAMPLING, temperature=temperature)
    assert_same(
        paged_engine.generate(prompts, 2, sampling), plain_engine.generate(prompts, 2, sampling)
    )


def test_completions_of_one_token(ending_model: Any, tokenizer: Any, prompts: list[Prompt]) -> None:
    paged_engine, plain_engine = both(ending_model("qwen3"), tokenizer)
    sampling = replace(SAMPLING, max_new_tokens=1)
    got = paged_engine.generate(prompts, 3, sampling)
    assert {len(completion.token_ids) for completion in flat(got)} == {1}
    assert_same(got, plain_engine.generate(prompts, 3, sampling))


def test_first_sample_continues_the_sample_indices(
    ending_model: Any, tokenizer: Any, prompts: list[Prompt]
) -> None:
    paged_engine, plain_engine = both(ending_model("llama"), tokenizer)
    first, second = (
        paged_engine.generate(prompts, 2, SAMPLING),
        paged_engine.generate(prompts, 2, replace(SAMPLING, first_sample=2)),
    )
    assert_same(
        [a + b for a, b in zip(first, second, strict=True)],
        plain_engine.generate(prompts, 4, SAMPLING),
    )


def test_a_stop_text_ends_rows(new_model: Any, tokenizer: Any, prompts: list[Prompt]) -> None:
    paged_engine, plain_engine = both(new_model("llama"), tokenizer, stop="1")
    expected = plain_engine.generate(prompts, 4, LONG)
    assert {completion.text[-1:] for completion in flat(expected) if completion.finished} >= {"1"}
    assert_same(paged_engine.generate(prompts, 4, LONG), expected)


def test_generate_uses_weights_loaded_between_calls(
    ending_model: Any, tokenizer: Any, prompts: list[Prompt]
) -> None:
    for family in ("qwen3", "llama"):  # a tied and an untied head
        paged_engine, plain_engine = both(ending_model(family), tokenizer)
        before = paged_engine.generate(prompts, 2, SAMPLING)
        for engine in (paged_engine, plain_engine):
            engine.load_weights(ending_model(family, seed=1).named_parameters())
        after = paged_engine.generate(prompts, 2, SAMPLING)
        assert flat(after) != flat(before)
        assert_same(after, plain_engine.generate(prompts, 2, SAMPLING))


def test_each_completion_may_have_its_own_limit(
    ending_model: Any, tokenizer: Any, prompts: list[Prompt]
) -> None:
    class VaryingLimits(PagedEngine):
        def completion_limit(self, prompt: Prompt, sample: int, sampling: Sampling) -> int:
            return 2 + 3 * sample

    model = ending_model("llama", every=1000)
    whole = TransformersEngine(model, tokenizer).generate(prompts, 3, SAMPLING)
    for got, expected in zip(
        VaryingLimits(model, tokenizer).generate(prompts, 3, SAMPLING), whole, strict=True
    ):
        for sample, (limited, unlimited) in enumerate(zip(got, expected, strict=True)):
            assert limited.token_ids == unlimited.token_ids[: 2 + 3 * sample]


# --- unsupported families, and the choice of the engine


UNSUPPORTED = [
    ("gemma2", {}, "packed attention does not support softcapping"),
    (
        "gpt_oss",
        {"num_local_experts": 2, "num_experts_per_tok": 1},
        "paged attention does not support attention sinks",
    ),
    ("bloom", {}, "hidden states differ by"),
]


@pytest.mark.parametrize(
    ("family", "shape", "reason"), UNSUPPORTED, ids=[case[0] for case in UNSUPPORTED]
)
def test_unsupported_family_gives_a_reason_and_stays_unchanged(
    family: str, shape: dict[str, Any], reason: str, new_model: Any, tokenizer: Any
) -> None:
    model = new_model(family, **shape)
    default_attention, ids = model.config._attn_implementation, torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        before = model(input_ids=ids).logits
        assert reason in PagedEngine(model, tokenizer).unsupported_reason()
        assert model.config._attn_implementation == default_attention
        assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize("num_slots", [1, 8, 40, 100, 1024, 2000])
def test_kept_graphs_have_more_sizes(num_slots: int) -> None:
    few, many = (graph_sizes(num_slots, kept) for kept in (False, True))
    assert set(few) <= set(many)
    for sizes in (few, many):
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == num_slots
    for sizes, max_ratio in ((few, 2), (many, 1.5)):
        assert all(high <= max_ratio * low for low, high in pairwise(sizes) if low >= 64)


def test_capture_runs_a_warm_up_step_once_per_size(
    new_model: Any,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Captures are only recorded here. On a CPU, a step inside a capture is a plain step."""
    capturing, errors = [], []

    @contextlib.contextmanager
    def capture(graph: Any, pool: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"  # the thread of `StepBackup` may wait meanwhile
        capturing.append(True)
        yield
        capturing.pop()
        if errors:
            raise RuntimeError(errors.pop())

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=lambda: "memory"))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    engine = PagedEngine(new_model("llama"), tokenizer, 8)
    assert engine.unsupported_reason() == ""
    steps: list[str] = []

    def steps_of_capture(longest: int = 20) -> list[str]:
        engine._free_buffers()
        engine.graphs.enabled = True
        buffers = engine._buffers_for([4], 8, longest)
        monkeypatch.setattr(
            buffers, "_run_step", lambda size: steps.append("captured" if capturing else "run")
        )
        steps.clear()
        buffers.state.live.fill_(1)
        buffers._capture(8)
        assert buffers.state.live.tolist() == [1] * 8
        return steps.copy()

    assert steps_of_capture() == ["run", "captured"]
    assert steps_of_capture() == ["captured"]
    assert steps_of_capture(longest=2000) == ["run", "captured"]
    errors.append("kernel is not loaded")
    assert steps_of_capture() == ["captured", "run", "captured"]
    assert engine.graphs.enabled
    errors.extend(["still not", "kernel is not loaded"])
    with caplog.at_level(logging.WARNING):
        assert steps_of_capture() == ["captured", "run", "captured"]
    assert not engine.graphs.enabled
    assert [record.getMessage() for record in caplog.records] == [
        "sampling without CUDA graphs: still not"
    ]


class OnGPU:
    """A model on the CPU that claims to be on a GPU."""

    def __init__(self, model: Any) -> None:
        self.__dict__["model"] = model

    def __getattr__(self, name: str) -> Any:
        return torch.device("cuda") if name == "device" else getattr(self.model, name)


def test_builtin_engine_is_the_plain_engine_without_a_gpu(new_model: Any, tokenizer: Any) -> None:
    engine = builtin_engine(new_model("llama"), tokenizer)
    assert type(engine) is TransformersEngine
    assert engine.max_rows == builtin.UNPAGED_ROWS


@pytest.mark.parametrize(
    ("family", "reason"),
    [("llama", ""), ("gemma2", "packed attention does not support softcapping")],
)
def test_builtin_engine_on_a_gpu_is_the_paged_engine_if_supported(
    family: str,
    reason: str,
    new_model: Any,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class PagedOnCPU(PagedEngine):  # unwraps the model, which is on the CPU
        def __init__(self, model: OnGPU, *args: Any) -> None:
            super().__init__(model.model, *args)

    class PlainOnCPU(TransformersEngine):
        def __init__(self, model: OnGPU, *args: Any) -> None:
            super().__init__(model.model, *args)

    monkeypatch.setattr(builtin, "PagedEngine", PagedOnCPU)
    monkeypatch.setattr(builtin, "TransformersEngine", PlainOnCPU)
    with caplog.at_level(logging.WARNING):
        engine = builtin_engine(OnGPU(new_model(family)), tokenizer, 64, "", "off")
    assert type(engine) is (PlainOnCPU if reason else PagedOnCPU)
    assert [record.getMessage() for record in caplog.records] == (
        [f"sampling is slower, without paged KV cache and CUDA graphs: {reason}"] if reason else []
    )
    assert engine.max_rows == 64
    engine = builtin_engine(OnGPU(new_model(family)), tokenizer, 0, "", "off")
    assert engine.max_rows == (builtin.UNPAGED_ROWS if reason else builtin.PAGED_ROWS)


@pytest.mark.parametrize("choice", ["on", "off"])
def test_linear_layers_are_fused_only_if_layers_are_compiled(
    choice: str, new_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PagedOnCPU(PagedEngine):
        def __init__(self, model: OnGPU, *args: Any) -> None:
            super().__init__(model.model, *args)

    monkeypatch.setattr(builtin, "PagedEngine", PagedOnCPU)
    for module in (compilation, fused_linear):
        monkeypatch.setattr(module, "can_compile", lambda model: True)
    model = new_model("llama")
    builtin_engine(OnGPU(model), tokenizer, 64, "", choice)
    layers = decoder_layers(model)
    assert {bool(layer._compiled_call_impl) for layer in layers} == {choice == "on"}
    assert {type(layer.mlp.up_proj) for layer in layers} == {
        fused_linear.FusedLinear if choice == "on" else nn.Linear
    }


def test_memory_for_less_than_one_completion_is_out_of_memory(
    new_model: Any, tokenizer: Any, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def out_of_memory(
        cache: Any, ends: Any, graphs: Any, sizes: Any, pages: int, kept: bool
    ) -> None:
        tried.append(pages)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(paged, "DecodeBuffers", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):  # the trainer names the knob and saves the run
        PagedEngine(new_model("qwen2"), tokenizer).generate(prompts, 4, Sampling(1.0, 200))
    assert tried == sorted(tried, reverse=True)
    assert len(tried) > 1  # it tried fewer pages first
