"""Run.records as typed intervals: what each warp ran when, the waits between, how busy each unit was, what fed what.

A record spans one code row of one warp, from the tick at which the warp came to it until it may go on, so time spent
queueing for the issue port is inside. Consecutive rows of one statement make one :class:`Interval`; times are ticks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from ..model.instructions import INSTRUCTIONS, PIPES, Path
from ..model.program import CODE_COLUMNS, Opcode, Program
from .engine import FIRST_PIPE, PATH, PORT, RESULT, Job, Run

SUBPARTITIONS = 4
STATEMENT = CODE_COLUMNS.index("statement")
#: Statements that have no rows of their own and add nothing to others'.
SILENT = ("loop", "end", "when", "end_when", "ending", "cluster_sync")

#: Rows that block a warp and the name of the wait in a timeline, the longest kind first: where several rows lie between two
#: statements of a warp, the gap is named by the first of these.
WAITS = {
    Opcode.WAIT_SCOREBOARD: "wait: loads",
    Opcode.WAIT_GROUP: "wait: cp.async",
    Opcode.MB_WAIT: "wait: mbarrier",
    Opcode.MMA_WAIT: "wait: wgmma",
    Opcode.BARRIER: "wait: barrier",
    Opcode.DEPEND: "wait: result",
}


@dataclass(frozen=True, kw_only=True)
class Interval:
    """One warp in one statement (its number in the Program, -1 for a wait) from ``start`` to ``end`` ticks.

    ``tile``: the CTA's tile. ``first_row``, ``last_row``: code rows. ``trip``: how often this warp ran the statement
    for this tile before. ``instructions``: issued, by name. ``held``: ticks of each of UNITS.
    """

    name: str
    start: int
    end: int
    sm: int
    slot: int
    warp: int
    subpartition: int
    tile: int
    statement: int
    first_row: int
    last_row: int
    trip: int
    instructions: tuple[tuple[str, int], ...]
    held: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class UnitSpan:
    """One unit of one sub-partition in use by the same statements; ``share``: of the span that it was held."""

    unit: str
    sm: int
    subpartition: int
    start: int
    end: int
    name: str
    share: float


@dataclass(frozen=True, kw_only=True)
class Flow:
    """``buffer`` was filled by ``producer`` and first read, in its role, by ``consumer``."""

    buffer: str
    producer: Interval
    consumer: Interval


UNITS = ("port", *PIPES)
TENSOR = UNITS.index("tensor")
QUEUED = (Path.WGMMA, Path.TCGEN05)  # instructions whose products go on after their issue


@dataclass(frozen=True, kw_only=True)
class _Row:
    """What one ISSUE row of the code means on a timeline."""

    statement: int
    instructions: tuple[tuple[str, int], ...]
    held: tuple[int, ...]


def intervals(program: Program, job: Job, run: Run, *, limit: int | None = None, ctas: int | None = None) -> list[Interval]:
    """Statements of each warp, merged row by row, in order of start.

    ``limit``: of the first so many records; ``ctas``: of the first so many CTAs to appear in them.
    """
    records = run.records[:limit]
    if ctas is not None:
        tiles = records[:, 5].tolist()
        kept = set(list(dict.fromkeys(tiles))[:ctas])
        records = records[[tile in kept for tile in tiles]]
    names, rows = statement_names(program), _rows(program, job)
    by_warp: dict[tuple[int, int, int, int], list[tuple[int, int, int]]] = {}
    for start, end, sm, slot, warp, tile, row in records.tolist():
        by_warp.setdefault((sm, slot, warp, tile), []).append((start, end, row))
    out: list[Interval] = []
    for (sm, slot, warp, tile), events in by_warp.items():
        trips: dict[int, int] = {}
        for group in _merged(sorted(events), rows):
            first, last = group[0], group[-1]
            statement = rows[first[2]].statement
            trip = trips.get(statement, 0)
            trips[statement] = trip + 1
            counts: dict[str, int] = {}
            for _, _, row in group:
                for name, n in rows[row].instructions:
                    counts[name] = counts.get(name, 0) + n
            held = tuple(sum(rows[row].held[i] for _, _, row in group) for i in range(len(UNITS)))
            out.append(
                Interval(
                    name=names[statement],
                    start=first[0],
                    end=last[1],
                    sm=sm,
                    slot=slot,
                    warp=warp,
                    subpartition=(slot * program.warps + warp) % SUBPARTITIONS,
                    tile=tile,
                    statement=statement,
                    first_row=first[2],
                    last_row=last[2],
                    trip=trip,
                    instructions=tuple(counts.items()),
                    held=held,
                )
            )
    return sorted(out, key=lambda x: (x.start, x.sm, x.slot, x.warp, x.end))


def statement_names(program: Program) -> list[str]:
    """A name per statement: its kind, with the kinds of those after it whose instructions were mixed into its rows."""
    owners = set(program.code[:, STATEMENT].tolist())
    names = [s.kind for s in program.statements]
    for i in sorted(owners):
        names[i] = "+".join(dict.fromkeys(program.statements[j].kind for j in members(program, i)))
    return names


def members(program: Program, statement: int) -> list[int]:
    """``statement`` and the ones after it that have no code rows of their own: their instructions are in its rows."""
    owners = set(program.code[:, STATEMENT].tolist())
    out = [statement]
    for i in range(statement + 1, len(program.statements)):
        if i in owners or program.statements[i].kind in SILENT:
            break
        out.append(i)
    return out


def _rows(program: Program, job: Job) -> dict[int, _Row]:
    out = {}
    for pc, row in enumerate(program.code.tolist()):
        if row[0] != Opcode.ISSUE:
            continue
        bundle, count = row[1], row[2]
        costs = job.bundles[bundle].tolist()
        held = [costs[PORT] * count, *(costs[FIRST_PIPE + i] * count for i in range(len(PIPES)))]
        if costs[PATH] == Path.TCGEN05:  # the same time on all four tensor cores; booked at the warp that issued it
            held[UNITS.index("tensor")] += costs[RESULT] * count
        issued = tuple((name, n * count) for name, n in program.bundles[bundle])
        out[pc] = _Row(statement=row[STATEMENT], instructions=issued, held=tuple(held))
    return out


def _merged(events: list[tuple[int, int, int]], rows: dict[int, _Row]) -> Iterator[list[tuple[int, int, int]]]:
    """Runs of (start, end, row) that belong to one statement; a loop that comes round starts a new run."""
    group: list[tuple[int, int, int]] = []
    for event in events:
        if group and (rows[event[2]].statement != rows[group[-1][2]].statement or event[2] <= group[-1][2]):
            yield group
            group = []
        group.append(event)
    if group:
        yield group


def waits(program: Program, statements: list[Interval]) -> list[Interval]:
    """The gaps between one warp's statements, named by the rows that blocked it there."""
    before: dict[tuple[int, int, int, int], Interval] = {}
    out = []
    for x in statements:
        key = (x.sm, x.slot, x.warp, x.tile)
        last = before.get(key)
        before[key] = x
        if last is None or x.start <= last.end:
            continue
        out.append(
            Interval(
                name=_wait_name(program, last.last_row, x.first_row),
                start=last.end,
                end=x.start,
                sm=x.sm,
                slot=x.slot,
                warp=x.warp,
                subpartition=x.subpartition,
                tile=x.tile,
                statement=-1,
                first_row=last.last_row + 1,
                last_row=x.first_row - 1,
                trip=x.trip,
                instructions=(),
                held=(0,) * len(UNITS),
            )
        )
    return out


def _wait_name(program: Program, left: int, right: int) -> str:
    code = program.code
    between = list(range(left + 1, right))
    if right <= left:  # round a loop: up to its END, then on from its LOOP
        end = next(pc for pc in range(left, len(code)) if code[pc, 0] == Opcode.END and code[pc, 7] < right)
        between = [*range(left + 1, end), *range(int(code[end, 7]) + 1, right)]
    found = [WAITS[Opcode(int(code[pc, 0]))] for pc in between if int(code[pc, 0]) in WAITS]
    return min(found, key=list(WAITS.values()).index, default="wait")


def unit_spans(statements: list[Interval], name_of: Callable[[Interval], str] = attrgetter("name")) -> list[UnitSpan]:
    """How the records kept each unit of each sub-partition busy. Spans of one unit never overlap.

    A span lasts while the same statements of warps on that sub-partition use the unit; ``share`` spreads each
    statement's hold evenly over its interval. Products that go on after their issue run one after the other, each whole.
    """
    users: dict[tuple[int, int, int], list[Interval]] = {}
    for x in statements:
        for unit, held in enumerate(x.held):
            if held > 0 and x.end > x.start:
                users.setdefault((x.sm, x.subpartition, unit), []).append(x)
    out: list[UnitSpan] = []
    for (sm, quarter, unit), group in sorted(users.items()):
        later = unit == TENSOR and any(INSTRUCTIONS[name].path in QUEUED for x in group for name, _ in x.instructions)
        for start, end, name, share in _queue(group, name_of) if later else _sweep(group, unit, name_of):
            out.append(UnitSpan(unit=UNITS[unit], sm=sm, subpartition=quarter, start=start, end=end, name=name, share=share))
    return out


def _queue(group: list[Interval], name_of: Callable[[Interval], str]) -> Iterator[tuple[int, int, str, float]]:
    """(start, end, name, 1) of each product, in order of issue: it begins with its issue, or when the one before it ends."""
    free = 0
    for x in sorted(group, key=lambda x: x.start):
        start = max(x.start, free)
        free = start + x.held[TENSOR]
        yield start, free, name_of(x), 1.0


def _sweep(group: list[Interval], unit: int, name_of: Callable[[Interval], str]) -> Iterator[tuple[int, int, str, float]]:
    """(start, end, names, share) between the edges of ``group``; neighbours with equal names become one span."""
    edges = sorted({t for x in group for t in (x.start, x.end)})
    ordered, active, nxt = sorted(group, key=lambda x: x.start), list[tuple[int, int]](), 0
    start, end, name, held = 0, 0, "", 0.0
    for left, right in pairwise(edges):
        while nxt < len(ordered) and ordered[nxt].start <= left:
            heapq.heappush(active, (ordered[nxt].end, nxt))
            nxt += 1
        while active and active[0][0] <= left:
            heapq.heappop(active)
        running = [ordered[i] for _, i in active]
        label = ", ".join(sorted({name_of(x) for x in running}))
        use = sum(x.held[unit] / (x.end - x.start) for x in running) * (right - left)
        if label == name and left == end:
            end, held = right, held + use
            continue
        if name:
            yield start, end, name, min(1.0, held / (end - start))
        start, end, name, held = left, right, label, use
    if name:
        yield start, end, name, min(1.0, held / (end - start))


LOADS, STORES = ("load", "tma_load"), ("store", "tma_store")


def flows(program: Program, statements: list[Interval]) -> list[Flow]:
    """Arrows from each fill of a buffer in a CTA, at the first warp that loads it, to where each role first reads it.

    A ring buffer's fills and reads are matched by its stages. Fills that nothing reads (or whose reader was
    cut off) have no arrow.
    """
    fills: dict[int, list[tuple[int, str]]] = {}
    reads: dict[int, list[tuple[int, str]]] = {}
    for i in {x.statement for x in statements}:
        inside = [(j, program.statements[j]) for j in members(program, i)]
        fills[i] = [(j, b) for j, s in inside if s.kind.startswith(LOADS) for b in s.writes]
        reads[i] = [(j, b) for j, s in inside if not s.kind.startswith((*LOADS, *STORES)) for b in s.reads]
    stages = {tile: _stages(program, tile) for tile in {x.tile for x in statements}}
    pending: dict[tuple[int, int, int, str, int], tuple[Interval, set[int]]] = {}
    filled: set[tuple[int, int, int, int, int]] = set()
    out = []
    for x in statements:
        role, place = program.statements[x.statement].role, (x.sm, x.slot, x.tile)
        for j, buffer in reads[x.statement]:
            producer, served = pending.get((*place, buffer, stages[x.tile].get((j, x.trip, buffer), 0)), (None, set()))
            if producer is not None and role not in served and x.start >= producer.end:
                out.append(Flow(buffer=buffer, producer=producer, consumer=x))
                served.add(role)
        visit = (*place, x.statement, x.trip)
        if fills[x.statement] and visit not in filled:
            filled.add(visit)
            for j, buffer in fills[x.statement]:
                pending[(*place, buffer, stages[x.tile].get((j, x.trip, buffer), 0))] = (x, set())
    return out


def _stages(program: Program, tile: int) -> dict[tuple[int, int, str], int]:
    """By statement, how often its role ran it for this tile before, and ring buffer: the stage that it means."""
    rings = {b.name: (b.ring, b.stages) for b in program.buffers if b.ring is not None}
    numbers = {id(s): i for i, s in enumerate(program.statements)}
    out: dict[tuple[int, int, str], int] = {}
    for role in range(len(program.roles)) if rings else ():
        steps, trips = {ring.name: 0 for ring in program.rings}, dict[int, int]()
        for s, _, _ in program.walk(tile, role):
            i = numbers[id(s)]
            trip = trips.get(i, 0)
            trips[i] = trip + 1
            if s.kind == "advance":
                steps[s.attrs["ring"]] += 1
            for name in (*s.reads, *s.writes):
                if name in rings:
                    ring, count = rings[name]
                    out[i, trip, name] = steps[ring] % count
    return out
