"""The best modulo schedule of a loop's operations under the units of an SM, by OR-tools' CP-SAT (:mod:`.modulo_model`).

No order is given, neither of a warp's operations nor of the products: what comes out is what dependences and units leave. The
search first places chains of operations whole (:mod:`.coarse`), then every operation by itself, from there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from .coarse import coarse
from .extras import extra
from .loop_graph import LoopGraph
from .modulo_model import RESOLUTION, Model
from .operations import Operation

#: Threads of the solver.
WORKERS = 2
#: Of the time allowed, for placing chains whole; what is left is for placing operations one by one.
CHAINS = 0.8
#: How much of the model the solver's linear relaxation has, one way after the other.
WAYS = (0, 1)
#: The longest interval looked for, in bounds.
LONGEST = 3.0
NEEDS = "the best modulo schedule"


@dataclass(frozen=True, kw_only=True)
class Room:
    """At ``most`` so many more copies of a buffer, each ``size`` of what is ``free`` in the ``pool`` that its buffers share."""

    most: int
    pool: str
    size: int
    free: int


@dataclass(frozen=True, kw_only=True)
class Placed:
    """An operation in the schedule: ``start`` in the interval, ``stage``, and ``cycles``, with what others cost it."""

    operation: Operation
    start: int
    stage: int
    cycles: int

    def begin(self, interval: int) -> int:
        """Cycles from the first operation of its trip."""
        return self.stage * interval + self.start


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """``interval`` cycles a trip; the model has none shorter than ``proven``. ``graph``: its operations, of which some may be
    chains. ``copies``: buffers with more copies than the Program has, and how many more."""

    interval: int
    placed: tuple[Placed, ...]
    proven: float
    graph: LoopGraph
    copies: Mapping[str, int]
    seconds: float

    @property
    def optimal(self) -> bool:
        """Whether none is shorter by more than the solver's steps."""
        return self.interval <= self.proven * (1 + RESOLUTION) + 1


def best_schedule(
    graph: LoopGraph, bound: float, *, seconds: float = 10.0, rooms: Mapping[str, Room] | None = None, seed: int = 0
) -> Schedule | None:
    """The schedule of the shortest interval found within ``seconds``; None where none was.

    ``rooms``: buffers that may have more copies. Raises ValueError where OR-tools is not installed.
    """
    extra("ortools", "optimum", NEEDS)
    began = time.monotonic()
    search = _Search(math.ceil(bound - 1e-6), rooms or {}, seed, began + seconds)
    found = search.chains(coarse(graph), seconds * CHAINS)
    if found is not None and found.interval > search.low:
        found = search.one_by_one(graph, found)
    return None if found is None else replace(found, seconds=time.monotonic() - began)


class _Search:
    """One loop, looked at until ``until`` on the monotonic clock."""

    def __init__(self, low: int, rooms: Mapping[str, Room], seed: int, until: float) -> None:
        self.low, self.rooms, self.seed, self.until = low, rooms, seed, until
        self.began = self.left

    @property
    def left(self) -> float:
        return max(0.0, self.until - time.monotonic())

    def chains(self, graph: LoopGraph, seconds: float) -> Schedule | None:
        """From nothing but the graph, whose operations are chains. What is proven of them is not yet proven of their parts.

        Each way of the solver begins anew, below what the one before it found: each has loops where it stays in a valley.
        """
        found: Schedule | None = None
        for number, linear in enumerate(WAYS):
            model = self._model(graph, LONGEST * self.low if found is None else found.interval)
            model.break_symmetry()
            better, proven = self._solve(model, (seconds - (self.began - self.left)) / (len(WAYS) - number), linear)
            found = better or found
            if found is not None and (proven >= found.interval or found.interval <= self.low):
                break
        return found

    def one_by_one(self, graph: LoopGraph, found: Schedule) -> Schedule:
        """A schedule of all operations that is shorter than ``found``, or ``found``, with what is proven."""
        model = self._model(graph, found.interval + len(graph.operations))  # each is rounded up by itself
        model.begin_at(*_spread(found, graph))
        better, proven = self._solve(model, self.left)
        if better is not None and better.interval < found.interval:
            found = better
        return replace(found, proven=min(proven, float(found.interval)))

    def _model(self, graph: LoopGraph, high: float) -> Model:
        model = Model(graph, self.low, math.ceil(high), {name: room.most for name, room in self.rooms.items()})
        for pool, free in {room.pool: room.free for room in self.rooms.values()}.items():
            model.pool({name: room.size for name, room in self.rooms.items() if room.pool == pool}, free)
        return model

    def _solve(self, model: Model, seconds: float, linear: int = 1) -> tuple[Schedule | None, float]:
        """The best schedule found, and the interval below which the model has none."""
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = max(0.05, min(seconds, self.left))
        solver.parameters.num_workers = WORKERS
        solver.parameters.linearization_level = linear
        solver.parameters.random_seed = self.seed
        solver.parameters.catch_sigint_signal = False
        status = _interruptible(solver, model.model)
        if status == cp_model.INFEASIBLE:
            return None, float(model.high)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, float(self.low)
        return _read(model, solver, self.low), solver.best_objective_bound


def _interruptible(solver: Any, model: Any) -> Any:
    """The solver's status; Ctrl-C stops the search and goes on as KeyboardInterrupt."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(solver.solve, model)
        try:
            return answer.result()
        except KeyboardInterrupt:
            solver.stop_search()
            raise


def _read(model: Model, solver: Any, low: int) -> Schedule:
    interval, graph = solver.value(model.interval), model.graph
    start, cycles = ([solver.value(var) for var in variables] for variables in (model.start, model.cycles))
    copies = {name: n for name, var in model.copies.items() if (n := solver.value(var))}
    stage = _stages(graph, interval, start, cycles, copies)
    return Schedule(
        interval=interval, proven=low, graph=graph, copies=copies, seconds=0.0,
        placed=tuple(
            Placed(operation=op, start=start[i], stage=stage[i], cycles=cycles[i]) for i, op in enumerate(graph.operations)
        ),
    )  # fmt: skip


def _stages(
    graph: LoopGraph, interval: int, start: Sequence[int], cycles: Sequence[int], copies: Mapping[str, int]
) -> list[int]:
    """The earliest stage of each operation."""
    stage = [0] * len(start)
    for _ in graph.operations:  # at most so long is a chain of dependences
        for e in graph.edges:
            ready = start[e.before] + math.ceil(e.latency - 1e-6) + (0 if e.begun else cycles[e.before])
            reach = max(0, math.ceil((ready - start[e.after]) / interval))
            stage[e.after] = max(stage[e.after], stage[e.before] + reach - e.distance - copies.get(e.buffer, 0))
    return stage


def _spread(found: Schedule, graph: LoopGraph) -> tuple[list[int], list[int]]:
    """Starts and cycles of ``graph``'s operations, one after the other where ``found`` has them in a chain."""
    place: dict[tuple[str, int, int], tuple[float, float]] = {}
    for p in found.placed:
        by_itself = p.operation.kind in ("product", "transfer")
        inside = [
            op for op in graph.operations
            if (op.role, op.cta) == (p.operation.role, p.operation.cta) and set(op.statements) <= set(p.operation.statements)
            and (op.kind in ("product", "transfer")) == by_itself
        ]  # fmt: skip
        work, at = sum(op.cycles for op in inside) or 1.0, float(p.start)
        for op in inside:
            place[op.kind, op.cta, op.statements[0]] = (at, p.cycles * op.cycles / work)
            at += p.cycles * op.cycles / work
    spread = [place[op.kind, op.cta, op.statements[0]] for op in graph.operations]
    return [round(at) % found.interval for at, _ in spread], [max(1, round(cycles)) for _, cycles in spread]
