"""How a stretch of code becomes bundles: one instruction at a time, in a binary's segments, and after an mbarrier's answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashsim.model.gpu import load_gpu
from flashsim.model.instructions import INSTRUCTIONS
from flashsim.model.program import Opcode, Program, Tiles
from flashsim.model.rows import divided
from flashsim.model.schedule import Builder
from flashsim.sim.engine import RESULT, TICKS_PER_CYCLE
from flashsim.sim.pricing import bundle_table

COUNTS = st.dictionaries(st.sampled_from(["ffma", "fadd", "fmnmx", "ex2", "control"]), st.integers(1, 90), min_size=1)
PART = st.fixed_dictionaries({name: st.integers(0, 60) for name in ("fma", "alu", "xu", "other", "stall_cycles")})


def program(**phase: Any) -> Program:
    """Warps that wait for an mbarrier and go on."""
    b = Builder(name="waits", registers=32)
    b.ring("k", 2)
    b.mbarrier("k_full", count=1, stages=2)
    with b.role("consumer", warps=4, registers=32), b.phase(**phase):
        b.op("mbarrier_wait", barrier="k_full", ring="k")
    return b.build(tensors=(), tiles=Tiles(names=("x",), values=np.zeros((1, 1), np.int64)))


def rows(p: Program) -> list[tuple[str, dict[str, int], int]]:
    return [
        (Opcode(row[0]).name, dict(p.bundles[row[1]]) if row[1] >= 0 else {}, int(row[2]))
        for row in p.code
        if row[0] != Opcode.EXIT
    ]


@given(COUNTS, st.lists(PART, min_size=1, max_size=4))
def test_segments_hold_what_there_is_in_the_binarys_proportions(counts: dict[str, int], parts: list[dict[str, int]]) -> None:
    out = divided(counts, parts)
    for name, n in counts.items():
        there = [part[INSTRUCTIONS[name].counter] for part in parts]
        got = [part.get(name, 0) for part in out]
        assert sum(got) == n
        if sum(there):
            assert all(abs(own - n * share / sum(there)) <= 1 for own, share in zip(got, there, strict=True))
    for segment, part in zip(parts, out, strict=True):
        issued = sum(n for name, n in part.items() if name != "stall")
        assert part["stall"] == max(0, segment["stall_cycles"] - issued)


def test_a_wait_asks_and_goes_on_with_the_answer() -> None:
    assert rows(program()) == [("ISSUE", {"try_wait": 1}, 1), ("MB_WAIT", {}, 0), ("DEPEND", {}, 0)]


@pytest.mark.parametrize("serial", [True, False])
def test_what_leads_to_a_wait_comes_before_it_one_by_one(serial: bool) -> None:
    """Three moves, two address instructions, four others and the try: ten, with 20 stalls between them."""
    found = rows(program(counts={"fma": 3, "alu": 2, "other": 5}, stall_cycles=30, serial=serial))
    issued = [(bundle, times) for kind, bundle, times in found if kind == "ISSUE"]
    total: dict[str, int] = {}
    for bundle, times in issued:
        for name, n in bundle.items():
            total[name] = total.get(name, 0) + n * times
    assert total == {"mov": 3, "int_alu": 2, "control": 4, "try_wait": 1, "stall": 20}
    assert "try_wait" in issued[-1][0]
    assert [kind for kind, _, _ in found][-2:] == ["MB_WAIT", "DEPEND"]
    if serial:
        assert [bundle | {"stall": 0} for bundle, _ in issued] == [
            {name: 1, "stall": 0} for name in ["mov"] * 3 + ["int_alu"] * 2 + ["control"] * 4 + ["try_wait"]
        ]
        assert all(bundle["stall"] == 2 for bundle, _ in issued)
    else:
        assert len(issued) < 5


@pytest.mark.parametrize("name", ["h100", "h200", "b200"])
def test_an_answer_takes_what_the_chip_says(name: str) -> None:
    gpu = load_gpu(name)
    p = program()
    (row,) = (i for i, bundle in enumerate(p.bundles) if dict(bundle) == {"try_wait": 1})
    assert gpu.async_ is not None
    assert bundle_table(p, gpu)[row, RESULT] == gpu.async_.mbarrier_try_cycles * TICKS_PER_CYCLE


@pytest.mark.parametrize("at_products", [True, False])
def test_what_prepares_products_stands_at_them(at_products: bool) -> None:
    """O is rescaled after two of four products; their address arithmetic goes where they are, or all over."""
    b = Builder(name="rescale among products", registers=168)
    for name in ("Q", "K"):
        b.smem(name, rows=64, cols=64, bytes_per_element=2)
    b.registers_tile("S", rows=64, cols=64)
    b.registers_tile("O", rows=64, cols=128)
    counts = {"alu": 20, "tensor": 4, "fma": 64}
    with b.role("consumer", warps=4, registers=168), b.phase(counts=counts, stall_cycles=120, at_products=at_products):
        b.op("wgmma", writes="S", reads=("Q", "K"), share=(0.0, 0.5))
        b.op("scale_rows", writes="O", reads="scale")
        b.op("wgmma", writes="S", reads=("Q", "K"), share=(0.5, 1.0))
        b.op("mma_commit")
    p = b.build(tensors=(), tiles=Tiles(names=("x",), values=np.zeros((1, 1), np.int64)))
    issued = [(bundle, times) for kind, bundle, times in rows(p) if kind == "ISSUE"]
    beside = [sum(bundle.get(name, 0) * n for bundle, n in issued if "fmul" in bundle) for name in ("fmul", "int_alu", "stall")]
    total = [sum(bundle.get(name, 0) * n for bundle, n in issued) for name in ("fmul", "int_alu", "stall")]
    assert (beside[0], total) == (64, [64, 20, 120 - 64 - 4 - 20 - 1])
    if at_products:
        assert beside[1] <= 20 / 2  # what two products of four need stands before or after all of O's numbers
    else:
        assert beside[1] > 20 * 0.8
