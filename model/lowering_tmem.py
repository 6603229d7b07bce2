"""What one warp issues for Blackwell's operations: products of a CTA (tcgen05), tensor memory, and softmax with one thread a row.

A tile in tensor memory has 128 lanes, 32 for each warp of a warpgroup, so a thread holds a whole row of it: no shuffles. FP32
arithmetic is on pairs of columns (f32x2). Instruction counts per element are those of FlashAttention-4's code (arXiv 2603.05451;
Dao-AILab/flash-attention, flash_attn/cute/softmax.py and flash_fwd_sm100.py), with three-input maxima (FMNMX3, read in its SASS).
"""

from __future__ import annotations

from collections.abc import Mapping

from .instructions import umma
from .lowering import Emitter, portion
from .lowering_async import K_STEP_BYTES
from .program import Buffer, Statement

#: Columns that one tcgen05.ld or tcgen05.st of the shapes used here moves for each of a warp's 32 lanes.
LOAD_COLUMNS, NARROW_COLUMNS = 32, 16
LANE_BYTES = 4
#: Instructions that 2^x takes for a pair of values without the MUFU: two clamps; the whole number by a magic addend and its
#: rest (three FADD2); a polynomial of degree 3 (three FFMA2); the whole number into the two exponents (two IMAD).
EMULATED_PAIR = {"fmnmx": 2, "fadd2": 3, "ffma2": 3, "imad": 2}


def columns(buffer: Buffer) -> int:
    """32-bit columns of a tile with one row a lane."""
    return max(1, int(buffer.cols * buffer.bytes_per_element) // LANE_BYTES)


def product(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """A CTA's tile in k-steps of 32 bytes, issued by one thread; ``pair``: together with the other CTA's."""
    a, dst = buffers[s.reads[0]], buffers[s.writes[0]]
    steps = int(a.cols * a.bytes_per_element) // K_STEP_BYTES
    name = umma(
        dst.cols, fp8=a.bytes_per_element == 1, from_tmem=a.space == "tmem", rows=dst.rows, pair=bool(s.attrs.get("pair"))
    )
    for _ in range(portion(steps, s)):
        emit.issue(name, 1)


def tmem_alloc(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    emit.issue("tmem_alloc", 1)
    emit.depend()


def row_max(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """Scores come out of tensor memory in pieces of 32 columns, and the maximum of one piece is taken while the next one comes.

    ``max_loaded``: the load gives each piece's maximum too (tcgen05.ld.red).
    """
    scores = buffers[s.reads[0]]
    pieces = max(1, columns(scores) // LOAD_COLUMNS)
    if s.attrs.get("max_loaded"):
        emit.issue("ldtm_x32", pieces)
        emit.depend()
        emit.issue("fmnmx3", -(-pieces // 2))
        return
    maxima = scores.cols // 2
    early = maxima * (pieces - 1) // pieces
    emit.issue("fmnmx3", early)
    emit.issue("ldtm_x32", pieces)
    emit.depend()
    emit.issue("fmnmx3", maxima - early)


def masked_row_max(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """As :func:`row_max`, but each score is selected first: predicates of seven columns come from one shift (R2P)."""
    scores = buffers[s.reads[0]]
    emit.issue("ldtm_x32", max(1, columns(scores) // LOAD_COLUMNS))
    emit.depend()
    emit.issue("int_alu", scores.cols + -(-scores.cols // 8))
    emit.issue("fmnmx3", scores.cols // 2)


def row_factor(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """The factor of the row's old sums, kept at 1 until the maximum has outgrown the threshold, and l times it."""
    emit.depend()
    emit.issue("fadd", 1)
    emit.issue("fmul", 1)
    emit.depend()
    emit.issue("ex2", 1)
    emit.issue("int_alu", 4)
    emit.issue("fmul", 2)


def exp2(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """2^x of a ``share`` of the row: on the MUFU, or, for ``emulated`` values of the row, on the FMA pipe.

    The statement that begins the row scales it and subtracts the maximum, one FFMA2 a pair, before its exponentials.
    """
    cols, emulated = buffers[s.writes[0]].cols, int(s.attrs.get("emulated", 0))
    first, last = s.attrs.get("share", (0.0, 1.0))
    start = float(s.attrs.get("emulated_from", 0.25))
    own = emulated_until(last, emulated, start) - emulated_until(first, emulated, start)
    if first == 0.0:
        emit.issue("ffma2", cols // 2)
    emit.issue("ex2", portion(cols, s) - own)
    for name, each in EMULATED_PAIR.items():
        emit.issue(name, each * (own // 2))


def emulated_until(share: float, emulated: int, start: float = 0.25) -> int:
    """How many of a row's ``emulated`` values lie in its first ``share``: they are spread from ``start`` to its last quarter."""
    return 2 * round(emulated / 2 * min(1.0, max(0.0, (share - start) / (0.75 - start))))


def row_sum(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    emit.issue("fadd2", portion(buffers[s.reads[0]].cols // 2, s))


def pack(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """Two values an instruction, into 16 or 8 bits."""
    narrow = buffers[s.writes[0]].bytes_per_element == 1
    emit.issue("f2fp8" if narrow else "f2fp", portion(buffers[s.reads[0]].cols // 2, s))


def tmem_load(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    width = columns(buffers[s.reads[0]])
    emit.issue("ldtm_x1" if width == 1 else "ldtm_x16", max(1, portion(width // NARROW_COLUMNS, s)))
    emit.depend()


def tmem_store(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """Ends with the wait that a barrier's arrival needs before it (tcgen05.wait::st)."""
    first, last = s.attrs.get("share", (0.0, 1.0))
    width = columns(buffers[s.writes[0]])
    whole = all(width * share % NARROW_COLUMNS == 0 for share in (first, last))
    wide = 1 if width == 1 else NARROW_COLUMNS if whole else NARROW_COLUMNS // 2  # a quarter of a row of 8-bit P has 8 columns
    emit.issue(f"sttm_x{wide}", max(1, portion(width // wide, s)))
    emit.depend()


def vote_scale(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """O of a warp's 32 rows times their factors, in place in tensor memory, if any factor is below 1.

    Which blocks that is depends on the numbers; the Program is told (``taken``), the interpreter finds out. Not ``asked``: it is
    every block, in halves of a row.
    """
    asked, width = bool(s.attrs.get("asked", True)), columns(buffers[s.writes[0]])
    if asked:
        emit.issue("int_alu", 2)
        emit.issue("vote", 1)
        emit.depend()
        emit.issue("control", 1)
    if s.attrs.get("taken"):
        loads = 1 if asked else max(1, width // NARROW_COLUMNS // 2)
        for _ in range(max(1, width // NARROW_COLUMNS // loads)):
            emit.issue("ldtm_x16", loads)
            emit.depend()
            emit.issue("fmul2", loads * NARROW_COLUMNS // 2)
            emit.issue("sttm_x16", loads)
        emit.depend()


def divide(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    o = buffers[s.writes[0]]
    emit.issue("rcp", 1)
    emit.issue("lg2", 1)
    emit.depend()
    emit.issue("ffma", 1)
    emit.issue("fmul2", o.cols // 2)
