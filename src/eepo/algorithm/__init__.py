"""EEPO and GRPO: the algorithm and the pure functions it is made of."""

from eepo.algorithm.eepo import (
    EEPO,
    complementary_loss,
    completion_mean,
    group_advantages,
    kl_penalty,
    policy_loss,
    to_unlearn,
    token_gate,
    token_mean,
    unlearn_gate,
    unlearn_loss,
    unlearned_weights,
)

__all__ = [
    "EEPO",
    "complementary_loss",
    "completion_mean",
    "group_advantages",
    "kl_penalty",
    "policy_loss",
    "to_unlearn",
    "token_gate",
    "token_mean",
    "unlearn_gate",
    "unlearn_loss",
    "unlearned_weights",
]
