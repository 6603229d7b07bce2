"""FA3's products and switches: what is refused without a producer, and that its tiles are loaded once whoever loads them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.program import Program, Tiles
from flashsim.model.schedule import Builder
from flashsim.model.schedules import get_schedule
from flashsim.sim.chip import bundle_counts

H100 = load_gpu("h100")
PROBLEM: dict[str, Any] = {"batch": 1, "heads_q": 2, "seqlen_q": 512, "seqlen_kv": 1000, "head_dim": 128}


def lowered(**fields: Any) -> Program:
    (program,) = get_schedule("fa3", **fields).lower(H100, Attention(**PROBLEM))
    return program


@pytest.mark.parametrize(
    ("fields", "shape", "sentence"),
    [
        ({"stages": 1}, {}, "fa3 without warp specialization has stages=1; a warpgroup loads one block while it multiplies"),
        ({}, {"dtype": "fp8"}, "fa3 in fp8 has V transposed by its producer's warpgroup: keep warp_specialization"),
        ({"cluster": 2}, {}, "fa3 has cluster=2, and only a producer waits for another CTA's empty stages"),
    ],
)
def test_what_needs_a_producer_is_refused_without_one(fields: dict[str, Any], shape: dict[str, Any], sentence: str) -> None:
    schedule = get_schedule("fa3", warp_specialization=False, **fields)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        schedule.lower(H100, Attention(**{**PROBLEM, **shape}))


@pytest.mark.parametrize("overlap", [True, False])
def test_each_tile_is_loaded_once_whoever_loads_it(overlap: bool) -> None:
    """Blocks by tensor over all roles of a CTA; a warp of four that load together brings a quarter of the bytes."""
    loads, shares = [], []
    for on in (True, False):
        program = lowered(warp_specialization=on, intra_overlap=overlap, block_kv=64, cluster=1)
        found = [
            (s.reads[0], s.writes[0], s.index.value(args, loops))
            for role in range(len(program.roles))
            for s, args, loops in program.walk(1, role)
            if s.kind == "tma_load" and s.index is not None
        ]
        assert len(set(found)) == len(found)
        loads.append(sorted(found))
        sizes = {row[4] for row in program.code if program.statements[row[8]].kind == "tma_load" and row[4] > 0}
        shares.append(max(sizes))
    assert loads[0] == loads[1]
    assert shares[0] == 4 * shares[1] == 64 * 128 * 2


def test_without_a_producer_a_cta_keeps_all_its_registers_and_has_no_empty_barriers() -> None:
    program = lowered(warp_specialization=False)
    assert [role.name for role in program.roles] == ["consumer0", "consumer1"]
    assert {role.registers for role in program.roles} == {255}
    assert not [b.name for b in program.barriers if b.name.endswith("empty")]


def product(rows: int, warps: int, cols: int = 64) -> Program:
    """One role multiplies a tile of ``rows`` rows."""
    b = Builder(name="product", registers=128)
    b.smem("A", rows=rows, cols=64, bytes_per_element=2)
    b.smem("B", rows=cols, cols=64, bytes_per_element=2)
    b.registers_tile("C", rows=rows, cols=cols)
    with b.role("compute", warps=warps, registers=128):
        b.op("wgmma", writes="C", reads=("A", "B"), transpose_b=True)
    return b.build(tensors=(), tiles=Tiles(names=("n",), values=np.ones((1, 1), np.int64)))


def test_warpgroups_of_a_role_share_a_tiles_rows() -> None:
    """64 columns of K are four k-steps; a warp issues them once for each 64 rows of its warpgroup."""
    for rows, warps, steps in ((64, 4, 4), (128, 4, 8), (128, 8, 4), (192, 12, 4)):
        program = product(rows, warps)
        counts = zip(program.bundles, bundle_counts(program)[0], strict=True)
        issued = sum(int(n) * dict(bundle).get("wgmma_n64_ss", 0) for bundle, n in counts)
        assert issued == steps * warps, (rows, warps)


@pytest.mark.parametrize(
    ("rows", "warps", "cols", "words"),
    [
        (96, 4, 64, "C has 96 rows for 4 warps; a warpgroup is four warps and its wgmma has 64 rows, so it takes a mult"),
        (64, 8, 64, "C has 64 rows for 8 warps; .* so it takes a multiple of 128"),
        (64, 4, 300, "C has 300 columns; wgmma's N is a multiple of 8 up to 256: change cols"),
    ],
)
def test_a_tile_that_no_product_covers_is_refused(rows: int, warps: int, cols: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        product(rows, warps, cols)


def test_a_tile_that_does_not_fit_a_warpgroups_registers_is_refused() -> None:
    words = "fa3 tile 192x176 holds 196 registers a thread of S, P and O at head_dim 128, and 3 consumer warpgroups have 160 each"
    with pytest.raises(ValueError, match=words):
        lowered(block_q=192)
