"""Every kernel compiles for the cards it is meant for, in the shapes that models ask for. That needs no card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from eepo.kernels import lm_head as head
from eepo.kernels import paged_attention, sampling

CARDS = [80, 90]  # Ampere, Hopper
INT64 = {
    "sources",
    "slots",
    "ends",
    "tokens",
    "positions",
    "num_drawn",
    "limits",
    "keys",
    "outputs",
    "targets",
}
INT32 = {"live", "out_tokens", "out_lengths", "out_finished", "tables"}
COUNTS = {"vocabulary", "window", "stride"}
CACHED = {"query", "new_key", "new_value", "key_pages", "value_pages", "out"}

ATTENTION: dict[str, Any] = {
    "NUM_HEADS": 14, "GROUP": 7, "ROWS": 16, "SIZE": 64, "PADDED": 64, "PAGE": 64, "SPLITS": 1, "SOFTCAP": False,
    "WINDOW": False, "PRECISION": "tf32",
}  # fmt: skip


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def kind(name: str, cached: str) -> str:
    """Of an argument, as the wrappers pass it."""
    if name in INT64:
        return "*i64"
    if name in INT32:
        return "*i32"
    if name in COUNTS or name.endswith(("_stride", "_row", "_head")):
        return "i32"
    if name in ("scale", "softcap"):
        return "fp32"
    return cached if name in CACHED else "*fp32"


def compiled(
    kernel: Any,
    constants: dict[str, Any],
    card: int,
    num_warps: int,
    cached: str = "*bf16",
    num_stages: int = 3,
) -> Any:
    signature = {
        name: "constexpr" if name in constants else kind(name, cached) for name in kernel.arg_names
    }
    aligned = {  # as addresses and even sizes are: Triton is told so at a launch
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name not in {*constants, "scale", "softcap", "vocabulary", "window"}
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return compile(source, target=GPUTarget("cuda", card, 32), options=options)


@pytest.mark.parametrize("card", CARDS)
def test_draws(card: int) -> None:
    constants = {"NUM_BLOCKS": 75, "PADDED_BLOCKS": 128, "BLOCK": sampling.BLOCK, "NUM_ENDS": 2}
    assert compiled(sampling._join_kernel, constants, card, 8).asm["cubin"]
    assert compiled(
        sampling._block_kernel, {"PADDED_BLOCKS": 128, "BLOCK": sampling.BLOCK}, card, 4
    ).asm["cubin"]


@pytest.mark.parametrize("card", CARDS)
def test_heads(card: int) -> None:
    assert compiled(head._stats_kernel, {"NUM_BLOCKS": 38, "BLOCK": head.BLOCK}, card, 8).asm[
        "cubin"
    ]
    for cached in ("*bf16", "*fp32"):  # of the gradient
        assert compiled(head._gradient_kernel, {"BLOCK": head.BLOCK}, card, 8, cached).asm["cubin"]


@pytest.mark.parametrize(("shape", "cached", "card"), [
    ({}, "*bf16", 80),
    ({"SPLITS": 16}, "*bf16", 90),
    ({"SIZE": 80, "PADDED": 128, "WINDOW": True}, "*bf16", 90),
    ({"GROUP": 2, "SOFTCAP": True}, "*fp16", 90),
    ({"PRECISION": "ieee"}, "*fp32", 90),
])  # fmt: skip
def test_attention_over_pages(shape: dict[str, Any], cached: str, card: int) -> None:
    assert compiled(paged_attention._decode_kernel, ATTENTION | shape, card, 4, cached).asm["cubin"]


@pytest.mark.parametrize(("card", "kilobytes"), [(80, 163), (90, 227)])
def test_reading_far_ahead_takes_no_more_than_the_room_it_asks_for(
    card: int, kilobytes: int
) -> None:
    stages = paged_attention.num_stages(2 * 64 * 128 * 2, kilobytes << 10)
    assert stages == paged_attention.STAGES
    shape = {"NUM_HEADS": 16, "GROUP": 8, "SIZE": 128, "PADDED": 128}
    made = compiled(paged_attention._decode_kernel, ATTENTION | shape, card, 4, num_stages=stages)
    assert made.metadata.shared <= stages * 2 * 64 * 128 * 2


def test_parts_are_joined() -> None:
    constants = {"SIZE": 80, "PADDED": 128, "SPLITS": 16}
    assert compiled(paged_attention._join_kernel, constants, 90, 1).asm["cubin"]
