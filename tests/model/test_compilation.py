"""Which modules are compiled and when; one graph serves all layers and batch sizes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from eepo.config import should_compile
from eepo.model import attention, compilation
from eepo.model.batching import MicroBatch, PackedLayout
from eepo.model.compilation import (
    can_compile,
    compile_layers,
    decoder_layers,
    norm_and_rotary_modules,
    should_compile_layers,
)
from eepo.model.policy import Policy, Scores


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "gemma2", "mistral", "phi", "gpt2", "gpt_neox", "opt"]
)
@pytest.mark.parametrize("depth", [1, 3])
def test_decoder_layers_contain_attention(family: str, depth: int, new_model: Any) -> None:
    layers = decoder_layers(new_model(family, num_hidden_layers=depth))
    assert len(layers) == depth
    assert len({type(layer) for layer in layers}) == 1
    for layer in layers:
        assert [name for name, _ in layer.named_modules() if "attn" in name or "attention" in name]


def test_a_list_of_as_many_experts_as_layers_is_not_taken_for_the_layers(new_model: Any) -> None:
    model = new_model("mixtral", num_hidden_layers=2, num_local_experts=2, num_experts_per_tok=1)
    assert {type(layer).__name__ for layer in decoder_layers(model)} == {"MixtralDecoderLayer"}


@pytest.mark.parametrize(("family", "shape", "names"), [
    ("qwen2", {}, ["norm", "rotary_emb"]),
    ("gemma3_text", {}, ["norm", "rotary_emb"]),
    ("phi", {}, ["rotary_emb", "final_layernorm"]),
    ("opt", {"word_embed_proj_dim": 16}, ["final_layer_norm"]),
    ("gpt2", {}, ["ln_f"]),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["norm"]),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ["norm", "rotary_emb"]),
])  # fmt: skip
def test_the_final_norm_and_the_rotary_embedding_are_found(
    family: str, shape: dict[str, Any], names: list[str], new_model: Any
) -> None:
    model = new_model(family, **shape)
    last_names = {id(module): name.split(".")[-1] for name, module in model.named_modules()}
    assert [last_names[id(module)] for module in norm_and_rotary_modules(model)] == names


def test_auto_compiles_large_models_where_possible(
    new_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model("llama")

    def decisions() -> list[bool]:
        return [should_compile_layers(model, choice) for choice in ("auto", "on", "off")]

    assert not can_compile(model)
    assert decisions() == [False, True, False]
    monkeypatch.setattr(compilation, "can_compile", lambda model: True)
    assert decisions() == [False, True, False]  # the model is small

    def as_if_large(choice: str, num_parameters: int) -> bool:
        return should_compile(choice, 10**8 if num_parameters else 0)

    monkeypatch.setattr(compilation, "should_compile", as_if_large)
    assert decisions() == [True, True, False]
    assert [should_compile("auto", size) for size in (10**8 - 1, 10**8)] == [False, True]


def test_compile_layers_warns_once_without_a_gpu(
    new_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = new_model("llama")
    with caplog.at_level(logging.WARNING, "eepo.model.compilation"):
        assert not compile_layers(model)
    assert [record.getMessage() for record in caplog.records] == [
        "layers are not compiled: compilation needs a GPU"
    ]
    assert not any(layer._compiled_call_impl for layer in decoder_layers(model))


def test_layers_are_not_compiled_if_torch_compile_is_disabled(
    new_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Fused linear layers would otherwise compute their product once per consumer."""
    with (
        caplog.at_level(logging.WARNING, "eepo.model.compilation"),
        torch._dynamo.config.patch(disable=True),
    ):
        assert not compile_layers(new_model("llama"))
    assert "TORCH_COMPILE_DISABLE" in caplog.text


@pytest.fixture
def compile_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Capture graphs on the CPU without generating code."""
    compile_module = nn.Module.compile

    def capture_only(self: nn.Module, **options: Any) -> None:
        compile_module(self, backend="aot_eager", **options)

    monkeypatch.setattr(compilation, "can_compile", lambda model: True)
    monkeypatch.setattr(nn.Module, "compile", capture_only)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def loss(batch: MicroBatch, scores: Scores) -> Tensor:
    return scores.logprobs.sum() - 0.5 * scores.entropies.sum()


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 3])
def test_one_graph_serves_all_layers_and_sizes_and_gives_the_same_gradients(
    compile_on_cpu: None, new_model: Any, ragged_pairs: Any, group: int
) -> None:
    model = new_model("qwen3", num_hidden_layers=3)
    names = [name for name, _ in model.named_parameters()]
    plain, policy = Policy(copy.deepcopy(model), 40), Policy(model, 40)
    policy.packed = policy._scorer.packing.enable_if_equivalent()
    assert compile_layers(policy.model)
    for seed, number in enumerate((5, 2, 7)):
        pairs = ragged_pairs(group * number, seed=seed, group=group)
        expected = plain.gradient(pairs, 0.9, loss)
        got = policy.gradient(pairs, 0.9, loss)
        assert list(got) == list(expected) == names
        for name, gradient in expected.items():
            size = max(1.0, gradient.abs().max().item())
            torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=2e-5 * size)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_layers_run_uncompiled_if_compilation_fails(
    compile_on_cpu: None,
    new_model: Any,
    ragged_pairs: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("no code for this GPU")

    def compile_badly(self: nn.Module, **options: Any) -> None:
        self._compiled_call_impl = torch.compile(self._call_impl, backend=broken, **options)

    monkeypatch.setattr(nn.Module, "compile", compile_badly)
    model = new_model("qwen3", num_hidden_layers=3)
    plain, policy = Policy(copy.deepcopy(model), 40), Policy(model, 40)
    assert compile_layers(policy.model)
    pairs = ragged_pairs(5, seed=0)
    with caplog.at_level(logging.WARNING, "eepo.model.compilation"):
        for _ in range(2):
            got, expected = policy.gradient(pairs, 0.9, loss), plain.gradient(pairs, 0.9, loss)
            assert all(torch.equal(got[name], gradient) for name, gradient in expected.items())
    [record] = [record for record in caplog.records if record.name == "eepo.model.compilation"]
    reason = "NotImplementedError: no code for this GPU"
    assert record.getMessage() == f"Qwen3DecoderLayer runs uncompiled, slower: {reason}"


@pytest.mark.slow
def test_max_seqlen_may_vary_within_one_graph(
    compile_on_cpu: None, new_model: Any, ragged_pairs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an argument of the GPU kernel; as a constant it would need a graph per value."""
    seen = []
    packed_attention = attention.packed_attention

    def with_max_seqlen(
        query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, *options: Any
    ) -> Tensor:
        zero = query.new_zeros(layout.max_seqlen).sum()
        return packed_attention(query, key, value, layout, *options) + zero

    monkeypatch.setattr(attention, "packed_attention", with_max_seqlen)
    policy = Policy(new_model("qwen3"), 40)
    policy.packed = policy._scorer.packing.enable_if_equivalent()
    compile_layers(policy.model)
    for seed, number in enumerate((5, 2, 7, 3)):
        for batch in policy.micro_batches(ragged_pairs(number, seed=seed)):
            seen.append(batch.inputs.layout.max_seqlen)  # type: ignore[union-attr]
            policy.score(batch, 1.0).logprobs.sum().backward()
    assert len(set(seen)) > 3
    assert counters["stats"]["unique_graphs"] == 1
