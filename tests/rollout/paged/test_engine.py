"""The paged engine, with the kernels' plain forms: token for token what the plain engine draws, whatever is short."""

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
from eepo.rollout.builtin import embedded_engine
from eepo.rollout.paged import engine as paged
from eepo.rollout.paged.cuda_graphs import _sizes
from eepo.rollout.paged.engine import PagedEngine
from eepo.rollout.paged.scheduler import PAGE, Slots
from eepo.rollout.transformers import TransformersEngine
from eepo.types import Completion, Prompt, Sampling, UserError

SAMPLING = Sampling(temperature=1.0, max_new_tokens=10, seed=5, stream="train/3")
LONG = replace(SAMPLING, max_new_tokens=PAGE + 9)
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
    """Of one token, of a page but one, of exactly a page, of one more, and of a few."""
    generator = torch.Generator().manual_seed(0)
    lengths = [1, PAGE - 1, PAGE, PAGE + 1, 7, 3]
    return [
        Prompt(
            f"p{place}",
            "",
            tuple(torch.randint(2, len(tokenizer), (length,), generator=generator).tolist()),
        )
        for place, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def ending(new_model: Any) -> Callable[..., Any]:
    """A tiny model in which every so-many-th token is an end, so that rows end at different times."""

    def build(family: str, every: int = 16, **shape: Any) -> Any:
        model = new_model(family, **({"max_position_embeddings": 512} | shape))
        model.generation_config.eos_token_id = list(range(1, model.config.vocab_size, every))
        return model

    return build


def flat(groups: list[list[Completion]]) -> list[Completion]:
    return [completion for group in groups for completion in group]


def assert_same(got: list[list[Completion]], expected: list[list[Completion]]) -> None:
    assert [len(group) for group in got] == [len(group) for group in expected]
    for ours, theirs in zip(flat(got), flat(expected), strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, rel=5e-5, abs=5e-5)
        assert ours.entropies == pytest.approx(theirs.entropies, rel=5e-5, abs=5e-5)
        assert (ours.text, ours.finished) == (theirs.text, theirs.finished)


def both(model: Any, tokenizer: Any, **options: Any) -> tuple[PagedEngine, TransformersEngine]:
    stop = options.get("stop", "")
    return PagedEngine(copy.deepcopy(model), tokenizer, **options), TransformersEngine(
        model, tokenizer, 1000, stop
    )


@pytest.mark.parametrize(
    ("family", "shape"), FAMILIES, ids=[f"{f}-{s.get('sliding_window', '')}" for f, s in FAMILIES]
)
def test_every_family_draws_what_the_plain_engine_draws(
    family: str, shape: dict[str, Any], ending: Any, tokenizer: Any, prompts: list[Prompt]
) -> None:
    ours, theirs = both(ending(family, **shape), tokenizer)
    assert ours.unusable() == ""
    expected = theirs.generate(prompts, 3, SAMPLING)
    assert len({len(completion.token_ids) for completion in flat(expected)}) > 4
    assert_same(ours.generate(prompts, 3, SAMPLING), expected)


@pytest.mark.parametrize("max_rows", [1, 3, 8, 11])
def test_fewer_slots_than_rows(
    max_rows: int, ending: Any, tokenizer: Any, prompts: list[Prompt]
) -> None:
    ours, theirs = both(ending("qwen3"), tokenizer, max_rows=max_rows)
    assert_same(ours.generate(prompts, 4, SAMPLING), theirs.generate(prompts, 4, SAMPLING))


def test_long_rows_cross_pages_and_move_together(
    ending: Any, tokenizer: Any, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    moves: list[list[int]] = []
    compact = Slots.compact
    monkeypatch.setattr(Slots, "compact", lambda slots: moves.append(compact(slots)) or moves[-1])
    ours, theirs = both(ending("llama", every=40), tokenizer)
    expected = theirs.generate(prompts, 4, LONG)
    assert max(len(completion.token_ids) for completion in flat(expected)) > PAGE
    assert_same(ours.generate(prompts, 4, LONG), expected)
    assert any(move != list(range(len(move))) for move in moves)


@pytest.mark.parametrize("max_rows", [5, 16])
def test_short_of_memory_rows_begin_again_and_end_the_same(
    max_rows: int,
    ending: Any,
    tokenizer: Any,
    prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, theirs = both(ending("llama", every=1000), tokenizer, max_rows=max_rows)
    monkeypatch.setattr(paged, "_free_bytes", lambda device: 8 * ours.cache.page_bytes)
    short = [prompts[0], prompts[4]]
    longer = replace(
        SAMPLING, max_new_tokens=2 * PAGE + 9
    )  # one page more for each is kept free: so let them want two
    expected = theirs.generate(short, 3, longer)
    with caplog.at_level(logging.WARNING, "eepo.rollout.paged.engine"):
        for _ in range(2):
            assert_same(ours.generate(short, 3, longer), expected)
    lines = [record.getMessage() for record in caplog.records]
    assert sum("the cache has room for" in line for line in lines) == 1  # said once
    assert sum("completions began again" in line for line in lines) == 2
    assert ours._buffers is not None
    assert ours._buffers.num_pages < 12


def test_buffers_serve_calls_of_other_sizes_and_grow(
    ending: Any, tokenizer: Any, prompts: list[Prompt]
) -> None:
    ours, theirs = both(ending("qwen2"), tokenizer)
    kept = []
    for some, num_samples, sampling in [
        (prompts[4:], 2, SAMPLING),
        (prompts[5:], 1, replace(SAMPLING, max_new_tokens=3)),  # smaller: what is there serves
        (prompts, 5, SAMPLING),
        (prompts[:3], 2, LONG),
        (prompts, 5, replace(SAMPLING, stream="train/4")),
        (prompts[4:], 2, SAMPLING),
    ]:
        assert_same(
            ours.generate(some, num_samples, sampling), theirs.generate(some, num_samples, sampling)
        )
        kept.append(ours._buffers)
    assert kept[0] is kept[1]
    assert kept[1] is not kept[2]


def test_a_large_cache_is_given_back_in_a_rest_and_not_before(
    ending: Any, tokenizer: Any, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its graphs take time to capture, and an evaluation is many calls."""
    monkeypatch.setattr(paged, "_card_bytes", lambda device: 1)
    ours, theirs = both(ending("llama"), tokenizer)
    for _ in range(2):
        kept = []
        for _ in range(2):
            assert_same(ours.generate(prompts, 2, SAMPLING), theirs.generate(prompts, 2, SAMPLING))
            kept.append(ours._buffers)
        assert kept[0] is kept[1] is not None
        ours.release_memory()
        assert ours._buffers is None
        assert ours.cache.pool is None


def test_the_second_call_takes_what_the_first_one_held_and_keeps_it(
    ending: Any, tokenizer: Any, prompts: list[Prompt]
) -> None:
    ours, theirs = both(ending("llama"), tokenizer)
    far = replace(SAMPLING, max_new_tokens=6 * PAGE)  # but every sixteenth token is an end
    ours.keep_bytes = 90 * ours.cache.page_bytes
    expected = theirs.generate(prompts, 4, far)
    assert_same(ours.generate(prompts, 4, far), expected)
    ours.release_memory()
    assert ours._buffers is None  # it had room for all at their longest
    assert 0 < 24 * ours._per_slot < 70
    kept = []
    for _ in range(2):
        assert_same(ours.generate(prompts, 4, far), expected)
        ours.release_memory()
        kept.append(ours._buffers)
    assert kept[0] is kept[1] is not None
    assert 24 * ours._per_slot < kept[0].num_pages <= 1 + paged.SPARE * 24 * ours._per_slot


def test_where_that_was_not_enough_the_next_call_takes_all_again(
    ending: Any, tokenizer: Any, prompts: list[Prompt]
) -> None:
    """Rows that are longer than those of the first call, of which there were fewer, too."""
    ours, theirs = both(ending("llama"), tokenizer)
    for ends in (ours.ends, theirs._eos):
        ends.fill_(-1)  # none ends by itself
    long = replace(SAMPLING, max_new_tokens=5 * PAGE)
    ours.generate(prompts[4:5], 2, replace(SAMPLING, max_new_tokens=4))
    assert (per_slot := ours._per_slot) > 0
    expected = theirs.generate(prompts[4:5], 16, long)
    sizes = []
    for _ in range(3):
        ours._forget_buffers()
        assert_same(ours.generate(prompts[4:5], 16, long), expected)
        sizes.append(ours._buffers.num_pages)  # type: ignore[union-attr]
    assert 16 * per_slot < sizes[0] < sizes[1]
    assert sizes[1] == sizes[2] > 16 * 5


def test_many_prompts_are_prefilled_and_drawn_in_parts(
    ending: Any, tokenizer: Any, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged, "PREFILL_TOKENS", 70)
    monkeypatch.setattr(paged, "MAX_OUTPUTS", 2 * 3 * SAMPLING.max_new_tokens)
    ours, theirs = both(ending("llama"), tokenizer)
    assert_same(ours.generate(prompts, 3, SAMPLING), theirs.generate(prompts, 3, SAMPLING))


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.7])
def test_temperatures(
    temperature: float, ending: Any, tokenizer: Any, prompts: list[Prompt]
) -> None:
    ours, theirs = both(ending("qwen3"), tokenizer)
    sampling = replace(SAMPLING, temperature=temperature)
    assert_same(ours.generate(prompts, 2, sampling), theirs.generate(prompts, 2, sampling))


def test_one_token_each(ending: Any, tokenizer: Any, prompts: list[Prompt]) -> None:
    ours, theirs = both(ending("qwen3"), tokenizer)
    sampling = replace(SAMPLING, max_new_tokens=1)
    got = ours.generate(prompts, 3, sampling)
    assert {len(completion.token_ids) for completion in flat(got)} == {1}
    assert_same(got, theirs.generate(prompts, 3, sampling))


def test_first_sample_goes_on_with_the_numbering(
    ending: Any, tokenizer: Any, prompts: list[Prompt]
) -> None:
    ours, theirs = both(ending("llama"), tokenizer)
    first, second = (
        ours.generate(prompts, 2, SAMPLING),
        ours.generate(prompts, 2, replace(SAMPLING, first_sample=2)),
    )
    assert_same(
        [a + b for a, b in zip(first, second, strict=True)], theirs.generate(prompts, 4, SAMPLING)
    )


def test_a_stop_text_ends_rows(new_model: Any, tokenizer: Any, prompts: list[Prompt]) -> None:
    ours, theirs = both(new_model("llama"), tokenizer, stop="1")
    expected = theirs.generate(prompts, 4, LONG)
    assert {completion.text[-1:] for completion in flat(expected) if completion.finished} >= {"1"}
    assert_same(ours.generate(prompts, 4, LONG), expected)


def test_weights_loaded_between_calls_are_the_ones_sampled_from(
    ending: Any, tokenizer: Any, prompts: list[Prompt]
) -> None:
    for family in ("qwen3", "llama"):  # a tied and an untied head
        ours, theirs = both(ending(family), tokenizer)
        before = ours.generate(prompts, 2, SAMPLING)
        for engine in (ours, theirs):
            engine.load_weights(ending(family, seed=1).named_parameters())
        after = ours.generate(prompts, 2, SAMPLING)
        assert flat(after) != flat(before)
        assert_same(after, theirs.generate(prompts, 2, SAMPLING))


def test_limits_may_be_a_completions_own(
    ending: Any, tokenizer: Any, prompts: list[Prompt]
) -> None:
    class Varied(PagedEngine):
        def limit(self, prompt: Prompt, sample: int, sampling: Sampling) -> int:
            return 2 + 3 * sample

    model = ending("llama", every=1000)
    whole = TransformersEngine(model, tokenizer).generate(prompts, 3, SAMPLING)
    for got, expected in zip(
        Varied(model, tokenizer).generate(prompts, 3, SAMPLING), whole, strict=True
    ):
        for sample, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
            assert ours.token_ids == theirs.token_ids[: 2 + 3 * sample]


# --- families that cannot, and which engine is taken


CANNOT = [
    ("gemma2", {}, "packed attention knows no caps"),
    (
        "gpt_oss",
        {"num_local_experts": 2, "num_experts_per_tok": 1},
        "paged attention knows no sinks",
    ),
    ("bloom", {}, "its attention is off by"),
]


@pytest.mark.parametrize(("family", "shape", "reason"), CANNOT, ids=[one[0] for one in CANNOT])
def test_a_family_that_cannot_says_why_and_is_left_as_it_was(
    family: str, shape: dict[str, Any], reason: str, new_model: Any, tokenizer: Any
) -> None:
    model = new_model(family, **shape)
    usual, ids = model.config._attn_implementation, torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        before = model(input_ids=ids).logits
        assert reason in PagedEngine(model, tokenizer).unusable()
        assert model.config._attn_implementation == usual
        assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize("num_slots", [1, 8, 40, 100, 1024, 2000])
def test_graphs_of_more_sizes_where_they_stay(num_slots: int) -> None:
    few, many = (_sizes(num_slots, kept) for kept in (False, True))
    assert set(few) <= set(many)
    for sizes in (few, many):
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == num_slots
    for sizes, most in ((few, 2), (many, 1.5)):
        assert all(high <= most * low for low, high in pairwise(sizes) if low >= 64)


def test_a_capture_is_warmed_up_once_for_its_sizes(
    new_model: Any,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Captures are recorded here, not made: what runs inside one is a step like any other on a CPU."""
    inside, troubles = [], []

    @contextlib.contextmanager
    def capture(graph: Any, pool: Any) -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()
        if troubles:
            raise RuntimeError(troubles.pop())

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=lambda: "memory"))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    engine = PagedEngine(new_model("llama"), tokenizer, 8)
    assert engine.unusable() == ""
    steps: list[str] = []

    def steps_of_capture(longest: int = 20) -> list[str]:
        engine._forget_buffers()
        engine.graphs = True
        buffers = engine._room_for([4], 8, longest)
        monkeypatch.setattr(
            buffers, "_step", lambda size: steps.append("captured" if inside else "run")
        )
        steps.clear()
        buffers.state.live.fill_(1)
        buffers._capture(8)
        assert buffers.state.live.tolist() == [1] * 8
        return steps.copy()

    assert steps_of_capture() == ["run", "captured"]
    assert steps_of_capture() == ["captured"]
    assert steps_of_capture(longest=2000) == ["run", "captured"]
    troubles.append("kernel is not loaded")
    assert steps_of_capture() == ["captured", "run", "captured"]
    assert engine.graphs
    troubles.extend(["still not", "kernel is not loaded"])
    with caplog.at_level(logging.WARNING):
        assert steps_of_capture() == ["captured", "run", "captured"]
    assert not engine.graphs
    assert [record.getMessage() for record in caplog.records] == [
        "sampling without CUDA graphs: still not"
    ]


class OnACard:
    """A model that says it is on a GPU, to see what is chosen there."""

    def __init__(self, model: Any) -> None:
        self.__dict__["model"] = model

    def __getattr__(self, name: str) -> Any:
        return torch.device("cuda") if name == "device" else getattr(self.model, name)


def test_without_a_gpu_the_plain_engine_samples(new_model: Any, tokenizer: Any) -> None:
    assert type(embedded_engine(new_model("llama"), tokenizer)) is TransformersEngine


@pytest.mark.parametrize(
    ("family", "problem"), [("llama", ""), ("gemma2", "packed attention knows no caps")]
)
def test_on_a_gpu_the_paged_engine_samples_where_it_can(
    family: str,
    problem: str,
    new_model: Any,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Here(PagedEngine):  # the model is really on the CPU; so is what the engine tries out
        def __init__(self, model: OnACard, *args: Any) -> None:
            super().__init__(model.model, *args)

    class Plain(TransformersEngine):
        def __init__(self, model: OnACard, *args: Any) -> None:
            super().__init__(model.model, *args)

    monkeypatch.setattr(builtin, "PagedEngine", Here)
    monkeypatch.setattr(builtin, "TransformersEngine", Plain)
    with caplog.at_level(logging.WARNING):
        engine = embedded_engine(OnACard(new_model(family)), tokenizer, 64, "", "off")
    assert type(engine) is (Plain if problem else Here)
    assert [record.getMessage() for record in caplog.records] == (
        [f"sampling without pages and CUDA graphs, which is slower: {problem}"] if problem else []
    )
    assert engine.max_rows == 64


@pytest.mark.parametrize("choice", ["on", "off"])
def test_products_are_packed_where_layers_are_compiled(
    choice: str, new_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Here(PagedEngine):
        def __init__(self, model: OnACard, *args: Any) -> None:
            super().__init__(model.model, *args)

    monkeypatch.setattr(builtin, "PagedEngine", Here)
    for module in (compilation, fused_linear):
        monkeypatch.setattr(module, "can_compile", lambda model: True)
    model = new_model("llama")
    embedded_engine(OnACard(model), tokenizer, 64, "", choice)
    layers = decoder_layers(model)
    assert {bool(layer._compiled_call_impl) for layer in layers} == {choice == "on"}
    assert {type(layer.mlp.up_proj) for layer in layers} == {
        fused_linear.PackedLinear if choice == "on" else nn.Linear
    }


def test_memory_for_not_even_one_completion_is_told_in_a_line(
    new_model: Any, tokenizer: Any, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def full(engine: PagedEngine, num_pages: int, *sizes: int) -> None:
        tried.append(num_pages)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(paged, "Buffers", full)
    with pytest.raises(UserError, match="max_new_tokens = 200 fits"):
        PagedEngine(new_model("qwen2"), tokenizer).generate(prompts, 4, Sampling(1.0, 200))
    assert tried == sorted(tried, reverse=True)
    assert len(tried) > 1  # first with fewer rows at a time
