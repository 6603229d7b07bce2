"""The op vocabulary: one row per tile operation, with the units it occupies, what completes it, what it issues and means.

``lower`` writes the warp instructions that one warp of the role issues (:mod:`.lowering`); ``meaning`` computes the tile's
numbers (:mod:`.meaning`). Costs are not here: an op issues instructions (:mod:`.instructions`), and the chip prices those
(:mod:`.gpu`). A new op is one row of OPS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from . import lowering, lowering_async, lowering_tmem, meaning, meaning_tmem
from .program import Buffer, Statement

Lowering = Callable[[lowering.Emitter, Statement, Mapping[str, Buffer], int], None]
Meaning = Callable[[meaning.State, Statement], None]


@dataclass(frozen=True, kw_only=True)
class Op:
    """A row: the op's name, the units it occupies, what completes it if asynchronous, its lowering and its meaning."""

    name: str
    units: str
    completes: str
    lower: Lowering
    meaning: Meaning
    source: str


def _op(name: str, units: str, lower: Lowering, means: Meaning, source: str, completes: str = "in order") -> Op:
    return Op(name=name, units=units, completes=completes, lower=lower, meaning=means, source=source)


_ROWS = (
    _op("setup", "fma, alu", lowering.setup, meaning.nothing, "a tile's addresses and row numbers, before its first load"),
    _op("load_async", "lsu, L2, HBM, SMEM", lowering.load_async, meaning.load, "PTX cp.async", "its commit group"),
    _op("load", "lsu, L2, HBM", lowering.load, meaning.load, "PTX ld.global", "its scoreboard"),
    _op("wait_load", "-", lowering.wait_load, meaning.nothing, "SASS scoreboard"),
    _op("store", "lsu, L2, HBM", lowering.store, meaning.store, "PTX st.global", "posted"),
    _op("to_smem", "lsu, SMEM", lowering.to_smem, meaning.copy, "PTX st.shared.v4"),
    _op("from_smem", "lsu, SMEM", lowering.from_smem, meaning.copy, "PTX ld.shared.v4", "its scoreboard"),
    _op("mma", "tensor, lsu, SMEM", lowering.mma, meaning.mma, "PTX mma.sync.m16n8k16 and ldmatrix.x4"),
    _op("move", "fma", lowering.move, meaning.copy, "SASS MOV"),
    _op("column", "-", lowering.silent, meaning.column, "the lane of a sector that a thread's access asked for"),
    _op("zero", "-", lowering.zero, meaning.zero, "RZ addend"),
    _op("mask", "alu", lowering.mask, meaning.mask, "FA2 sec. 3.1 (causal masking)"),
    _op("row_max", "alu, lsu", lowering.row_max, meaning.row_max, "FA2 alg. 1 line 9"),
    _op("exp2", "fma, mufu", lowering.exp2, meaning.exp2, "FA2 alg. 1 line 9, exp2 form"),
    _op("row_sum", "fma", lowering.row_sum, meaning.row_sum, "FA2 alg. 1 line 9"),
    _op("quad_sum", "lsu, fma", lowering.quad_sum, meaning.nothing, "four threads of a quad share a row"),
    _op("rescale", "fma, mufu", lowering.rescale, meaning.rescale, "FA2 alg. 1 line 10"),
    _op("row_scale", "fma, mufu", lowering.row_scale, meaning.row_scale, "FA2 alg. 1 line 10, the factor and l"),
    _op("scale_rows", "fma", lowering.scale_rows, meaning.scale_rows, "FA2 alg. 1 line 10, O"),
    _op("convert", "alu", lowering.convert, meaning.convert, "PTX cvt.rn.bf16x2.f32"),
    _op("divide", "mufu, fma", lowering.divide, meaning.divide, "FA2 alg. 1 lines 12-13"),
    _op(
        "cross_warp",
        "lsu, SMEM, alu or fma",
        lowering.cross_warp,
        meaning.cross_warp,
        "FA2 sec. 3.3 (split-K warps)",
        "a CTA barrier",
    ),
    _op("cross_warp_tile", "lsu, SMEM, fma", lowering.cross_warp_tile, meaning.cross_warp_tile, "FA2 sec. 3.3", "a CTA barrier"),
    _op("fragments", "lsu, SMEM", lowering.fragments, meaning.copy, "PTX ldmatrix.x4", "its scoreboard"),
    _op("merge", "fma, mufu, alu", lowering.merge, meaning.merge, "FA1 alg. 1 lines 10-13"),
    _op("divide_rows", "mufu, fma", lowering.divide_rows, meaning.divide_rows, "FA1 alg. 1 line 12, a divide a block"),
    _op("spill", "lsu, L2", lowering.spill, meaning.nothing, "SASS STL: more values alive than a thread has registers", "posted"),
    _op("refill", "lsu, SMEM", lowering.refill, meaning.nothing, "SASS LDL: local memory lies in L1", "its scoreboard"),
    _op("log_sum", "mufu, fma", lowering.log_sum, meaning.log_sum, "FA2 alg. 1 line 13"),
    _op("start_code", "-", lowering.start_code, meaning.nothing, "SASS: indices, addresses, ULDC, barriers' initialisation"),
    _op("commit", "-", lowering.marker, meaning.nothing, "PTX cp.async.commit_group"),
    _op("wait_group", "-", lowering.marker, meaning.nothing, "PTX cp.async.wait_group"),
    _op("barrier", "-", lowering.marker, meaning.nothing, "PTX bar.sync"),
    _op("tma_load", "TMA, L2, HBM", lowering_async.tma_load, meaning.load, "PTX cp.async.bulk.tensor", "its mbarrier"),
    _op("tma_store", "TMA, L2, HBM, SMEM", lowering_async.tma_store, meaning.store, "PTX cp.async.bulk.tensor", "its group"),
    _op("store_wait", "-", lowering_async.store_wait, meaning.nothing, "PTX cp.async.bulk.wait_group.read"),
    _op("mbarrier_expect", "-", lowering_async.mbarrier_expect, meaning.nothing, "PTX mbarrier.arrive.expect_tx"),
    _op("mbarrier_arrive", "-", lowering_async.mbarrier_arrive, meaning.nothing, "PTX mbarrier.arrive"),
    _op("mbarrier_wait", "-", lowering_async.mbarrier_wait, meaning.nothing, "PTX mbarrier.try_wait.parity"),
    _op("advance", "-", lowering_async.advance, meaning.nothing, "CUTLASS PipelineState::operator++"),
    _op("tile", "-", lowering_async.tile, meaning.nothing, "a persistent kernel's loop over tiles"),
    _op("transpose", "lsu, SMEM, alu", lowering_async.transpose, meaning.copy, "FA3 sec. 3.3 (V transpose in the producer)"),
    _op("named_sync", "-", lowering_async.named, meaning.nothing, "PTX barrier.sync with a thread count"),
    _op("named_arrive", "-", lowering_async.named, meaning.nothing, "PTX barrier.arrive"),
    _op("wgmma", "tensor, SMEM", lowering_async.product, meaning.mma, "PTX wgmma.mma_async", "its product group"),
    _op("mma_commit", "-", lowering_async.product_group, meaning.nothing, "PTX wgmma.commit_group"),
    _op("mma_wait", "-", lowering_async.product_group, meaning.nothing, "PTX wgmma.wait_group"),
    _op("stmatrix", "lsu, SMEM", lowering_async.stmatrix, meaning.copy, "PTX stmatrix.x4"),
    _op("fence_async", "-", lowering_async.control, meaning.nothing, "PTX fence.proxy.async"),
    _op("loop_back", "-", lowering_async.loop_back, meaning.nothing, "SASS BRA: to a loop's begin"),
    _op("branch", "-", lowering_async.control, meaning.nothing, "SASS BRA: around what another warpgroup does for all"),
    _op("setmaxnreg", "-", lowering_async.control, meaning.nothing, "PTX setmaxnreg"),
    _op("cluster_sync", "-", lowering.silent, meaning.nothing, "PTX barrier.cluster.arrive and wait"),
    _op("umma", "tensor, SMEM, TMEM", lowering_tmem.product, meaning.mma, "PTX tcgen05.mma", "an mbarrier (tcgen05.commit)"),
    _op("tmem_alloc", "TMEM", lowering_tmem.tmem_alloc, meaning.nothing, "PTX tcgen05.alloc"),
    _op("tmem_free", "TMEM", lowering.silent, meaning.nothing, "PTX tcgen05.dealloc"),
    _op("tmem_load", "TMEM", lowering_tmem.tmem_load, meaning.copy, "PTX tcgen05.ld.32x32b.x16", "tcgen05.wait::ld"),
    _op("tmem_store", "TMEM", lowering_tmem.tmem_store, meaning_tmem.copy_whole, "PTX tcgen05.st.32x32b.x16", "tcgen05.wait::st"),
    _op("lane_max", "TMEM, alu", lowering_tmem.row_max, meaning_tmem.lane_max, "FA4 sec. 3.1 (one thread a row)"),
    _op("lane_masked_max", "TMEM, alu", lowering_tmem.masked_row_max, meaning_tmem.lane_masked_max, "FA4 code, mask.py"),
    _op("lane_factor", "fma, mufu, alu", lowering_tmem.row_factor, meaning.row_scale, "FA4 sec. 3.1 (conditional rescaling)"),
    _op("lane_exp2", "fma, mufu, alu", lowering_tmem.exp2, meaning_tmem.lane_exp2, "FA4 sec. 3.1 (emulated exponentials)"),
    _op("lane_sum", "fma", lowering_tmem.row_sum, meaning.row_sum, "FA2 alg. 1 line 9"),
    _op("lane_pack", "alu", lowering_tmem.pack, meaning_tmem.convert_whole, "PTX cvt.rn.bf16x2.f32"),
    _op("vote_scale", "alu, TMEM, fma", lowering_tmem.vote_scale, meaning.scale_rows, "FA4 sec. 3.1 (correction warps)"),
    _op("lane_divide", "mufu, fma", lowering_tmem.divide, meaning.divide, "FA2 alg. 1 lines 12-13"),
    _op("loop", "-", lowering.silent, meaning.nothing, "structure"),
    _op("end", "-", lowering.silent, meaning.nothing, "structure"),
    _op("when", "-", lowering.silent, meaning.nothing, "structure"),
    _op("end_when", "-", lowering.silent, meaning.nothing, "structure"),
    _op("ending", "-", lowering.silent, meaning.nothing, "structure"),
)

OPS: dict[str, Op] = {op.name: op for op in _ROWS}
