"""Fused linear layers: weights keep names and values, logits stay the same, products run once.

Most tests stop at torch's graphs. One test generates code, and needs a C compiler.
"""

from __future__ import annotations

import copy
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code

from eepo.model import compilation
from eepo.model.compilation import compile_layers, decoder_layers
from eepo.rollout import fused_linear
from eepo.rollout.fused_linear import FusedLinear, compile_fused, fuse_linears
from eepo.rollout.paged.engine import PagedEngine
from eepo.types import Completion, Prompt, Sampling

SAVED_PRODUCTS = {  # per layer
    "qwen2": 3,
    "qwen3": 3,
    "llama": 3,
    "gemma2": 3,
    "gemma3_text": 3,
    "phi": 2,
    "opt": 2,
    "phi3": 0,
    "gpt2": 0,
}
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
GREEDY = Sampling(temperature=0.0, max_new_tokens=7)
PROMPTS = [Prompt(str(index), "", tuple(range(3, 5 + 4 * index))) for index in range(4)]
CAN_GENERATE_CODE = (
    any(map(shutil.which, ("gcc", "clang")))
    and Path(sysconfig.get_path("include"), "Python.h").is_file()
)


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([[3, 4, 5, 9], [7, 7, 2, 8]]), use_cache=False).logits


def sampled(engine: PagedEngine, sampling: Sampling = GREEDY) -> list[Completion]:
    return flat(engine.generate(PROMPTS, 2, sampling))


def flat(groups: list[list[Completion]]) -> list[Completion]:
    return [completion for group in groups for completion in group]


def assert_same(got: list[Completion], expected: list[Completion]) -> None:
    for actual, reference in zip(got, expected, strict=True):
        assert actual.token_ids == reference.token_ids
        assert actual.logprobs == pytest.approx(reference.logprobs, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("family", SAVED_PRODUCTS)
def test_fusing_keeps_names_weights_and_logits(family: str, new_model: Any) -> None:
    model = new_model(family)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    parameters, expected = dict(model.named_parameters()), logits(model)
    assert fuse_linears(model) == SAVED_PRODUCTS[family] * len(decoder_layers(model))
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert all(weight is parameters[name] for name, weight in model.named_parameters())
    assert (FusedLinear in {type(module) for module in model.modules()}) == bool(
        SAVED_PRODUCTS[family]
    )
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)


def test_fused_weights_share_one_storage(new_model: Any) -> None:
    model = new_model("qwen2")
    fuse_linears(model)
    for layer in decoder_layers(model):
        for parent, names in (
            (layer.self_attn, fused_linear.FUSABLE_NAMES[0]),
            (layer.mlp, fused_linear.FUSABLE_NAMES[1]),
        ):
            linears = [getattr(parent, name) for name in names]
            for kind in ("weight", "bias") if parent is layer.self_attn else ("weight",):
                fused = getattr(linears[0].fused, kind)
                parts = [getattr(linear, kind) for linear in linears]
                assert torch.equal(fused, torch.cat(parts))
                addresses = {part.untyped_storage().data_ptr() for part in parts}
                assert addresses == {fused.untyped_storage().data_ptr()}
    storages = [weight.untyped_storage() for weight in model.parameters()]
    num_bytes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert sum(num_bytes.values()) == sum(4 * weight.numel() for weight in model.parameters())


class LinearSubclass(nn.Linear):
    pass


def test_layers_that_differ_are_not_fused(new_model: Any) -> None:
    """Another class (as adapters have), bias, dtype or size, or a weight that layers share."""
    model = new_model("qwen2", num_hidden_layers=6)
    layers = decoder_layers(model)
    layers[0].self_attn.k_proj.__class__ = LinearSubclass
    layers[1].self_attn.v_proj.bias = None
    layers[2].mlp.up_proj.double()
    layers[3].mlp.up_proj = nn.Linear(16, 64, bias=False)
    layers[5].mlp.up_proj.weight = layers[4].mlp.up_proj.weight
    assert fuse_linears(model) == 6 * 3 - 2 - 2 - 1 - 1 - 2
    for layer, names in (
        (0, fused_linear.FUSABLE_NAMES[0]),
        (1, fused_linear.FUSABLE_NAMES[0]),
        (2, fused_linear.FUSABLE_NAMES[1]),
    ):
        modules = layers[layer].named_modules()
        assert FusedLinear not in {type(m) for name, m in modules if name.endswith(names)}
    assert layers[5].mlp.up_proj.weight is layers[4].mlp.up_proj.weight
    assert fuse_linears(model) == 0  # already fused


def test_fused_model_cannot_be_cast_or_copied(new_model: Any) -> None:
    model = new_model("llama")
    fuse_linears(model)
    with pytest.raises(RuntimeError, match="cannot be moved or cast"):
        model.half()
    with pytest.raises(RuntimeError, match="cannot be copied"):
        copy.deepcopy(model)


# --- compiled


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Compile to graphs only, with the custom pass; collect the number of products per graph."""
    module_compile, counts, passes = nn.Module.compile, [], []

    def count(graph: Any, inputs: Any) -> Any:
        for graph_pass in passes:
            graph_pass(graph.graph)
        graph.recompile()
        counts.append(sum(node.target in PRODUCTS for node in graph.graph.nodes))
        return graph

    backend = aot_autograd(fw_compiler=count, decompositions=select_decomp_table())

    def compile_to_graphs(self: Any, options: dict[str, Any] | None = None, **others: Any) -> None:
        passes[:] = [options["post_grad_custom_pre_pass"]] if options else []
        module_compile(self, backend=backend, **others)

    for module in (compilation, fused_linear):
        monkeypatch.setattr(module, "can_compile", lambda model: True)
    monkeypatch.setattr(nn.Module, "compile", compile_to_graphs)
    torch._dynamo.reset()
    yield counts
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("family", "compile_model", "expected"),
    [
        ("qwen2", compile_fused, 4),
        pytest.param("qwen2", compile_layers, 7, marks=pytest.mark.slow),
        pytest.param("qwen3", compile_fused, 4, marks=pytest.mark.slow),
        pytest.param("phi", compile_fused, 4, marks=pytest.mark.slow),
        # has norms between products and residual sums
        pytest.param("gemma2", compile_fused, 4, marks=pytest.mark.slow),
        # runs attention and MLP in parallel
        pytest.param("cohere", compile_fused, 4, marks=pytest.mark.slow),
    ],
)
def test_compiled_layer_computes_each_fused_product_once(
    family: str, compile_model: Any, expected: int, new_model: Any, products: list[int]
) -> None:
    model = new_model(family)
    expected_logits = logits(model)
    assert compile_model(model)
    torch.testing.assert_close(logits(model), expected_logits, rtol=1e-4, atol=1e-4)
    assert [count for count in products if count] == [expected]  # one graph for both layers


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gemma3_text", "mistral"])
def test_engine_with_fused_layers_follows_loaded_weights(
    family: str, new_model: Any, tokenizer: Any, products: list[int]
) -> None:
    """Qwen2 is also compiled. Attention splits each layer into several graphs."""
    first, second = (new_model(family, seed=seed) for seed in (0, 1))
    engine = PagedEngine(copy.deepcopy(first), tokenizer)
    assert engine.unsupported_reason() == ""
    assert compile_fused(engine.model) if family == "qwen2" else fuse_linears(engine.model)
    seen = []
    for model in (first, second, first):
        engine.load_weights(model.named_parameters())
        for sampling in (GREEDY, Sampling(temperature=1.0, max_new_tokens=5, seed=1)):
            got = sampled(engine, sampling)
            assert_same(got, sampled(PagedEngine(copy.deepcopy(model), tokenizer), sampling))
            seen.append([completion.token_ids for completion in got])
    assert seen[0] != seen[2]
    assert seen[:2] == seen[4:]
    # Products per graph: q+k+v 1, o 1, gate+up and down 2.
    assert set(products) - {0} == ({1, 2} if family == "qwen2" else set())


def test_last_norm_and_rotary_embedding_are_compiled_once_for_all_sizes(
    new_model: Any, tokenizer: Any, products: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill and decode steps share two graphs without products."""
    monkeypatch.setattr(fused_linear, "compile_layers", lambda model, options: True)
    model = new_model("qwen2")
    engine = PagedEngine(copy.deepcopy(model), tokenizer)
    assert engine.unsupported_reason() == ""
    assert compile_fused(engine.model)
    counters.clear()
    plain = PagedEngine(model, tokenizer)
    for num_prompts in (3, 1, 2):
        got, expected = (e.generate(PROMPTS[:num_prompts], 3, GREEDY) for e in (engine, plain))
        assert_same(flat(got), flat(expected))
    assert products == [0, 0]
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.skipif(not CAN_GENERATE_CODE, reason="needs a C compiler and Python's headers")
def test_generated_code_computes_each_fused_product_once(
    new_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (compilation, fused_linear):
        monkeypatch.setattr(module, "can_compile", lambda model: True)
    torch._dynamo.reset()
    model = new_model("qwen2")
    engine = PagedEngine(copy.deepcopy(model), tokenizer)
    assert engine.unsupported_reason() == ""
    assert compile_fused(engine.model)
    got, codes = run_and_get_code(sampled, engine)
    assert_same(got, sampled(PagedEngine(model, tokenizer)))
    calls = ("extern_kernels.mm(", "extern_kernels.addmm(")
    counts = {tuple(map(code.count, calls)) for code in codes}
    # q+k+v; o; gate+up and down.
    assert counts - {(0, 0)} == {(0, 1), (1, 0), (2, 0)}
    torch._dynamo.reset()
