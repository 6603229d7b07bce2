"""One CTA tile as its roles run it: a coroutine a role, ring buffers, barriers and asynchronous products, all without time.

Roles take turns, a statement each; at ``mbarrier_wait`` and ``named_sync`` a role stops until the phase has completed. Arrivals,
bytes and parity count as in :mod:`.engine`: a role of w warps makes w arrivals, a bulk copy delivers its bytes at once. What a
kernel must not rely on is made to show: a stage holds NaN until it is loaded, an accumulator while a product is in flight, and a
product whose operands are written before it has been waited for gives NaN.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..model.lowering_async import arrivals, expected_bytes
from ..model.meaning import State
from ..model.ops import OPS
from ..model.program import Buffer, Program, Statement

Array = NDArray[Any]
Key = tuple[str, int]  # a buffer and its stage

#: Statements that a role does at a time in a random order: now step by step with the others, now far ahead of them.
BURSTS = (1, 3, 10, 30, 100)


class Tiles(MutableMapping[str, Array]):
    """A role's view of the CTA's arrays: a ring buffer's name means the stage that the role's ring has reached."""

    def __init__(self, arrays: dict[Key, Array], buffers: Mapping[str, Buffer], steps: dict[str, int]) -> None:
        self.arrays, self.buffers, self.steps = arrays, buffers, steps
        self.through: str | None = None  # the ring whose stage is meant where it is not the buffer's own: a load's

    def key(self, name: str) -> Key:
        buffer = self.buffers.get(name)
        if buffer is None or buffer.ring is None:
            return name, 0
        return name, self.steps.get(self.through or buffer.ring, 0) % buffer.stages

    def poison(self, name: str) -> Array:
        buffer = self.buffers[name]
        self[name] = np.full((buffer.rows, buffer.cols), np.nan, np.float32)
        return self[name]

    def __getitem__(self, name: str) -> Array:
        return self.arrays[self.key(name)]

    def __setitem__(self, name: str, value: Array) -> None:
        self.arrays[self.key(name)] = value

    def __delitem__(self, name: str) -> None:
        del self.arrays[self.key(name)]

    def __iter__(self) -> Iterator[str]:
        return iter({name for name, _ in self.arrays})

    def __len__(self) -> int:
        return len({name for name, _ in self.arrays})


@dataclass(kw_only=True)
class Phases:
    """A barrier, or one stage of it: the arrivals and the bytes due in the phase that runs, and how many phases are over."""

    name: str
    count: int
    arrived: int = 0
    due: int = 0
    over: int = 0

    def add(self, arrivals: int, size: int = 0, count: int = 0) -> None:
        """``count``: the arrivals that complete the phase, where a named barrier's op says so itself."""
        self.arrived += arrivals
        self.due += size
        if self.arrived == (count or self.count) and self.due == 0:
            self.arrived, self.over = 0, self.over + 1


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A role stands at ``barrier`` until its phase number ``phase`` is over."""

    barrier: Phases
    phase: int

    @property
    def over(self) -> bool:
        return self.barrier.over > self.phase

    def __str__(self) -> str:
        b = self.barrier
        due = f", {b.due} B due" if b.due else ""
        return f"phase {self.phase} of {b.name} ({b.arrived} of {b.count} arrivals{due})"


class Products:
    """A role's asynchronous products, by group: their results are there when the role has waited for them.

    A product in flight may read its operands and write its accumulator at any time. If one of these arrays is replaced before it
    has been waited for, its result is NaN.
    """

    def __init__(self, state: State, tiles: Tiles) -> None:
        self.state, self.tiles = state, tiles
        self.open: list[InFlight] = []
        self.groups: list[list[InFlight]] = []
        self.results: dict[Key, Array] = {}  # of accumulators in flight, which hold NaN meanwhile

    def issue(self, s: Statement) -> None:
        (name,) = s.writes
        key = self.tiles.key(name)
        nan = self.tiles.poison(name) if name not in self.tiles else self.tiles[name]
        if key in self.results:
            self.tiles[name] = self.results[key]
        else:
            nan = np.full_like(nan, np.nan)
        OPS[s.kind].meaning(self.state, s)
        self.results[key], self.tiles[name] = self.tiles[name], nan
        used = [(each, self.tiles.arrays[each]) for each in (key, *map(self.tiles.key, s.reads))]
        self.open.append(InFlight(accumulator=key, used=used))

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait(self, unfinished: int) -> None:
        arrays = self.tiles.arrays
        while len(self.groups) > unfinished:
            for product in self.groups.pop(0):
                if any(arrays[key] is not array for key, array in product.used):
                    self.results[product.accumulator] = np.full_like(self.results[product.accumulator], np.nan)
            in_flight = {each.accumulator for group in (*self.groups, self.open) for each in group}
            for key in self.results.keys() - in_flight:
                arrays[key] = self.results.pop(key)


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """A product that has not been waited for, and the arrays that it uses until then."""

    accumulator: Key
    used: list[tuple[Key, Array]]


class Cta:
    """What the roles of one tile share: arrays by buffer and stage, and barriers, all fresh."""

    def __init__(self, program: Program, tile: int) -> None:
        self.program, self.tile = program, tile
        self.buffers = {b.name: b for b in program.buffers}
        self.arrays: dict[Key, Array] = {}
        for b in program.buffers:
            for stage in range(b.stages if b.ring else 0):
                self.arrays[b.name, stage] = np.full((b.rows, b.cols), np.nan, np.float32)
        self.barriers = {
            (b.name, stage): Phases(name=f"{b.kind} {b.name}" + (f"[{stage}]" if b.stages > 1 else ""), count=b.count)
            for b in program.barriers
            for stage in range(b.stages)
        }
        self.stages = {b.name: b.stages for b in program.barriers}


class Worker:
    """One role at work: its place in each ring and its products; ``state`` is what statements compute on."""

    def __init__(self, cta: Cta, role: int, state: State) -> None:
        self.cta, self.role, self.state = cta, role, state
        self.name, self.warps = cta.program.roles[role].name, cta.program.roles[role].warps
        self.steps: dict[str, int] = {}
        self.tiles = Tiles(cta.arrays, cta.buffers, self.steps)
        state.tiles = self.tiles
        self.products = Products(state, self.tiles)
        self.wait: Wait | None = None

    def run(self) -> Iterator[None]:
        """Do one statement after the other; where one leaves a ``wait``, the next must not be asked for before it is over."""
        for s, args, loops in self.cta.program.walk(self.cta.tile, self.role):
            self.state.args, self.state.loops = args, loops
            self.wait = self._step(s)
            yield

    def _step(self, s: Statement) -> Wait | None:
        wait = None
        self.tiles.through = s.attrs["ring"] if s.kind == "tma_load" else None
        match s.kind:
            case "mbarrier_wait":
                wait = self._mbarrier_wait(s)
            case "named_sync" | "named_arrive":
                wait = self._named(s)
            case "mbarrier_arrive":
                self._arrive(s, arrivals(s))
            case "mbarrier_expect":
                self._arrive(s, 1, expected_bytes(s, self.cta.buffers) * int(s.attrs.get("ctas", 1)))
            case "advance":
                self.steps[s.attrs["ring"]] = self.steps.get(s.attrs["ring"], 0) + 1
            case "wgmma":
                self.products.issue(s)
            case "mma_commit":
                self.products.commit()
            case "mma_wait":
                self.products.wait(int(s.attrs.get("arg", 0)))
            case _:
                OPS[s.kind].meaning(self.state, s)
        if s.kind == "tma_load":
            delivered = self.cta.buffers[s.writes[0]].size_bytes * int(s.attrs.get("ctas", 1))
            self._stage(s).add(0, -delivered * self.warps)
        return wait

    def _stage(self, s: Statement) -> Phases:
        name = s.attrs["barrier"]
        return self.cta.barriers[name, self.steps.get(s.attrs["ring"], 0) % self.cta.stages[name]]

    def _mbarrier_wait(self, s: Statement) -> Wait | None:
        """The parity that a wait names is that of the ring's phase, or with ``previous`` of the one before."""
        barrier = self._stage(s)
        turn = self.steps.get(s.attrs["ring"], 0) // self.cta.stages[s.attrs["barrier"]] + bool(s.attrs.get("previous"))
        return Wait(barrier=barrier, phase=barrier.over) if barrier.over % 2 == turn % 2 else None

    def _arrive(self, s: Statement, count: int, size: int = 0) -> None:
        for _ in range(self.warps):
            self._stage(s).add(count, size)

    def _named(self, s: Statement) -> Wait | None:
        barrier = self.cta.barriers[s.attrs["barrier"], 0]
        phase = barrier.over
        for _ in range(self.warps):
            phase = barrier.over
            barrier.add(1, count=int(s.attrs.get("count", 0)))
        return Wait(barrier=barrier, phase=phase) if s.kind == "named_sync" else None


def run_tile(cta: Cta, states: list[State], rng: random.Random | None = None) -> None:
    """Run every role of the tile to its end, in turn, or with ``rng`` in a random order.

    Raises RuntimeError where no role can go on: who waits on which barrier and phase.
    """
    workers = [Worker(cta, role, state) for role, state in enumerate(states)]
    running = {worker.name: (worker, worker.run()) for worker in workers}
    while running:
        ready = [each for each in running.values() if each[0].wait is None or each[0].wait.over]
        if not ready:
            stuck = "; ".join(f"{name} waits for {worker.wait}" for name, (worker, _) in running.items())
            raise RuntimeError(f"{cta.program.name} cannot go on in tile {cta.tile}: {stuck}")
        for worker, steps in [rng.choice(ready)] if rng else ready:
            for _ in range(rng.choice(BURSTS) if rng else 1):
                if next(steps, running) is running:  # its end
                    del running[worker.name]
                    break
                if worker.wait is not None and not worker.wait.over:
                    break
