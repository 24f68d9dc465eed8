"""`python -m eepo.adapters.verl`: verl's `main_ppo` with EEPO's trainer in the place of its synchronous one."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from eepo.adapters.verl.options import default_section, read_options
from eepo.types import UserError

CONFIG = "eepo_trainer"  # verl's `ppo_trainer` with an `eepo` section


def main() -> None:
    """Read the command line as verl does. A user's mistake is one line, and no Ray was started for it."""
    try:
        import hydra
        from hydra.core.config_store import ConfigStore
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    except ImportError as error:
        _refuse(f"{error}; this adapter needs verl's V1 trainer: pip install 'eepo[verl]'")
    if not hasattr(PPOTrainer, "prepare_step"):
        _refuse("this adapter needs verl 0.9.1 or a later 0.9: pip install 'eepo[verl]'")
    store_config(ConfigStore.instance())
    hydra.main(config_path="pkg://verl.trainer.config", config_name=CONFIG, version_base=None)(
        launch
    )()


def store_config(store: Any) -> None:
    """Beside verl's own primary configs, so that `eepo.gate=step` is an override like any other."""
    store.store(CONFIG, {"defaults": ["ppo_trainer", "_self_"], "eepo": default_section()})


def launch(config: Any) -> None:
    """What verl's own entry does, after EEPO's checks."""
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
        _refuse(str(error))
    validate_config(
        config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
    )
    run_ppo(config, task_runner_class=ray.remote(TaskRunner))


def _refuse(line: str) -> NoReturn:
    print(f"eepo: {line}", file=sys.stderr)
    sys.exit(2)


class TaskRunner:
    """Runs inside Ray: verl's own runner, which finds EEPO's trainer under the name `sync`.

    A trainer under a name of its own would get verl's asynchronous replay buffer.
    """

    def run(self, config: Any) -> None:
        from verl.trainer.main_ppo import TaskRunnerV1
        from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

        from eepo.adapters.verl.trainer import EEPOTrainer

        TRAINER_REGISTRY["sync"] = EEPOTrainer
        runner = TaskRunnerV1.__ray_metadata__.modified_class()
        runner.run(config)
