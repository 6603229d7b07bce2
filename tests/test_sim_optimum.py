"""The best modulo schedule beside a pipeline: its graph comes from the Program, its properties from the graph alone."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from flashsim import Attention, get_schedule, load_gpu, simulate
from flashsim.sim.dependence import dependences, steady_loops
from flashsim.sim.loop_bounds import loop_bounds, unit_loads
from flashsim.sim.loop_graph import Edge, LoopGraph, loop_graph
from flashsim.sim.modulo import Placed, Room, Schedule, best_schedule
from flashsim.sim.moves import blocks, moves, overlaps, products, tile_of, vectors
from flashsim.sim.operations import Operation
from flashsim.sim.optimum import RECORDS, best, lacking, own_interval, rooms_of, steady_loop
from flashsim.sim.predict import Result

PROBLEM = Attention(batch=1, heads_q=8, seqlen_q=4096, head_dim=128)
IDEAL_FA4 = {"counts": "ideal", "cta_pair": False, "exp2_emulation": 0.0}


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


def at(schedule: Schedule, name: str) -> Placed:
    return next(p for p in schedule.placed if p.operation.name.startswith(name))


def under_each_other(schedule: Schedule) -> dict[tuple[str, str], float]:
    """Share of a tile's vector work (first) that runs under the products of another (second)."""
    out: dict[tuple[str, str], float] = {}
    for v in vectors(schedule):
        for p in products(schedule):
            key = (tile_of(v), tile_of(p))
            out[key] = out.get(key, 0.0) + overlaps(schedule, v, p)
    work = {tile_of(v): sum(w.cycles for w in vectors(schedule) if tile_of(w) == tile_of(v)) for v in vectors(schedule)}
    return {key: shared / work[key[0]] for key, shared in out.items()}


def check(schedule: Schedule, of: LoopGraph) -> None:
    """Whatever the solver says: every dependence is kept, every warp does one thing, no unit is asked for twice."""
    period = schedule.interval
    assert [p.operation for p in schedule.placed] == list(of.operations)
    for e in of.edges:
        before, after = schedule.placed[e.before], schedule.placed[e.after]
        distance = e.distance + schedule.copies.get(e.buffer, 0)
        ready = before.begin(period) + (0 if e.begun else before.cycles) + e.latency
        assert after.begin(period) + distance * period >= ready - 1e-6
    held: dict[str, Any] = {}
    for p in schedule.placed:
        assert 0 <= p.start < period
        assert p.cycles <= period
        uses = p.operation.beside_uses if p.beside else p.operation.uses
        shares = {unit: cycles / p.cycles for unit, cycles in uses.items() if cycles / p.cycles > 0.3}
        if p.operation.warp and not p.operation.issue:
            shares[p.operation.warp] = 1.0
        if p.operation.kind == "product":
            shares["tensor"] = 1.0
        for unit, share in shares.items():
            line = held.setdefault(unit, np.zeros(period))
            line[np.arange(p.start, p.start + p.cycles) % period] += share
    for unit, line in held.items():
        assert line.max() <= 1.01, unit
    for p in schedule.placed:  # at its own price only where no product runs
        dear = p.operation.kind in ("vector", "issue") and p.operation.beside > p.operation.cycles * 1.001
        if dear and not p.beside and any(q.operation.kind == "product" for q in schedule.placed):
            assert not sum(overlaps(schedule, p, q) for q in schedule.placed if q.operation.kind == "product")


# --- small graphs, whose optimum is known ---


def test_one_tile_takes_the_sum() -> None:
    found = best_schedule(tiles(1), loop_bounds(tiles(1)).bound)
    assert found is not None
    assert found.optimal
    assert found.interval == 400 == loop_bounds(tiles(1)).recurrence
    check(found, tiles(1))


def test_two_tiles_take_turns_although_nothing_says_so() -> None:
    two = tiles(2)
    found = best_schedule(two, loop_bounds(two).bound)
    assert found is not None
    check(found, two)
    assert (found.interval, found.optimal) == (400, True)
    shares = under_each_other(found)
    assert shares["tile 0", "tile 1"] == shares["tile 1", "tile 0"] == 1.0
    assert sum("take turns" in move for move in _moves(two, found)) == 1


def _moves(of: LoopGraph, schedule: Schedule) -> list[str]:
    program = result("fa3", "h100").launches[0].program
    return list(moves(program, of, schedule, ()))


def test_a_second_copy_of_scores_lets_softmax_run_beside_its_own_tiles_products() -> None:
    one = tiles(1)
    rooms = {"S0": Room(most=1, pool="registers", size=64, free=64)}
    bound = loop_bounds(one, {"S0": 1}).bound
    found = best_schedule(one, bound, rooms=rooms)
    assert found is not None
    check(found, one)
    assert found.copies == {"S0": 1}
    assert (found.interval, found.optimal) == (200, True)
    assert under_each_other(found)["tile 0", "tile 0"] == 1.0


def test_p_beside_s_gives_intra_warpgroup_overlap() -> None:
    """As FA3 has it: S is free once P is made from it, so that the next Q K^T need not wait for P V; P in S's place makes it."""
    names = (("Q K^T S0", "product", 100), ("exp2 S0", "vector", 150), ("convert P0", "vector", 50), ("P V O0", "product", 100))
    parts = tuple(operation(name, kind, cycles, "tensor" if kind == "product" else "mufu") for name, kind, cycles in names)
    chain = [edge(0, 1), edge(1, 2), edge(2, 3)]
    apart = LoopGraph(operations=parts, edges=(*chain, edge(2, 0, 1, "S0"), edge(3, 2, 1, "P0")))
    found = best_schedule(apart, loop_bounds(apart).bound)
    assert found is not None
    check(found, apart)
    assert (found.interval, found.optimal) == (300, True)  # Q K^T and softmax in turn
    assert overlaps(found, at(found, "exp2"), at(found, "P V")) == 100
    in_place = LoopGraph(operations=parts, edges=(*chain, edge(3, 0, 1, "S0")))
    serial = best_schedule(in_place, loop_bounds(in_place).bound)
    assert serial is not None
    assert (serial.interval, serial.optimal) == (400, True)


def test_no_room_no_copy() -> None:
    rooms = {f"S{i}": Room(most=1, pool="registers", size=64, free=100) for i in range(2)}
    two = tiles(2, softmax=100)
    found = best_schedule(two, 400, rooms=rooms)
    assert found is not None
    assert sum(found.copies.values()) <= 1
    check(found, two)


def test_the_bound_counts_what_products_slow() -> None:
    """Vector work of 300 cycles, 600 beside a product, with 400 of products: 300 + 400 x (1 - 1/2)."""
    op = operation("exp", "vector", 300, "port")
    slow = replace(op, beside=600.0, beside_uses={"port": 600.0})
    loads = unit_loads(LoopGraph(operations=(operation("P V", "product", 400, "tensor"), slow), edges=()))
    assert loads["port"] == pytest.approx(500)
    assert loads["tensor"] == 400


def test_circular_waits_within_a_trip_are_named() -> None:
    knot = LoopGraph(operations=tiles(1).operations, edges=(edge(0, 1), edge(1, 0)))
    with pytest.raises(ValueError, match=r"^these operations wait for each other within a trip: "):
        loop_bounds(knot)


# --- real schedules ---


@pytest.mark.parametrize(("q_stages", "mma", "smem", "exp"), [(1, 1024, 768, 1024), (2, 2048, 1536, 2048)])
def test_unit_loads_are_fa4s_published_roofline(q_stages: int, mma: float, smem: float, exp: float) -> None:
    """Tables 1 and 3 of the paper: 128 x 128 and 256 x 128, D 128, all exponentials on the MUFU."""
    ops = graph("fa4", "b200", q_stages=q_stages, **IDEAL_FA4).operations
    multiplied = [op for op in ops if op.kind == "product"]
    assert sum(op.uses["tensor"] for op in multiplied) == mma
    assert sum(op.uses["smem"] for op in multiplied) == smem
    exponentials = sum(op.uses.get("mufu", 0.0) for op in ops)
    assert exp <= exponentials <= exp + 8 * q_stages + 1e-6  # and one a row for the factor of its old sums
    loads = loop_bounds(graph("fa4", "b200", q_stages=q_stages, **IDEAL_FA4)).units
    assert loads["tensor"] == mma


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("fa2", "h100", {}), ("fa2", "a100-80gb", {}), ("fa3", "h100", {}), ("fa3", "h100", {"intra_overlap": False}),
    ("fa3", "h100", {"intra_overlap": False, "pingpong": False}), ("fa4", "b200", {}), ("fa4", "b200", {"q_stages": 1}),
    ("fa4", "b300", {}), ("triton", "h100", {}), ("triton", "b200", {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "gpu", "fields"), CASES, ids=[f"{n}-{g}-{len(f)}" for n, g, f in CASES])
def test_no_kernel_beats_its_bound(name: str, gpu: str, fields: dict[str, Any]) -> None:
    """The engine's own interval is at or above it, whatever the units do to each other; and not twice as long."""
    launch = result(name, gpu, **fields).launches[-1]
    loops, _, _ = steady_loop(launch.program)
    own = own_interval(launch, loops, graph(name, gpu, **fields))
    assert own is not None
    bound = loop_bounds(graph(name, gpu, **fields)).bound
    assert bound <= own < 2 * bound


def test_the_dependence_graph_does_not_know_the_codes_order() -> None:
    """With and without intra-warpgroup overlap FA3's statements do the same to the same blocks, whatever trip they are in."""
    seen = []
    for overlap in (True, False):
        program = get_schedule("fa3", intra_overlap=overlap).lower(load_gpu("h100"), PROBLEM)[0]
        loops = steady_loops(program, 0)
        depends, _ = dependences(program, 0, loops)
        offset = blocks(program, depends)
        names = [f"{s.role} {s.kind} {s.writes} {bool(s.attrs.get('accumulate'))}" for s in program.statements]
        flows = {
            (names[d.before], names[d.after], d.distance + offset[d.after] - offset[d.before])
            for d in depends
            if not d.buffer and "mma" in names[d.before] + names[d.after]
        }
        seen.append(flows)
    assert seen[0] == seen[1]
    assert any("tma_load" in before for before, _, _ in seen[0])


def test_a_ring_lets_its_producer_run_ahead_by_its_stages() -> None:
    for stages in (2, 3):
        program = get_schedule("fa3", stages=stages, block_kv=64).lower(load_gpu("h100"), PROBLEM)[0]
        depends, _ = dependences(program, 0, steady_loops(program, 0))
        load = next(i for i, s in enumerate(program.statements) if s.kind == "tma_load" and s.writes == ("Ks",) and i > 10)
        there = {d.distance for d in depends if d.before == load and d.after != load and not d.buffer}
        back = {d.distance for d in depends if d.after == load and d.before != load and d.buffer == "Ks"}
        assert {a + b for a in there for b in back} == {stages}


def test_one_q_tile_of_fa4_takes_the_sum_of_its_chain() -> None:
    """S, P and O of one tile: Q K^T, softmax and P V one after the other, and no schedule is shorter."""
    g = graph("fa4", "b200", q_stages=1)
    bounds = loop_bounds(g)
    found = best_schedule(g, bounds.bound, seconds=10)
    assert found is not None
    check(found, g)
    assert bounds.recurrence > 1.5 * bounds.units["tensor"]
    assert found.interval <= bounds.recurrence + len(bounds.chain)  # rounded up, operation by operation
    assert found.optimal
    for part in ("Q K^T", "lane_exp2", "P V"):
        assert any(name.startswith(part) for name in bounds.chain)


@pytest.mark.parametrize(
    ("name", "gpu", "fields"),
    [("fa3", "h100", {"pingpong": False, "intra_overlap": False}), ("fa4", "b200", {"exp2_emulation": 0.25})],
)
def test_tiles_take_turns_from_the_dependence_graph_alone(name: str, gpu: str, fields: dict[str, Any]) -> None:
    """Ping-pong of FA3's warpgroups and of FA4's Q tiles: softmax of each runs under the other's products."""
    g = graph(name, gpu, **fields)
    bound = loop_bounds(g).bound
    found = best_schedule(g, bound, seconds=6)
    assert found is not None
    check(found, g)
    assert bound <= found.interval < 1.4 * bound
    shares = under_each_other(found)
    assert shares["tile 0", "tile 1"] > 0.25
    assert shares["tile 1", "tile 0"] > 0.25


def test_a_second_q_tile_is_worth_it_and_needs_room() -> None:
    program = result("fa4", "b200", q_stages=1).launches[0].program
    gpu = load_gpu("b200")
    assert lacking(program, gpu, 1) == ""
    assert lacking(program, gpu, 2).startswith("registers: 2 x ")
    loops, depends, _ = steady_loop(program)
    rooms = rooms_of(program, gpu, loops, depends, 1)
    assert rooms["S0.0"].pool == "tmem.0"
    assert rooms["S0.0"].size == 128


@pytest.mark.slow
def test_the_whole_answer() -> None:
    found = best(result("fa4", "b200", q_stages=1), load_gpu("b200"), seconds=8)
    built = found.built
    assert built.schedule is not None
    assert found.own is not None
    assert built.bounds.bound <= found.own
    changes = [v.change for v in found.variants]
    assert changes[0] == "as built"
    assert changes[-1] == "one more CTA's Q tiles in flight"
    assert found.variants[-1].ctas == 2
    more = next(v for v in found.variants if v.change.startswith("more copies of buffers (") and "2 of S0" in v.change)
    assert more.schedule is not None
    assert more.schedule.interval < 0.7 * built.schedule.interval


def test_short_loops_and_straight_kernels_get_a_sentence() -> None:
    standard = simulate(get_schedule("standard"), load_gpu("h100"), PROBLEM)
    with pytest.raises(ValueError, match=r"^standard_softmax has no loop: each of its tiles is done in one pass; "):
        best(standard, load_gpu("h100"), kernel="standard_softmax")
    with pytest.raises(ValueError, match=r"^standard has no kernel 'gemm'; it has standard_qk, standard_softmax, standard_pv: "):
        best(standard, load_gpu("h100"), kernel="gemm")
    short = simulate(get_schedule("fa3"), load_gpu("h100"), Attention(batch=1, heads_q=1, seqlen_q=384, head_dim=128))
    with pytest.raises(ValueError, match=r"^fa3_fwd has no steady loop of 3 trips in this problem: .*give it more keys$"):
        best(short, load_gpu("h100"))


def test_the_same_search_gives_the_same_schedule() -> None:
    two = tiles(2, softmax=150)
    first, second = (best_schedule(two, loop_bounds(two).bound) for _ in range(2))
    assert first is not None
    assert second is not None
    assert [(p.start, p.stage) for p in first.placed] == [(p.start, p.stage) for p in second.placed]
    assert first.interval == math.ceil(loop_bounds(two).bound)
