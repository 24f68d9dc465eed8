"""Products of few rows in the engine's model: whose they are, and that layers stay one graph. What runs here is the
kernel's plain form; `kernels/interpreted.py` has the kernel.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from eepo import kernels
from eepo.compiled import decoder_layers
from eepo.kernels import reference
from eepo.rollout import thin
from eepo.rollout.paged import PagedEngine
from eepo.types import Prompt, Sampling


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Up to eight rows are few; the list is of those that were multiplied as such."""
    pytest.importorskip("triton", reason="Triton is not installed")
    seen = []

    def plain(x: Tensor, *more: Any) -> Tensor:
        seen.append(len(x))
        return reference.thin_product(x, *more)

    monkeypatch.setattr(thin, "MOST_ROWS", 8)
    monkeypatch.setattr(thin, "TYPES", {torch.float32})
    monkeypatch.setattr(kernels, "available", lambda device: True)
    monkeypatch.setattr(
        kernels, "chosen", lambda name, device: plain if name == "thin_product" else getattr(reference, name)
    )
    return seen


@pytest.fixture
def graphs() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def maps_of(model: Any) -> dict[str, nn.Module]:
    return {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}


def test_nothing_changes_until_it_is_switched_on(new_model: Any) -> None:
    model = new_model("qwen2")
    assert thin.MOST_ROWS == 0
    assert not thin.adopt(model)
    assert {type(part) for part in maps_of(model).values()} == {nn.Linear}


@pytest.mark.parametrize("family", ["qwen2", "llama", "phi", "gpt2"])  # some, no and all biases; no linear maps
def test_linear_maps_of_layers_change_and_weights_stay_where_they_are(
    family: str, new_model: Any, few: list[int]
) -> None:
    model = new_model(family)
    before = {name: (weight, weight.data_ptr()) for name, weight in model.state_dict(keep_vars=True).items()}
    outside = {id(model.get_output_embeddings())}
    inside = [part for layer in decoder_layers(model) for part in layer.modules() if isinstance(part, nn.Linear)]
    assert thin.adopt(model) == bool(inside)
    assert {type(part) for part in inside} == ({thin.ThinLinear} if inside else set())
    assert not any(type(part) is thin.ThinLinear for part in model.modules() if id(part) in outside)
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(after[name] is weight and weight.data_ptr() == place for name, (weight, place) in before.items())


def test_other_kinds_of_maps_and_of_numbers_stay(new_model: Any, few: list[int]) -> None:
    class Own(nn.Linear):
        pass

    model = new_model("llama")
    first, *_ = maps_of(model).values()
    first.__class__ = Own
    decoder_layers(model)[1].mlp.double()
    assert thin.adopt(model)
    kinds = {name: type(part) for name, part in maps_of(model).items()}
    assert kinds["model.layers.0.self_attn.q_proj"] is Own
    assert kinds["model.layers.1.mlp.up_proj"] is nn.Linear
    assert kinds["model.layers.1.self_attn.q_proj"] is thin.ThinLinear


def test_few_rows_take_the_kernel_and_many_do_not(new_model: Any, few: list[int]) -> None:
    model = new_model("qwen2")
    expected = copy.deepcopy(model)
    thin.adopt(model)
    for num_rows in (1, 8, 9):
        few.clear()
        ids = torch.arange(2, 2 + num_rows)[None]
        with torch.inference_mode():
            torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-4)
        assert few == ([num_rows] * 14 if num_rows <= 8 else [])


def test_a_kernel_that_fails_or_errs_is_not_used(
    new_model: Any, few: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(x: Tensor, *more: Any) -> Tensor:
        raise RuntimeError("no such\ninstruction")

    def wrong(x: Tensor, *more: Any) -> Tensor:
        return 1.1 * reference.thin_product(x, *more)

    def empty(x: Tensor, *more: Any) -> Tensor:
        return torch.nan * reference.thin_product(x, *more)

    for kernel, reason in ((broken, "no such"), (wrong, "products are off by 0.1"), (empty, "products are off by nan")):
        model = new_model("llama")
        monkeypatch.setattr(kernels, "chosen", lambda name, device, kernel=kernel: kernel)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "eepo.rollout.thin"):
            assert not thin.adopt(model)
        assert [record.getMessage() for record in caplog.records] == [
            f"few rows are multiplied as many are, which is slower: {reason}"
        ]
        assert thin.ThinLinear not in {type(part) for part in model.modules()}


def test_one_graph_serves_few_rows_and_many(new_model: Any, few: list[int], graphs: None) -> None:
    model = new_model("qwen2", num_hidden_layers=3)
    expected = copy.deepcopy(model)
    thin.adopt(model)
    for layer in decoder_layers(model):
        layer.compile(dynamic=True, backend="aot_eager")
    for num_rows in (5, 20, 8, 3, 11):
        few.clear()
        ids = torch.arange(2, 2 + num_rows)[None]
        with torch.inference_mode():
            got, wanted = (one(ids, use_cache=False).logits for one in (model, expected))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        assert len(few) == (21 if num_rows <= 8 else 0)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_the_engine_draws_the_same_and_takes_new_weights(new_model: Any, few: list[int], tokenizer: Any) -> None:
    prompts = [Prompt(str(place), "", (place + 2, 5, 9)) for place in range(4)]
    sampling = Sampling(temperature=1.0, max_new_tokens=9, seed=1)
    first, second = new_model("qwen2"), new_model("qwen2", seed=1)
    engine = PagedEngine(copy.deepcopy(first), tokenizer)
    assert engine.unusable() == ""
    few.clear()
    for model in (first, second, first):
        engine.load_weights(model.named_parameters())
        plain = PagedEngine(copy.deepcopy(model), tokenizer)
        got, expected = (one.generate(prompts, 2, sampling) for one in (engine, plain))
        assert [[one.token_ids for one in g] for g in got] == [[one.token_ids for one in g] for g in expected]
    assert few.count(8) > 3 * 15  # heads and all: eight slots
