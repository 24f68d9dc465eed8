"""A warm start can set the probability of a completion's first token."""

from __future__ import annotations

import math

import pytest
import torch

from eepo.model.policy import Scores
from eepo.recipe import load_warmup
from eepo.types import Demonstration, Prompt, UserError
from eepo.warmup import first_token_loss


def test_the_loss_is_zero_at_the_target_on_both_sides_of_one_half() -> None:
    targets = torch.tensor([1e-5, 0.3, 0.999])
    logprobs = targets.log()[:, None].repeat(1, 4)
    complements = torch.log1p(-targets)[:, None].repeat(1, 4)
    scores = Scores(logprobs, torch.zeros(3, 4), complements)
    assert first_token_loss(scores, targets) == pytest.approx([0, 0, 0], abs=1e-6)


def test_the_loss_measures_the_rare_side_on_a_log_scale() -> None:
    p = torch.tensor([[1e-3], [1 - 1e-3]])
    scores = Scores(p.log(), torch.zeros(2, 1), torch.log1p(-p))
    losses = first_token_loss(scores, torch.tensor([1e-5, 1 - 1e-5]))
    expected = math.log(100) - 0.5  # smooth L1 beyond an error of 1
    assert losses.tolist() == pytest.approx([expected, expected], rel=1e-2)


@pytest.mark.parametrize(("p", "target", "slope"), [(1e-5, 0.999, -1), (0.999, 1e-5, 1)])
def test_the_gradient_does_not_vanish_far_from_the_target(
    p: float, target: float, slope: float
) -> None:
    odds = torch.logit(torch.tensor([[p]], dtype=torch.float64)).requires_grad_()
    logprobs, complements = (torch.nn.functional.logsigmoid(each) for each in (odds, -odds))
    scores = Scores(logprobs, torch.zeros(1, 1), complements)
    first_token_loss(scores, torch.tensor([target])).sum().backward()
    assert odds.grad is not None
    assert float(odds.grad) == pytest.approx(slope)


@pytest.mark.parametrize("probability", [0.0, -0.1, 1.5, math.nan, math.inf])
def test_a_target_that_is_no_probability_is_refused(probability: float) -> None:
    prompt = Prompt("train/0", "1 + 1 = ", ())
    with pytest.raises(UserError, match="first_token_probability must be above 0 and up to 1, got"):
        Demonstration(prompt, "2", probability)
    assert Demonstration(prompt, "2", 1.0).first_token_probability == 1.0


def test_recipes_for_another_probability_start_from_the_shipped_policy() -> None:
    config = load_warmup("shortcut/warmup_p", ["task.rare_probability=1e-3"])
    assert config.model.path == "builtin:shortcut"
    assert config.task.rare_probability == 1e-3  # type: ignore[union-attr]
