"""Triton on Blackwell: one elected thread issues loads and products; S, O and P live in tensor memory.

The warps wait for S, do softmax with a row a thread (4 warps) or two threads a row (8), and carry O through registers to rescale
it, every block. P V of a block and Q K^T of the next follow each other on the tensor cores, and no softmax hides under them but
that of another CTA. The elected thread is one of these warps'; here its loads and its products are roles of one warp each, which
the CTA's barriers keep in step. With ``warp_specialize`` the loop is split into a load, a product, a softmax and a correction
part, with two S.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..program import Index, Program, Tensor, Tiles
from ..schedule import Builder
from .triton_tiles import LANES, TMEM_COLUMNS, TritonTile, registers

QUARTER, UNIT = 16384, 8  # registers of a sub-partition; per thread they come in eights
BLOCKS = Index(arg="n_blocks")


def lower_tmem(t: TritonTile, tensors: tuple[Tensor, ...], tiles: Tiles, profile: str) -> Program:
    b = Builder(name="triton_fwd", registers=0)
    _buffers(b, t)
    held = _registers(t, _warps(t))
    with b.role("softmax" if t.warp_specialize else "compute", warps=t.warps, registers=held):
        _compute(b, t)
    if t.warp_specialize:
        with b.role("correction", warps=4, registers=held):
            _correction(b, t)
    with b.role("mma", warps=1, registers=held):
        _products(b, t)
    with b.role("load", warps=1, registers=held):
        _loads(b, t)
    return b.build(tensors=tensors, tiles=tiles, profile=profile, tmem_columns=t.tmem_columns)


def _warps(t: TritonTile) -> int:
    """Of the roles: those that compute, and one each for products and loads."""
    return t.warps + (6 if t.warp_specialize else 2)


def _own(t: TritonTile) -> tuple[float, float]:
    """The share of a row that a thread of the tile has: two of them take a row with 8 warps."""
    return 1 - 4 / t.warps, 1.0


def _registers(t: TritonTile, warps: int) -> int:
    """Per thread of the model's ``warps``, so that as many CTAs fit as on the chip: the elected thread has no registers of its
    own, and tensor memory has room for so many CTAs only."""
    most = QUARTER // -(-warps // 4) // 32 // UNIT * UNIT
    least = QUARTER // (8 * warps * (TMEM_COLUMNS // t.tmem_columns + 1)) // UNIT * UNIT + UNIT
    own = registers(t) * t.warps // (t.warps if t.warp_specialize else warps) // UNIT * UNIT
    return min(most, 248, max(least, own))


def _buffers(b: Builder, t: TritonTile) -> None:
    e, kv, d = t.element, t.block_kv, t.head_dim
    b.smem("Qs", rows=LANES, cols=d, bytes_per_element=e)
    for name in ("k", "v"):
        b.ring(name, t.buffers)
        b.mbarrier(f"{name}_full", count=1, stages=t.buffers)
        b.mbarrier(f"{name}_empty", count=1, stages=t.buffers)
        b.smem(f"{name.upper()}s", rows=kv, cols=d, bytes_per_element=e, stages=t.buffers, ring=name)
    for ring in ("q", "p", "o", "stats"):
        b.ring(ring, 1)
    scores = 2 if t.warp_specialize else 1
    b.ring("s", scores)
    for name, count, stages in (("q_full", 1, 1), ("s_full", 1, scores), ("o_full", 1, 1)):
        b.mbarrier(name, count=count, stages=stages)
    b.named_barrier("cta", warps=_warps(t))
    if t.warp_specialize:
        for name in ("p_full", "o_rescaled", "stats_full", "stats_empty"):
            b.mbarrier(name, count=4)
        b.mbarrier("s_empty", count=4, stages=scores)
        b.smem("Stat", rows=LANES, cols=1, bytes_per_element=4)
        b.smem("Max", rows=LANES, cols=1, bytes_per_element=4)
    else:
        b.named_barrier("step", warps=t.warps + 1)
        b.named_barrier("factors", warps=t.warps)
        b.smem("Stat", rows=LANES, cols=1, bytes_per_element=4)
    b.named_barrier("out", warps=t.warps if not t.warp_specialize else 4)
    b._buffer("S", "tmem", LANES, kv, 4, scores, "s")
    b.tmem("P", rows=LANES, cols=kv, bytes_per_element=e)
    b.tmem("O", rows=LANES, cols=d)
    b.registers_tile("scores", rows=LANES, cols=kv)
    b.registers_tile("Pregs", rows=LANES, cols=kv, bytes_per_element=e)
    b.registers_tile("acc", rows=LANES, cols=d)
    b.registers_tile("Oout", rows=LANES, cols=d, bytes_per_element=e)
    for name in ("m", "l", "factor", "LSEout"):
        b.registers_tile(name, rows=LANES, cols=1)


def _wait(b: Builder, barrier: str, ring: str, *, previous: bool = False) -> None:
    b.op("mbarrier_wait", barrier=barrier, ring=ring, previous=previous)


def _arrive(b: Builder, barrier: str, ring: str, *, products: bool = False) -> None:
    b.op("mbarrier_arrive", barrier=barrier, ring=ring, products=products)


def _advance(b: Builder, *rings: str) -> None:
    for ring in rings:
        b.op("advance", ring=ring)


# --- the elected thread ---


def _loads(b: Builder, t: TritonTile) -> None:
    b.op("named_sync", barrier="cta")
    b.op("mbarrier_expect", barrier="q_full", ring="q", of=("Qs",))
    b.op("tma_load", writes="Qs", reads="Q", index=Index(arg="q_block"), barrier="q_full", ring="q", copies=1)
    copies = max(1, t.head_dim // 64)
    with b.loop("i", BLOCKS):
        for name in ("K", "V"):
            ring = name.lower()
            _wait(b, f"{ring}_empty", ring, previous=True)
            b.op("mbarrier_expect", barrier=f"{ring}_full", ring=ring, of=(f"{name}s",))
            b.op(
                "tma_load", writes=f"{name}s", reads=name, index=Index(loop="i"), barrier=f"{ring}_full", ring=ring, copies=copies
            )  # fmt: skip
            _advance(b, ring)


def _products(b: Builder, t: TritonTile) -> None:
    b.op("tmem_alloc")
    b.op("named_sync", barrier="cta")
    _wait(b, "q_full", "q")
    if t.warp_specialize:
        with b.when(Index(arg="n_blocks", const=-1)):
            _scores(b, t)
    with b.loop("i", BLOCKS):
        if t.warp_specialize:  # the next block's S into the other place
            with b.when(Index(arg="n_blocks", const=-2, loop="i", coef=-1)):
                _scores(b, t)
            _wait(b, "v_full", "v")
            _wait(b, "p_full", "p")
            _wait(b, "o_rescaled", "p")
            _advance(b, "p")
        else:
            _scores(b, t)
            b.op("named_sync", barrier="step")  # P is stored and O rescaled
            _wait(b, "v_full", "v")
        b.op("umma", writes="O", reads=("P", "Vs"), accumulate=True)
        _arrive(b, "o_full", "o", products=True)
        _arrive(b, "v_empty", "v", products=True)
        _advance(b, "o", "v")


def _scores(b: Builder, t: TritonTile) -> None:
    _wait(b, "k_full", "k")
    if t.warp_specialize:
        _wait(b, "s_empty", "s", previous=True)
    b.op("umma", writes="S", reads=("Qs", "Ks"), transpose_b=True)
    _arrive(b, "s_full", "s", products=True)
    _arrive(b, "k_empty", "k", products=True)
    _advance(b, "k", "s")


# --- the warps that compute ---


def _compute(b: Builder, t: TritonTile) -> None:
    b.op("named_sync", barrier="cta")
    b.op("zero", writes="m", shape=(LANES,), value=-np.inf)
    b.op("zero", writes="l", shape=(LANES,))
    if not t.warp_specialize:
        _clear(b, t)
    for phase in ("full", "masked"):
        j = Index(arg=None if phase == "full" else "n_full", loop="i")
        with b.loop("i", Index(arg=f"n_{phase}"), overhead=t.overhead):
            _softmax(b, t, j, masked=phase == "masked")
    if t.warp_specialize:
        _wait(b, "stats_empty", "stats", previous=True)
        b.op("to_smem", writes="Stat", reads="l")
        b.op("to_smem", writes="Max", reads="m")
        _arrive(b, "stats_full", "stats")
    else:
        _epilogue(b, t, "l", "m")


def _softmax(b: Builder, t: TritonTile, j: Index, *, masked: bool) -> None:
    """One block: scores in, maximum, factor, exponentials, row sum, P out; O through registers where no other warps do it."""
    _wait(b, "s_full", "s")
    _maximum(b, t, j, masked)
    b.op("lane_factor", writes=("l", "factor"), reads=("m", "m_old"))
    if t.warp_specialize:
        _arrive(b, "s_empty", "s")
        _wait(b, "stats_empty", "stats", previous=True)
        b.op("to_smem", writes="Stat", reads="factor")
        _arrive(b, "stats_full", "stats")
        _advance(b, "stats")
    b.op("exp2", writes="scores", reads=("scores", "m"))
    b.op("row_sum", writes="l", reads="scores")
    b.op("lane_pack", writes="Pregs", reads="scores", share=_own(t))
    if t.warps > 4:  # two threads share a row of S, and others a row of O: the factors go through shared memory
        b.op("to_smem", writes="Stat", reads="factor")
        b.op("named_sync", barrier="factors")
        b.op("from_smem", writes="factor", reads="Stat")
    _wait(b, "o_full", "o", previous=True)  # the last P V has read P and written O
    b.op("tmem_store", writes="P", reads="Pregs", share=_own(t))
    if not t.warp_specialize:
        _rescale(b, t, "factor")
    if t.warp_specialize:
        _arrive(b, "p_full", "p")
        _advance(b, "p")
    else:
        b.op("named_sync", barrier="step")
    _advance(b, "s", "o")


def _maximum(b: Builder, t: TritonTile, j: Index, masked: bool) -> None:
    if t.warps > 4:
        b.op("tmem_load", writes="scores", reads="S", share=_own(t))
        if masked:
            b.op("mask", writes="scores", index=j)
        b.op("row_max", writes=("m", "m_old"), reads="scores")
        return
    names: dict[str, Any] = {"writes": ("m", "m_old", "scores"), "reads": "S", "threshold_log2": 0.0}
    if masked:
        b.op("lane_masked_max", **names, index=j)
    else:
        b.op("lane_max", **names)


def _clear(b: Builder, t: TritonTile) -> None:
    b.op("zero", writes="acc", shape=(LANES, t.head_dim))
    b.op("tmem_store", writes="O", reads="acc", share=_own(t))


def _rescale(b: Builder, t: TritonTile, factor: str) -> None:
    """O comes out of tensor memory, is multiplied and goes back, whether a row's maximum has grown or not."""
    b.op("tmem_load", writes="acc", reads="O", share=_own(t))
    b.op("scale_rows", writes="acc", reads=factor)
    b.op("tmem_store", writes="O", reads="acc", share=_own(t))


def _correction(b: Builder, t: TritonTile) -> None:
    b.op("named_sync", barrier="cta")
    _clear(b, t)
    with b.loop("i", BLOCKS, overhead=t.overhead):
        _wait(b, "stats_full", "stats")
        b.op("from_smem", writes="scale", reads="Stat")
        _arrive(b, "stats_empty", "stats")
        _wait(b, "o_full", "o", previous=True)
        _rescale(b, t, "scale")
        _arrive(b, "o_rescaled", "p")
        _advance(b, "stats", "p", "o")
    _wait(b, "stats_full", "stats")
    b.op("from_smem", writes="sum", reads="Stat")
    b.op("from_smem", writes="max", reads="Max")
    _epilogue(b, t, "sum", "max")


def _epilogue(b: Builder, t: TritonTile, row_sum: str, row_max: str) -> None:
    _wait(b, "o_full", "o", previous=True)
    b.op("tmem_load", writes="acc", reads="O", share=_own(t))
    b.op("lane_divide", writes=("acc", "LSEout"), reads=(row_sum, row_max))
    b.op("lane_pack", writes="Oout", reads="acc", share=_own(t))
    b.op("to_smem", writes="Oout.smem", reads="Oout")
    b.op("named_sync", barrier="out")
    b.op("from_smem", writes="Oout", reads="Oout")
    b.op("store", writes="O", reads="Oout", index=Index(arg="q_block"))
    b.op("store", writes="LSE", reads="LSEout", index=Index(arg="q_block"))
