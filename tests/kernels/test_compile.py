"""Every kernel compiles for the supported GPUs, in the shapes of real models. Needs no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from eepo.kernels import lm_head as head
from eepo.kernels import paged_attention, sampling

CAPABILITIES = [80, 90]  # Ampere, Hopper
INT64 = {
    "sources",
    "slots",
    "end_tokens",
    "tokens",
    "positions",
    "num_sampled",
    "limits",
    "keys",
    "outputs",
    "targets",
}
INT32 = {"live", "out_tokens", "out_lengths", "out_finished", "page_tables"}
COUNTS = {"vocabulary", "window", "stride"}
CACHED = {"query", "new_key", "new_value", "key_pages", "value_pages", "out"}

ATTENTION: dict[str, Any] = {
    "NUM_HEADS": 14, "GROUP": 7, "ROWS": 16, "SIZE": 64, "PADDED": 64, "PAGE": 64, "SPLITS": 1,
    "SOFTCAP": False, "WINDOW": False, "PRECISION": "tf32",
}  # fmt: skip


@pytest.fixture(autouse=True)
def private_triton_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def argument_type(name: str, cached: str) -> str:
    """Return the Triton type with which the wrappers pass an argument."""
    if name in INT64:
        return "*i64"
    if name in INT32:
        return "*i32"
    if name in COUNTS or name.endswith(("_stride", "_row", "_head")):
        return "i32"
    if name in ("scale", "softcap"):
        return "fp32"
    return cached if name in CACHED else "*fp32"


def compile_kernel(
    kernel: Any,
    constants: dict[str, Any],
    capability: int,
    num_warps: int,
    cached: str = "*bf16",
    num_stages: int = 3,
) -> Any:
    signature = {
        name: "constexpr" if name in constants else argument_type(name, cached)
        for name in kernel.arg_names
    }
    # At a launch, Triton detects aligned addresses and sizes.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if name not in {*constants, "scale", "softcap", "vocabulary", "window"}
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_sampling(capability: int) -> None:
    constants = {
        "NUM_BLOCKS": 75,
        "PADDED_BLOCKS": 128,
        "BLOCK": sampling.BLOCK,
        "NUM_END_TOKENS": 2,
    }
    assert compile_kernel(sampling._join_kernel, constants, capability, 8).asm["cubin"]
    assert compile_kernel(
        sampling._block_kernel, {"PADDED_BLOCKS": 128, "BLOCK": sampling.BLOCK}, capability, 4
    ).asm["cubin"]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_lm_head(capability: int) -> None:
    assert compile_kernel(
        head._statistics_kernel, {"NUM_BLOCKS": 38, "BLOCK": head.BLOCK}, capability, 8
    ).asm["cubin"]
    for cached in ("*bf16", "*fp32"):  # of the gradient
        assert compile_kernel(
            head._gradient_kernel, {"BLOCK": head.BLOCK}, capability, 8, cached
        ).asm["cubin"]


@pytest.mark.parametrize(("shape", "cached", "capability"), [
    ({}, "*bf16", 80),
    ({"SPLITS": 16}, "*bf16", 90),
    ({"SIZE": 80, "PADDED": 128, "WINDOW": True}, "*bf16", 90),
    ({"GROUP": 2, "SOFTCAP": True}, "*fp16", 90),
    ({"PRECISION": "ieee"}, "*fp32", 90),
])  # fmt: skip
def test_paged_attention(shape: dict[str, Any], cached: str, capability: int) -> None:
    assert compile_kernel(
        paged_attention._decode_kernel, ATTENTION | shape, capability, 4, cached
    ).asm["cubin"]


@pytest.mark.parametrize(("capability", "kilobytes"), [(80, 163), (90, 227)])
def test_loading_ahead_needs_no_more_shared_memory_than_estimated(
    capability: int, kilobytes: int
) -> None:
    stages = paged_attention.num_stages(2 * 64 * 128 * 2, kilobytes << 10)
    assert stages == paged_attention.STAGES
    shape = {"NUM_HEADS": 16, "GROUP": 8, "SIZE": 128, "PADDED": 128}
    kernel = compile_kernel(
        paged_attention._decode_kernel, ATTENTION | shape, capability, 4, num_stages=stages
    )
    assert kernel.metadata.shared <= stages * 2 * 64 * 128 * 2


def test_joining_of_splits() -> None:
    constants = {"SIZE": 80, "PADDED": 128, "SPLITS": 16}
    assert compile_kernel(paged_attention._join_kernel, constants, 90, 1).asm["cubin"]
