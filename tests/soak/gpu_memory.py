"""Runs `eepo train` out of GPU memory in each phase, and follows the printed command.

    python tests/soak/gpu_memory.py            # on a GPU, about a minute
    python tests/soak/gpu_memory.py --dry      # on the CPU: errors are raised, not provoked

Part 1, per phase (stage1, unlearn, stage2, update, and update after the first optimizer update): in
step 2, when the phase begins, the limit of the process is set to the memory that it has at that
moment plus a little. torch then really fails in this phase or, because sampling adapts to little
memory, in the next one. The run must print one line and save step 1, although
`checkpoint_every = 0`. The printed command is run without a limit and must finish the run.
Part 2: the whole process has a limit between the peak of a run with and without gradient
checkpointing. The printed commands are followed, under the same limit, until the run is finished.
Every run is a fork of this process, which has imported everything but has not touched CUDA.
"""

import contextlib
import gc
import io
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

import eepo.cli
from eepo.algorithm.metrics import StepMetrics
from eepo.tasks.countdown import build_tokenizer
from eepo.trainer import Trainer

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TERM", "dumb")
DRY = "--dry" in sys.argv
DEVICE = "cpu" if DRY else "cuda"
MB = 2**20
SIZE = (
    {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    if DRY
    else {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
)
RECIPE = """
name = "oom"
[model]
path = "{policy}"
device = "{device}"
compile = "off"
micro_batch_tokens = 65536
[task]
num_evaluation = 4
[algorithm]
group_size = {group}
max_new_tokens = {tokens}
gate = "always"
unlearn_lr = 1e-3
kl_coef = 0.01
[training]
num_steps = 3
prompts_per_step = {prompts}
prompts_per_mini_batch = {mini}
learning_rate = 1e-5
checkpoint_every = 0
log_completions = 1
[evaluation]
every = 0
num_samples = 1
"""


SECOND = "second mini-batch"
FAILED: list[str] = []


def write_inputs(folder: Path) -> Path:
    """Write a random Llama with the tokenizer of the countdown policy."""
    tokenizer = build_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **SIZE,
    )
    torch.manual_seed(0)
    policy = folder / "policy"
    transformers.LlamaForCausalLM(config).save_pretrained(policy)
    tokenizer.save_pretrained(policy)
    numbers = (
        {"group": 4, "tokens": 8, "prompts": 4, "mini": 2}
        if DRY
        else {"group": 8, "tokens": 96, "prompts": 64, "mini": 32}
    )
    recipe = folder / "oom.toml"
    recipe.write_text(RECIPE.format(policy=policy, device=DEVICE, **numbers))
    return recipe


def limit_now(more_bytes: int) -> None:
    """Allow this process no more than it has now, plus `more_bytes`."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(
        min(1.0, (torch.cuda.memory_reserved() + more_bytes) / total)
    )


def provoke(phase: str, step: int) -> None:
    """Let memory run out when `phase` of `step` begins."""
    current: dict[str, Any] = {"step": 0}
    one_step, phase_of = Trainer._one_step, StepMetrics.phase

    def counted(self: Trainer, bar: Any) -> None:
        current.update(step=self.step + 1, engine=self.algorithm.engine, backup=self.backup)
        return one_step(self, bar)

    def limited(self: StepMetrics, name: str) -> Any:
        begins = name == phase or (
            phase == SECOND and name == "update" and current["backup"].updated
        )
        if begins and current["step"] == step:
            current["step"] = -1
            if not DRY:
                if name.startswith("stage"):  # the engine may keep its cache between calls
                    current["engine"]._free_buffers()
                limit_now(2 * MB)
                return phase_of(self, name)

            @contextlib.contextmanager
            def failing() -> Iterator[None]:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
                yield

            self.last_phase = name
            return failing()
        return phase_of(self, name)

    Trainer._one_step, StepMetrics.phase = counted, limited


def run(arguments: list[str], before: Callable[[], None] = lambda: None) -> tuple[int, str, float]:
    """Run `eepo ARGUMENTS` in a fork; return its exit code, its stderr, and its peak in bytes."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        errors, code = io.StringIO(), 1
        try:
            sys.argv, sys.stderr = ["eepo", *arguments], errors
            sys.stdout = io.StringIO()
            before()
            eepo.cli.main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            errors.write(traceback.format_exc())
        peak = 0 if DRY else torch.cuda.max_memory_reserved()
        os.write(write, json.dumps([code, errors.getvalue()[-6000:], peak]).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        code, text, peak = json.loads(pipe.read())
    os.waitpid(pid, 0)
    return code, text, peak


def is_one_line(code: int, errors: str) -> bool:
    return code == 2 and "Traceback" not in errors and errors.count("eepo: ") == 1


def continued(errors: str) -> list[str]:
    """Return the arguments of the command that the line prints."""
    line = next(line for line in errors.splitlines() if line.startswith("eepo: "))
    return shlex.split(line.rpartition("continue with: ")[2])[1:]


def steps(out: Path) -> list[int]:
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines]


def check(name: str, fine: bool) -> None:
    FAILED.extend([] if fine else [name])
    print(f"   {'ok  ' if fine else 'FAIL'} {name}", flush=True)


def one_phase(phase: str, recipe: Path, folder: Path) -> None:
    out = folder / phase
    print(f"\n== {phase}", flush=True)
    code, errors, _ = run(["train", str(recipe), "--out", str(out)], lambda: provoke(phase, 2))
    print(errors.strip()[-1500:])
    check(f"{phase}: one line", is_one_line(code, errors))
    check(f"{phase}: records of step 1 only", steps(out) == [1])
    saved = sorted(path.name for path in out.glob("checkpoints/step-*"))
    check(f"{phase}: step 1 is saved", saved[-1:] == ["step-000001"])
    if not is_one_line(code, errors):
        return
    code, errors, _ = run(continued(errors))
    print(errors.strip()[-1500:])
    check(f"{phase}: the printed command finishes the run", code == 0 and steps(out) == [1, 2, 3])


def whole_limit(recipe: Path, folder: Path) -> None:
    print("\n== one limit for the whole process", flush=True)
    plain = run(["train", str(recipe), "--out", str(folder / "plain")])
    saving = ["--set", "model.gradient_checkpointing=true"]
    small = run(["train", str(recipe), "--out", str(folder / "small"), *saving])
    print(f"peaks: {plain[2] / MB:,.0f} MB, with checkpointing {small[2] / MB:,.0f} MB")
    if plain[0] or small[0]:
        print(plain[1][-1500:], small[1][-1500:])
    check("the runs without a limit finish", plain[0] == 0 and small[0] == 0)
    limit = (plain[2] + small[2]) / 2

    def limited() -> None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / total)

    out = folder / "limited"
    arguments = ["train", str(recipe), "--out", str(out)]
    for _ in range(6):
        code, errors, _ = run(arguments, limited)
        print(errors.strip()[-1500:])
        if not is_one_line(code, errors):
            break
        arguments = continued(errors)
    check("under the limit, the named knobs finish the run", code == 0 and steps(out) == [1, 2, 3])


def main() -> None:
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="oom-"))
    recipe = write_inputs(folder)
    for phase in ("stage1", "unlearn", "stage2", "update", SECOND):
        one_phase(phase, recipe, folder)
        print(f"   {time.monotonic() - started:.0f} s")
    if not DRY:
        whole_limit(recipe, folder)
    shutil.rmtree(folder)
    print(f"\n{len(FAILED)} failed: {FAILED}; {time.monotonic() - started:.0f} s")
    sys.exit(bool(FAILED))


if __name__ == "__main__":
    main()
