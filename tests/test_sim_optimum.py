"""The best modulo schedule of small graphs whose optimum is known: found from dependences and units alone."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
from loop_graphs import check, edge, operation, result, tiles, under_each_other

from flashsim.sim.coarse import coarse
from flashsim.sim.loop_bounds import loop_bounds, unit_loads
from flashsim.sim.loop_graph import LoopGraph
from flashsim.sim.modulo import Placed, Room, Schedule, best_schedule
from flashsim.sim.moves import moves, overlaps


def at(schedule: Schedule, name: str) -> Placed:
    return next(p for p in schedule.placed if p.operation.name.startswith(name))


def test_one_tile_takes_the_sum() -> None:
    found = best_schedule(tiles(1), loop_bounds(tiles(1)).bound)
    assert found is not None
    assert found.optimal
    assert found.interval == 400 == loop_bounds(tiles(1)).recurrence
    check(found)


def test_two_tiles_take_turns_although_nothing_says_so() -> None:
    two = tiles(2)
    found = best_schedule(two, loop_bounds(two).bound)
    assert found is not None
    check(found)
    assert (found.interval, found.optimal) == (400, True)
    shares = under_each_other(found)
    assert shares["tile 0", "tile 1"] == shares["tile 1", "tile 0"] == 1.0
    program = result("fa3", "h100").launches[0].program
    assert sum("take turns" in move for move in moves(program, found, ())) == 1
    assert list(moves(program, found, (), found)) == []  # what a kernel does already is no move


def test_a_second_copy_of_scores_lets_softmax_run_beside_its_own_tiles_products() -> None:
    one = tiles(1)
    rooms = {"S0": Room(most=1, pool="registers", size=64, free=64)}
    bound = loop_bounds(one, {"S0": 1}).bound
    found = best_schedule(one, bound, rooms=rooms)
    assert found is not None
    check(found)
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
    check(found)
    assert (found.interval, found.optimal) == (300, True)  # Q K^T and softmax in turn
    assert overlaps(found, at(found, "exp2"), at(found, "P V")) >= 50
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
    check(found)


def test_the_bound_counts_what_products_slow() -> None:
    """Vector work of 300 cycles, 600 beside a product, with 400 of products: 300 + 400 x (1 - 1/2)."""
    op = operation("exp", "vector", 300, "port")
    slow = replace(op, beside=600.0, beside_uses={"port": 600.0})
    loads = unit_loads(LoopGraph(operations=(operation("P V", "product", 400, "tensor"), slow), edges=()))
    assert loads["port"] == pytest.approx(500)
    assert loads["tensor"] == 400


def test_two_warps_that_want_one_unit_share_it_fairly() -> None:
    """Each asks for all of the MUFU for 100 cycles of its own 150: together no trip takes less than 200, nor more than both."""
    halves = []
    for n in range(2):
        op = operation(f"exp2 S{n}", "vector", 100, "mufu", f"softmax{n}")
        rest = operation(f"row_max m{n}", "vector", 50, "alu", f"softmax{n}")
        halves += [op, replace(rest, cta=0)]
    graph = LoopGraph(operations=tuple(halves), edges=(edge(0, 1), edge(2, 3)))
    found = best_schedule(graph, loop_bounds(graph).bound)
    assert found is not None
    check(found)
    assert (found.interval, found.optimal) == (200, True)


def test_vector_work_beside_products_takes_what_it_loses_there() -> None:
    """One warp of 300 cycles at half its pace beside 400 cycles of products: as the bound says, 500."""
    slow = replace(operation("exp2 S0", "vector", 300, "port"), beside=600.0, beside_uses={"port": 600.0})
    graph = LoopGraph(operations=(operation("P V O0", "product", 400, "tensor"), slow), edges=())
    found = best_schedule(graph, loop_bounds(graph).bound)
    assert found is not None
    check(found)
    assert found.interval == pytest.approx(500, abs=2)


def test_chains_are_whole_and_lose_nothing() -> None:
    two = tiles(2)
    assert coarse(two) == two  # softmax waits for one product and another waits for it
    names = ("exp2 S0 0-40 %", "exp2 S0 40-100 % + row_sum", "convert P0")
    parts = tuple(operation(name, "vector", 50, "mufu") for name in names)
    chained = LoopGraph(operations=parts, edges=(edge(0, 1), edge(1, 2), edge(2, 0, 1)))
    (one,) = coarse(chained).operations
    assert (one.name, one.cycles, one.uses) == ("exp2 S0 0-100 % + row_sum + convert P0", 150, {"mufu": 150})
    held = operation("P V O0", "product", 10, "tensor")
    told = LoopGraph(operations=(*parts, held), edges=(edge(0, 1), edge(1, 2), edge(0, 3)))
    assert len(coarse(told).operations) == 3  # P V needs the first part, which must not wait for the others


def test_the_time_allowed_is_the_clocks_on_the_wall() -> None:
    many = tiles(5, softmax=130)
    started = time.monotonic()
    best_schedule(many, 1.0, seconds=2)
    assert time.monotonic() - started < 4


def test_the_same_search_gives_the_same_interval() -> None:
    two = tiles(2, softmax=150)
    first, second = (best_schedule(two, loop_bounds(two).bound) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.interval == second.interval == math.ceil(loop_bounds(two).bound)


def test_circular_waits_within_a_trip_are_named() -> None:
    knot = LoopGraph(operations=tiles(1).operations, edges=(edge(0, 1), edge(1, 0)))
    with pytest.raises(ValueError, match=r"^these operations wait for each other within a trip: "):
        loop_bounds(knot)


