"""Compiled layers: which modules they are, when they are wanted, and that one graph serves all layers and sizes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from eepo.config import compiles
from eepo.model import attention, compilation
from eepo.model.batching import MicroBatch
from eepo.model.compilation import (
    beside_layers,
    can_compile,
    compile_layers,
    decoder_layers,
    wants_compiling,
)
from eepo.model.policy import Policy, Scores


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "gemma2", "mistral", "phi", "gpt2", "gpt_neox", "opt"]
)
@pytest.mark.parametrize("depth", [1, 3])
def test_the_layers_are_those_that_hold_attention(family: str, depth: int, new_model: Any) -> None:
    layers = decoder_layers(new_model(family, num_hidden_layers=depth))
    assert len(layers) == depth
    assert len({type(layer) for layer in layers}) == 1
    for layer in layers:
        assert [name for name, _ in layer.named_modules() if "attn" in name or "attention" in name]


def test_as_many_experts_as_layers_are_no_layers(new_model: Any) -> None:
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
def test_beside_the_layers_are_norms_and_rotary_embeddings(
    family: str, shape: dict[str, Any], names: list[str], new_model: Any
) -> None:
    model = new_model(family, **shape)
    known = {id(module): name.split(".")[-1] for name, module in model.named_modules()}
    assert [known[id(module)] for module in beside_layers(model)] == names


def test_when_layers_are_compiled(new_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model("llama")
    assert not can_compile(model)
    assert [wants_compiling(model, choice) for choice in ("auto", "on", "off")] == [
        False,
        True,
        False,
    ]
    monkeypatch.setattr(compilation, "can_compile", lambda model: True)
    assert [wants_compiling(model, choice) for choice in ("auto", "on", "off")] == [
        False,
        True,
        False,
    ]
    monkeypatch.setattr(
        compilation, "compiles", lambda choice, size: compiles(choice, 10**8 if size else 0)
    )
    assert [wants_compiling(model, choice) for choice in ("auto", "on", "off")] == [
        True,
        True,
        False,
    ]
    assert [compiles("auto", size) for size in (10**8 - 1, 10**8)] == [False, True]


def test_where_torch_cannot_compile_one_line_says_so(
    new_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = new_model("llama")
    with caplog.at_level(logging.WARNING, "eepo.model.compilation"):
        assert not compile_layers(model)
    assert [record.getMessage() for record in caplog.records] == [
        "layers are not compiled: that needs a GPU"
    ]
    assert not any(layer._compiled_call_impl for layer in decoder_layers(model))


def test_a_compiler_that_is_turned_off_counts_as_none(
    new_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Packed products would otherwise be computed as often as they are asked for."""
    with (
        caplog.at_level(logging.WARNING, "eepo.model.compilation"),
        torch._dynamo.config.patch(disable=True),
    ):
        assert not compile_layers(new_model("llama"))
    assert "TORCH_COMPILE_DISABLE" in caplog.text


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile on the CPU, as far as graphs go: no code is generated."""
    whole = nn.Module.compile
    monkeypatch.setattr(compilation, "can_compile", lambda model: True)
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **options: whole(self, backend="aot_eager", **options)
    )
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def loss(batch: MicroBatch, scores: Scores) -> Tensor:
    return scores.logprobs.sum() - 0.5 * scores.entropies.sum()


@pytest.mark.parametrize("group", [1, 3])
def test_one_graph_serves_all_layers_and_sizes_with_the_same_gradients(
    here: None, new_model: Any, ragged_pairs: Any, group: int
) -> None:
    model = new_model("qwen3", num_hidden_layers=3)
    names = [name for name, _ in model.named_parameters()]
    plain, policy = Policy(copy.deepcopy(model), 40), Policy(model, 40)
    policy.packed = policy._scorer.packing.adopt()
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


def test_what_torch_fails_to_compile_runs_as_it_is(
    here: None,
    new_model: Any,
    ragged_pairs: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("no code for this card")

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
    said = (
        "Qwen3DecoderLayer is not compiled, and slower: NotImplementedError: no code for this card"
    )
    assert [
        record.getMessage() for record in caplog.records if record.name == "eepo.model.compilation"
    ] == [said]


def test_the_longest_sequence_may_vary_within_one_graph(
    here: None, new_model: Any, ragged_pairs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU its length goes into the kernel; a graph that took it for a constant would be compiled for each."""
    seen = []
    masked = attention.packed_attention

    def with_length(
        query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, *more: Any
    ) -> Tensor:
        return masked(query, key, value, starts, longest, *more) + query.new_zeros(longest).sum()

    monkeypatch.setattr(attention, "packed_attention", with_length)
    policy = Policy(new_model("qwen3"), 40)
    policy.packed = policy._scorer.packing.adopt()
    compile_layers(policy.model)
    for seed, number in enumerate((5, 2, 7, 3)):
        for batch in policy.micro_batches(ragged_pairs(number, seed=seed)):
            seen.append(batch.inputs.longest)  # type: ignore[union-attr]
            policy.score(batch, 1.0).logprobs.sum().backward()
    assert len(set(seen)) > 3
    assert counters["stats"]["unique_graphs"] == 1
