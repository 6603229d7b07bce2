"""The optimum beside shipped schedules: their graphs, their own loops, and what is found from the graph alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
from loop_graphs import PROBLEM, check, graph, result, under_each_other

from flashsim import Attention, get_schedule, load_gpu, simulate
from flashsim.sim.coarse import coarse
from flashsim.sim.dependence import dependences, steady_loops
from flashsim.sim.loop_bounds import loop_bounds
from flashsim.sim.modulo import best_schedule
from flashsim.sim.moves import blocks
from flashsim.sim.optimum import RECORDS, best, lacking, loops_of, rooms_of, steady_loop
from flashsim.sim.own_loop import own_interval, own_trip
from flashsim.sim.switches import Loops, tried

IDEAL_FA4 = {"counts": "ideal", "cta_pair": False, "exp2_emulation": 0.0}


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


#: Schedule, chip, its fields, keys, head_dim; and the kernel where it is not the only one with a loop.
CASES: list[tuple[str, str, dict[str, Any], int, int]] = [
    ("standard", "a100-80gb", {}, 2048, 128), ("standard", "h100", {}, 4096, 128), ("fa1", "a100-40gb", {}, 1024, 64),
    ("fa1", "h100", {}, 1024, 128), ("fa2", "a100-80gb", {}, 4096, 128), ("fa2", "h100", {}, 4096, 128),
    ("fa2", "h100", {}, 2048, 64), ("fa2", "b200", {}, 2048, 128), ("fa3", "h100", {}, 4096, 128), ("fa3", "h200", {}, 4096, 64),
    ("fa3", "h100", {"intra_overlap": False}, 4096, 128), ("fa3", "h100", {"pingpong": False}, 4096, 128),
    ("fa3", "h100", {"intra_overlap": False, "pingpong": False}, 4096, 128), ("fa4", "b200", {}, 4096, 128),
    ("fa4", "b200", {"q_stages": 1}, 4096, 128), ("fa4", "b300", {}, 4096, 128), ("triton", "h100", {}, 4096, 128),
    ("triton", "b200", {}, 4096, 128), ("triton", "a100-80gb", {}, 2048, 128), ("gluon", "b200", {}, 4096, 128),
    ("cudnn", "h100", {}, 4096, 128), ("cudnn", "b200", {}, 4096, 128),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "gpu", "fields", "keys", "head_dim"), CASES, ids=[f"{n}-{g}-{k}x{d}-{len(f)}" for n, g, f, k, d in CASES]
)
def test_the_answer_lies_between_the_bound_and_the_kernels_own(
    name: str, gpu: str, fields: dict[str, Any], keys: int, head_dim: int
) -> None:
    """Whatever units do to each other, own is at or above the bound and not twice as long; a short search loses nothing of it."""
    problem = Attention(batch=1, heads_q=8, seqlen_q=keys, head_dim=head_dim)
    ran = simulate(get_schedule(name, **fields), load_gpu(gpu), problem, record_limit=RECORDS)
    found = best(ran, load_gpu(gpu), seconds=2, variants=False)
    assert found.own is not None
    assert found.interval is not None
    bound = found.built.bounds.bound
    assert bound <= found.own < 2 * bound
    assert bound <= found.interval + 1e-6
    assert found.interval <= found.own
    assert found.trip is not None
    assert {p.operation.name for p in found.trip.placed} == {op.name for op in coarse(found.built.graph).operations}
    if found.better is not None:
        check(found.better)


def test_l2_and_hbm_are_two_queues() -> None:
    """P of the standard pipeline misses L2: HBM binds, and the two together would be above the kernel's own interval."""
    launch = result("standard", "h100").launches[-1]
    g = graph("standard", "h100")
    bounds, own = loop_bounds(g), own_interval(launch, steady_loop(launch.program)[0], g)
    assert own is not None
    assert bounds.unit == "hbm"
    assert 0.9 * own < bounds.units["hbm"] <= own < bounds.units["hbm"] + bounds.units["l2"]


def test_a_trip_of_the_kernels_own_is_as_long_as_it_is() -> None:
    launch = result("fa3", "h100").launches[0]
    loops, _, _ = steady_loop(launch.program)
    g = graph("fa3", "h100")
    own, trip = own_interval(launch, loops, g), own_trip(launch, loops, g)
    assert own is not None
    assert trip is not None
    for op, (start, cycles) in zip(g.operations, trip, strict=True):
        assert 0 <= start < 3 * own
        assert cycles <= own
        if op.kind == "vector":
            assert cycles > 0.8 * op.cycles, op.name  # mixed code shares its time as it shares its cost
    warps = {op.warp for op in g.operations if op.kind == "vector"}
    for warp in warps:
        assert sum(n for op, (_, n) in zip(g.operations, trip, strict=True) if op.warp == warp) <= own * 1.01


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
    check(found)
    assert bounds.recurrence > 1.5 * bounds.units["tensor"]
    assert found.interval <= bounds.recurrence + len(bounds.chain)  # rounded up, operation by operation
    assert found.optimal
    for part in ("Q K^T", "lane_exp2", "P V"):
        assert any(name.startswith(part) for name in bounds.chain)


def test_ping_pong_of_fa3_comes_from_the_dependence_graph_alone() -> None:
    """Without ping-pong and overlap in the code: softmax of each warpgroup goes under the other's products, a tenth faster."""
    fields = {"pingpong": False, "intra_overlap": False}
    g, launch = graph("fa3", "h100", **fields), result("fa3", "h100", **fields).launches[0]
    own = own_interval(launch, steady_loop(launch.program)[0], g)
    found = best_schedule(g, loop_bounds(g).bound, seconds=12)
    assert found is not None
    check(found)
    assert own is not None
    assert found.interval < 0.9 * own
    shares = under_each_other(found)
    assert shares["tile 0", "tile 1"] > 0.5
    assert shares["tile 1", "tile 0"] > 0.5


def test_two_tiles_of_fa4_take_turns_from_the_dependence_graph_alone() -> None:
    g = graph("fa4", "b200")
    bound = loop_bounds(g).bound
    found = best_schedule(g, bound, seconds=12)
    assert found is not None
    check(found)
    assert bound <= found.interval < 1.05 * bound
    shares = under_each_other(found)
    assert shares["tile 0", "tile 1"] > 0.25
    assert shares["tile 1", "tile 0"] > 0.25


def test_switches_are_run_by_the_engine() -> None:
    """Ping-pong and overlap each gain, and what the engine says of a switch is what a run with it says."""
    gpu, problem = load_gpu("h100"), Attention(batch=1, heads_q=2, seqlen_q=4096, head_dim=128)

    def run(schedule: Any) -> Loops:
        return loops_of(simulate(schedule, gpu, problem, record_limit=RECORDS), gpu, "fa3_fwd")

    plain = get_schedule("fa3", pingpong=False, intra_overlap=False)
    own = run(plain)
    found, left_out = tried(plain, own, run, math.inf)
    assert left_out == ()
    gains = {t.switch: t for t in found if not t.refused and t.comparable < own.interval}
    assert {"pingpong=true", "intra_overlap=true"} <= set(gains)
    assert gains["pingpong=true"].interval == run(get_schedule("fa3", pingpong=True, intra_overlap=False)).interval
    assert any(t.says == "all that gain" and len(t.fields) > 1 for t in found)
    refused = {t.switch: t.refused for t in found if t.refused}
    assert "shared memory" in refused["stages=3"]
    half = next(t for t in found if t.switch == "block_kv=80")
    assert half.comparable == pytest.approx(half.interval * 176 / 80)
    assert tried(plain, own, run, 0.0)[0] == ()  # no time, nothing run


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
    found = best(result("fa4", "b200", q_stages=1), load_gpu("b200"), seconds=20)
    built = found.built
    assert built.schedule is not None
    assert found.own is not None
    assert built.bounds.bound <= found.own
    changes = [v.change for v in found.variants]
    assert changes[0] == "as built"
    assert changes[-1] == "one more CTA's Q tiles in flight"
    assert found.variants[-1].ctas == 2
    more = next(v for v in found.variants if v.change.startswith("more copies of buffers (") and " of S0" in v.change)
    assert more.schedule is not None
    assert more.schedule.interval < 0.7 * built.schedule.interval
    assert found.seconds < 25


def test_short_loops_and_straight_kernels_get_a_sentence() -> None:
    standard = simulate(get_schedule("standard"), load_gpu("h100"), PROBLEM)
    with pytest.raises(ValueError, match=r"^standard_softmax has no loop: each of its tiles is done in one pass; "):
        best(standard, load_gpu("h100"), kernel="standard_softmax")
    with pytest.raises(ValueError, match=r"^standard has no kernel 'gemm'; it has standard_qk, standard_softmax, standard_pv: "):
        best(standard, load_gpu("h100"), kernel="gemm")
    short = simulate(get_schedule("fa3"), load_gpu("h100"), Attention(batch=1, heads_q=1, seqlen_q=384, head_dim=128))
    with pytest.raises(ValueError, match=r"^fa3_fwd has no steady loop of 3 trips in this problem: .*give it more keys$"):
        best(short, load_gpu("h100"))
