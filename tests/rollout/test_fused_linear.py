"""Packed products: weights stay what and where they were by name, nothing is said differently, and each is computed
once. The compiler runs as far as its graphs; one test, where a C compiler is, goes the whole way.
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
from eepo.rollout.fused_linear import PackedLinear, compile_packed, pack
from eepo.rollout.paged.engine import PagedEngine
from eepo.types import Completion, Prompt, Sampling

SPARED = {
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
ADDS = torch.ops.higher_order.auto_functionalized  # a product to what is there
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, ADDS)
GREEDY = Sampling(temperature=0.0, max_new_tokens=7)
PROMPTS = [Prompt(str(place), "", tuple(range(3, 5 + 4 * place))) for place in range(4)]
CAN_GENERATE = (
    any(map(shutil.which, ("gcc", "clang")))
    and Path(sysconfig.get_path("include"), "Python.h").is_file()
)


def maps_of(model: Any) -> dict[str, nn.Module]:
    return {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([[3, 4, 5, 9], [7, 7, 2, 8]]), use_cache=False).logits


def drawn(engine: PagedEngine, sampling: Sampling = GREEDY) -> list[Completion]:
    return [one for group in engine.generate(PROMPTS, 2, sampling) for one in group]


def assert_same(got: list[Completion], expected: list[Completion]) -> None:
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]
    assert [x for one in got for x in one.logprobs] == pytest.approx(
        [x for one in expected for x in one.logprobs], rel=1e-4, abs=1e-4
    )


@pytest.mark.parametrize("family", SPARED)
def test_names_values_and_what_a_model_says_stay(family: str, new_model: Any) -> None:
    model = new_model(family)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    parameters, said = dict(model.named_parameters()), logits(model)
    assert pack(model) == SPARED[family] * len(decoder_layers(model))
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert all(weight is parameters[name] for name, weight in model.named_parameters())
    assert (PackedLinear in {type(part) for part in model.modules()}) == bool(SPARED[family])
    torch.testing.assert_close(logits(model), said, rtol=1e-5, atol=1e-5)


def test_weights_lie_in_one_tensor_and_nowhere_else(new_model: Any) -> None:
    model = new_model("qwen2")
    pack(model)
    for layer in decoder_layers(model):
        for parent, names in (
            (layer.self_attn, fused_linear.SIBLINGS[0]),
            (layer.mlp, fused_linear.SIBLINGS[1]),
        ):
            parts = [getattr(parent, name) for name in names]
            for kind in ("weight", "bias") if parent is layer.self_attn else ("weight",):
                whole = getattr(parts[0].pack, kind)
                assert torch.equal(whole, torch.cat([getattr(part, kind) for part in parts]))
                places = {getattr(part, kind).untyped_storage().data_ptr() for part in parts}
                assert places == {whole.untyped_storage().data_ptr()}
    num_bytes = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in model.parameters()
    }
    assert sum(num_bytes.values()) == sum(4 * weight.numel() for weight in model.parameters())


class Own(nn.Linear):
    pass


def test_siblings_that_differ_stay_apart(new_model: Any) -> None:
    """Adapters and the like are of another class; a bias, a type or a size of its own; a weight that is shared."""
    model = new_model("qwen2", num_hidden_layers=6)
    layers = decoder_layers(model)
    layers[0].self_attn.k_proj.__class__ = Own
    layers[1].self_attn.v_proj.bias = None
    layers[2].mlp.up_proj.double()
    layers[3].mlp.up_proj = nn.Linear(16, 64, bias=False)
    layers[5].mlp.up_proj.weight = layers[4].mlp.up_proj.weight
    assert pack(model) == 6 * 3 - 2 - 2 - 1 - 1 - 2
    for layer, names in (
        (0, fused_linear.SIBLINGS[0]),
        (1, fused_linear.SIBLINGS[0]),
        (2, fused_linear.SIBLINGS[1]),
    ):
        kinds = {type(part) for name, part in layers[layer].named_modules() if name.endswith(names)}
        assert PackedLinear not in kinds
    assert layers[5].mlp.up_proj.weight is layers[4].mlp.up_proj.weight
    assert pack(model) == 0  # those that are, are


def test_a_packed_model_cannot_be_cast_away_from_its_pack(new_model: Any) -> None:
    model = new_model("llama")
    pack(model)
    with pytest.raises(RuntimeError, match="stays on its device and in its type"):
        model.half()
    with pytest.raises(RuntimeError, match="is not copied"):
        copy.deepcopy(model)


# --- compiled


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Compile here, as far as graphs go, with the passes that the options name; how many products each graph has."""
    whole, counts, passes = nn.Module.compile, [], []

    def count(graph: Any, inputs: Any) -> Any:
        for each in passes:
            each(graph.graph)
        graph.recompile()
        counts.append(sum(node.target in PRODUCTS for node in graph.graph.nodes))
        return graph

    backend = aot_autograd(fw_compiler=count, decompositions=select_decomp_table())

    def compile_here(self: Any, options: dict[str, Any] | None = None, **others: Any) -> None:
        passes[:] = [options["post_grad_custom_pre_pass"]] if options else []
        whole(self, backend=backend, **others)

    for module in (compilation, fused_linear):
        monkeypatch.setattr(module, "can_compile", lambda model: True)
    monkeypatch.setattr(nn.Module, "compile", compile_here)
    torch._dynamo.reset()
    yield counts
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("family", "compile_it", "expected"),
    [
        ("qwen2", compile_layers, 7),
        ("qwen2", compile_packed, 4),
        ("qwen3", compile_packed, 4),
        ("phi", compile_packed, 4),
        ("gemma2", compile_packed, 4),  # with norms between products and sums
        ("cohere", compile_packed, 4),  # attention beside the MLP
    ],
)
def test_a_layer_computes_products_of_one_input_once(
    family: str, compile_it: Any, expected: int, new_model: Any, products: list[int]
) -> None:
    model = new_model(family)
    said = logits(model)
    assert compile_it(model)
    torch.testing.assert_close(logits(model), said, rtol=1e-4, atol=1e-4)
    assert [number for number in products if number] == [expected]  # one graph for both layers


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gemma3_text", "mistral"])
def test_the_engine_draws_the_same_and_samples_from_weights_pushed_later(
    family: str, new_model: Any, tokenizer: Any, products: list[int]
) -> None:
    """Compiled for one family, where all of it meets: attention parts the graphs of a layer."""
    first, second = (new_model(family, seed=seed) for seed in (0, 1))
    engine = PagedEngine(copy.deepcopy(first), tokenizer)
    assert engine.unusable() == ""
    assert compile_packed(engine.model) if family == "qwen2" else pack(engine.model)
    seen = []
    for model in (first, second, first):
        engine.load_weights(model.named_parameters())
        for sampling in (GREEDY, Sampling(temperature=1.0, max_new_tokens=5, seed=1)):
            got = drawn(engine, sampling)
            assert_same(got, drawn(PagedEngine(copy.deepcopy(model), tokenizer), sampling))
            seen.append([one.token_ids for one in got])
    assert seen[0] != seen[2]
    assert seen[:2] == seen[4:]
    assert set(products) - {0} == (
        {1, 2} if family == "qwen2" else set()
    )  # q+k+v; o; gate+up and down


def test_what_is_beside_the_layers_is_compiled_once_for_all_sizes(
    new_model: Any, tokenizer: Any, products: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two graphs without products: cosines and sines, and the last norm, for prefill and for decode steps alike."""
    monkeypatch.setattr(fused_linear, "compile_layers", lambda model, options: True)
    model = new_model("qwen2")
    engine = PagedEngine(copy.deepcopy(model), tokenizer)
    assert engine.unusable() == ""
    assert compile_packed(engine.model)
    counters.clear()
    plain = PagedEngine(model, tokenizer)
    for num_prompts in (3, 1, 2):
        got, expected = (one.generate(PROMPTS[:num_prompts], 3, GREEDY) for one in (engine, plain))
        assert_same(
            [one for group in got for one in group], [one for group in expected for one in group]
        )
    assert products == [0, 0]
    assert not counters["graph_break"]


@pytest.mark.skipif(not CAN_GENERATE, reason="needs a C compiler and Python's headers")
def test_the_code_that_torch_generates_computes_them_once(
    new_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (compilation, fused_linear):
        monkeypatch.setattr(module, "can_compile", lambda model: True)
    torch._dynamo.reset()
    model = new_model("qwen2")
    engine = PagedEngine(copy.deepcopy(model), tokenizer)
    assert engine.unusable() == ""
    assert compile_packed(engine.model)
    got, codes = run_and_get_code(drawn, engine)
    assert_same(got, drawn(PagedEngine(model, tokenizer)))
    calls = ("extern_kernels.mm(", "extern_kernels.addmm(", "eepo.add_product.default(")
    counts = {tuple(map(code.count, calls)) for code in codes}
    assert counts - {(0, 0, 0)} == {
        (0, 1, 0),
        (1, 0, 0),
        (1, 0, 1),
    }  # q+k+v; o; gate+up, and down with its sum
    torch._dynamo.reset()
