"""Tests EEPO in TRL's trainer with two processes: DDP and FSDP2 must agree with one process."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="needs the extra: pip install 'eepo[trl]'")

from safetensors import safe_open
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def run_processes(
    tmp_path_factory: Any, sharp_model: Any, tokenizer: Any
) -> Callable[..., dict[str, Tensor]]:
    """Return a function that runs trl_processes.py and loads what its first process saved."""
    folder = tmp_path_factory.mktemp("processes")
    sharp_model().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")

    def run(
        num_processes: int, *settings: str, launcher: list[str] | None = None
    ) -> dict[str, Tensor]:
        out = folder / f"{len(list(folder.iterdir()))}.safetensors"
        script = str(Path(__file__).with_name("trl_processes.py"))
        arguments = [str(folder / "model"), str(out), *settings]
        if num_processes == 1:
            runpy.run_path(script)["main"](*arguments)
        else:
            torchrun = ["torch.distributed.run", "--standalone"]
            module = launcher or [*torchrun, f"--nproc-per-node={num_processes}"]
            command = [sys.executable, "-m", *module, script, *arguments]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            process = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=300
            )
            assert process.returncode == 0, process.stderr[-3000:]
        with safe_open(out, "pt") as file:
            expected = {"processes": str(num_processes), "sharded": str(launcher is not None)}
            assert file.metadata() == expected
        return load_file(out)

    return run


def batch_sizes(rows: int) -> list[str]:
    return [f"per_device_train_batch_size={rows}", "gradient_accumulation_steps=2"]


def fsdp2_launcher() -> list[str]:
    """Use the configuration file that ships."""
    config = str(Path(__file__).parents[2] / "examples" / "fsdp2.yaml")
    port = str(20_000 + os.getpid() % 20_000)
    launcher = ["accelerate.commands.launch", "--config_file", config]
    return [*launcher, "--num_processes=2", "--main_process_port", port]


@pytest.fixture(scope="module")
def one_process(run_processes: Any) -> dict[str, Tensor]:
    """Run two rollouts for each of two optimizer steps: every second one is inside an update."""
    result = run_processes(1, *batch_sizes(4), "steps_per_generation=1")
    assert len(result["sampled"]) == 8
    assert torch.equal(result["restored"], result["sampled"][0::2])
    assert (result["sampled"][1::2] - result["sampled"][0::2]).abs().amax(1).min() > 0.01
    assert (result["end"] - result["sampled"][0]).abs().max() > 1e-5
    return result


def test_two_processes_agree_with_one_when_every_group_is_split(
    run_processes: Any, one_process: Any
) -> None:
    two = run_processes(2, *batch_sizes(2), "steps_per_generation=1")
    assert torch.equal(two["restored"], two["sampled"][0::2])
    for name, value in one_process.items():
        torch.testing.assert_close(two[name], value, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize(
    "server", [[], ["use_vllm=true", 'vllm_mode="server"', "generation_kwargs={}"]]
)
def test_two_processes_with_sharded_weights_agree_with_one(
    run_processes: Any, server: list[str]
) -> None:
    """An update has two micro-batches. FSDP defers the reduction of gradients in the first one."""
    one = run_processes(1, *batch_sizes(4), *server)
    two = run_processes(2, *batch_sizes(2), *server, launcher=fsdp2_launcher())
    # The gap between the server's log-probabilities and the trainer's.
    assert max(one.pop("gap"), two.pop("gap")) < 1e-4
    assert torch.equal(two["restored"], two["sampled"][0::2])
    assert (two["sampled"][1] - two["sampled"][0]).abs().max() > 0.01
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-6, rtol=1e-5, msg=name)


SELECTION = ['unlearn_on="unrewarded"', "unlearn_kl_target=1e-2", 'gate="always"']


@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_choose_the_same_rows_and_unlearn_lr_as_one(
    run_processes: Any, sharded: bool
) -> None:
    one = run_processes(1, *batch_sizes(8), *SELECTION)
    launcher = fsdp2_launcher() if sharded else None
    two = run_processes(2, *batch_sizes(4), *SELECTION, launcher=launcher)
    assert (one["sampled"][1::2] - one["sampled"][0::2]).abs().amax(1).max() > 1e-3
    assert torch.equal(two["restored"], two["sampled"][0::2])
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-6, rtol=1e-4, msg=name)


KNOBS = ['credit="full"', 'saturation="exact"', "unlearn_max_completions=4", 'gate="always"']


@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_agree_with_one_with_full_credit_and_exact_saturation(
    run_processes: Any, sharded: bool
) -> None:
    """Four of eight completions of stage 1 are unlearned, two in each process."""
    one = run_processes(1, *batch_sizes(8), *KNOBS)
    launcher = fsdp2_launcher() if sharded else None
    two = run_processes(2, *batch_sizes(4), *KNOBS, launcher=launcher)
    assert (one["sampled"][1::2] - one["sampled"][0::2]).abs().amax(1).min() > 1e-3
    assert torch.equal(two["restored"], two["sampled"][0::2])
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-6, rtol=1e-4, msg=name)
