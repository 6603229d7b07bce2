"""Triton's schedule: what each chip's compiler makes of it, its refusals, and that no op races another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.instructions import counters
from flashsim.model.schedules import get_schedule
from flashsim.sim.hazards import check

FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("a100-80gb", {}), ("a100-80gb", {"num_warps": 4, "num_stages": 4}), ("a100-80gb", {"num_stages": 2}),
    ("h100", {}), ("h100", {"num_warps": 8, "block_kv": 128, "num_stages": 2}),
    ("h100", {"block_q": 64, "num_warps": 4, "num_stages": 4}),
    ("b200", {}), ("b200", {"num_warps": 4, "block_kv": 64}), ("b200", {"warp_specialize": True}),
    ("b200", {"warp_specialize": True, "block_kv": 64, "num_stages": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("gpu", "fields"), FIELDS)
@pytest.mark.parametrize("causal", [False, True])
def test_no_hazards(gpu: str, fields: dict[str, Any], causal: bool) -> None:
    attention = Attention(batch=1, heads_q=2, heads_kv=1, seqlen_q=700, seqlen_kv=633, head_dim=128, causal=causal)
    verdict = check(get_schedule("triton", **fields), load_gpu(gpu), attention)
    assert not verdict.findings, str(verdict)


@pytest.mark.parametrize(
    ("gpu", "warps", "block_kv", "stages", "product", "number"),
    [
        ("a100-80gb", 4, 64, 3, "hmma", 4 * 256),
        ("h100", 4, 64, 3, "wgmma_n64_ss", 4 * 16),
        ("h100", 8, 64, 3, "wgmma_n64_ss", 8 * 8),
        ("b200", 4, 64, 3, "umma_n64_ss", 8),
        ("b200", 4, 64, 3, "umma_n128_ts", 4),
        ("b200", 8, 128, 2, "umma_n128_ts", 8),
    ],
)
def test_products_a_block_are_those_of_the_compiled_kernel(
    gpu: str, warps: int, block_kv: int, stages: int, product: str, number: int
) -> None:
    """256 HMMA a warp, 16 or 8 HGMMA of Q K^T, 8 + 4 UTCHMMA (Triton 3.6.0, tiles of 128 rows, head_dim 128)."""
    schedule = get_schedule("triton", num_warps=warps, block_kv=block_kv, num_stages=stages, block_q=128)
    counts = []
    for keys in (block_kv, 2 * block_kv):
        attention = Attention(batch=1, heads_q=1, seqlen_q=128, seqlen_kv=keys, head_dim=128)
        counts.append(schedule.lower(load_gpu(gpu), attention)[0].instruction_counts(0)[product])
    assert counts[1] - counts[0] == number


@pytest.mark.parametrize(("gpu", "smem"), [("a100-80gb", 98304), ("h100", 131072), ("b200", 131072)])
def test_shared_memory_is_that_of_the_compiled_kernel(gpu: str, smem: int) -> None:
    """128x64, three stages: two places in the ring with mma.sync, three with asynchronous products (Triton 3.6.0's metadata)."""
    schedule = get_schedule("triton", num_warps=4, block_kv=64, num_stages=3)
    attention = Attention(batch=1, heads_q=1, seqlen_q=128, head_dim=128)
    program = schedule.lower(load_gpu(gpu), attention)[0]
    assert smem <= program.smem_bytes <= smem + 512  # beside tiles: row factors
    assert program.tmem_columns == (256 if gpu == "b200" else 0)


@pytest.mark.parametrize(("block_kv", "stages"), [(32, 7), (64, 6), (128, 3)])
def test_a_larger_block_has_as_many_stages_as_fit(block_kv: int, stages: int) -> None:
    attention = Attention(batch=1, heads_q=1, seqlen_q=128, head_dim=128)
    (program,) = get_schedule("triton", block_kv=block_kv).lower(load_gpu("h100"), attention)
    assert {ring.stages for ring in program.rings} == {stages}
    assert program.smem_bytes <= load_gpu("h100").sm.smem_per_cta_bytes


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_on_hopper_it_is_the_tutorials_kernel_for_h100(head_dim: int, causal: bool) -> None:
    """Eight warps, seven places in the ring, as much shared memory as the compiled kernel has, and its instructions a block."""
    attention = Attention(batch=1, heads_q=1, seqlen_q=128, seqlen_kv=1024, head_dim=head_dim, causal=causal)
    (program,) = get_schedule("triton").lower(load_gpu("h100"), attention)
    registers = {64: (117, 126), 128: (125, 168)}[head_dim][causal]
    assert [(role.warps, role.registers) for role in program.roles] == [(8, registers)]
    assert {ring.stages for ring in program.rings} == {7}
    assert program.smem_bytes == {64: 131072, 128: 147456}[head_dim]
    assert program.profile.startswith("sass: triton 3.0.0")
    counts = []
    for keys in (896, 1024):
        a = replace(attention, seqlen_q=keys, seqlen_kv=keys)
        (p,) = get_schedule("triton").lower(load_gpu("h100"), a)
        counts.append(counters(p.instruction_counts(len(p.tiles) - 1)))
    blocks = 128 // {64: 64, 128: 32}[head_dim]
    assert counts[1]["xu"] - counts[0]["xu"] == 8 * blocks * {64: 34, 128: 18}[head_dim]


@pytest.mark.parametrize(
    ("gpu", "fields", "part"),
    [
        ("h100", {"warp_specialize": True}, "set warp_specialize=false"),
        ("h100", {"num_stages": 1}, "change num_stages"),
        ("h100", {"block_q": 96}, "change block_q"),
        ("h100", {"num_warps": 8, "block_q": 64}, "change block_q or num_warps"),
        ("a100-80gb", {"num_warps": 8, "block_q": 64}, "change block_q or num_warps"),
        ("b200", {"block_q": 64}, "change block_q or num_warps"),
        ("b200", {"block_kv": 16}, "it must be 32, 64 or 128"),
        ("b200", {"counts": "counted"}, "it must be one of binary, typical, ideal"),
    ],
)
def test_refusals(gpu: str, fields: dict[str, Any], part: str) -> None:
    attention = Attention(batch=1, heads_q=1, seqlen_q=128, head_dim=128)
    with pytest.raises(ValueError, match=part):
        get_schedule("triton", **fields).lower(load_gpu(gpu), attention)
