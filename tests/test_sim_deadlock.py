"""A CTA whose warps wait for one that never comes is reported, not returned as a finished run; both engines say the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.program import CODE_COLUMNS, Index, Opcode, Program, Tiles
from flashsim.model.schedule import Builder
from flashsim.model.schedules import get_schedule
from flashsim.sim.engine import Job
from flashsim.sim.predict import ENGINES, simulate
from flashsim.sim.pricing import make_job


def job_of(program: Program, *, sms: int = 1, slots: int = 1) -> Job:
    job = make_job(
        program,
        load_gpu("h200"),
        clock_mhz=1500.0,
        slots=slots,
        queue=np.arange(len(program.tiles)),
        miss_ppm=np.zeros(len(program.tensors), np.int64),
        shares=1,
        hbm_bytes_per_s=1e12,
    )
    return replace(job, sms=sms)


def tiles(*n: int) -> Tiles:
    return Tiles(names=("n",), values=np.array([[each] for each in n]))


def row(opcode: Opcode, **columns: int) -> list[int]:
    return [int(opcode), *(columns.get(name, -1) for name in CODE_COLUMNS[1:])]


def skipped_barrier() -> tuple[Job, str]:
    """The last of four warps leaves where the others wait for it."""
    result = simulate(get_schedule("fa2"), load_gpu("h200"), Attention(batch=1, heads_q=1, seqlen_q=128, head_dim=64))
    code = np.array([row(Opcode.BARRIER, arg=0, count=4), row(Opcode.EXIT)], np.int64)
    job = replace(result.launches[0].job, code=code, warp_start=np.array([0, 0, 0, 1], np.int64))
    return job, "deadlock at tick 0: no event is left and tile 0 has not ended; its warp 0 waits at code row 0"


def unfinished_phase() -> tuple[Job, str]:
    """Two warps arrive at an mbarrier that counts three, in a tile whose guard lets them; the one before it ends."""
    b = Builder(name="phase", registers=32)
    b.ring("r", 1)
    b.mbarrier("full", count=3)
    with b.role("arrive", warps=2, registers=32), b.when(Index(arg="n")):
        b.op("mbarrier_arrive", barrier="full", ring="r")
    with b.role("wait", warps=1, registers=32), b.when(Index(arg="n")):
        b.op("mbarrier_wait", barrier="full", ring="r")
    program = b.build(tensors=(), tiles=tiles(-1, -1, 0, -1))
    return job_of(program), r"deadlock at tick \d+: no event is left and tile 2 has not ended; its warp 2 waits at code row \d+"


def missing_bytes() -> tuple[Job, str]:
    """More bytes are expected than are copied."""
    b = Builder(name="bytes", registers=32)
    b.ring("r", 2)
    b.mbarrier("full", count=1, stages=2)
    with b.role("expect", warps=1, registers=32):
        b.op("mbarrier_expect", barrier="full", ring="r", bytes=4096)
    with b.role("wait", warps=4, registers=32):
        b.op("mbarrier_wait", barrier="full", ring="r")
    program = b.build(tensors=(), tiles=tiles(0, 0, 0))
    return job_of(program, sms=2, slots=2), r"deadlock .* tile 0 has not ended; its warp 1 waits at code row \d+"


def persistent_turn() -> tuple[Job, str]:
    """Nobody gives the turn in a CTA's second tile: the third tile's is used up there, and the third waits for one in vain."""
    b = Builder(name="turn", registers=32)
    b.named_barrier("turn", warps=2)
    with b.role("give", warps=1, registers=32):
        b.op("tile")
        with b.when(Index(arg="n")):
            b.op("named_arrive", barrier="turn")
    with b.role("take", warps=1, registers=32):
        b.op("tile")
        b.op("named_sync", barrier="turn")
    program = b.build(tensors=(), tiles=tiles(0, 0, -1, -1, 0, 0, -1), persistent=True)
    return job_of(program, slots=2), r"deadlock .* tile 4 has not ended; its warp 1 waits at code row \d+"


CASES: list[Callable[[], tuple[Job, str]]] = [skipped_barrier, unfinished_phase, missing_bytes, persistent_turn]


@pytest.mark.parametrize("case", CASES)
def test_engines_report_the_same_deadlock(case: Callable[[], tuple[Job, str]]) -> None:
    job, expected = case()
    said: dict[str, Any] = {}
    for name, engine in ENGINES.items():
        with pytest.raises(RuntimeError, match=expected) as caught:
            engine(job)
        said[name] = str(caught.value)
    assert len(set(said.values())) == 1, said
    row_said = int(str(caught.value).rsplit(" ", 1)[1])
    assert job.code[row_said, 0] in (Opcode.BARRIER, Opcode.MB_WAIT)
