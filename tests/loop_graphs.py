"""Steady loops for tests of the optimum: small graphs made by hand, those of shipped schedules, and what a schedule must keep."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from flashsim import Attention, get_schedule, load_gpu, simulate
from flashsim.sim.loop_graph import Edge, LoopGraph, loop_graph
from flashsim.sim.modulo import Placed, Schedule
from flashsim.sim.modulo_model import crowding, slowed_by_products
from flashsim.sim.moves import overlaps, products, tile_of, vectors
from flashsim.sim.operations import Operation
from flashsim.sim.optimum import RECORDS, steady_loop
from flashsim.sim.predict import Result

PROBLEM = Attention(batch=1, heads_q=8, seqlen_q=4096, head_dim=128)


@cache
def result(name: str, gpu: str, **fields: Any) -> Result:
    return simulate(get_schedule(name, **fields), load_gpu(gpu), PROBLEM, record_limit=RECORDS)


@cache
def graph(name: str, gpu: str, **fields: Any) -> LoopGraph:
    launch = result(name, gpu, **fields).launches[-1]
    loops, depends, skipped = steady_loop(launch.program)
    return loop_graph(launch.program, load_gpu(gpu), launch.job, loops, depends, skipped, launch.occupancy.ctas_per_sm)


def operation(name: str, kind: str, cycles: float, unit: str, role: str = "warps") -> Operation:
    return Operation(
        name=name, role=role, cta=0, kind=kind, unit=unit, statements=(0,), cycles=cycles, uses={unit: cycles}, beside=cycles,
        beside_uses={unit: cycles},
    )  # fmt: skip


def edge(before: int, after: int, distance: int = 0, buffer: str = "") -> Edge:
    return Edge(before=before, after=after, distance=distance, latency=0.0, buffer=buffer)


def tiles(count: int, *, softmax: float = 200) -> LoopGraph:
    """Q K^T, softmax and P V of ``count`` independent tiles; P takes S's place."""
    operations, edges = [], []
    for tile in range(count):
        qk, soft, pv = (3 * tile + i for i in range(3))
        operations += [
            operation(f"Q K^T S{tile}", "product", 100, "tensor"),
            operation(f"softmax S{tile}", "vector", softmax, "mufu", f"softmax{tile}"),
            operation(f"P V O{tile}", "product", 100, "tensor"),
        ]
        edges += [edge(qk, soft), edge(soft, pv), edge(pv, qk, 1, f"S{tile}")]
    return LoopGraph(operations=tuple(operations), edges=tuple(edges))


def under_each_other(schedule: Schedule) -> dict[tuple[str, str], float]:
    """Share of a tile's vector work (first) that runs under the products of another (second)."""
    out: dict[tuple[str, str], float] = {}
    for v in vectors(schedule):
        for p in products(schedule):
            key = (tile_of(v), tile_of(p))
            out[key] = out.get(key, 0.0) + overlaps(schedule, v, p)
    work = {tile_of(v): sum(w.cycles for w in vectors(schedule) if tile_of(w) == tile_of(v)) for v in vectors(schedule)}
    return {key: shared / work[key[0]] for key, shared in out.items()}


def check(schedule: Schedule) -> None:
    """Whatever the solver says: every dependence is kept, every warp and the tensor cores do one thing at a time, and what is
    beside an operation makes it as long as the prices say."""
    period, placed = schedule.interval, schedule.placed
    assert [p.operation for p in placed] == list(schedule.graph.operations)
    for e in schedule.graph.edges:
        before, after = placed[e.before], placed[e.after]
        distance = e.distance + schedule.copies.get(e.buffer, 0)
        ready = before.begin(period) + (0 if e.begun else before.cycles) + e.latency
        assert after.begin(period) + distance * period >= ready - 1e-6
    lines = [_line(p, period) for p in placed]
    held: dict[str, Any] = {}
    for p, line in zip(placed, lines, strict=True):
        assert 0 <= p.start < period
        assert p.operation.cycles - 1e-5 <= p.cycles <= period
        unit = "tensor" if p.operation.kind == "product" else p.operation.warp if not p.operation.issue else ""
        if unit:
            held[unit] = held.get(unit, 0) + line
    for unit, line in held.items():
        assert line.max() <= 1, unit
    _priced(schedule, lines)


def _line(p: Placed, period: int) -> Any:
    """1 at each cycle of the interval in which ``p`` runs."""
    line = np.zeros(period, np.int64)
    np.add.at(line, np.arange(p.start, p.start + p.cycles) % period, 1)
    return line


def _priced(schedule: Schedule, lines: list[Any]) -> None:
    """Cycles of work of the warps are theirs alone and what they lose beside products and each other."""
    placed = schedule.placed
    busy = sum(p.operation.cycles for p in placed if p.operation.kind == "product")
    duty = min(1.0, busy / schedule.interval)
    for p, line in zip(placed, lines, strict=True):
        op = p.operation
        if op.kind not in ("vector", "issue"):
            continue
        slow, lost = slowed_by_products(op), 0.0
        for q, other in zip(placed, lines, strict=True):
            both = int((line * other).sum())
            if q.operation.kind == "product":
                lost += both * slow
            elif q.operation.kind in ("vector", "issue") and q.operation.warp != op.warp:
                lost += both * (1 - 1 / crowding(op, q.operation, duty)) * (1 - duty * slow)
        assert p.cycles >= (op.cycles + lost) * 0.98 - 2, op.name
