"""EEPO inside TRL's `GRPOTrainer`. A script changes an import and two class names (docs/trl.md).

TRL samples, grades and updates. EEPO changes the rollout: it samples half of every group from θ,
takes one unlearning step, samples the other half from θ′, and keeps the log-probabilities of each
half under the weights that sampled it (with `credit = "full"` those of both halves under θ). TRL
samples from the model that it trains, so θ′ is written into that model and θ is restored bit for
bit.
"""

from __future__ import annotations

from importlib import metadata

from eepo.types import UserError

# As in pyproject.toml. tests/adapters/test_trl_settings.py lists what the adapter relies on.
OLDEST_TRL = (1, 15)
FIRST_UNSUPPORTED_TRL = (1, 17)


def check_trl() -> None:
    """Reject TRL versions that may sample, order or score rows in another way."""
    oldest, unsupported = (
        ".".join(map(str, version)) for version in (OLDEST_TRL, FIRST_UNSUPPORTED_TRL)
    )
    requirement = f"trl>={oldest},<{unsupported}"
    try:
        installed = metadata.version("trl")
    except metadata.PackageNotFoundError:
        raise UserError(
            f"eepo.adapters.trl needs {requirement}, but trl is not installed: "
            "pip install 'eepo[trl]'"
        ) from None
    if not OLDEST_TRL <= tuple(map(int, installed.split(".")[:2])) < FIRST_UNSUPPORTED_TRL:
        raise UserError(
            f"eepo.adapters.trl needs {requirement}, but trl {installed} is installed: "
            f"pip install '{requirement}'"
        )


check_trl()  # before the imports below, which may fail with another version
from eepo.adapters.trl.config import EEPOConfig  # noqa: E402
from eepo.adapters.trl.trainer import EEPOTrainer  # noqa: E402

__all__ = ["EEPOConfig", "EEPOTrainer", "check_trl"]
