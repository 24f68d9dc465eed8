"""Starts verl's `main_ppo` with EEPO's trainer instead of its synchronous trainer."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from eepo.adapters.verl.options import default_section, read_options
from eepo.types import UserError

CONFIG = "eepo_trainer"  # verl's `ppo_trainer` with an `eepo` section


def main() -> None:
    """Read the command line as verl does. Wrong settings give one error line before Ray starts."""
    try:
        import hydra
        from hydra.core.config_store import ConfigStore
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    except ImportError as error:
        _exit_with_error(f"{error}; this adapter needs verl's V1 trainer: pip install 'eepo[verl]'")
    if not hasattr(PPOTrainer, "prepare_step"):
        _exit_with_error("this adapter needs verl 0.9.1 or a later 0.9: pip install 'eepo[verl]'")
    store_config(ConfigStore.instance())
    with_hydra = hydra.main("pkg://verl.trainer.config", CONFIG, version_base=None)
    with_hydra(launch)()


def store_config(store: Any) -> None:
    """Register verl's config with an `eepo` section, so that `eepo.gate=step` is an override."""
    store.store(CONFIG, {"defaults": ["ppo_trainer", "_self_"], "eepo": default_section()})


def launch(config: Any) -> None:
    """Check EEPO's settings, then do what verl's entry point does."""
    import ray
    from omegaconf import OmegaConf
    from verl.trainer.main_ppo import run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    auto_set_device(config)
    try:
        plain: Any = OmegaConf.to_container(config, resolve=True)
        read_options(plain)
    except UserError as error:
        _exit_with_error(str(error))
    validate_config(
        config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
    )
    run_ppo(config, task_runner_class=ray.remote(TaskRunner))


def _exit_with_error(line: str) -> NoReturn:
    print(f"eepo: {line}", file=sys.stderr)
    sys.exit(2)


class TaskRunner:
    """Runs verl's task runner inside Ray, with EEPO's trainer registered as `sync`.

    verl gives trainers under other names its asynchronous replay buffer.
    """

    def run(self, config: Any) -> None:
        from verl.trainer.main_ppo import TaskRunnerV1
        from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

        from eepo.adapters.verl.trainer import EEPOTrainer

        TRAINER_REGISTRY["sync"] = EEPOTrainer
        runner = TaskRunnerV1.__ray_metadata__.modified_class()
        runner.run(config)
