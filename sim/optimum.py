"""How far a pipeline's steady loop is from the best one: its bounds, its own interval, the best found, and the moves between.

``best(result)`` reads the dependence graph of one kernel's loop (:mod:`.dependence`), prices it (:mod:`.operations`), takes
bounds (:mod:`.loop_bounds`), measures the interval that the engine's timeline shows (:mod:`.own_loop`), and looks for the best
modulo schedule (:mod:`.modulo`): as the kernel is built, with more copies of buffers where there is room, and with one more
CTA in flight. Given the means to run a changed schedule, it has the engine try the switches that it has (:mod:`.switches`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..model.gpu import GPU
from ..model.program import Program
from ..model.schedule import Schedule as Pipeline
from .coarse import coarse
from .dependence import Dependence, Loop, dependences, steady_loops
from .engine import STALLS
from .extras import extra
from .loop_bounds import LoopBounds, loop_bounds
from .loop_graph import LoopGraph, loop_graph
from .modulo import NEEDS, Placed, Room, Schedule, best_schedule
from .moves import moves
from .own_loop import own_interval, own_trip, working_loop
from .predict import Launch, Result
from .switches import Loops, Tried, tried, work_of

#: Records of the timeline that the kernel's own interval needs.
RECORDS = 400_000
#: Registers of a thread for addresses, row statistics and fragments, beside its tiles (as in FA2's own estimate).
STATE_REGISTERS = 40
#: Copies of a buffer that are added at most.
MOST_COPIES = 2
#: A variant is looked at where the best schedule without it is so much above the busiest unit.
WORTHWHILE = 1.02
#: Of the time allowed: until the loop as built has been searched, and until the engine has tried switches.
AS_BUILT, SWITCHED = 0.5, 0.8
#: Waits of less than this share of the time are not told.
LEAST_WAIT = 0.03


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
    """``own``: cycles a trip in the engine's timeline, None where the loop is too short to tell; ``trip``: one of its trips, all
    in stage 0, None where there is none.

    ``variants``: as built first. ``moves``: what the best schedule as built does otherwise than the kernel, in words, none where
    the kernel's own is as good. ``tried``: what the schedule's switches make of the loop, by the engine, the best first; there
    was no time for those in ``left_out``. ``waits``: what the working role's first warp waits for, as shares of the kernel's
    time, the longest first. ``seconds``: that all this took.
    """

    kernel: str
    gpu: str
    ctas: int
    own: float | None
    trip: Schedule | None
    variants: tuple[Variant, ...]
    moves: tuple[str, ...]
    tried: tuple[Tried, ...]
    left_out: tuple[str, ...]
    waits: tuple[tuple[str, float], ...]
    seconds: float

    @property
    def built(self) -> Variant:
        return self.variants[0]

    @property
    def better(self) -> Schedule | None:
        """The schedule found for the loop as built, where it is shorter than the kernel's own."""
        found = self.built.schedule
        return found if found is not None and (self.own is None or found.interval < self.own) else None

    @property
    def interval(self) -> float | None:
        """The shortest known: the kernel's own, or one found."""
        return float(self.better.interval) if self.better is not None else self.own


def best(
    result: Result, gpu: GPU, *, kernel: str | None = None, seconds: float = 60.0, seed: int = 0, variants: bool = True,
    pipeline: Pipeline | None = None, run: Callable[[Pipeline], Result] | None = None,
) -> Optimum:  # fmt: skip
    """The optimum beside one kernel of ``result`` (the longest with a loop, or ``kernel``), simulated with RECORDS.

    ``seconds``: of the wall clock, for all of it: about half for the loop as built, the rest for switches and variants.
    ``variants``: look at more buffers and tiles too. ``pipeline`` and ``run``: the schedule and how it is simulated, to try its
    switches. Raises ValueError where the kernel has no steady loop or OR-tools is missing.
    """
    extra("ortools", "optimum", NEEDS)
    began = time.monotonic()
    launch = _launch(result, kernel)
    loop = _Loop(launch, gpu)
    first = seconds * AS_BUILT if variants or run is not None else seconds
    built = _variant("as built", loop.graph(loop.ctas), {}, loop.ctas, first, seed)
    own = own_interval(launch, loop.loops, built.graph)
    outcomes: tuple[Tried, ...] = ()
    left_out: tuple[str, ...] = ()
    if own is not None and pipeline is not None and run is not None:
        now = Loops(interval=own, work=work_of(launch.program, built.graph), program=launch.program)
        name, until = launch.program.name, began + seconds * (SWITCHED if variants and _worthwhile(built) else 1.0)
        outcomes, left_out = tried(pipeline, now, lambda changed: loops_of(run(changed), gpu, name), until)
    more = _more(loop, built, began + seconds, seed) if variants and _worthwhile(built) else []
    optimum = Optimum(
        kernel=launch.program.name, gpu=gpu.name, ctas=loop.ctas, own=own, variants=(built, *more), moves=(), tried=outcomes,
        left_out=left_out, waits=_waits(loop, built.graph), seconds=time.monotonic() - began, trip=_trip(loop, built.graph, own),
    )  # fmt: skip
    if optimum.better is None:
        return optimum
    return replace(optimum, moves=tuple(moves(launch.program, optimum.better, loop.depends, optimum.trip)))


class _Loop:
    """The steady loop of one kernel's run."""

    def __init__(self, launch: Launch, gpu: GPU) -> None:
        self.launch, self.gpu = launch, gpu
        self.ctas = min(launch.occupancy.ctas_per_sm, len(launch.job.queue))  # those that the grid gives an SM
        self.loops, self.depends, self.skipped = steady_loop(launch.program)

    def graph(self, ctas: int) -> LoopGraph:
        launch = self.launch
        return loop_graph(launch.program, self.gpu, launch.job, self.loops, self.depends, self.skipped, ctas)


def _trip(loop: _Loop, graph: LoopGraph, own: float | None) -> Schedule | None:
    """A trip of the kernel's own, of the same chains that schedules are made of."""
    chains = coarse(graph)
    ran = own_trip(loop.launch, loop.loops, chains)
    if own is None or ran is None:
        return None
    period = round(own)
    placed = []
    for op, (start, cycles) in zip(chains.operations, ran, strict=True):
        by_itself = op.kind in ("product", "transfer")
        placed.append(Placed(operation=op, start=start % period, stage=0, cycles=round(op.cycles) if by_itself else cycles))
    return Schedule(interval=period, placed=tuple(placed), proven=0.0, graph=chains, copies={}, seconds=0.0)


def _waits(loop: _Loop, graph: LoopGraph) -> tuple[tuple[str, float], ...]:
    program, run = loop.launch.program, loop.launch.run
    role = working_loop(program, loop.loops, graph).role
    stalls = run.stalls[0, sum(r.warps for r in program.roles[:role])] / max(1, run.ticks)
    named = ((name, float(share)) for name, share in zip(STALLS, stalls, strict=True) if share > LEAST_WAIT)
    return tuple(sorted(named, key=lambda item: -item[1]))


def loops_of(result: Result, gpu: GPU, kernel: str) -> Loops:
    """The steady loop of the kernel of that name, or of the longest, where a switch gave it another."""
    names = [x.program.name for x in result.launches]
    loop = _Loop(_launch(result, kernel if kernel in names else None), gpu)
    graph = loop.graph(loop.ctas)
    own = own_interval(loop.launch, loop.loops, graph)
    if own is None:
        raise ValueError("its loop is too short to tell: give it more keys")
    return Loops(interval=own, work=work_of(loop.launch.program, graph), program=loop.launch.program)


def _more(loop: _Loop, built: Variant, until: float, seed: int) -> list[Variant]:
    """More copies of buffers, and one more CTA in flight where dependences bind."""
    found = []
    program, ctas = loop.launch.program, loop.ctas
    rooms = rooms_of(program, loop.gpu, loop.loops, loop.depends, ctas)
    second = built.bounds.recurrence > built.bounds.resource
    if rooms:
        left = (until - time.monotonic()) / (1 + second)
        more = _variant("more copies of buffers", built.graph, rooms, ctas, left, seed)
        if more.schedule is not None and more.schedule.copies:
            names = ", ".join(f"{n + 1} of {name.partition('.')[0]}" for name, n in more.schedule.copies.items())
            found.append(replace(more, change=f"more copies of buffers ({names})"))
    if second:
        lacks = lacking(program, loop.gpu, ctas + 1)
        left = until - time.monotonic()
        found.append(_variant("one more CTA's Q tiles in flight", loop.graph(ctas + 1), {}, ctas + 1, left, seed, fits=lacks))
    return found


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
    schedule = best_schedule(graph, bounds.bound, seconds=max(0.1, seconds), rooms=rooms, seed=seed)
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
