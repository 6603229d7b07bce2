"""The best modulo schedule of a loop's operations under the units of an SM, by OR-tools' CP-SAT.

Every trip of the loop repeats the schedule of the one before, ``interval`` cycles later. An operation has a start in the interval
and a stage (how many intervals later than the trip's first). For a fixed interval all constraints are linear, so that the
solver looks for a schedule at one interval after the other: first at the bound, then between what failed and what was found.
No order is given, neither of a warp's operations nor of the products: what comes out is what dependences and units leave.

An operation of a warp may run at its own pace or, where units are shared, slower with a smaller share of them (STRETCHES). It
pays the prices beside a product over its whole length unless no product runs while it does. Schedules found are thus ones
that the prices allow; a finer mixture may do better.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from .extras import extra
from .loop_graph import LoopGraph
from .operations import Operation

#: How much slower an operation of a warp may run to leave units to others.
STRETCHES = (1.0, 2.0)
#: An operation that holds less than this of a unit is counted in the bound of that unit, but not against others at each moment.
LIGHT = 0.3
#: Of a unit, which the shares of operations that hold it at the same time must not exceed.
WHOLE = 10_000
#: Stages that a schedule may have.
STAGES = 4
#: Parts of the model that are soon decided: tiles that take equal turns, every operation of a warp at the prices beside products,
#: or none beside a product.
TURNS, LOUD, QUIET = "turns", "loud", "quiet"
#: Intervals that are tried first, in bounds, and the share of the time allowed that each may take.
CLIMB = (1.6, 2.5, 4.0, 8.0)
GLANCE = 0.12
#: The solver's own measure of work that counts as a second: what a processor of 2020 does in about one. Effort is measured by it,
#: so that the answer is the same on any machine, unless the wall clock runs PATIENCE times ahead of it.
EFFORT, PATIENCE = 0.15, 4.0
#: Of each look, for placing operations as early as possible one by one before the solver's own way.
EARLIEST = 0.4
#: The interval is found to this share of itself.
RESOLUTION = 0.001
#: Of the time allowed, for making the schedule found shorter.
TIDYING = 0.2
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
    """An operation in the schedule: ``start`` in the interval, ``stage``, ``cycles``, and if priced ``beside`` a product."""

    operation: Operation
    start: int
    stage: int
    cycles: int
    beside: bool

    def begin(self, interval: int) -> int:
        """Cycles from the first operation of its trip."""
        return self.stage * interval + self.start


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """``interval`` cycles a trip; ``optimal`` if the model has none shorter (by RESOLUTION): ``refuted`` has no schedule.
    ``copies``: buffers with more copies than the Program has, and how many more."""

    interval: int
    placed: tuple[Placed, ...]
    optimal: bool
    refuted: int
    copies: Mapping[str, int]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class _Mode:
    cycles: int
    shares: Mapping[str, int]
    quiet: bool = False
    beside: bool = False
    stretched: bool = False

    def fits(self, only: str) -> bool:
        return not self.stretched and self.quiet == (only == QUIET)


def best_schedule(
    graph: LoopGraph, bound: float, *, seconds: float = 10.0, rooms: Mapping[str, Room] | None = None, seed: int = 0
) -> Schedule | None:
    """The schedule of the shortest interval found in about ``seconds`` of one processor; None where none was.

    ``rooms``: buffers that may have more copies. Raises ValueError where OR-tools is not installed.
    """
    extra("ortools", "optimum", NEEDS)
    started = time.monotonic()
    search = _Search(graph, rooms or {}, seed)
    low = math.ceil(bound - 1e-6)
    hunt = _Hunt(search, low, started, seconds)
    for modes in (TURNS, LOUD, QUIET):
        hunt.descend(modes)
    hunt.halve()
    if hunt.found is None:
        return None
    tidy = search.at(hunt.found.interval, seconds * TIDYING, hint=hunt.found, tidy=True)[1] or hunt.found
    return replace(tidy, optimal=hunt.close, refuted=hunt.refuted, seconds=time.monotonic() - started)


class _Hunt:
    """Where the shortest interval is: above ``refuted``, at most that of ``found``."""

    def __init__(self, search: _Search, low: int, started: float, seconds: float) -> None:
        self.search, self.low, self.started, self.seconds = search, low, started, seconds
        self.refuted = self.floor = low - 1
        self.found: Schedule | None = None

    @property
    def left(self) -> float:
        """Of the effort, without what is kept for a tidy schedule; none when the clock on the wall is far ahead of it."""
        if time.monotonic() - self.started > PATIENCE * self.seconds:
            return 0.0
        return self.seconds * (1 - TIDYING) - self.search.spent

    @property
    def close(self) -> bool:
        return self.found is not None and self.found.interval - self.refuted <= max(1, int(RESOLUTION * self.found.interval))

    def descend(self, modes: str) -> None:
        """Look at shorter and shorter intervals in a part of the model, until one is not soon decided."""
        if self.found is None:
            self.found = next(filter(None, (self._glance(math.ceil(self.low * f), modes) for f in CLIMB)), None)
        while self.found is not None and self.found.interval > self.low:
            better = self._glance((self.found.interval + self.low) // 2, modes)
            if better is None:
                return
            self.found = better

    def _glance(self, interval: int, modes: str) -> Schedule | None:
        return self.search.at(interval, min(self.left, self.seconds * GLANCE), modes=modes)[1] if self.left > 0 else None

    def halve(self) -> None:
        """Close in with all of the model: first at the bound, then half way between what failed and what was found."""
        interval = self.low
        while self.found is not None and self.left > 0 and self.found.interval > interval:
            status, better = self.search.at(interval, self.left / 3, hint=self.found)
            if better is not None:
                self.found = better
            else:
                self.floor = interval
                if status == "infeasible":
                    self.refuted = interval
            if self.found.interval - self.floor <= max(1, int(RESOLUTION * self.found.interval)):
                if self.close or self.floor == self.refuted:
                    return
                self.floor = self.refuted  # what was not decided in time gets another look
            interval = (self.found.interval + self.floor) // 2


class _Search:
    """One graph, looked at for several intervals."""

    def __init__(self, graph: LoopGraph, rooms: Mapping[str, Room], seed: int) -> None:
        self.graph, self.rooms, self.seed = graph, rooms, seed
        self.spent = 0.0
        operations = graph.operations
        asynchronous = any(op.kind == "product" for op in operations)
        held_up = sum(op.delay for op in operations)
        tensor = sum(op.uses.get("tensor", 0.0) for op in operations if op.kind == "product")
        slower = 1 + held_up / tensor if tensor else 1.0
        self.modes = [_modes(op, asynchronous, slower) for op in operations]
        self.longest = [max(m.cycles for m in modes) for modes in self.modes]

        self.alike = _alike(operations)

    def at(
        self, interval: int, seconds: float, *, modes: str = "", hint: Schedule | None = None, tidy: bool = False
    ) -> tuple[str, Schedule | None]:
        """A schedule with this ``interval``, or why there is none: "infeasible" or "unknown". ``modes``: LOUD or QUIET ones only;
        ``hint``: where to begin; ``tidy``: a short one."""
        from ortools.sat.python import cp_model

        model = _Model(cp_model, self, interval, modes)
        if hint is not None:
            model.begin_at(hint)
        if tidy:
            model.shorten()
        status = cp_model.UNKNOWN
        for branching, share in ((cp_model.FIXED_SEARCH, EARLIEST), (cp_model.AUTOMATIC_SEARCH, 1 - EARLIEST)):
            solver = cp_model.CpSolver()
            solver.parameters.max_deterministic_time = max(0.001, seconds * share * EFFORT)
            solver.parameters.max_time_in_seconds = max(1.0, PATIENCE * seconds * share)
            solver.parameters.num_workers = 1
            solver.parameters.random_seed = self.seed
            solver.parameters.linearization_level = 0
            solver.parameters.search_branching = branching
            if tidy and branching == cp_model.FIXED_SEARCH:
                continue
            solver.parameters.catch_sigint_signal = False
            status = _interruptible(solver, model.model)
            self.spent += solver.response_proto.deterministic_time / EFFORT
            if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
                return "found", model.read(solver)
            if status == cp_model.INFEASIBLE:
                break
        return ("infeasible" if status == cp_model.INFEASIBLE else "unknown"), None


def _interruptible(solver: Any, model: Any) -> Any:
    """The solver's status; Ctrl-C stops the search and goes on as KeyboardInterrupt."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(solver.solve, model)
        try:
            return answer.result()
        except KeyboardInterrupt:
            solver.stop_search()
            raise


def _alike(operations: Sequence[Operation]) -> list[list[int]]:
    """Operations of different tiles that have the same name but for its numbers."""
    groups: dict[tuple[str, str], list[int]] = {}
    for i, op in enumerate(operations):
        key = (re.sub(r"(?<=[A-Za-z])\d+", "", op.role), re.sub(r"(?<=[A-Za-z])\d+", "", op.name))
        groups.setdefault(key, []).append(i)
    most = max((len(group) for group in groups.values()), default=1)
    return [group for group in groups.values() if len(group) == most > 1]


def _modes(op: Operation, asynchronous: bool, slower: float) -> list[_Mode]:
    """How ``op`` may run: by itself or at the prices beside products, which are ``slower`` by what holds them up."""
    if op.kind in ("product", "transfer"):
        cycles = max(1, math.ceil(op.cycles * (slower if op.kind == "product" else 1.0) - 1e-6))
        return [_Mode(cycles=cycles, shares=_shares(op.uses, cycles, op.kind))]
    dear = asynchronous and (op.beside > op.cycles * 1.001 or op.beside_uses != op.uses)
    out = []
    for stretch in STRETCHES:
        cycles = max(1, math.ceil(op.beside * stretch - 1e-6)) if dear else max(1, math.ceil(op.cycles * stretch - 1e-6))
        shares = _shares(op.beside_uses if dear else op.uses, cycles, op.kind)
        out.append(_Mode(cycles=cycles, shares=shares, beside=dear, stretched=stretch > 1))
        if max(shares.values(), default=0) <= WHOLE / 2:
            break  # it leaves room for another
    if dear:
        cycles = max(1, math.ceil(op.cycles - 1e-6))
        out.append(_Mode(cycles=cycles, shares=_shares(op.uses, cycles, op.kind), quiet=True))
    return out


def _shares(uses: Mapping[str, float], cycles: int, kind: str) -> dict[str, int]:
    shares = {unit: min(WHOLE, math.floor(WHOLE * held / cycles)) for unit, held in uses.items()}
    if kind == "product":
        shares["tensor"] = WHOLE
    if kind == "transfer":
        shares["l2"] = WHOLE
    return {unit: share for unit, share in shares.items() if share > LIGHT * WHOLE}


class _Model:
    """The constraints of one interval."""

    def __init__(self, cp: Any, search: _Search, interval: int, only: str) -> None:
        model = cp.CpModel()
        self.model, self.search, self.interval = model, search, interval
        operations = search.graph.operations
        count = len(operations)
        self.start = [model.new_int_var(0, interval - 1, f"start {i}") for i in range(count)]
        self.stage = [model.new_int_var(0, STAGES - 1, f"stage {i}") for i in range(count)]
        self.begin = [model.new_int_var(0, interval * STAGES - 1, f"begin {i}") for i in range(count)]
        for begin, start, stage in zip(self.begin, self.start, self.stage, strict=True):
            model.add(begin == start + interval * stage)
        self.chosen = [[model.new_bool_var(f"mode {i} {m}") for m in range(len(modes))] for i, modes in enumerate(search.modes)]
        self.length = []
        for literals, modes in zip(self.chosen, search.modes, strict=True):
            model.add_exactly_one(literals)
            if only and any(mode.fits(only) for mode in modes):
                for lit, mode in zip(literals, modes, strict=True):
                    if not mode.fits(only):
                        model.add(lit == 0)
            self.length.append(sum(lit * mode.cycles for lit, mode in zip(literals, modes, strict=True)))
        self.copies = {name: model.new_int_var(0, room.most, f"copies of {name}") for name, room in search.rooms.items()}
        for pool, free in {room.pool: room.free for room in search.rooms.values()}.items():
            mine = [n * search.rooms[name].size for name, n in self.copies.items() if search.rooms[name].pool == pool]
            model.add(sum(mine) <= free)
        first = next((i for i, op in enumerate(operations) if op.kind == "product"), 0)
        model.add(self.start[first] == 0)
        self._dependences()
        self._units()
        if only == TURNS:
            self._turns()
        model.add_decision_strategy(self.begin, cp.CHOOSE_LOWEST_MIN, cp.SELECT_MIN_VALUE)

    def _turns(self) -> None:
        """Operations that several tiles have alike follow each other by equal parts of the interval."""
        for group in self.search.alike:
            for number, other in enumerate(group[1:], start=1):
                wraps = self.model.new_bool_var("")
                shift = number * self.interval // len(group) - self.interval * wraps
                self.model.add(self.start[other] == self.start[group[0]] + shift)
                for a, b in zip(self.chosen[group[0]], self.chosen[other], strict=False):
                    self.model.add(a == b)

    def _dependences(self) -> None:
        period = self.interval
        for e in self.search.graph.edges:
            distance = e.distance + self.copies.get(e.buffer, 0)
            begin = self.begin[e.before]
            after = self.begin[e.after] + period * distance
            lag = math.ceil(e.latency - 1e-6)
            self.model.add(after >= begin + lag + (0 if e.begun else self.length[e.before]))

    def _units(self) -> None:
        """Each unit is a circle of ``interval`` cycles: two turns of it see every overlap of two operations."""
        model, search = self.model, self.search
        held: dict[str, list[tuple[Any, int, str]]] = {}
        quiet: list[tuple[Any, int]] = []
        loud = any(mode.quiet for modes in search.modes for mode in modes)
        warps: dict[str, list[Any]] = {}
        for i, op in enumerate(search.graph.operations):
            for literal, mode in zip(self.chosen[i], search.modes[i], strict=True):
                if mode.cycles > self.interval:
                    model.add(literal == 0)
                    continue
                turns = [self._turn(i, mode.cycles, literal, turn) for turn in (0, 1)]
                for unit, share in mode.shares.items():
                    held.setdefault(unit, []).extend((turn, share, op.warp) for turn in turns)
                if op.warp and not op.issue:
                    warps.setdefault(op.warp, []).extend(turns)
                if loud and (mode.quiet or op.kind == "product"):
                    quiet.extend((turn, len(search.modes) if op.kind == "product" else 1) for turn in turns)
            if op.issue:
                one = [self._turn(i, min(self.interval, max(1, math.ceil(op.issue))), None, turn) for turn in (0, 1)]
                warps.setdefault(op.warp, []).extend(one)
        for intervals in warps.values():
            model.add_no_overlap(intervals)
        for entries in held.values():
            if all(share == WHOLE for _, share, _ in entries):
                model.add_no_overlap([turn for turn, _, _ in entries])
            elif _crowded(entries):
                model.add_cumulative([turn for turn, _, _ in entries], [share for _, share, _ in entries], WHOLE)
        if quiet:
            model.add_cumulative([turn for turn, _ in quiet], [demand for _, demand in quiet], len(search.modes))

    def _turn(self, i: int, cycles: int, literal: Any, turn: int) -> Any:
        begin = self.start[i] + turn * self.interval
        if literal is None:
            return self.model.new_fixed_size_interval_var(begin, cycles, "")
        return self.model.new_optional_fixed_size_interval_var(begin, cycles, literal, "")

    def begin_at(self, schedule: Schedule) -> None:
        """Hint at what an earlier schedule did."""
        for i, placed in enumerate(schedule.placed):
            self.model.add_hint(self.stage[i], placed.stage)
            self.model.add_hint(self.start[i], min(placed.start, self.interval - 1))
            for literal, mode in zip(self.chosen[i], self.search.modes[i], strict=True):
                self.model.add_hint(literal, mode.cycles == placed.cycles and mode.beside == placed.beside)

    def shorten(self) -> None:
        """Ask for the schedule whose operations begin soonest, so that few trips and buffers are in flight."""
        self.model.minimize(sum(self.begin) + self.interval * sum(self.copies.values()))

    def read(self, solver: Any) -> Schedule:
        placed = []
        for i, op in enumerate(self.search.graph.operations):
            mode = next(m for lit, m in zip(self.chosen[i], self.search.modes[i], strict=True) if solver.value(lit))
            placed.append(
                Placed(
                    operation=op, start=solver.value(self.start[i]), stage=solver.value(self.stage[i]), cycles=mode.cycles,
                    beside=mode.beside,
                )
            )  # fmt: skip
        copies = {name: n for name, var in self.copies.items() if (n := solver.value(var))}
        return Schedule(interval=self.interval, placed=tuple(placed), optimal=False, refuted=0, copies=copies, seconds=0.0)


def _crowded(entries: Sequence[tuple[Any, int, str]]) -> bool:
    """Whether operations of different warps can ask for more than the whole of a unit at the same time."""
    most: dict[str, int] = {}
    total = 0
    for number, (_, share, warp) in enumerate(entries):
        if warp:
            most[warp] = max(most.get(warp, 0), share)
        elif number % 2 == 0:
            total += share
    return total + sum(most.values()) > WHOLE
