"""How far a pipeline's steady loop is from the best one: its bounds, its own interval, the best found, and the moves between.

``best(result)`` reads the dependence graph of one kernel's loop (:mod:`.dependence`), prices it (:mod:`.operations`), takes
bounds (:mod:`.loop_bounds`), measures the interval that the engine's timeline shows, and looks for the best modulo schedule
(:mod:`.modulo`): as the kernel is built, with more copies of buffers where there is room, and with one more CTA in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..model.gpu import GPU
from ..model.program import IntArray, Opcode, Program
from ..model.rows import OPCODE, STATEMENT
from .dependence import Dependence, Loop, dependences, steady_loops
from .engine import TICKS_PER_CYCLE
from .extras import extra
from .loop_bounds import LoopBounds, loop_bounds
from .loop_graph import LoopGraph, loop_graph
from .modulo import NEEDS, Room, Schedule, best_schedule
from .moves import moves
from .predict import Launch, Result

#: Records of the timeline that the kernel's own interval needs.
RECORDS = 400_000
#: Registers of a thread for addresses, row statistics and fragments, beside its tiles (as in FA2's own estimate).
STATE_REGISTERS = 40
#: Copies of a buffer that are added at most.
MOST_COPIES = 2
#: A variant is looked at where the best schedule without it is so much above the busiest unit.
WORTHWHILE = 1.02


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A loop as built, or changed as ``change`` says: its bounds and its best schedule (None: none found in time).

    ``ctas``: in flight on an SM; intervals are of one trip of all of them. ``fits``: "" or why it cannot be built as it is.
    """

    change: str
    graph: LoopGraph
    bounds: LoopBounds
    schedule: Schedule | None
    ctas: int
    fits: str = ""


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """``own``: cycles a trip in the engine's timeline, None where the loop is too short to tell. ``variants``: as built first.

    ``moves``: what the best schedule as built does otherwise than the kernel, in words.
    """

    kernel: str
    gpu: str
    ctas: int
    own: float | None
    variants: tuple[Variant, ...]
    moves: tuple[str, ...]
    seconds: float

    @property
    def built(self) -> Variant:
        return self.variants[0]


def best(
    result: Result, gpu: GPU, *, kernel: str | None = None, seconds: float = 20.0, seed: int = 0, variants: bool = True
) -> Optimum:
    """The optimum beside one kernel of ``result`` (the longest with a loop, or ``kernel``), simulated with RECORDS.

    ``seconds``: for each schedule that is looked for. ``variants``: look at more buffers and tiles too. Raises ValueError where
    the kernel has no steady loop or OR-tools is missing.
    """
    extra("ortools", "optimum", NEEDS)
    launch = _launch(result, kernel)
    program = launch.program
    ctas = min(launch.occupancy.ctas_per_sm, len(launch.job.queue))  # those that the grid gives an SM
    loops, depends, skipped = steady_loop(program)
    graph = loop_graph(program, gpu, launch.job, loops, depends, skipped, ctas)
    looked = [_variant("as built", graph, {}, ctas, seconds, seed)]
    rooms = rooms_of(program, gpu, loops, depends, ctas)
    if variants and rooms and _worthwhile(looked[0]):
        more = _variant("more copies of buffers", graph, rooms, ctas, seconds, seed)
        if more.schedule is not None and more.schedule.copies:
            names = ", ".join(f"{n + 1} of {name.partition('.')[0]}" for name, n in more.schedule.copies.items())
            looked.append(replace(more, change=f"more copies of buffers ({names})"))
    if variants and _worthwhile(looked[0]) and looked[0].bounds.recurrence > looked[0].bounds.resource:
        second = loop_graph(program, gpu, launch.job, loops, depends, skipped, ctas + 1)
        lacks = lacking(program, gpu, ctas + 1)
        looked.append(_variant("one more CTA's Q tiles in flight", second, {}, ctas + 1, seconds, seed, fits=lacks))
    own = own_interval(launch, loops, graph)
    found = looked[0].schedule
    return Optimum(
        kernel=program.name, gpu=gpu.name, ctas=ctas, own=own, variants=tuple(looked), seconds=seconds,
        moves=tuple(moves(program, graph, found, depends)) if found is not None else (),
    )  # fmt: skip


def steady_loop(program: Program) -> tuple[tuple[Loop, ...], tuple[Dependence, ...], frozenset[int]]:
    """Loops, dependences and left-out statements of the tile with most trips. Raises ValueError where there is no steady loop."""
    tile = _longest_tile(program)
    loops = steady_loops(program, tile)
    if not loops:
        raise ValueError(f"{program.name} has no loop: each of its tiles is done in one pass; choose another kernel or schedule")
    depends, skipped = dependences(program, tile, loops)
    return loops, depends, skipped


def _longest_tile(program: Program) -> int:
    """The tile with most trips, by the tile arguments that loops count with."""
    names = {s.index.arg for s in program.statements if s.kind == "loop" and s.index is not None and s.index.arg}
    if not names:
        return 0
    return int(np.argmax(sum(program.tiles.column(name) for name in sorted(names))))


def _launch(result: Result, kernel: str | None) -> Launch:
    if kernel is None:
        loops = [x for x in result.launches if steady_loops(x.program, _longest_tile(x.program))]
        return max(loops or result.launches, key=lambda x: x.cycles)
    names = [x.program.name for x in result.launches]
    if kernel not in names:
        raise ValueError(f"{result.schedule} has no kernel {kernel!r}; it has {', '.join(names)}: change --kernel")
    return result.launches[names.index(kernel)]


def _variant(
    change: str, graph: LoopGraph, rooms: Mapping[str, Room], ctas: int, seconds: float, seed: int, *, fits: str = ""
) -> Variant:
    bounds = loop_bounds(graph, {name: room.most for name, room in rooms.items()})
    schedule = best_schedule(graph, bounds.bound, seconds=seconds, rooms=rooms, seed=seed)
    return Variant(change=change, graph=graph, bounds=bounds, schedule=schedule, ctas=ctas, fits=fits)


def _worthwhile(variant: Variant) -> bool:
    return variant.schedule is None or variant.schedule.interval > WORTHWHILE * variant.bounds.resource


# --- room ---


def rooms_of(
    program: Program, gpu: GPU, loops: Sequence[Loop], depends: Sequence[Dependence], ctas: int
) -> dict[str, Room]:
    """Buffers of the steady loop that could have more copies, by the name that edges give them."""
    buffers = {b.name: b for b in program.buffers}
    free = _free(program, gpu, loops, ctas)
    out: dict[str, Room] = {}
    for name in dict.fromkeys(d.buffer for d in depends if d.buffer in buffers):
        b = buffers[name]
        if b.cols <= 1:
            continue  # row statistics
        role = next(program.statements[d.before].role for d in depends if d.buffer == name)
        pool = f"registers of {program.roles[role].name}" if b.space == "register" else b.space
        size = b.size_bytes if b.space != "register" else b.size_bytes // (4 * 32 * program.roles[role].warps)
        if b.space == "tmem":
            size = max(1, int(b.cols * b.bytes_per_element) // 4)
        most = min(MOST_COPIES, free.get(pool, 0) // max(1, size))
        if most > 0:
            for cta in range(ctas):
                out[f"{name}.{cta}"] = Room(most=most, pool=f"{pool}.{cta}", size=size, free=free[pool])
    return out


def _free(program: Program, gpu: GPU, loops: Sequence[Loop], ctas: int) -> dict[str, int]:
    """What a CTA leaves free: bytes of shared memory, columns of tensor memory, registers of a role's threads."""
    sm = gpu.sm
    smem = min(int(sm.smem_per_cta_bytes), int(sm.smem_bytes) // ctas - int(sm.smem_reserved_per_cta_bytes))
    free = {"smem": smem - program.smem_bytes}
    if gpu.tmem is not None:
        free["tmem"] = int(gpu.tmem.columns) // ctas - program.tmem_columns
    for loop in loops:
        role = program.roles[loop.role]
        inside = program.statements[loop.start : loop.end]
        used = {name for s in inside for name in (*s.reads, *s.writes)}
        tiles = [b for b in program.buffers if b.name in used and b.space == "register"]
        held = sum(b.size_bytes for b in tiles) // (4 * 32 * role.warps)
        free[f"registers of {role.name}"] = role.registers - STATE_REGISTERS - held
    return free


def lacking(program: Program, gpu: GPU, ctas: int) -> str:
    """Why ``ctas`` CTAs of ``program`` do not fit on an SM as they are; "" where they do."""
    sm = gpu.sm
    registers = sum(role.warps * role.registers * 32 for role in program.roles)
    found = []
    if ctas * registers > sm.registers:
        found.append(f"registers: {ctas} x {registers} of {int(sm.registers)}")
    if ctas * (program.smem_bytes + int(sm.smem_reserved_per_cta_bytes)) > sm.smem_bytes:
        found.append(f"shared memory: {ctas} x {program.smem_bytes} B of {int(sm.smem_bytes)} B")
    if gpu.tmem is not None and ctas * program.tmem_columns > gpu.tmem.columns:
        found.append(f"tensor memory: {ctas} x {program.tmem_columns} columns of {int(gpu.tmem.columns)}")
    return "; ".join(found)


# --- the kernel's own ---


def own_interval(launch: Launch, loops: Sequence[Loop], graph: LoopGraph) -> float | None:
    """Cycles a trip of the working role's loop in the records, over the middle half of each tile's trips; None with too few."""
    program = launch.program
    work = {loop.role: 0.0 for loop in loops}
    names = {program.roles[role].name: role for role in work}
    for op in graph.operations:
        if op.kind == "vector":
            work[names[op.role]] += op.cycles
    role = max(work, key=lambda r: work[r])
    loop = next(each for each in loops if each.role == role)
    row = next(
        pc for pc, r in enumerate(program.code) if loop.start < r[STATEMENT] < loop.end and r[OPCODE] == Opcode.ISSUE
    )
    warp = sum(r.warps for r in program.roles[:role])
    records = launch.run.records
    mine = records[(records[:, 6] == row) & (records[:, 4] == warp)]
    periods = list(_periods(mine))
    return float(np.mean(periods)) if periods else None


def _periods(records: IntArray) -> Iterator[float]:
    for sm, slot, tile in dict.fromkeys(map(tuple, records[:, [2, 3, 5]].tolist())):
        starts = np.sort(records[(records[:, 2] == sm) & (records[:, 3] == slot) & (records[:, 5] == tile), 0])
        quarter = len(starts) // 4
        if len(starts) >= 6:
            middle = starts[quarter : len(starts) - quarter]
            yield float(middle[-1] - middle[0]) / (len(middle) - 1) / TICKS_PER_CYCLE
