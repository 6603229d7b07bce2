"""Occupancy: CTAs per SM for known kernels, worked out by hand, and the sentence where not one fits."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import PAIRS

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.program import Program, Tiles
from flashsim.model.schedule import Builder
from flashsim.model.schedules import get_schedule
from flashsim.model.tiling import occupancy


def kernel(*, warps: int = 4, registers: int = 32, smem: int = 0) -> Program:
    """A kernel that does nothing with these resources."""
    b = Builder(name="kernel", warps=warps, registers=registers)
    if smem:
        b.smem("tile", rows=1, cols=smem, bytes_per_element=1)
    return b.build(tensors=(), tiles=Tiles(names=("n",), values=np.zeros((1, 1), np.int64)))


def shipped(name: str, gpu: str, head_dim: int) -> tuple[Program, ...]:
    return get_schedule(name).lower(load_gpu(gpu), Attention(batch=1, heads_q=1, seqlen_q=1024, head_dim=head_dim))


def test_fa2_on_an_h200_as_the_profiler_saw_it() -> None:
    """head_dim 128: 255 registers a thread leave room for two CTAs of four warps; shared memory would hold three."""
    (program,) = shipped("fa2", "h200", 128)
    fits = occupancy(load_gpu("h200"), program)
    assert (fits.ctas_per_sm, fits.warps_per_sm, fits.limiter) == (2, 8, "registers")
    assert program.smem_bytes == (128 + 64 + 64) * 128 * 2
    assert fits.arithmetic == {
        "registers": "255 x 32 -> 8192 a warp, 16384 a sub-partition: 2 warps each, 4 a CTA -> 2",
        "smem": "(65536 + 1024) B -> 66560 B of 233472 B -> 3",
        "warps": "4 of 64 -> 16",
        "ctas": "at most 32",
    }


@pytest.mark.parametrize(
    ("name", "gpu", "head_dim", "ctas", "limiter"),
    [
        ("fa2", "a100-40gb", 64, 2, "registers"),
        ("fa2", "a100-40gb", 128, 2, "registers"),  # (65536 + 1024) x 2 = 133120 B of 167936 B: SMEM holds two as well
        ("fa2", "a100-40gb", 256, 1, "registers"),  # eight warps: 16 of the 8 x 2 that registers hold
        ("fa2", "h200", 256, 2, "registers"),  # the 64 x 64 tile of sm_90
        ("fa1", "a100-40gb", 64, 2, "registers"),
        ("standard", "a100-40gb", 64, 3, "registers"),
    ],
)
def test_known_kernels(name: str, gpu: str, head_dim: int, ctas: int, limiter: str) -> None:
    fits = occupancy(load_gpu(gpu), shipped(name, gpu, head_dim)[0])
    assert (fits.ctas_per_sm, fits.limiter) == (ctas, limiter)


@pytest.mark.parametrize(("name", "gpu"), PAIRS)
def test_every_shipped_kernel_fits_somewhere(name: str, gpu: str) -> None:
    for head_dim in (32, 64, 128):
        for program in shipped(name, gpu, head_dim):
            fits = occupancy(load_gpu(gpu), program)
            assert 1 <= fits.ctas_per_sm <= 32
            assert fits.warps_per_sm == fits.ctas_per_sm * (program.warps + program.idle_warps) <= 64
            assert fits.ctas_per_sm * program.smem_bytes <= load_gpu(gpu).sm.smem_bytes
            assert fits.warps_per_sm * 32 * program.registers <= load_gpu(gpu).sm.registers


@pytest.mark.parametrize(
    ("resources", "ctas", "limiter"),
    [
        ({"warps": 4, "registers": 32}, 16, "registers"),  # 1024 a warp: 16 warps a sub-partition; warps say 16 too
        ({"warps": 4, "registers": 16}, 16, "warps"),
        ({"warps": 1, "registers": 16}, 32, "ctas"),
        ({"warps": 4, "registers": 33}, 12, "registers"),  # 1056 -> 1280 a warp: 12 warps each
        ({"warps": 3, "registers": 255}, 2, "registers"),  # 8 warps hold two CTAs of three
        ({"warps": 1, "registers": 16, "smem": 100_000}, 2, "smem"),
        ({"warps": 1, "registers": 16, "smem": 115_712}, 2, "smem"),  # 2 x (115712 + 1024) = 233472, to the byte
        ({"warps": 1, "registers": 16, "smem": 115_713}, 1, "smem"),
        ({"warps": 8, "registers": 128}, 2, "registers"),
        ({"warps": 1, "registers": 200}, 8, "registers"),  # 6400 a warp: two a sub-partition, though ten fit in the whole file
    ],
)
def test_four_limits_on_an_h200(resources: dict[str, int], ctas: int, limiter: str) -> None:
    fits = occupancy(load_gpu("h200"), kernel(**resources))
    assert (fits.ctas_per_sm, fits.limiter) == (ctas, limiter)


@given(warps=st.integers(1, 8), registers=st.integers(1, 255), smem=st.integers(0, 100_000), more=st.integers(0, 60))
def test_more_of_anything_never_fits_more_often(warps: int, registers: int, smem: int, more: int) -> None:
    gpu = load_gpu("h200")
    base = occupancy(gpu, kernel(warps=warps, registers=registers, smem=smem)).ctas_per_sm
    assert occupancy(gpu, kernel(warps=warps, registers=min(255, registers + more), smem=smem)).ctas_per_sm <= base
    assert occupancy(gpu, kernel(warps=warps, registers=registers, smem=smem + 1000 * more)).ctas_per_sm <= base
    assert base * warps * registers * 32 <= gpu.sm.registers


def test_a_stage_buffer_named_with_a_dot_shares_its_parent() -> None:
    b = Builder(name="kernel", warps=4, registers=32)
    b.smem("tile", rows=64, cols=64, bytes_per_element=2)
    b.smem("tile.alias", rows=64, cols=64, bytes_per_element=2)
    program = b.build(tensors=(), tiles=Tiles(names=("n",), values=np.zeros((1, 1), np.int64)))
    assert program.smem_bytes == 64 * 64 * 2


REFUSED = [
    (
        kernel(registers=256),
        "kernel needs 256 registers per thread; h200 has at most 255: use smaller tiles, more warps or a smaller head dimension",
    ),
    (
        kernel(smem=232_449),
        "kernel needs 232449 B of shared memory; h200 gives a CTA at most 232448 B: use smaller tiles, fewer stages or a"
        " smaller head dimension",
    ),
    (
        kernel(warps=12, registers=255),
        "kernel does not fit on h200 (registers: 255 x 32 -> 8192 a warp, 16384 a sub-partition: 2 warps each,"
        " 12 a CTA -> 0); use smaller tiles or more warps",
    ),
]


@pytest.mark.parametrize(("program", "sentence"), REFUSED)
def test_refusals_are_sentences(program: Program, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        occupancy(load_gpu("h200"), program)


def test_more_warps_than_an_sm_has_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^kernel does not fit on h200 \(warps: 65 of 64 -> 0\); use smaller tiles or more warps$"
    ):
        occupancy(load_gpu("h200"), kernel(warps=65, registers=16))


def test_the_largest_cta_that_fits_does() -> None:
    assert occupancy(load_gpu("h200"), kernel(smem=232_448)).ctas_per_sm == 1
    assert occupancy(load_gpu("a100-40gb"), kernel(smem=166_912)).ctas_per_sm == 1


def test_the_chip_decides() -> None:
    """The same kernel, with more shared memory on the chip, fits more often."""
    (program,) = shipped("fa2", "a100-40gb", 128)
    slim = replace(program, roles=(replace(program.roles[0], registers=128),))
    assert occupancy(load_gpu("a100-40gb"), slim).ctas_per_sm == 2
    assert occupancy(load_gpu("h200"), slim).ctas_per_sm == 3
