"""What one warp issues for each tile operation: the lowerings that ``ops.OPS`` names.

Fragment arithmetic follows the PTX ISA's m16n8k16 layout: a thread holds ``rows/8`` rows of a warp's accumulator and
``rows * cols / 32`` of its elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from .instructions import WARP_VECTOR_BYTES
from .program import Buffer, Statement

MMA_M, MMA_N, MMA_K = 16, 8, 16


class Emitter(Protocol):
    """Where a lowering writes its instructions (implemented by ``schedule.Builder``)."""

    def issue(
        self, name: str, count: int, *, scoreboard: int = -1, total_bytes: int = 0, barrier: str = "", ring: str = ""
    ) -> None: ...
    def wait_scoreboard(self, scoreboard: int) -> None: ...
    def depend(self) -> None: ...
    def marker(self, kind: str, arg: int) -> None: ...
    def order(
        self, kind: str, barrier: str = "", ring: str = "", *, count: int = 0, total_bytes: int = 0, arg: int = -1
    ) -> None: ...


def elements(buffer: Buffer, warps: int) -> int:
    """Accumulator elements per thread of a tile spread over ``warps`` warps."""
    return max(1, buffer.rows * buffer.cols // (32 * warps))


def portion(n: int, s: Statement) -> int:
    """How many of ``n`` a statement does itself: those between the two numbers of its ``share``, all without it."""
    first, last = (float(x) for x in s.attrs.get("share", (0.0, 1.0)))
    return round(n * last) - round(n * first)


def thread_rows(statement: Statement, buffer: Buffer, warps: int) -> int:
    """Rows of a tile that one thread owns: all warps share the rows under split-Q, each has them all under split-K."""
    rows = buffer.rows if statement.attrs.get("split") == "cols" else buffer.rows // warps
    return max(1, rows // 8)


def silent(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """Structure (loop, when), and what the access before it did already, issue nothing."""


def setup(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    emit.issue("control", 1)  # the CTA's number; how much address arithmetic follows only a binary tells


def load_async(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    size = buffers[s.writes[0]].size_bytes // warps
    emit.issue("ldgsts", -(-size // WARP_VECTOR_BYTES), total_bytes=size)


def load(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    size = max(1, buffers[s.writes[0]].size_bytes // warps)
    emit.issue("ldg", -(-size // WARP_VECTOR_BYTES), scoreboard=int(s.attrs.get("scoreboard", 2)), total_bytes=size)


def wait_load(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    emit.wait_scoreboard(int(s.attrs["scoreboard"]))


def store(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    size = max(1, buffers[s.reads[0]].size_bytes // warps)
    emit.issue("stg", -(-size // WARP_VECTOR_BYTES), total_bytes=size)


def to_smem(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    size = buffers[s.reads[0]].size_bytes // (1 if s.attrs.get("each_warp") else warps)
    emit.issue("sts", max(1, -(-size // WARP_VECTOR_BYTES)))


def from_smem(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    size = buffers[s.reads[0]].size_bytes // (1 if s.attrs.get("each_warp") else warps)
    emit.issue("lds", max(1, -(-size // WARP_VECTOR_BYTES)), scoreboard=3)
    emit.wait_scoreboard(3)


def mma_shape(s: Statement, buffers: Mapping[str, Buffer], warps: int) -> tuple[int, int, int]:
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


def mma(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    m, n, k = mma_shape(s, buffers, warps)
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


def move(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    emit.issue("mov", elements(buffers[s.reads[0]], warps))


def zero(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """The first product of a chain takes RZ as its addend: clearing an accumulator issues nothing."""


def mask(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    n = elements(buffers[s.writes[0]], warps)
    emit.issue("int_alu", 2 * n)  # compare and select


def row_max(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    tile = buffers[s.reads[0]]
    rows = thread_rows(s, tile, warps)
    emit.depend()
    emit.issue("fmnmx", portion(elements(tile, warps), s))
    for _ in range(2 if portion(rows, s) else 0):  # four threads share a row: two exchange steps
        emit.depend()
        emit.issue("shfl", portion(rows, s))
        emit.depend()
        emit.issue("fmnmx", portion(rows, s))


def exp2(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    tile = buffers[s.writes[0]]
    n = elements(tile, warps)
    emit.issue("fmul", portion(thread_rows(s, tile, warps), s))  # scaled maximum, one per row
    emit.issue("ffma", portion(n, s))
    emit.issue("ex2", portion(n, s))


def row_sum(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    emit.issue("fadd", portion(elements(buffers[s.reads[0]], warps), s))


def quad_sum(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    rows = thread_rows(s, buffers[s.attrs["like"]], warps)
    for _ in range(2):
        emit.depend()
        emit.issue("shfl", rows)
        emit.depend()
        emit.issue("fadd", rows)


def rescale(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    o = buffers[s.writes[0]]
    rows = thread_rows(s, o, warps)
    emit.depend()
    emit.issue("fadd", rows)
    emit.issue("fmul", rows)
    emit.depend()
    emit.issue("ex2", rows)
    emit.depend()
    undo = rows if s.attrs.get("divided") else 0  # O was divided by l: the factor takes l along
    emit.issue("fmul", rows + undo + elements(o, warps))


def row_scale(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """The factor of a row's old sums, and l times it: two rows a thread under split-Q."""
    emit.depend()
    emit.issue("fadd", 2)
    emit.issue("fmul", 2)
    emit.issue("ex2", 2)
    emit.issue("fmul", 2)


def scale_rows(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    emit.issue("fmul", portion(elements(buffers[s.writes[0]], warps), s))


def convert(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    emit.issue("f2fp", max(1, elements(buffers[s.reads[0]], warps) // 2))
    emit.depend()


def divide(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    o = buffers[s.writes[0]]
    rows = thread_rows(s, o, warps)
    emit.depend()
    emit.issue("rcp", rows)
    emit.issue("lg2", rows)
    emit.depend()
    emit.issue("ffma", rows)
    emit.issue("fmul", elements(o, warps))


def divide_rows(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    o = buffers[s.writes[0]]
    emit.depend()
    emit.issue("rcp", thread_rows(s, o, warps))
    emit.depend()
    emit.issue("fmul", elements(o, warps))


def spill(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """``registers`` of every thread go to local memory: a warp's STL each, written through L1 to L2."""
    emit.issue("stl", int(s.attrs["registers"]))


def refill(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """They come back: an LDL each. From L1 they take the SMEM port and its latency; otherwise (``far``) they load L2."""
    if s.attrs.get("far"):
        emit.issue("ldl_far", int(s.attrs["registers"]))
    else:
        emit.issue("ldl", int(s.attrs["registers"]), scoreboard=1)
        emit.wait_scoreboard(1)


def cross_warp(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """Row statistics of every warp go through shared memory: store, barrier, load all, combine."""
    rows = thread_rows(s, buffers[s.attrs["like"]], warps)
    combine = "fmnmx" if s.attrs["combine"] == "max" else "fadd"
    emit.depend()
    emit.issue("sts32", rows)
    if s.attrs.get("barrier", True):  # else a later one of the same step covers it
        emit.issue("control", 1)
        emit.marker("barrier", int(s.attrs.get("arg", 0)))
    emit.issue("lds32", max(1, rows * warps // 4), scoreboard=3)  # a quad's lanes read the four warps' values
    emit.wait_scoreboard(3)
    emit.issue(combine, rows * (warps - 1 + (len(s.writes) > 1)))


def cross_warp_tile(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """Partial tiles of all warps are summed through shared memory; each warp keeps its share of the sum."""
    size = buffers[s.reads[0]].size_bytes
    emit.depend()
    emit.issue("sts", -(-size // WARP_VECTOR_BYTES))
    emit.issue("control", 1)
    emit.marker("barrier", int(s.attrs.get("arg", 0)))
    emit.issue("lds", -(-size // WARP_VECTOR_BYTES), scoreboard=3)
    emit.wait_scoreboard(3)
    parts = warps - 1 + bool(s.attrs.get("accumulate"))
    emit.issue("fadd", max(1, size // 4 // 32 // warps * parts))


def fragments(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """Operand fragments that stay in registers: this warp's share of the tile, 16 x 16 an LDSM.x4."""
    tile = buffers[s.reads[0]]
    emit.issue("ldsm", max(1, tile.rows * tile.cols // 256 // warps), scoreboard=4)
    emit.wait_scoreboard(4)


def merge(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
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
    emit.issue("fmul", elements(o, warps))
    emit.issue("ffma", elements(o, warps))


def log_sum(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    emit.issue("lg2", 1)
    emit.issue("ffma", 1)


def start_code(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """What a binary runs before its first load: ``instructions`` of a warp, the sum of their stall counts, and between them the
    first reads of ``argument_lines`` lines of the kernel's arguments, which stall the warp one after the other."""
    lines, n = int(s.attrs.get("argument_lines", 0)), int(s.attrs["instructions"])
    stalls = max(0, int(s.attrs["stall_cycles"]) - n)
    for i in range(lines + 1):
        if i:
            emit.issue("uldc", 1)
            emit.depend()
        done, here = i / (lines + 1), (i + 1) / (lines + 1)
        emit.issue("control", round(n * here) - round(n * done))
        emit.issue("stall", round(stalls * here) - round(stalls * done))


def marker(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    emit.issue("control", 1)
    emit.marker(s.kind, int(s.attrs.get("arg", 0)))
