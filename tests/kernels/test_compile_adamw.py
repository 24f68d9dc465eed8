"""AdamW's kernels compile for the cards they are meant for. That needs no card."""

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
EIGHT = SHARED | {
    "LEVELS_1": FIRST_LEVELS,
    "LEVELS_2": SECOND_LEVELS,
    "BLOCK": BLOCK,
    "ROWS": adamw.TILE // BLOCK,
}
TYPES = {"key": "*i32", "index": "i32", "count": "i32", "num_blocks": "i32"}


@pytest.mark.parametrize("card", [80, 90])  # Ampere, Hopper
@pytest.mark.parametrize(("kernel", "constants", "moments"), [
    (adamw._bf16_kernel, SHARED | {"TILE": adamw.TILE}, {"first": "*bf16", "second": "*bf16"}),
    (adamw._8bit_kernel, EIGHT, {"first": "*i8", "second": "*u8"}),
])  # fmt: skip
def test_updates(
    kernel: Any,
    constants: dict[str, Any],
    moments: dict[str, str],
    card: int,
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
    assert compile(source, target=GPUTarget("cuda", card, 32)).asm["cubin"]
