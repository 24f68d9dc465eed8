"""AdamW's kernels compile for the supported GPUs. Needs no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from eepo.kernels import adamw
from eepo.model.optimizers import BETA_1, BETA_2, BLOCK, EPS, FIRST_LEVELS, SECOND_LEVELS

SHARED = {"KEEP_1": 1 - BETA_1, "KEEP_2": 1 - BETA_2, "EPS": EPS}
EIGHT_BIT = SHARED | {
    "LEVELS_1": FIRST_LEVELS,
    "LEVELS_2": SECOND_LEVELS,
    "BLOCK": BLOCK,
    "ROWS": adamw.TILE // BLOCK,
}
TYPES = {"random_key": "*i32", "tensor_index": "i32", "count": "i32", "num_blocks": "i32"}


@pytest.mark.parametrize("capability", [80, 90])  # Ampere, Hopper
@pytest.mark.parametrize(("kernel", "constants", "moments"), [
    (adamw._bf16_kernel, SHARED | {"TILE": adamw.TILE}, {"first": "*bf16", "second": "*bf16"}),
    (adamw._8bit_kernel, EIGHT_BIT, {"first": "*i8", "second": "*u8"}),
])  # fmt: skip
def test_an_update_compiles(
    kernel: Any,
    constants: dict[str, Any],
    moments: dict[str, str],
    capability: int,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = TYPES | moments
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*fp32")
        for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    assert compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
