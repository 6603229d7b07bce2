"""A kernel's own steady loop, read off the records of its run: how long a trip takes, and when each operation begins in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..model.program import IntArray, Opcode, Program
from ..model.rows import OPCODE, STATEMENT
from .dependence import Loop
from .engine import TICKS_PER_CYCLE
from .loop_graph import LoopGraph
from .predict import Launch

#: Trips that a role must make without leaving its loop for them to be counted.
FEWEST = 6
START, END, SM, SLOT, WARP, TILE, ROW = range(7)


def own_interval(launch: Launch, loops: Sequence[Loop], graph: LoopGraph) -> float | None:
    """Cycles a trip of the working role's loop, over the middle half of each stretch of trips; None with fewer than FEWEST."""
    records, loop = launch.run.records, working_loop(launch.program, loops, graph)
    stretches = list(_stretches(records, launch.program, loop))
    trips = sum(len(starts) - 1 for starts in stretches)
    taken = sum(float(starts[-1] - starts[0]) for starts in stretches)
    return taken / trips / TICKS_PER_CYCLE if trips else None


def working_loop(program: Program, loops: Sequence[Loop], graph: LoopGraph) -> Loop:
    """The loop of the role with most vector work."""
    names = {program.roles[loop.role].name: loop for loop in loops}
    work = dict.fromkeys(names, 0.0)
    for op in graph.operations:
        if op.kind == "vector":
            work[op.role] += op.cycles
    return names[max(work, key=lambda name: work[name])]


def _row(program: Program, loop: Loop) -> int:
    return next(pc for pc, r in enumerate(program.code) if loop.start < r[STATEMENT] < loop.end and r[OPCODE] == Opcode.ISSUE)


def _first_warp(program: Program, role: int) -> int:
    return sum(r.warps for r in program.roles[:role])


def _stretches(records: IntArray, program: Program, loop: Loop) -> Iterator[IntArray]:
    """When the middle trips begin that a CTA makes in a row; with an outer loop one stretch for each pass."""
    inside = np.zeros(len(program.code), bool)
    inside[[loop.start <= r[STATEMENT] <= loop.end for r in program.code]] = True
    row, mine = _row(program, loop), records[records[:, WARP] == _first_warp(program, loop.role)]
    for place in dict.fromkeys(map(tuple, mine[:, [SM, SLOT, TILE]].tolist())):
        of_tile = mine[(mine[:, [SM, SLOT, TILE]] == place).all(axis=1)]
        of_tile = of_tile[np.argsort(of_tile[:, START], kind="stable")]
        number = np.cumsum(~inside[of_tile[:, ROW]])  # what lies outside ends a stretch
        begins = of_tile[:, ROW] == row
        for each in dict.fromkeys(number[begins].tolist()):
            starts = of_tile[begins & (number == each), START]
            quarter = len(starts) // 4
            if len(starts) >= FEWEST:
                yield starts[quarter : len(starts) - quarter]


def own_trip(launch: Launch, loops: Sequence[Loop], graph: LoopGraph) -> list[tuple[int, int]] | None:
    """(start, cycles) of each operation of ``graph`` in one trip from the middle of the run; None where there is no such trip.

    A trip begins with the working role's first row. What runs by itself begins where it is issued. Operations whose
    instructions a compiler mixed share the time of their stretch of code, as they share its cost.
    """
    program, records = launch.program, launch.run.records
    own = own_interval(launch, loops, graph)
    if own is None:
        return None
    longest = max(_stretches(records, program, working_loop(program, loops, graph)), key=len)
    begin, period = int(longest[len(longest) // 2]), round(own * TICKS_PER_CYCLE)
    window = records[(records[:, START] >= begin) & (records[:, START] < begin + 3 * period)]
    slots = sorted(set(window[:, SLOT].tolist()))
    if len(slots) < 1 + max(op.cta for op in graph.operations):
        return None
    statement = np.array([r[STATEMENT] for r in program.code])
    roles = {r.name: number for number, r in enumerate(program.roles)}
    ran: list[tuple[int, int] | None] = []
    for op in graph.operations:
        mine = window[(window[:, SLOT] == slots[op.cta]) & (window[:, WARP] == _first_warp(program, roles[op.role]))]
        mine = mine[np.isin(statement[mine[:, ROW]], op.statements)]
        starts = mine[mine[:, ROW] == mine[:, ROW].min(initial=len(statement)), START]
        ends = mine[mine[:, ROW] == mine[:, ROW].max(initial=-1), END]
        ran.append((int(starts.min()), int(ends[ends > starts.min()].min())) if len(mine) else None)
    shared = _shared(graph, ran)
    if shared is None:
        return None
    return [((a - begin) // TICKS_PER_CYCLE, max(1, (b - a) // TICKS_PER_CYCLE)) for a, b in shared]


def _shared(graph: LoopGraph, ran: Sequence[tuple[int, int] | None]) -> list[tuple[int, int]] | None:
    """When each operation ran, of which some have no rows of their own but lie in those of the one before on their warp."""
    operations = graph.operations
    stretches: list[list[int]] = []
    open_ones: dict[str, list[int]] = {}
    for i, op in enumerate(operations):
        if ran[i] is not None:
            stretches.append([i])
            if op.kind == "vector":
                open_ones[op.warp] = stretches[-1]
        elif op.warp in open_ones:
            open_ones[op.warp].append(i)
        else:
            return None
    out = [(0, 0)] * len(operations)
    for inside in stretches:
        begin, end = ran[inside[0]] or (0, 0)
        work = sum(operations[i].cycles for i in inside) or 1.0
        at = float(begin)
        for i in inside:
            until = at + (end - begin) * operations[i].cycles / work
            out[i], at = (round(at), round(until)), until
    return out
