"""Chunked scores and gradients equal those of full logits, which never exist."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from eepo.model.lm_head import LMHead

SIZE, VOCABULARY = 12, 50
COLUMNS = ["logprobs", "entropies", "complements"]


def new_head(
    *, bias: bool = False, scale: float = 1.0, softcap: float = 0.0, seed: int = 0
) -> LMHead:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(VOCABULARY, SIZE, generator=generator).requires_grad_()
    vector = torch.randn(VOCABULARY, generator=generator).requires_grad_() if bias else None
    return LMHead(weight, vector, scale, softcap)


def states(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(number, SIZE, generator=generator).requires_grad_()
    return hidden, torch.randint(VOCABULARY, (number,), generator=generator)


def plain_columns(
    hidden: Tensor, head: LMHead, targets: Tensor, temperature: float
) -> list[Tensor]:
    """Compute the scores from full logits, differentiable by autograd, in the inputs' dtype."""
    logits = hidden @ head.weight.t()
    if head.bias is not None:
        logits = logits + head.bias
    logits = logits * head.scale
    if head.softcap:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logprobs = (logits / temperature).log_softmax(-1)
    is_target = torch.nn.functional.one_hot(targets, VOCABULARY).bool()
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    others = logprobs.masked_fill(is_target, -torch.inf)
    return [logprobs[is_target], entropies, others.logsumexp(-1)]


def plain_gradients(
    hidden: Tensor, head: LMHead, targets: Tensor, temperature: float, upstream: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the three columns and the gradients on hidden, weight and bias, in float64."""
    wide = hidden.detach().double().requires_grad_()
    weight = head.weight.detach().double().requires_grad_()
    bias = None if head.bias is None else head.bias.detach().double().requires_grad_()
    columns = plain_columns(
        wide, LMHead(weight, bias, head.scale, head.softcap), targets, temperature
    )
    total = sum((d.double() * column).sum() for d, column in zip(upstream, columns, strict=True))
    inputs = [wide, weight, *([] if bias is None else [bias])]
    return columns, list(torch.autograd.grad(total, inputs))  # type: ignore[arg-type]


def our_gradients(
    hidden: Tensor,
    head: LMHead,
    targets: Tensor,
    temperature: float,
    upstream: Tensor,
    chunk: int,
    dtype: torch.dtype,
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    columns = head.scores(hidden, targets, temperature, chunk, dtype)
    total = sum((d * column).sum() for d, column in zip(upstream, columns, strict=True))
    inputs = [hidden, head.weight, *([] if head.bias is None else [head.bias])]
    return columns, list(torch.autograd.grad(total, inputs))  # type: ignore[arg-type]


def assert_close(got: Any, expected: Any, tolerance: float) -> None:
    for tensor, exact in zip(got, expected, strict=True):
        error = (tensor.double() - exact).abs().max()
        assert error <= tolerance * max(1.0, exact.abs().max().item())


TRANSFORMS = [
    {},
    {"bias": True},
    {"scale": 0.3},
    {"softcap": 2.0},
    {"bias": True, "scale": 1.7, "softcap": 3.0},
]


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])  # 4 does not divide 11
@pytest.mark.parametrize(
    "transform", TRANSFORMS, ids=lambda transform: "-".join(transform) or "plain"
)
def test_scores_and_gradients_equal_those_of_full_logits(
    transform: dict[str, Any], chunk: int
) -> None:
    head, (hidden, targets) = new_head(**transform), states(11)
    upstream = torch.randn(3, 11, generator=torch.Generator().manual_seed(1))
    for temperature in (1.0, 0.6):
        columns, gradients = our_gradients(
            hidden, head, targets, temperature, upstream, chunk, torch.float32
        )
        plain = plain_gradients(hidden, head, targets, temperature, upstream)
        assert_close(columns, plain[0], 1e-5)
        assert_close(gradients, plain[1], 1e-5)


@pytest.mark.parametrize("column", range(3), ids=COLUMNS)
def test_the_gradient_of_a_single_score(column: int) -> None:
    """Autograd passes zeros, not None, as upstream gradients of the other scores."""
    head, (hidden, targets) = new_head(bias=True), states(6)
    upstream = torch.zeros(3, 6)
    upstream[column] = torch.randn(6, generator=torch.Generator().manual_seed(2))
    _, expected = plain_gradients(hidden, head, targets, 0.8, upstream)
    inputs = [hidden, head.weight, head.bias]
    alone = head.scores(hidden, targets, 0.8, 4, torch.float32)[column]
    gradients = torch.autograd.grad((alone * upstream[column]).sum(), inputs)
    assert_close(gradients, expected, 1e-5)


@pytest.mark.parametrize(
    "transform", TRANSFORMS, ids=lambda transform: "-".join(transform) or "plain"
)
def test_bf16_products_are_close(transform: dict[str, Any]) -> None:
    """Only the factors of products are rounded: logits stay in fp32."""
    head, (hidden, targets) = new_head(**transform), states(9)
    upstream = torch.randn(3, 9, generator=torch.Generator().manual_seed(1))
    columns, gradients = our_gradients(hidden, head, targets, 1.0, upstream, 4, torch.bfloat16)
    rounded = LMHead(head.weight.detach().bfloat16().float(), head.bias, head.scale, head.softcap)
    rounded_hidden = hidden.detach().bfloat16().float()
    plain = plain_gradients(rounded_hidden, rounded, targets, 1.0, upstream)
    assert {tensor.dtype for tensor in (*columns, *gradients)} == {torch.float32}
    assert_close(columns, plain[0], 0.04)
    assert_close(gradients, plain[1], 0.04)


def test_a_tied_matrix_gets_the_gradients_of_head_and_embedding() -> None:
    embedding = nn.Embedding(VOCABULARY, SIZE)
    ids, targets = torch.arange(7), torch.arange(3, 10)
    head = LMHead(embedding.weight, None, 1.0, 0.0)
    head.scores(torch.tanh(embedding(ids)), targets, 1.0, 3, torch.float32)[0].sum().backward()
    ours = embedding.weight.grad
    wide = embedding.weight.detach().double().requires_grad_()
    plain_head = LMHead(wide, None, 1.0, 0.0)
    plain_columns(torch.tanh(wide[ids]), plain_head, targets, 1.0)[0].sum().backward()
    assert_close([ours], [wide.grad], 1e-5)


def test_a_frozen_matrix_gets_no_gradient() -> None:
    head, (hidden, targets) = new_head(), states(5)
    head.weight.requires_grad_(False)
    head.scores(hidden, targets, 1.0, 2, torch.float32)[0].sum().backward()
    assert head.weight.grad is None
    assert hidden.grad is not None


def test_nearly_certain_tokens_have_exact_complements_and_gradients() -> None:
    head, (hidden, targets) = new_head(), states(4)
    targets = (hidden @ head.weight.t()).argmax(-1)
    upstream = torch.stack([torch.zeros(4), torch.zeros(4), torch.ones(4)])
    columns, gradients = our_gradients(hidden, head, targets, 0.02, upstream, 3, torch.float32)
    plain = plain_gradients(hidden, head, targets, 0.02, upstream)
    assert columns[2].min() < -30
    assert_close(columns, plain[0], 1e-4)
    assert_close(gradients, plain[1], 1e-4)


class MostLogitRows(TorchDispatchMode):
    """Records the most rows of any [rows, vocabulary] tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            # [SIZE, VOCABULARY] is the transposed weight.
            if (
                isinstance(tensor, Tensor)
                and tensor.dim() == 2
                and tensor.shape[1] == VOCABULARY
                and tensor.shape[0] != SIZE
            ):
                self.rows = max(self.rows, tensor.shape[0])
        return out


@pytest.mark.parametrize(
    "transform", [{}, {"bias": True, "scale": 1.7, "softcap": 3.0}], ids=["plain", "transformed"]
)
def test_logits_exist_for_one_chunk_at_a_time(transform: dict[str, Any]) -> None:
    head, (hidden, targets) = new_head(**transform), states(40)
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
    with MostLogitRows() as most, hooks:
        columns = head.scores(hidden, targets, 1.0, 5, torch.float32)
        assert most.rows == 5
        assert not [t for t in saved if t.shape[-1] == VOCABULARY and t.dim() == 2]
        sum(column.sum() for column in columns).backward()  # type: ignore[union-attr]
    assert most.rows == 5
    with MostLogitRows() as most:
        plain_columns(hidden, head, targets, 1.0)
    assert most.rows == 40  # the measurement detects full logits


def test_from_model_reads_the_current_weights_and_config() -> None:
    projection = nn.Linear(SIZE, VOCABULARY)
    model = SimpleNamespace(
        get_output_embeddings=lambda: projection, config=SimpleNamespace(logits_scaling=4.0)
    )
    assert LMHead.from_model(model).scale == 0.25
    assert LMHead.from_model(model).weight is projection.weight
    assert LMHead.from_model(model).bias is projection.bias
    model.config = SimpleNamespace(logit_scale=0.5, final_logit_softcapping=30.0)
    assert (LMHead.from_model(model).scale, LMHead.from_model(model).softcap) == (0.5, 30.0)
    model.config = SimpleNamespace(logit_scale=None, final_logit_softcapping=None)
    assert (LMHead.from_model(model).scale, LMHead.from_model(model).softcap) == (1.0, 0.0)
    projection = copy.deepcopy(projection)
    assert LMHead.from_model(model).weight is projection.weight
