"""EEPO in TRL's trainer with two processes: DDP and FSDP2 say what one process says."""

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

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def run_processes(
    tmp_path_factory: Any, sharp_model: Any, tokenizer: Any
) -> Callable[..., dict[str, Tensor]]:
    """trl_processes.py, side by side with itself; what its first process wrote down."""
    folder = tmp_path_factory.mktemp("processes")
    sharp_model().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")

    def run(number: int, *settings: str, launcher: list[str] | None = None) -> dict[str, Tensor]:
        out = folder / f"{len(list(folder.iterdir()))}.safetensors"
        script, arguments = (
            str(Path(__file__).with_name("trl_processes.py")),
            [str(folder / "model"), str(out), *settings],
        )
        if number == 1:
            runpy.run_path(script)["main"](*arguments)
        else:
            start = launcher or [
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={number}",
            ]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            command = [sys.executable, "-m", *start, script, *arguments]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, done.stderr[-3000:]
        with safe_open(out, "pt") as file:
            assert file.metadata() == {
                "processes": str(number),
                "sharded": str(launcher is not None),
            }
        return load_file(out)

    return run


@pytest.fixture(scope="module")
def one_process(run_processes: Any) -> dict[str, Tensor]:
    """Two rollouts for each of two optimizer steps: the second comes in the middle of an update."""
    found = run_processes(
        1,
        "per_device_train_batch_size=4",
        "gradient_accumulation_steps=2",
        "steps_per_generation=1",
    )
    assert len(found["sampled"]) == 8
    assert torch.equal(found["restored"], found["sampled"][0::2])
    assert (found["sampled"][1::2] - found["sampled"][0::2]).abs().amax(1).min() > 0.01
    assert (found["end"] - found["sampled"][0]).abs().max() > 1e-5
    return found


def test_two_processes_agree_with_one_where_every_group_is_cut(
    run_processes: Any, one_process: Any
) -> None:
    two = run_processes(
        2,
        "per_device_train_batch_size=2",
        "gradient_accumulation_steps=2",
        "steps_per_generation=1",
    )
    assert torch.equal(two["restored"], two["sampled"][0::2])
    for name, value in one_process.items():
        torch.testing.assert_close(two[name], value, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize(
    "server", [[], ["use_vllm=true", 'vllm_mode="server"', "generation_kwargs={}"]]
)
def test_weights_shared_out_over_two_processes_agree_with_one(
    run_processes: Any, server: list[str]
) -> None:
    """FSDP2, with the configuration that ships. Updates of two micro-batches: in the first, FSDP defers reduction."""
    config = str(Path(__file__).parents[2] / "examples" / "fsdp2.yaml")
    port = str(20_000 + os.getpid() % 20_000)
    launcher = [
        "accelerate.commands.launch",
        "--config_file",
        config,
        "--num_processes=2",
        "--main_process_port",
        port,
    ]
    one = run_processes(
        1, "per_device_train_batch_size=4", "gradient_accumulation_steps=2", *server
    )
    settings = ["per_device_train_batch_size=2", "gradient_accumulation_steps=2", *server]
    two = run_processes(2, *settings, launcher=launcher)
    assert (
        max(one.pop("gap"), two.pop("gap")) < 1e-4
    )  # between a server's log-probabilities and ours
    assert torch.equal(two["restored"], two["sampled"][0::2])
    assert (two["sampled"][1] - two["sampled"][0]).abs().max() > 0.01
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-6, rtol=1e-5, msg=name)


CHOICES = ['unlearn_on="unrewarded"', "unlearn_kl_target=1e-2", 'gate="always"']


@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_choose_the_same_rows_and_rate_as_one(
    run_processes: Any, sharded: bool
) -> None:
    config, port = (
        str(Path(__file__).parents[2] / "examples" / "fsdp2.yaml"),
        str(20_000 + os.getpid() % 20_000),
    )
    accelerate = [
        "accelerate.commands.launch",
        "--config_file",
        config,
        "--num_processes=2",
        "--main_process_port",
        port,
    ]
    one = run_processes(
        1, "per_device_train_batch_size=8", "gradient_accumulation_steps=2", *CHOICES
    )
    settings = ["per_device_train_batch_size=4", "gradient_accumulation_steps=2", *CHOICES]
    two = run_processes(2, *settings, launcher=accelerate if sharded else None)
    assert (one["sampled"][1::2] - one["sampled"][0::2]).abs().amax(1).max() > 1e-3
    assert torch.equal(two["restored"], two["sampled"][0::2])
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-6, rtol=1e-4, msg=name)
