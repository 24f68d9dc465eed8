"""The head, chunk by chunk: what it says and its gradients are those of whole logits, which it never holds."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from eepo.model.lm_head import Head

SIZE, VOCABULARY = 12, 50
COLUMNS = ["logprobs", "entropies", "complements"]


def new_head(*, bias: bool = False, scale: float = 1.0, cap: float = 0.0, seed: int = 0) -> Head:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(VOCABULARY, SIZE, generator=generator).requires_grad_()
    own = torch.randn(VOCABULARY, generator=generator).requires_grad_() if bias else None
    return Head(weight, own, scale, cap)


def states(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(number, SIZE, generator=generator).requires_grad_()
    return hidden, torch.randint(VOCABULARY, (number,), generator=generator)


def plain_columns(hidden: Tensor, head: Head, targets: Tensor, temperature: float) -> list[Tensor]:
    """By autograd over whole logits, in the type of what is given."""
    logits = hidden @ head.weight.t()
    if head.bias is not None:
        logits = logits + head.bias
    logits = logits * head.scale
    if head.cap:
        logits = head.cap * torch.tanh(logits / head.cap)
    logprobs = (logits / temperature).log_softmax(-1)
    own = torch.nn.functional.one_hot(targets, VOCABULARY).bool()
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    return [logprobs[own], entropies, logprobs.masked_fill(own, -torch.inf).logsumexp(-1)]


def plain_gradients(
    hidden: Tensor, head: Head, targets: Tensor, temperature: float, given: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """The three columns, and the gradients on hidden, weight and bias, in float64."""
    wide = hidden.detach().double().requires_grad_()
    weight = head.weight.detach().double().requires_grad_()
    bias = None if head.bias is None else head.bias.detach().double().requires_grad_()
    columns = plain_columns(wide, Head(weight, bias, head.scale, head.cap), targets, temperature)
    total = sum(
        (share.double() * column).sum() for share, column in zip(given, columns, strict=True)
    )
    inputs = [wide, weight, *([] if bias is None else [bias])]
    return columns, list(torch.autograd.grad(total, inputs))  # type: ignore[arg-type]


def our_gradients(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: float,
    given: Tensor,
    chunk: int,
    dtype: torch.dtype,
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    columns = head.scores(hidden, targets, temperature, chunk, dtype)
    total = sum((share * column).sum() for share, column in zip(given, columns, strict=True))
    inputs = [hidden, head.weight, *([] if head.bias is None else [head.bias])]
    return columns, list(torch.autograd.grad(total, inputs))  # type: ignore[arg-type]


def assert_close(got: Any, expected: Any, tolerance: float) -> None:
    for one, other in zip(got, expected, strict=True):
        assert (one.double() - other).abs().max() <= tolerance * max(1.0, other.abs().max().item())


BENDS = [{}, {"bias": True}, {"scale": 0.3}, {"cap": 2.0}, {"bias": True, "scale": 1.7, "cap": 3.0}]


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])  # 4 does not divide 11
@pytest.mark.parametrize("bend", BENDS, ids=lambda bend: "-".join(bend) or "plain")
def test_columns_and_gradients_are_those_of_whole_logits(bend: dict[str, Any], chunk: int) -> None:
    head, (hidden, targets) = new_head(**bend), states(11)
    given = torch.randn(3, 11, generator=torch.Generator().manual_seed(1))
    for temperature in (1.0, 0.6):
        columns, gradients = our_gradients(
            hidden, head, targets, temperature, given, chunk, torch.float32
        )
        expected, wanted = plain_gradients(hidden, head, targets, temperature, given)
        assert_close(columns, expected, 1e-5)
        assert_close(gradients, wanted, 1e-5)


@pytest.mark.parametrize("column", range(3), ids=COLUMNS)
def test_one_column_alone_brings_its_own_gradient(column: int) -> None:
    """Nothing flows in on the others: autograd then hands over zeros, not None."""
    head, (hidden, targets) = new_head(bias=True), states(6)
    given = torch.zeros(3, 6)
    given[column] = torch.randn(6, generator=torch.Generator().manual_seed(2))
    _, wanted = plain_gradients(hidden, head, targets, 0.8, given)
    inputs = [hidden, head.weight, head.bias]
    alone = head.scores(hidden, targets, 0.8, 4, torch.float32)[column]
    assert_close(torch.autograd.grad((alone * given[column]).sum(), inputs), wanted, 1e-5)


@pytest.mark.parametrize("bend", BENDS, ids=lambda bend: "-".join(bend) or "plain")
def test_bf16_products_are_near(bend: dict[str, Any]) -> None:
    """The rounding of what is multiplied, and no more: logits themselves stay in fp32."""
    head, (hidden, targets) = new_head(**bend), states(9)
    given = torch.randn(3, 9, generator=torch.Generator().manual_seed(1))
    columns, gradients = our_gradients(hidden, head, targets, 1.0, given, 4, torch.bfloat16)
    rounded = Head(head.weight.detach().bfloat16().float(), head.bias, head.scale, head.cap)
    expected, wanted = plain_gradients(
        hidden.detach().bfloat16().float(), rounded, targets, 1.0, given
    )
    assert {one.dtype for one in (*columns, *gradients)} == {torch.float32}
    assert_close(columns, expected, 0.04)
    assert_close(gradients, wanted, 0.04)


def test_a_tied_matrix_gets_both_gradients() -> None:
    embedding = nn.Embedding(VOCABULARY, SIZE)
    ids, targets = torch.arange(7), torch.arange(3, 10)
    head = Head(embedding.weight, None, 1.0, 0.0)
    head.scores(torch.tanh(embedding(ids)), targets, 1.0, 3, torch.float32)[0].sum().backward()
    ours = embedding.weight.grad
    wide = embedding.weight.detach().double().requires_grad_()
    plain_columns(torch.tanh(wide[ids]), Head(wide, None, 1.0, 0.0), targets, 1.0)[
        0
    ].sum().backward()
    assert_close([ours], [wide.grad], 1e-5)


def test_a_frozen_matrix_stays_without_gradient() -> None:
    head, (hidden, targets) = new_head(), states(5)
    head.weight.requires_grad_(False)
    head.scores(hidden, targets, 1.0, 2, torch.float32)[0].sum().backward()
    assert head.weight.grad is None
    assert hidden.grad is not None


def test_all_but_certain_tokens_keep_their_complement_and_its_gradient() -> None:
    head, (hidden, targets) = new_head(), states(4)
    targets = (hidden @ head.weight.t()).argmax(-1)
    given = torch.stack([torch.zeros(4), torch.zeros(4), torch.ones(4)])
    columns, gradients = our_gradients(hidden, head, targets, 0.02, given, 3, torch.float32)
    expected, wanted = plain_gradients(hidden, head, targets, 0.02, given)
    assert columns[2].min() < -30
    assert_close(columns, expected, 1e-4)
    assert_close(gradients, wanted, 1e-4)


class Tallest(TorchDispatchMode):
    """The most rows of any tensor as wide as the vocabulary that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, list | tuple) else [out]:
            if (
                isinstance(one, Tensor)
                and one.dim() == 2
                and one.shape[1] == VOCABULARY
                and one.shape[0] != SIZE
            ):
                self.rows = max(self.rows, one.shape[0])
        return out


@pytest.mark.parametrize(
    "bend", [{}, {"bias": True, "scale": 1.7, "cap": 3.0}], ids=["plain", "bent"]
)
def test_no_more_logits_than_a_chunks_ever_exist(bend: dict[str, Any]) -> None:
    head, (hidden, targets) = new_head(**bend), states(40)
    kept: list[Tensor] = []

    def keep(one: Tensor) -> Tensor:
        kept.append(one)
        return one

    with Tallest() as tallest, torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        columns = head.scores(hidden, targets, 1.0, 5, torch.float32)
        assert tallest.rows == 5
        assert not [one for one in kept if one.shape[-1] == VOCABULARY and one.dim() == 2]
        sum(column.sum() for column in columns).backward()  # type: ignore[union-attr]
    assert tallest.rows == 5
    with Tallest() as whole:
        plain_columns(hidden, head, targets, 1.0)
    assert whole.rows == 40  # the measure sees what it is for


def test_a_head_is_read_from_a_model_as_it_is_now() -> None:
    projection = nn.Linear(SIZE, VOCABULARY)
    model = SimpleNamespace(
        get_output_embeddings=lambda: projection, config=SimpleNamespace(logits_scaling=4.0)
    )
    assert Head.of(model).scale == 0.25
    assert Head.of(model).weight is projection.weight
    assert Head.of(model).bias is projection.bias
    model.config = SimpleNamespace(logit_scale=0.5, final_logit_softcapping=30.0)
    assert (Head.of(model).scale, Head.of(model).cap) == (0.5, 30.0)
    model.config = SimpleNamespace(logit_scale=None, final_logit_softcapping=None)
    assert (Head.of(model).scale, Head.of(model).cap) == (1.0, 0.0)
    projection = copy.deepcopy(projection)
    assert Head.of(model).weight is projection.weight
