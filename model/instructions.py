"""The warp instructions that a Program is made of: one row each, with the units they occupy.

A row names the fields of the chip that price it (``pipe``, ``warp`` and ``port`` sections, see :mod:`.gpu`), never a number:
the same Program costs different cycles on different chips. Sources of the classes: CUDA Binary Utilities (SASS names) and
the microbenchmarks in ``validate/microbench``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

#: Execution pipes of one sub-partition, in the order of the engines' arrays.
PIPES = ("fma", "alu", "mufu", "tensor", "lsu", "control", "tmem")

#: Bytes that one warp moves with 16-byte accesses (32 lanes x 16 B).
WARP_VECTOR_BYTES = 512


class Path(IntEnum):
    """Where an instruction goes after it has issued."""

    NONE = 0  # completes in its pipe
    SMEM = 1  # the SM's shared-memory port
    GLOBAL_LOAD = 2  # L2, then HBM on a miss; completion by scoreboard
    GLOBAL_TO_SMEM = 3  # like GLOBAL_LOAD, but lands in shared memory; completion by commit group (cp.async)
    GLOBAL_STORE = 4  # posted: nothing waits for it
    TMA_LOAD = 5  # a bulk copy from L2 into shared memory; completion by an mbarrier's bytes
    TMA_STORE = 6  # a bulk copy out of shared memory; a warp may wait until that has been read
    WGMMA = 7  # one k-step of a warpgroup's product, asynchronous; completion by product group
    TCGEN05 = 8  # one k-step of a CTA's product on all tensor cores of the SM, asynchronous; completion by an mbarrier


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One warp instruction: the pipe it occupies, the chip field that prices it, and where its data go.

    ``smem_bytes``: bytes of the shared-memory port per warp instruction; ``spill_bytes``: bytes of local memory that pass L2
    (stores are written through); ``tmem_bytes``: of tensor memory, negative for a store. ``packed``: it works on two values
    (f32x2). ``counter``: the profiler's pipe that counts it ("none": nothing is executed).
    """

    name: str
    pipe: str
    cost: str
    counter: str
    path: Path = Path.NONE
    smem_bytes: int = 0
    spill_bytes: int = 0
    columns: int = 0  # N of a warpgroup's or a CTA's product
    fp8: bool = False
    from_register: bool = False  # its A operand, of a warpgroup product
    rows: int = 0  # of a CTA's product, on one SM
    pair: bool = False  # one product of two CTAs, each with its own rows and half of B
    tmem_bytes: int = 0
    packed: bool = False
    passes: int = 1  # through its pipe
    sass: str


def _row(
    name: str,
    pipe: str,
    counter: str,
    sass: str,
    cost: str = "",
    path: Path = Path.NONE,
    smem: int = 0,
    spill: int = 0,
    tmem: int = 0,
    packed: bool = False,
    passes: int = 1,
) -> Instruction:
    return Instruction(
        name=name, pipe=pipe, cost=cost or name, counter=counter, sass=sass, path=path, smem_bytes=smem, spill_bytes=spill,
        tmem_bytes=tmem, packed=packed, passes=passes,
    )  # fmt: skip


_ROWS = (
    _row("ffma", "fma", "fma", "FFMA"),
    _row("fmul", "fma", "fma", "FMUL"),
    _row("fadd", "fma", "fma", "FADD"),
    # turned off by its predicate: issued and counted; one or two beside an HMMA cost nothing (validate/data/h200_mma_mix.csv)
    _row("fmul_off", "fma", "fma", "@!P FMUL", cost="fmul"),
    _row("imad", "fma", "fma", "IMAD"),
    _row("mov", "fma", "fma", "IMAD.MOV.U32"),
    _row("fmnmx", "alu", "alu", "FMNMX"),
    _row("f2fp", "alu", "alu", "F2FP.BF16.F32.PACK_AB"),
    # e4m3x2 at half the rate of bf16x2: 32 lanes a clock and SM against 62 (B300/GB300 attention analysis note, on B300)
    _row("f2fp8", "alu", "alu", "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C", cost="f2fp", passes=2),
    _row("int_alu", "alu", "alu", "IADD3, LOP3, ISETP, SEL, FSEL, PRMT"),
    _row("ex2", "mufu", "xu", "MUFU.EX2"),
    _row("rcp", "mufu", "xu", "MUFU.RCP", cost="ex2"),
    _row("lg2", "mufu", "xu", "MUFU.LG2", cost="ex2"),
    _row("shfl", "lsu", "lsu", "SHFL.BFLY", path=Path.SMEM, smem=128),
    _row("hmma", "tensor", "tensor", "HMMA.16816.F32"),
    _row("ldsm", "lsu", "lsu", "LDSM.16.M88.4", cost="lsu", path=Path.SMEM, smem=512),
    _row("lds", "lsu", "lsu", "LDS.128", cost="lsu", path=Path.SMEM, smem=512),
    _row("sts", "lsu", "lsu", "STS.128", cost="lsu", path=Path.SMEM, smem=512),
    _row("lds32", "lsu", "lsu", "LDS", cost="lsu", path=Path.SMEM, smem=128),
    _row("sts32", "lsu", "lsu", "STS", cost="lsu", path=Path.SMEM, smem=128),
    _row("ldgsts", "lsu", "lsu", "LDGSTS.E.BYPASS.128", cost="lsu", path=Path.GLOBAL_TO_SMEM, smem=512),
    _row("ldg", "lsu", "lsu", "LDG.E.128", cost="lsu", path=Path.GLOBAL_LOAD),
    _row("stg", "lsu", "lsu", "STG.E.128", cost="lsu", path=Path.GLOBAL_STORE),
    _row("stl", "lsu", "lsu", "STL", cost="lsu", spill=128),
    _row("ldl", "lsu", "lsu", "LDL", cost="lsu", path=Path.SMEM, smem=128),  # from L1, through the same port
    _row("ldl_far", "lsu", "lsu", "LDL", cost="lsu", spill=128),  # L1 does not hold it: from L2
    _row("control", "control", "other", "BRA, BAR, DEPBAR, UMOV, NOP"),
    _row("uldc", "control", "other", "ULDC (a line of the kernel's arguments that the SM has not read)", cost="control"),
    _row("try_wait", "control", "other", "SYNCS.PHASECHK.TRANS64.TRYWAIT", cost="control"),
    _row("stsm", "lsu", "lsu", "STSM.16.M88.4", cost="lsu", path=Path.SMEM, smem=512),
    _row("st16", "lsu", "lsu", "ST.E.U16", cost="lsu", path=Path.SMEM, smem=256),  # 64 B of a swizzled row, two lanes a bank
    _row("utmaldg", "control", "other", "UTMALDG", cost="control", path=Path.TMA_LOAD),
    _row("utmastg", "control", "other", "UTMASTG", cost="control", path=Path.TMA_STORE),
    _row("ffma2", "fma", "fma", "FFMA2", cost="ffma", packed=True),
    _row("fadd2", "fma", "fma", "FADD2", cost="fadd", packed=True),
    _row("fmul2", "fma", "fma", "FMUL2", cost="fmul", packed=True),
    _row("fmnmx3", "alu", "alu", "FMNMX3", cost="fmnmx"),
    _row("vote", "alu", "alu", "VOTE.ANY", cost="int_alu"),
    _row("ldtm_x32", "tmem", "other", "LDTM.x32", cost="control", tmem=4096),
    _row("ldtm_x16", "tmem", "other", "LDTM.x16", cost="control", tmem=2048),
    _row("sttm_x16", "tmem", "other", "STTM.x16", cost="control", tmem=-2048),
    _row("ldtm_x1", "tmem", "other", "LDTM", cost="control", tmem=128),
    _row("sttm_x1", "tmem", "other", "STTM", cost="control", tmem=-128),
    _row("sttm_x8", "tmem", "other", "STTM.x8", cost="control", tmem=-1024),
    _row("tmem_alloc", "tmem", "other", "UTCATOMSWS.FIND_AND_SET", cost="control"),
    _row("refetch", "control", "none", "the wait after a taken branch, until its target has been fetched", cost="control"),
    _row("stall", "control", "none", "a cycle in which the compiler's stall count holds the warp", cost="control"),
)


def wgmma(columns: int, *, fp8: bool, from_register: bool) -> str:
    """The name of one k-step (32 bytes of K) of m64 x ``columns``, its A operand in registers or in shared memory."""
    return f"wgmma{'8' if fp8 else ''}_n{columns}_{'rs' if from_register else 'ss'}"


def _wgmma_row(columns: int, fp8: bool, from_register: bool) -> Instruction:
    """A warp's quarter: 16 rows of A (32 bytes each, if in shared memory) and a quarter of B's ``columns`` rows."""
    return Instruction(
        name=wgmma(columns, fp8=fp8, from_register=from_register), pipe="tensor", cost="control", counter="tensor",
        path=Path.WGMMA, smem_bytes=8 * columns + (0 if from_register else 512), columns=columns, fp8=fp8,
        from_register=from_register,
        sass=f"{'QGMMA' if fp8 else 'HGMMA'}.64x{columns}x{32 if fp8 else 16}.F32",
    )  # fmt: skip


_WGMMA = tuple(_wgmma_row(n, fp8, rs) for n in range(8, 257, 8) for fp8 in (False, True) for rs in (False, True))


def umma(columns: int, *, fp8: bool, from_tmem: bool, rows: int = 128, pair: bool = False) -> str:
    """The name of one k-step (32 bytes of K) of a CTA's ``rows`` x ``columns``, its A operand in tensor or in shared memory."""
    shape = "_pair" if pair else "" if rows == 128 else f"_m{rows}"
    return f"umma{'8' if fp8 else ''}_n{columns}_{'ts' if from_tmem else 'ss'}{shape}"


def _umma_row(columns: int, fp8: bool, from_tmem: bool, rows: int, pair: bool) -> Instruction:
    """On one SM: 32 bytes of each row of A (if in shared memory) and of each row of B; of a pair's B, half."""
    return Instruction(
        name=umma(columns, fp8=fp8, from_tmem=from_tmem, rows=rows, pair=pair), pipe="tensor", cost="control", counter="tensor",
        path=Path.TCGEN05, smem_bytes=32 * ((0 if from_tmem else rows) + columns // (2 if pair else 1)), columns=columns, fp8=fp8,
        rows=rows, pair=pair, sass=f"{'UTCQMMA' if fp8 else 'UTCHMMA'}{'.2CTA' if pair else ''}",
    )  # fmt: skip


_UMMA = tuple(
    _umma_row(n, fp8, ts, rows, pair)
    for n in range(16, 257, 16)
    for fp8 in (False, True)
    for ts in (False, True)
    for rows, pair in ((128, False), (64, False), (128, True))
)

INSTRUCTIONS: dict[str, Instruction] = {row.name: row for row in (*_ROWS, *_WGMMA, *_UMMA)}
INSTRUCTION_ID: dict[str, int] = {name: i for i, name in enumerate(INSTRUCTIONS)}
COUNTERS = ("fma", "alu", "xu", "tensor", "lsu", "other")


def counters(counts: Mapping[str, int]) -> dict[str, int]:
    """Sum instruction counts into the profiler's pipes (COUNTERS) plus ``total``."""
    out = dict.fromkeys(COUNTERS, 0)
    for name, n in counts.items():
        if INSTRUCTIONS[name].counter in out:
            out[INSTRUCTIONS[name].counter] += n
    out["total"] = sum(out.values())
    return out
