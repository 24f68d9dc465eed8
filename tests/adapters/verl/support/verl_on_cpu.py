"""Lets verl run on the CPU, for tests: a CPU platform, gloo, and rollouts with `transformers`.

verl imports this module in every process (VERL_USE_EXTERNAL_MODULES). Its trainer, workers, FSDP2
engine, agent loops, weight push and checkpoints are unchanged.
"""

from __future__ import annotations

import contextlib
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import verl.utils.distributed
from verl.plugin.platform import PlatformBase, set_platform
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry


class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "none"

    @property
    def device_module(self) -> ModuleType:
        return _CPU

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Any:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"  # verl places its workers on GPUs, so the tests tell Ray that there are some

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


_CPU: Any = SimpleNamespace(
    **{name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("_")},
    empty_cache=lambda: None,
    ipc_collect=lambda: None,
    memory_allocated=lambda *_: 0,
    memory_reserved=lambda *_: 0,
    max_memory_allocated=lambda *_: 0,
    max_memory_reserved=lambda *_: 0,
    reset_peak_memory_stats=lambda *_: None,
    mem_get_info=lambda *_: (1, 1),
    get_device_name=lambda *_: "cpu",
    get_device_properties=lambda *_: SimpleNamespace(name="cpu", total_memory=1),
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
)

set_platform(PlatformCPU())

_init_process_group = verl.utils.distributed.initialize_global_process_group_ray
verl.utils.distributed.initialize_global_process_group_ray = (
    lambda timeout_second=None, backend=None: _init_process_group(timeout_second, "gloo")
)

_ROLLOUT_REGISTRY[("transformers", "async")] = "transformers_rollout.TransformersRollout"


def _load_replica() -> type:
    from transformers_rollout import TransformersReplica

    return TransformersReplica


RolloutReplicaRegistry.register("transformers", _load_replica)
