"""The warp instructions that a Program is made of: one row each, with the units they occupy.

A row names the fields of the chip that price it (``pipe``, ``warp`` and ``port`` sections, see :mod:`.gpu`), never a number:
the same Program costs different cycles on different chips. Sources of the classes: CUDA Binary Utilities (SASS names) and
the microbenchmarks in ``validate/microbench``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

#: Execution pipes of one sub-partition, in the order of the engines' arrays.
PIPES = ("fma", "alu", "mufu", "tensor", "lsu", "control")

#: Bytes that one warp moves with 16-byte accesses (32 lanes x 16 B).
WARP_VECTOR_BYTES = 512


class Path(IntEnum):
    """Where an instruction goes after it has issued."""

    NONE = 0  # completes in its pipe
    SMEM = 1  # the SM's shared-memory port
    GLOBAL_LOAD = 2  # L2, then HBM on a miss; completion by scoreboard
    GLOBAL_TO_SMEM = 3  # like GLOBAL_LOAD, but lands in shared memory; completion by commit group (cp.async)
    GLOBAL_STORE = 4  # posted: nothing waits for it


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One warp instruction: the pipe it occupies, the chip field that prices it, and where its data go.

    ``smem_bytes``: bytes of the shared-memory port per warp instruction; ``spill_bytes``: bytes of local memory written through
    to L2. ``counter``: the profiler's pipe that counts it.
    """

    name: str
    pipe: str
    cost: str
    counter: str
    path: Path = Path.NONE
    smem_bytes: int = 0
    spill_bytes: int = 0
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
) -> Instruction:
    return Instruction(
        name=name, pipe=pipe, cost=cost or name, counter=counter, sass=sass, path=path, smem_bytes=smem, spill_bytes=spill
    )


_ROWS = (
    _row("ffma", "fma", "fma", "FFMA"),
    _row("fmul", "fma", "fma", "FMUL"),
    _row("fadd", "fma", "fma", "FADD"),
    _row("imad", "fma", "fma", "IMAD"),
    _row("mov", "fma", "fma", "IMAD.MOV.U32"),
    _row("fmnmx", "alu", "alu", "FMNMX"),
    _row("f2fp", "alu", "alu", "F2FP.BF16.F32.PACK_AB"),
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
    _row("control", "control", "other", "BRA, BAR, DEPBAR, UMOV, NOP"),
)

INSTRUCTIONS: dict[str, Instruction] = {row.name: row for row in _ROWS}
INSTRUCTION_ID: dict[str, int] = {row.name: i for i, row in enumerate(_ROWS)}
COUNTERS = ("fma", "alu", "xu", "tensor", "lsu", "other")
