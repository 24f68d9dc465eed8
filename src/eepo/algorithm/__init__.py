"""EEPO and GRPO: the algorithm (`EEPO`) and the pure functions that it is made of."""

from eepo.algorithm.advantages import advantage_weights, rollout_advantages
from eepo.algorithm.eepo import EEPO
from eepo.algorithm.gates import StepGate, completions_to_unlearn, token_gate, unlearn_gate
from eepo.algorithm.grpo import group_advantages
from eepo.algorithm.losses import (
    PolicyTerms,
    complementary_loss,
    completion_mean,
    grpo_token_loss,
    k3,
    kl_penalty,
    regularised,
    token_mean,
    token_weights,
    unlearn_loss,
)
from eepo.algorithm.lr_search import SearchResult, lr_above_floor, lr_for_kl
from eepo.algorithm.metrics import StepMetrics
from eepo.algorithm.unlearning import unlearned_weights

__all__ = [
    "EEPO",
    "PolicyTerms",
    "SearchResult",
    "StepGate",
    "StepMetrics",
    "advantage_weights",
    "complementary_loss",
    "completion_mean",
    "completions_to_unlearn",
    "group_advantages",
    "grpo_token_loss",
    "k3",
    "kl_penalty",
    "lr_above_floor",
    "lr_for_kl",
    "regularised",
    "rollout_advantages",
    "token_gate",
    "token_mean",
    "token_weights",
    "unlearn_gate",
    "unlearn_loss",
    "unlearned_weights",
]
