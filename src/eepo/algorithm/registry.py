"""The methods that a recipe selects by name. docs/methods.md describes them.

A new advantage or loss is a module, a line here, its name in the knob (`config.AlgorithmConfig`,
which is read without torch), and a recipe in `recipes/methods/`. Methods that change sampling,
rewards or the entropy bonus are in `dynamic_sampling.py`, `outcome_bonus.py`, `entropy_target.py`
and `credit.py` (`engine_ratio_cap`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from eepo.algorithm import dr_grpo, grpo, maxrl, passk
from eepo.algorithm.cispo import cispo_loss
from eepo.algorithm.covariance import clip_cov_loss, kl_cov_loss
from eepo.algorithm.losses import PolicyTerms, TokenLoss, grpo_token_loss
from eepo.algorithm.sequence_ratio import gspo_loss
from eepo.config import AlgorithmConfig

# rewards [Q, G] -> advantages [Q, G]
ADVANTAGES: dict[str, Callable[[Tensor, AlgorithmConfig], Tensor]] = {
    "grpo": grpo.advantages,
    "dr_grpo": dr_grpo.advantages,
    "maxrl": maxrl.advantages,
    "passk": passk.advantages,
}
LOSSES: dict[str, Callable[[PolicyTerms, AlgorithmConfig], TokenLoss]] = {
    "grpo": grpo_token_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "clip_cov": clip_cov_loss,
    "kl_cov": kl_cov_loss,
}
SELECT_TOKENS = ("clip_cov", "kl_cov")  # losses that need `PolicyTerms.selected`
