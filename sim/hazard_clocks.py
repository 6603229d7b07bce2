"""Who knows what: vector clocks of warps, and barriers that hand knowledge from those that arrive to those that wait.

A clock has one component for each warp (its own steps), one for each queue of a warp that works on its own (product groups,
cp.async groups, TMA stores: finished groups) and one for each barrier instance (finished phases). ``clock[c] >= v`` reads "what
component c did up to v is over, and this warp knows it". A second clock holds what is known across a proxy fence.
After Lamport (1978) and FastTrack (Flanagan and Freund, PLDI 2009).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..model.program import Role, Statement
from .hazard_findings import Site
from .hazard_ops import BULK, CP_ASYNC, MMA, WARP

#: (2, places): what is known, and what is known across proxy fences. An arrival hands on both.
Knowledge = NDArray[np.int64]
#: The clocks' first place: Lamport's logical time, a step an op, which is at least that of all that the warp knows of.
TIME = 0
EVENTS = 4  # ordering ops of a warp that a finding can still show


def joined(a: Knowledge | None, b: Knowledge) -> Knowledge:
    """Everything that either knows, kept in ``a`` where there is one; ``b`` stays as it is."""
    return b.copy() if a is None else np.maximum(a, b, out=a)


class Places:
    """Hands out the components of a clock."""

    def __init__(self) -> None:
        self.size = 0

    def new(self) -> int:
        self.size += 1
        return self.size - 1


class At:
    """An op as one warp runs it."""

    __slots__ = ("loops", "statement", "tile", "warp")

    def __init__(self, warp: Warp, tile: int, statement: Statement, loops: tuple[tuple[str, int], ...]) -> None:
        self.warp, self.tile, self.statement, self.loops = warp, tile, statement, loops

    def site(self) -> Site:
        op = str(self.statement).strip()
        return Site(role=self.warp.name, warps=self.warp.label, op=" ".join(op.split()), tile=self.tile, loops=self.loops)


class Event(NamedTuple):
    """An ordering op that has happened, with the barrier instance and phase it took part in."""

    at: At
    barrier: str = ""
    phase: int | None = None

    def __str__(self) -> str:
        return str(self.at.site()) + (f" -> {self.barrier} phase {self.phase}" if self.barrier else "")


class Warp:
    """One warp of a role, or (``weight`` > 1) all its further ones, which run the same code at their own pace.

    Two of a role are enough: what two of its warps can do to each other, these two can. ``rank``: its CTA's in the cluster;
    ``of_cta``: how sentences name that.
    """

    def __init__(self, role: int, of: Role, lead: bool, places: Places, *, rank: int = 0, of_cta: str = "") -> None:
        self.role, self.name, self.rank = role, of.name, rank
        self.who = of.name + of_cta
        self.weight = 1 if lead else of.warps - 1
        rest = "warp 1" if of.warps == 2 else f"warps 1-{of.warps - 1}"
        self.label = (of.name if of.warps == 1 else f"{of.name} {'warp 0' if lead else rest}") + of_cta
        self.shared = of.warps > 1
        self.own = places.new()
        self.agents = {WARP: self.own, MMA: places.new(), CP_ASYNC: places.new(), BULK: places.new()}
        self.closed = {MMA: 0, CP_ASYNC: 0, BULK: 0}
        self.last: dict[str, tuple[int, At]] = {}  # group and op of the last access of each agent
        self.known: Knowledge = np.zeros((2, 0), np.int64)
        self.clock, self.fenced = self.known
        self.lessons: list[tuple[Knowledge | tuple[int, int], Event]] = []
        self.turns: dict[str, int] = {}
        self.log: deque[Event] = deque(maxlen=EVENTS)
        self.blocked: tuple[At, Mbarrier | Named, int] | None = None
        self.ended = False
        self.written: set[str] = set()
        self.followed = 0

    def begin(self, size: int, rings: tuple[str, ...]) -> None:
        self.known = np.zeros((2, size), np.int64)
        self.clock, self.fenced = self.known  # its rows, not copies
        self.clock[self.own] = 1
        self.turns = dict.fromkeys(rings, 0)

    def note(self, at: At, barrier: str = "", phase: int | None = None) -> Event:
        event = Event(at, barrier, phase)
        self.log.append(event)
        return event

    def release(self, agent: str = WARP) -> Knowledge:
        """What the warp hands on as it arrives somewhere; what it does next is not in it.

        With an ``agent`` the arrival happens once all that this agent was given is done (tcgen05.commit).
        """
        given = self.known.copy()
        if agent != WARP:
            given[0, self.agents[agent]] = self.closed[agent] + 1
            self.closed[agent] += 1
        self.clock[self.own] += 1
        return given

    def learn(self, knowledge: Knowledge, event: Event) -> None:
        np.maximum(self.known, knowledge, out=self.known)
        self.lessons.append((knowledge, event))
        self.clock[self.own] += 1

    def drain(self, agent: str, left: int, event: Event) -> None:
        """All but the last ``left`` closed groups of ``agent`` are done."""
        place, value = self.agents[agent], self.closed[agent] - left
        if value > self.clock[place]:
            self.clock[place] = value
            self.lessons.append(((place, value), event))

    def why(self, place: int, value: int) -> Event | None:
        """The op through which the warp first knew that component ``place`` had come to ``value``."""
        for lesson, event in self.lessons:
            known = (lesson[1] if lesson[0] == place else 0) if isinstance(lesson, tuple) else lesson[0, place]
            if known >= value:
                return event
        return None

    def fence(self) -> None:
        """What the warp knows now, its own accesses included, counts across proxies too."""
        self.fenced[:] = self.clock
        self.clock[self.own] += 1


@dataclass(eq=False, slots=True)
class Mbarrier:
    """One instance (a stage) of an mbarrier: ``completed`` phases are over, ``pending`` arrivals and ``due`` bytes awaited."""

    name: str
    stage: int | None
    count: int
    place: int
    rank: int = 0
    of_cta: str = ""
    pending: int = 0
    due: int = 0
    completed: int = 0
    gathered: Knowledge | None = None
    arrivals: list[tuple[At, int]] = field(default_factory=list)
    copied: set[Warp] = field(default_factory=set)  # whose bytes have come in this phase
    released: list[Knowledge] = field(default_factory=list)
    passes: dict[Warp, tuple[int, int, At]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pending = self.count

    @property
    def label(self) -> str:
        return (self.name if self.stage is None else f"{self.name}[{self.stage}]") + self.of_cta

    @property
    def open_bytes(self) -> bool:
        """All arrivals are there and the bytes do not add up."""
        return self.pending == 0 and self.due != 0

    def lacks(self) -> str:
        has = f"{self.count - self.pending} of {self.count} arrivals"
        return has + (f" and {self.due} B to come" if self.due > 0 else f" and {-self.due} B too many" if self.due else "")

    def complete(self) -> Knowledge:
        """End the phase; who waits for it knows what everyone who arrived knew."""
        assert self.gathered is not None
        self.completed += 1
        self.gathered[0, self.place] = self.completed
        self.released.append(self.gathered)
        self.gathered, self.pending, self.arrivals, self.copied = None, self.count, [], set()
        return self.released[-1]


@dataclass(eq=False, slots=True)
class Named:
    """A named barrier of the CTA, or the barrier of a cluster: ``count`` warps complete it, then it begins anew."""

    name: str
    count: int
    place: int
    rank: int = 0
    of_cta: str = ""
    completed: int = 0
    arrived: int = 0
    gathered: Knowledge | None = None
    arrivals: list[tuple[At, int]] = field(default_factory=list)
    released: list[Knowledge] = field(default_factory=list)

    stage = None

    @property
    def label(self) -> str:
        return self.name + self.of_cta

    def lacks(self) -> str:
        return f"{self.arrived} of {self.count} warps"

    def complete(self) -> None:
        assert self.gathered is not None
        self.completed += 1
        self.gathered[0, self.place] = self.completed
        self.released.append(self.gathered)
        self.gathered, self.arrived, self.arrivals = None, 0, []
