"""Streams of one or two instructions: what warps get that share a pipe or the port."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_jobs import H200, QUARTERS, both, job_of

from flashsim.model.instructions import INSTRUCTIONS, PIPES
from flashsim.model.program import Index, Tiles
from flashsim.model.schedule import Builder
from flashsim.sim.engine import (
    TICKS_PER_CYCLE,
    Job,
)


class Streams:
    """A kernel of ``warps`` warps with one loop that issues the given instructions (of INSTRUCTIONS) each trip."""

    def __init__(self, mix: dict[str, int], *, warps: int = 1, trips: int = 100) -> None:
        b = Builder(name="stream", warps=warps, registers=32)
        with b.loop("i", Index(arg="n")):
            for name, n in mix.items():
                b.issue(name, n)
        self.program = b.build(tensors=(), tiles=Tiles(names=("n",), values=np.array([[trips]])))

    def job(self, **changed: Any) -> Job:
        return replace(job_of(self.program, "h200"), **changed)

    def cycles(self) -> float:
        return both(self.job()).ticks / TICKS_PER_CYCLE


#: What saturates a sub-partition's pipe; the rest saturates the SM's SMEM port first, goes to memory, needs another chip, or is
#: no instruction that holds anything: a stall, what a predicate turns off.
PRICED = sorted(
    name
    for name, row in INSTRUCTIONS.items()
    if (not row.smem_bytes or name == "shfl") and row.path < 2 and row.pipe in PIPES[:6] and not row.packed
    and name not in ("stall", "fmul_off", "refetch")
)


def occupied(name: str) -> float:
    """Cycles for which one instruction keeps its pipe or the port, whichever is longer."""
    each = INSTRUCTIONS[name]
    return max(each.passes * getattr(H200.pipe, each.cost), getattr(H200.port, each.cost))


@pytest.mark.parametrize("name", PRICED)
def test_two_warps_that_share_a_saturated_pipe_each_get_half(name: str) -> None:
    """Warps 0 and 4 live on the same sub-partition; 1, 2, 3 and 5, 6, 7 likewise: each pair takes twice one warp's pipe time."""
    stream = Streams({name: 10}, warps=8)
    run = both(stream.job())
    cost = occupied(name)
    if name != "shfl":
        assert run.ticks / TICKS_PER_CYCLE == pytest.approx(2 * 1000 * cost, rel=0.03)
    ends = run.records.copy()
    last = [int(ends[ends[:, 4] == warp][:, 1].max()) for warp in range(8)]
    assert max(last) - min(last) <= 0.03 * max(last), "one warp of a pair was starved"


def test_one_warp_alone_runs_at_its_own_gap() -> None:
    gap = max(float(H200.warp.ffma), float(H200.port.ffma), float(H200.pipe.ffma))
    assert Streams({"ffma": 14}).cycles() == pytest.approx(1400 * gap, rel=0.02)


@pytest.mark.parametrize("vector", ["ffma", "fadd", "fmnmx", "f2fp", "int_alu", "ex2"])
def test_matrix_and_vector_work_share_the_port(vector: str) -> None:
    """The port gives every instruction its ticks: time is at least their sum, and at most 5 % more when that binds."""
    count = 6
    stream = Streams({"hmma": 2, vector: count}, warps=8, trips=100)
    run = both(stream.job())
    cost = INSTRUCTIONS[vector].cost
    port = 2 * 100 * (2 * float(H200.port.hmma) + count * getattr(H200.port, cost))
    pipe = 2 * 100 * count * getattr(H200.pipe, cost)
    got = run.ticks / TICKS_PER_CYCLE
    assert run.busy[0, :, -1] / TICKS_PER_CYCLE == pytest.approx([port] * QUARTERS, rel=0.001)
    assert got >= max(port, pipe)
    assert got <= 1.05 * max(port, pipe)


def test_round_robin_serves_unequal_warps_alternately() -> None:
    """With a saturated pipe, no warp is more than one bundle ahead of its neighbour at any time."""
    run = both(Streams({"ex2": 14}, warps=8).job())
    starts: Sequence[Any] = run.records[np.argsort(run.records[:, 1], kind="stable")]
    done = np.zeros(8, int)
    for row in starts:
        done[row[4]] += 1
        assert abs(done[row[4]] - done[(row[4] + 4) % 8]) <= 1
