"""The program of ``validate/microbench/burst.cu`` as a schedule's Program: load, compute, load again, one CTA an SM."""

from __future__ import annotations

import numpy as np

from flashsim.model.gpu import load_gpu
from flashsim.model.program import Index, IntArray, Program, Tensor, Tiles
from flashsim.model.schedule import Builder
from flashsim.sim import fast_engine
from flashsim.sim.engine import TICKS_PER_CYCLE
from flashsim.sim.pricing import make_job
from flashsim.sim.residency import Residency

H200 = load_gpu("h200")
SHARERS = {"hbm": 1, "l2": 1, "shared": 8}  # SMs that load the same bytes
ROW = 128  # bytes


def burst_program(where: str, size: int, gap: int, rounds: int) -> Program:
    """A CTA an SM. ``l2``: a first round that is not looked at reads what the others read again."""
    sms, again = int(H200.sm.count), where == "l2"
    b = Builder(name="bursts", registers=32)
    b.ring("burst", 1)
    b.smem("X", rows=size // ROW, cols=ROW // 2, bytes_per_element=2)
    b.mbarrier("full", count=1)
    with b.role("loader", warps=1, registers=32), b.loop("i", Index(arg="rounds")):
        b.op("mbarrier_expect", barrier="full", ring="burst", of=("X",))
        block = Index(arg="first") if again else Index(arg="first", loop="i", coef=1)
        b.op("tma_load", writes="X", reads="D", index=block, barrier="full", ring="burst")
        b.op("mbarrier_wait", barrier="full", ring="burst")
        b.op("advance", ring="burst")
        b.issue("stall", gap)
    each = 1 if again else rounds
    first = np.arange(sms) // SHARERS[where] * each
    tensor = Tensor(
        name="D", heads=1, rows=(int(first.max()) + each) * (size // ROW), cols=ROW // 2, bytes_per_element=2,
        block_rows=size // ROW, head_arg="plane",
    )  # fmt: skip
    values = np.column_stack((np.zeros_like(first), first, np.full_like(first, rounds + again)))
    return b.build(tensors=(tensor,), tiles=Tiles(names=("plane", "first", "rounds"), values=values))


def burst_cycles(where: str, size: int, gap: int, rounds: int, *, alone: bool = False) -> IntArray:
    """Cycles from a burst's first issue to its last byte; shape (rounds, SMs). ``alone``: one SM has the chip for itself."""
    program = burst_program(where, size, gap, rounds)
    job = make_job(
        program, H200, clock_mhz=float(H200.clock.boost_mhz), slots=1, queue=np.arange(1 if alone else len(program.tiles)),
        miss_ppm=np.zeros(1), shares=1.0, hbm_bytes_per_s=float(H200.hbm.read_bytes_per_s),
        l2=Residency((program,), int(H200.l2.resident_bytes)).shared(program), record_limit=1_000_000,
    )  # fmt: skip
    records = fast_engine.run(job).records
    rows = np.unique(records[:, 6])
    loads, stalls = (records[records[:, 6] == row] for row in (rows[-2], rows[-1]))
    out = []
    for sm in np.unique(records[:, 2]):
        begins, ends = (part[part[:, 2] == sm][:, 0] for part in (loads, stalls))
        out.append((ends - begins) / TICKS_PER_CYCLE)
    return np.array(out).T[where == "l2" :]
