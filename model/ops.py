"""The op vocabulary: one row per tile operation, with what it issues, what completes it and what it means in numpy.

``lower`` writes the warp instructions that one warp of the role issues; ``meaning`` computes the tile's numbers. Costs are
not here: an op issues instructions (:mod:`.instructions`), and the chip prices those (:mod:`.gpu`).
A new op is one row of OPS. Fragment arithmetic follows the PTX ISA's m16n8k16 layout: a thread holds ``rows/8`` rows of a
warp's accumulator and ``rows * cols / 32`` of its elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .instructions import WARP_VECTOR_BYTES
from .program import Buffer, Statement

Array = NDArray[Any]
MMA_M, MMA_N, MMA_K = 16, 8, 16
LOG2_E = float(np.log2(np.e))


class Emitter(Protocol):
    """Where a lowering writes its instructions (implemented by ``schedule.Builder``)."""

    def issue(self, name: str, count: int, *, scoreboard: int = -1, total_bytes: int = 0) -> None: ...
    def wait_scoreboard(self, scoreboard: int) -> None: ...
    def depend(self) -> None: ...
    def marker(self, kind: str, arg: int) -> None: ...


class State(Protocol):
    """What a meaning may touch: the tile's named arrays and global memory (implemented by ``sim.values``)."""

    tiles: dict[str, Array]
    args: Mapping[str, int]
    loops: Mapping[str, int]
    scale: float
    operand: Callable[[Array], Array]

    def index(self, statement: Statement) -> int: ...
    def load(self, tensor: str, block: int, into: str) -> Array: ...
    def store(self, tensor: str, block: int, tile: Array) -> None: ...
    def visible(self, q_block: int, kv_block: int, shape: tuple[int, int]) -> Array: ...


Lowering = Callable[[Emitter, Statement, Mapping[str, Buffer], int], None]
Meaning = Callable[[State, Statement], None]


@dataclass(frozen=True, kw_only=True)
class Op:
    """A row: the op's name, the units it occupies, what completes it if asynchronous, its lowering and its meaning."""

    name: str
    units: str
    completes: str
    lower: Lowering
    meaning: Meaning
    source: str


def _elements(buffer: Buffer, warps: int) -> int:
    """Accumulator elements per thread of a tile spread over ``warps`` warps."""
    return max(1, buffer.rows * buffer.cols // (32 * warps))


def _thread_rows(statement: Statement, buffer: Buffer, warps: int) -> int:
    """Rows of a tile that one thread owns: all warps share the rows under split-Q, each has them all under split-K."""
    rows = buffer.rows if statement.attrs.get("split") == "cols" else buffer.rows // warps
    return max(1, rows // 8)


def _nothing(state: State, statement: Statement) -> None:
    """Ordering ops move no numbers."""


def _silent(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """Structure (loop, when) issues nothing by itself."""


# --- moves -----------------------------------------------------------------------------------------------------------


def _lower_load_async(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    size = buffers[s.writes[0]].size_bytes // warps
    emit.issue("ldgsts", -(-size // WARP_VECTOR_BYTES), total_bytes=size)


def _mean_load(state: State, s: Statement) -> None:
    state.tiles[s.writes[0]] = state.load(s.reads[0], state.index(s), s.writes[0])


def _lower_load(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    size = max(1, buffers[s.writes[0]].size_bytes // warps)
    emit.issue("ldg", -(-size // WARP_VECTOR_BYTES), scoreboard=int(s.attrs.get("scoreboard", 2)), total_bytes=size)


def _lower_wait_load(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    emit.wait_scoreboard(int(s.attrs["scoreboard"]))


def _lower_store(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    size = max(1, buffers[s.reads[0]].size_bytes // warps)
    emit.issue("stg", -(-size // WARP_VECTOR_BYTES), total_bytes=size)


def _mean_store(state: State, s: Statement) -> None:
    state.store(s.writes[0], state.index(s), state.tiles[s.reads[0]])


def _lower_to_smem(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    size = buffers[s.reads[0]].size_bytes // (1 if s.attrs.get("each_warp") else warps)
    emit.issue("sts", max(1, -(-size // WARP_VECTOR_BYTES)))


def _lower_from_smem(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    size = buffers[s.reads[0]].size_bytes // (1 if s.attrs.get("each_warp") else warps)
    emit.issue("lds", max(1, -(-size // WARP_VECTOR_BYTES)), scoreboard=3)
    emit.wait_scoreboard(3)


def _mean_copy(state: State, s: Statement) -> None:
    state.tiles[s.writes[0]] = state.tiles[s.reads[0]]


# --- matrix ----------------------------------------------------------------------------------------------------------


def _mma_shape(s: Statement, buffers: Mapping[str, Buffer], warps: int) -> tuple[int, int, int]:
    """(M, N, K) of one warp: split-Q shares rows, "cols" shares columns, "k" shares the reduction (partial sums)."""
    a, dst = buffers[s.reads[0]], buffers[s.writes[0]]
    m, n, k = dst.rows, dst.cols, a.cols
    split = s.attrs.get("split", "rows")
    if split == "rows":
        m //= warps
    elif split == "cols":
        n //= warps
    else:
        k //= warps
    return m, n, k


def _lower_mma(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    m, n, k = _mma_shape(s, buffers, warps)
    a, b = (buffers[name] for name in s.reads)
    loads = (n // 16 if b.space == "smem" else 0) + (m // MMA_M if a.space == "smem" else 0)
    products = (m // MMA_M) * (n // MMA_N)
    steps = k // MMA_K
    emit.issue("ldsm", loads, scoreboard=0)
    for step in range(steps):
        if loads:
            emit.wait_scoreboard(step % 2)
        if step + 1 < steps:  # fragments of the next k-step load between the products of this one
            emit.issue("ldsm", loads, scoreboard=(step + 1) % 2)
        emit.issue("hmma", products)


def _mean_mma(state: State, s: Statement) -> None:
    a, b = (state.operand(state.tiles[name]).astype(np.float32) for name in s.reads)
    if s.attrs.get("transpose_b"):
        b = b.T
    parts = int(s.attrs.get("parts", 1))
    if s.attrs.get("split") == "k":
        pieces = np.split(np.arange(a.shape[1]), parts)
        out = np.stack([a[:, p] @ b[p] for p in pieces])
    else:
        out = a @ b
    if s.attrs.get("accumulate"):
        out = state.tiles[s.writes[0]] + out
    state.tiles[s.writes[0]] = out


def _lower_zero(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """The first product of a chain takes RZ as its addend: clearing an accumulator issues nothing."""


def _mean_zero(state: State, s: Statement) -> None:
    state.tiles[s.writes[0]] = np.full(s.attrs["shape"], s.attrs.get("value", 0.0), dtype=np.float32)


# --- vector ----------------------------------------------------------------------------------------------------------


def _lower_mask(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    n = _elements(buffers[s.writes[0]], warps)
    emit.issue("int_alu", 2 * n)  # compare and select


def _mean_mask(state: State, s: Statement) -> None:
    tile = state.tiles[s.writes[0]]
    own = s.attrs.get("q_index")
    q_block = state.args["q_block"] if own is None else own.value(state.args, state.loops)
    seen = state.visible(q_block, state.index(s), (tile.shape[-2], tile.shape[-1]))
    state.tiles[s.writes[0]] = np.where(seen, tile, -np.inf).astype(np.float32)


def _lower_row_max(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    tile = buffers[s.reads[0]]
    rows = _thread_rows(s, tile, warps)
    emit.depend()
    emit.issue("fmnmx", _elements(tile, warps))
    for _ in range(2):  # four threads share a row: two exchange steps
        emit.depend()
        emit.issue("shfl", rows)
        emit.depend()
        emit.issue("fmnmx", rows)


def _mean_row_max(state: State, s: Statement) -> None:
    tile, name = state.tiles[s.reads[0]], s.writes[0]
    if s.attrs.get("split") == "cols":
        parts = np.stack(np.split(tile, int(s.attrs["parts"]), axis=-1))
        state.tiles[name] = parts.max(axis=-1)
        return
    if len(s.writes) > 1:
        state.tiles[s.writes[1]] = state.tiles[name]
    top = tile.max(axis=-1)
    state.tiles[name] = np.maximum(state.tiles[name], top) if len(s.writes) > 1 else top


def _lower_exp2(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    tile = buffers[s.writes[0]]
    n = _elements(tile, warps)
    emit.issue("fmul", _thread_rows(s, tile, warps))  # scaled maximum, one per row
    emit.issue("ffma", n)
    emit.issue("ex2", n)


def _finite(m: Array) -> Array:
    """A row with no visible key has maximum -inf; subtracting 0 instead keeps its exponentials at 0 (FA2's rule)."""
    return np.where(np.isneginf(m), np.float32(0.0), m)


def _mean_exp2(state: State, s: Statement) -> None:
    c = np.float32(state.scale * LOG2_E)
    tile, m = state.tiles[s.reads[0]], _finite(state.tiles[s.reads[1]])
    state.tiles[s.writes[0]] = np.exp2(tile * c - m[..., None] * c, dtype=np.float32)


def _lower_row_sum(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    emit.issue("fadd", _elements(buffers[s.reads[0]], warps))


def _mean_row_sum(state: State, s: Statement) -> None:
    tile, name = state.tiles[s.reads[0]], s.writes[0]
    if s.attrs.get("split") == "cols":
        state.tiles[name] = np.stack(np.split(tile, int(s.attrs["parts"]), axis=-1)).sum(axis=-1)
    else:
        state.tiles[name] = state.tiles[name] + tile.sum(axis=-1)


def _lower_quad_sum(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    rows = _thread_rows(s, buffers[s.attrs["like"]], warps)
    for _ in range(2):
        emit.depend()
        emit.issue("shfl", rows)
        emit.depend()
        emit.issue("fadd", rows)


def _lower_rescale(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    o = buffers[s.writes[0]]
    rows = _thread_rows(s, o, warps)
    emit.depend()
    emit.issue("fadd", rows)
    emit.issue("fmul", rows)
    emit.depend()
    emit.issue("ex2", rows)
    emit.depend()
    emit.issue("fmul", rows + _elements(o, warps))


def _mean_rescale(state: State, s: Statement) -> None:
    """O and l times exp2((m_previous - m) * scale)."""
    c = np.float32(state.scale * LOG2_E)
    new, old = (state.tiles[name] for name in s.reads)
    factor = np.exp2((old - _finite(new)) * c, dtype=np.float32)
    state.tiles[s.writes[0]] = state.tiles[s.writes[0]] * factor[:, None]
    state.tiles[s.writes[1]] = state.tiles[s.writes[1]] * factor


def _lower_convert(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    emit.issue("f2fp", max(1, _elements(buffers[s.reads[0]], warps) // 2))
    emit.depend()


def _mean_convert(state: State, s: Statement) -> None:
    state.tiles[s.writes[0]] = state.operand(state.tiles[s.reads[0]])


def _lower_divide(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    o = buffers[s.writes[0]]
    rows = _thread_rows(s, o, warps)
    emit.depend()
    emit.issue("rcp", rows)
    emit.issue("lg2", rows)
    emit.depend()
    emit.issue("ffma", rows)
    emit.issue("fmul", _elements(o, warps))


def _mean_divide(state: State, s: Statement) -> None:
    """O / l and LSE = scale * m + ln l; a row that saw no key gives O = 0 and LSE = -inf."""
    o, lse = s.writes
    l, m = (state.tiles[name] for name in s.reads)
    with np.errstate(divide="ignore"):
        state.tiles[lse] = np.where(l > 0, state.scale * _finite(m) + np.log(l), -np.inf).astype(np.float32)
    state.tiles[o] = (state.tiles[o] / np.where(l > 0, l, 1.0)[:, None]).astype(np.float32)


# --- split-K: partial results of several warps ---


def _lower_cross_warp(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """Row statistics of every warp go through shared memory: store, barrier, load all, combine."""
    rows = _thread_rows(s, buffers[s.attrs["like"]], warps)
    combine = "fmnmx" if s.attrs["combine"] == "max" else "fadd"
    emit.depend()
    emit.issue("sts32", rows)
    emit.issue("control", 1)
    emit.marker("barrier", int(s.attrs.get("arg", 0)))
    emit.issue("lds32", rows * warps, scoreboard=3)
    emit.wait_scoreboard(3)
    emit.issue(combine, rows * (warps - 1))


def _mean_cross_warp(state: State, s: Statement) -> None:
    parts = state.tiles[s.reads[0]]
    state.tiles[s.writes[0]] = parts.max(axis=0) if s.attrs["combine"] == "max" else parts.sum(axis=0)


def _lower_cross_warp_tile(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """Partial tiles of all warps are summed through shared memory; each warp keeps its share of the sum."""
    size = buffers[s.reads[0]].size_bytes
    emit.depend()
    emit.issue("sts", -(-size // WARP_VECTOR_BYTES))
    emit.issue("control", 1)
    emit.marker("barrier", int(s.attrs.get("arg", 0)))
    emit.issue("lds", -(-size // WARP_VECTOR_BYTES), scoreboard=3)
    emit.wait_scoreboard(3)
    emit.issue("fadd", max(1, size // 4 // 32 // warps * (warps - 1)))


def _mean_cross_warp_tile(state: State, s: Statement) -> None:
    state.tiles[s.writes[0]] = state.tiles[s.reads[0]].sum(axis=0)


def _lower_fragments(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """Operand fragments that stay in registers: this warp's share of the tile, 16 x 16 an LDSM.x4."""
    tile = buffers[s.reads[0]]
    emit.issue("ldsm", max(1, tile.rows * tile.cols // 256 // warps), scoreboard=4)
    emit.wait_scoreboard(4)


def _lower_merge(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """Both parts are rescaled and divided in every step: what FA2 defers to the end."""
    o = buffers[s.writes[0]]
    rows = max(1, o.rows // 8)
    emit.issue("fmnmx", rows)
    emit.issue("fadd", 2 * rows)
    emit.issue("fmul", 4 * rows)
    emit.issue("ex2", 2 * rows)
    emit.issue("ffma", rows)
    emit.issue("rcp", rows)
    emit.depend()
    emit.issue("fmul", _elements(o, warps))
    emit.issue("ffma", _elements(o, warps))


def _mean_merge(state: State, s: Statement) -> None:
    """FA1 algorithm 1, lines 11-13: (O, l, m) of the blocks so far and of this block, normalised."""
    o, l, m = (state.tiles[name] for name in s.writes)
    o_new, l_new, m_new = (state.tiles[name] for name in s.reads)
    c = np.float32(state.scale * LOG2_E)
    top = np.maximum(m, m_new)
    old = l * np.exp2((m - _finite(top)) * c, dtype=np.float32)
    fresh = np.exp2((m_new - _finite(top)) * c, dtype=np.float32)
    total = old + fresh * l_new
    divisor = np.where(total > 0, total, 1.0)[:, None]
    state.tiles[s.writes[0]] = ((old[:, None] * o + fresh[:, None] * o_new) / divisor).astype(np.float32)
    state.tiles[s.writes[1]], state.tiles[s.writes[2]] = total.astype(np.float32), top


def _lower_log_sum(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    emit.issue("lg2", 1)
    emit.issue("ffma", 1)


def _mean_log_sum(state: State, s: Statement) -> None:
    l, m = (state.tiles[name] for name in s.reads)
    with np.errstate(divide="ignore"):
        value = np.where(l > 0, state.scale * _finite(m) + np.log(l), -np.inf)
    state.tiles[s.writes[0]] = value.astype(np.float32)


# --- order -----------------------------------------------------------------------------------------------------------


def _lower_marker(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    emit.issue("control", 1)
    emit.marker(s.kind, int(s.attrs.get("arg", 0)))


def _op(name: str, units: str, lower: Lowering, meaning: Meaning, source: str, completes: str = "in order") -> Op:
    return Op(name=name, units=units, completes=completes, lower=lower, meaning=meaning, source=source)


_ROWS = (
    _op("load_async", "lsu, L2, HBM, SMEM", _lower_load_async, _mean_load, "PTX cp.async", "its commit group"),
    _op("load", "lsu, L2, HBM", _lower_load, _mean_load, "PTX ld.global", "its scoreboard"),
    _op("wait_load", "-", _lower_wait_load, _nothing, "SASS scoreboard"),
    _op("store", "lsu, L2, HBM", _lower_store, _mean_store, "PTX st.global", "posted"),
    _op("to_smem", "lsu, SMEM", _lower_to_smem, _mean_copy, "PTX st.shared.v4"),
    _op("from_smem", "lsu, SMEM", _lower_from_smem, _mean_copy, "PTX ld.shared.v4", "its scoreboard"),
    _op("mma", "tensor, lsu, SMEM", _lower_mma, _mean_mma, "PTX mma.sync.m16n8k16 and ldmatrix.x4"),
    _op("zero", "-", _lower_zero, _mean_zero, "RZ addend"),
    _op("mask", "alu", _lower_mask, _mean_mask, "FA2 sec. 3.1 (causal masking)"),
    _op("row_max", "alu, lsu", _lower_row_max, _mean_row_max, "FA2 alg. 1 line 9"),
    _op("exp2", "fma, mufu", _lower_exp2, _mean_exp2, "FA2 alg. 1 line 9, exp2 form"),
    _op("row_sum", "fma", _lower_row_sum, _mean_row_sum, "FA2 alg. 1 line 9"),
    _op("quad_sum", "lsu, fma", _lower_quad_sum, _nothing, "four threads of a quad share a row"),
    _op("rescale", "fma, mufu", _lower_rescale, _mean_rescale, "FA2 alg. 1 line 10"),
    _op("convert", "alu", _lower_convert, _mean_convert, "PTX cvt.rn.bf16x2.f32"),
    _op("divide", "mufu, fma", _lower_divide, _mean_divide, "FA2 alg. 1 lines 12-13"),
    _op("cross_warp", "lsu, SMEM, alu or fma", _lower_cross_warp, _mean_cross_warp, "FA2 sec. 3.3 (split-K warps)", "a CTA barrier"),
    _op("cross_warp_tile", "lsu, SMEM, fma", _lower_cross_warp_tile, _mean_cross_warp_tile, "FA2 sec. 3.3", "a CTA barrier"),
    _op("fragments", "lsu, SMEM", _lower_fragments, _mean_copy, "PTX ldmatrix.x4", "its scoreboard"),
    _op("merge", "fma, mufu, alu", _lower_merge, _mean_merge, "FA1 alg. 1 lines 10-13"),
    _op("log_sum", "mufu, fma", _lower_log_sum, _mean_log_sum, "FA2 alg. 1 line 13"),
    _op("commit", "-", _lower_marker, _nothing, "PTX cp.async.commit_group"),
    _op("wait_group", "-", _lower_marker, _nothing, "PTX cp.async.wait_group"),
    _op("barrier", "-", _lower_marker, _nothing, "PTX bar.sync"),
    _op("loop", "-", _silent, _nothing, "structure"),
    _op("end", "-", _silent, _nothing, "structure"),
    _op("when", "-", _silent, _nothing, "structure"),
    _op("end_when", "-", _silent, _nothing, "structure"),
)

OPS: dict[str, Op] = {op.name: op for op in _ROWS}
