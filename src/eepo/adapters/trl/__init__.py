"""EEPO inside TRL's `GRPOTrainer`: an import and two class names change in a script (docs/trl.md).

TRL samples, grades and updates. What EEPO adds to a rollout: half of every group from θ, one step of unlearning, the
other half from θ′, and each half's log-probabilities under the weights that sampled it. Gate and loss are
`algorithm.py`'s. TRL samples from the very model it trains, so θ′ is written into it and θ comes back bit for bit.
"""

from __future__ import annotations

from importlib import metadata

from eepo.types import UserError

OLDEST, TOO_NEW = (
    (1, 15),
    (1, 17),
)  # as in pyproject.toml; tests/adapters/test_trl_settings.py says what for


def check_trl() -> None:
    """Before anything of TRL is touched: another version may sample, order or score in another way."""
    wanted = f"trl>={OLDEST[0]}.{OLDEST[1]},<{TOO_NEW[0]}.{TOO_NEW[1]}"
    try:
        found = metadata.version("trl")
    except metadata.PackageNotFoundError:
        raise UserError(
            f"eepo.adapters.trl needs {wanted}, and trl is not installed: pip install 'eepo[trl]'"
        ) from None
    if not OLDEST <= tuple(map(int, found.split(".")[:2])) < TOO_NEW:
        raise UserError(
            f"eepo.adapters.trl needs {wanted}, found trl {found}: pip install '{wanted}'"
        )


check_trl()
from eepo.adapters.trl.config import EEPOConfig  # noqa: E402  (only a version that passed)
from eepo.adapters.trl.trainer import EEPOTrainer  # noqa: E402

__all__ = ["EEPOConfig", "EEPOTrainer", "check_trl"]
