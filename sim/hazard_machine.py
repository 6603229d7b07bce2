"""Follows a Program's statements role by role, for a few tiles, and keeps book of who knows what.

The CTAs of a cluster are followed together. Each warp is a coroutine that runs until it waits for something that has not
happened. One order of running them is enough: a hazard is an access that the clocks do not order, whatever came first here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import dropwhile, islice
from typing import Any

from ..model.program import Statement
from . import hazard_mbarriers
from .hazard_clocks import TIME, At, Event, Mbarrier, Named, Warp, joined
from .hazard_cta import Remote, cluster
from .hazard_findings import Finding, Order
from .hazard_memory import OVERWRITE, WRITE_EARLY, Cell, Memory, Operand, Record
from .hazard_ops import BULK, EFFECTS, GENERIC, MBARRIER, MMA, WARP, Effect
from .hazard_script import TOUCHING, Plan, Planned, Script
from .hazard_words import barrier_name, deadlock_finding, race_sentence, responsible, too_soon

#: Ops of one run that are followed at most, and findings after which a run ends.
LIMIT, ENOUGH = 200_000, 8

Blocking = Iterator[None]


@dataclass(frozen=True, slots=True)
class Step:
    """An op that was followed, with the barrier and phase it took part in, from ``begin`` to ``end`` in logical time."""

    event: Event
    begin: int
    end: int


#: Steps of an op (hazard_ops.Effect.step): methods of the machine, and what hazard_mbarriers does.
ACTING = ("posted", "close", "drain", "announce", "fence", "advance")
AT_MBARRIERS = ("deliver", "expect", "arrive")
#: By the ids of two statements and what they meet in: their order, and the statement that the later one owes it to.
Orders = dict[tuple[int, int, str], tuple[Order, Statement | None]]


class Machine:
    """A CTA that runs ``tiles`` one after the other, or a cluster whose CTAs share each so many of the grid's: number i of
    ``tiles`` means tiles i * cluster to (i + 1) * cluster - 1. ``backwards``: take the warps in the other order.
    ``keep``: remember so many ops that it followed last, in ``steps``.
    """

    def __init__(
        self, script: Script, tiles: Sequence[int], *, backwards: bool = False, enough: int = ENOUGH, keep: int = 0
    ) -> None:
        self.script, self.program, self.tiles, self.enough = script, script.program, tiles, enough
        self.ctas = cluster(script.program)
        self.warps = [warp for cta in self.ctas for warp in cta.warps]
        self.buffers = {b.name: b for b in script.program.buffers}
        self.memory = Memory(self._race)
        self.findings: dict[tuple[Any, ...], Finding] = {}
        self.landing: dict[int, tuple[int, int]] = {}  # by CTA: the phase of an mbarrier that counts a copy's bytes
        self.steps: deque[Step] = deque(maxlen=keep)
        self.culprits: dict[Finding, tuple[At | None, At | None]] = {}
        self.open_exchanges: dict[Warp, list[At]] = {warp: [] for warp in self.warps}
        self.order = self.warps[::-1] if backwards else self.warps
        self.blocking: dict[str, Callable[[At], Blocking]] = {
            "wait": partial(hazard_mbarriers.wait, self), "sync": self._sync, "exchange": self._exchange,
            "allocate": self._allocate,
        }  # fmt: skip
        self.acting: dict[str, Callable[[At], None]] = {name: getattr(self, f"_{name}") for name in ACTING}
        self.acting |= {name: partial(getattr(hazard_mbarriers, name), self) for name in AT_MBARRIERS}

    @property
    def followed(self) -> int:
        return sum(warp.followed for warp in self.warps)

    @property
    def full(self) -> bool:
        return self.followed >= LIMIT

    # --- running ---

    def run(self) -> list[Finding]:
        """Follow all warps to their ends, or to a deadlock, or until there are enough findings or ops."""
        lives = {warp: self._life(warp) for warp in self.order}
        while lives and len(self.findings) < self.enough and not self.full:
            before = (self.followed, len(lives))
            for warp in list(lives):
                if next(lives[warp], warp) is warp:
                    del lives[warp]
                    warp.ended = True
            if lives and (self.followed, len(lives)) == before:
                self._add(*deadlock_finding(self))
                break
        if not lives and not self.findings:
            self._leftovers()
        return list(self.findings.values())

    def _life(self, warp: Warp) -> Iterator[None]:
        """A persistent warp goes on with its next tile after its ``tile`` op, or from its beginning where it has none."""
        tile = 0
        for number, share in enumerate(self.tiles):
            tile = share * len(self.ctas) + warp.rank
            steps = self.script.steps(tile, warp.role, warp.rank)
            if number > 0 and self.script.again[warp.role]:
                steps = islice(dropwhile(lambda step: step[0].statement.kind != "tile", steps), 1, None)
            yield from self._follow(warp, tile, steps)
        yield from self._follow(warp, tile, self.script.last(warp.role, warp.rank))

    def _follow(self, warp: Warp, tile: int, steps: Iterable[Planned]) -> Blocking:
        for plan, loops in steps:
            at, begin = At(warp, tile, plan.statement, loops), int(warp.clock[TIME])
            warp.followed += 1
            warp.clock[TIME] = begin + 1
            if plan.blocks:
                yield from self.blocking[plan.effect.step](at)
            elif plan.effect.step:
                self.acting[plan.effect.step](at)
            self._do(at, plan, begin)

    def _do(self, at: At, plan: Plan, begin: int) -> None:
        """What an op touches; ``begin``: when it began in logical time."""
        warp = at.warp
        for operand in plan.plain:
            if operand.memory not in warp.written:
                if not operand.writes:
                    self._touch(at, plan.effect, operand)
                warp.written.add(operand.memory)
        if plan.effect.step not in TOUCHING:
            for operand in plan.operands:
                self._touch(at, plan.effect, operand)
        if plan.read:
            warp.drain(BULK, 0, warp.note(at))
        if self.steps.maxlen:
            event = warp.log[-1] if warp.log and warp.log[-1].at is at else Event(at)
            self.steps.append(Step(event, begin, int(warp.clock[TIME])))

    def _touch(self, at: At, row: Effect, operand: Operand) -> None:
        """A product of a CTA pair works on the tiles of both; a multicast copy puts its part of a tile into every CTA's."""
        warp, agent, part = at.warp, row.agent, operand.part
        spread = int(at.statement.attrs.get("multicast", 1))
        everywhere = spread > 1 or (agent == MMA and at.statement.attrs.get("pair"))
        if spread > 1:
            part = (warp.rank / spread, (warp.rank + 1) / spread)
        for rank in range(len(self.ctas)) if everywhere else (warp.rank,):
            if agent == MBARRIER:
                place, value = self.landing[rank] if rank in self.landing else next(iter(self.landing.values()))
            elif agent == WARP:
                place, value = warp.own, warp.clock[warp.own]
            else:
                place, value = warp.agents[agent], warp.closed[agent] + (agent != BULK)
                warp.last[agent] = (value, at)
                self.cross(at, rank, place, value, f"multiplies with tiles of CTA {rank}")
            record = Record(place, value, operand.extent, operand.tag, at, agent, operand.writes, row.proxy == GENERIC, part)
            for cell in self.memory.of(operand, warp, rank):
                self.memory.touch(cell, record)

    def cross(self, at: At, rank: int, place: int, value: int, what: str) -> None:
        """Note what an op does to another CTA of its cluster, which must be there by then, and stay until it knows."""
        if rank == at.warp.rank:
            return
        cta = self.ctas[rank]
        if not at.warp.clock[cta.start]:
            self.report(
                "early remote access", f"{at.warp.who} {what} while nothing tells it that CTA {rank} has begun and initialised"
                " its barriers: no cluster_sync comes before", at,
            )  # fmt: skip
        cta.remote[place, what] = Remote(place, value, at, what)

    # --- what a warp does alone ---

    def _advance(self, at: At) -> None:
        at.warp.turns[at.statement.attrs["ring"]] += 1

    def _fence(self, at: At) -> None:
        at.warp.fence()
        at.warp.note(at)

    def _close(self, at: At) -> None:
        at.warp.closed[EFFECTS[at.statement.kind].agent] += 1

    def _drain(self, at: At) -> None:
        at.warp.drain(EFFECTS[at.statement.kind].agent, int(at.statement.attrs.get("arg", 0)), at.warp.note(at))

    def _posted(self, at: At) -> None:
        """A TMA store is a group of its own; with ``wait="read"`` its warp goes on once it has read shared memory."""
        at.warp.closed[BULK] += 1

    # --- named barriers ---

    def _barrier_of(self, at: At) -> Named:
        return self.ctas[at.warp.rank].named[barrier_name(at.statement)]

    def _announce(self, at: At) -> None:
        warp, b = at.warp, self._barrier_of(at)
        warp.note(at, b.label, b.completed)
        twice = [earlier for earlier, _ in b.arrivals if earlier.warp is warp]
        if warp.clock[b.place] < b.completed or twice:
            self.report(
                "named barrier", f"{warp.who} arrives at {b.label} again while nothing tells it that the barrier's last"
                f" completion is over ({b.lacks()}): one of the two arrivals stands in for a warp that has not come",
                at, twice[0] if twice else None, barrier=b,
            )  # fmt: skip
        b.gathered = joined(b.gathered, warp.release())
        b.arrivals.append((at, warp.weight))
        b.arrived += warp.weight
        expected = int(at.statement.attrs.get("count", 0)) or b.count
        if b.arrived > expected:
            self.report("named barrier", f"{b.arrived} warps arrive at {b.label}, which waits for {expected}", at, barrier=b)
        if b.arrived >= expected:
            b.complete()

    def _sync(self, at: At) -> Blocking:
        warp, b = at.warp, self._barrier_of(at)
        turn = b.completed
        self._announce(at)
        warp.blocked = (at, b, turn)
        while b.completed == turn:
            yield
        warp.blocked = None
        warp.learn(b.released[turn], Event(at, b.label, turn))

    def _exchange(self, at: At) -> Blocking:
        """Store a part, meet, load all parts; with ``barrier=False`` the next exchange's meeting serves this one too."""
        plan = self.script.plans[id(at.statement)]
        *reads, _, part, _ = plan.operands
        for operand in (*reads, part):
            self._touch(at, plan.effect, operand)
        self.open_exchanges[at.warp].append(at)
        if at.statement.attrs.get("barrier", True):
            yield from self._sync(at)
            for earlier in self.open_exchanges[at.warp]:
                done = self.script.plans[id(earlier.statement)]
                self._touch(earlier, done.effect, done.operands[-1])
                self._touch(earlier, done.effect, done.operands[-3])
            self.open_exchanges[at.warp] = []

    def _allocate(self, at: At) -> Blocking:
        """A pair allocates its tensor memory together: either CTA's warp goes on once both have it (cta_group::2)."""
        plan = self.script.plans[id(at.statement)]
        for operand in plan.operands:
            self._touch(at, plan.effect, operand)
        if at.statement.attrs.get("pair"):
            yield from self._sync(at)

    # --- the end ---

    def _leftovers(self) -> None:
        """Queues that nobody knows to be done, and phases that have begun."""
        for cta in self.ctas:
            for remote in cta.unknown():
                self.report(
                    "late remote access", f"CTA {cta.rank} may have ended when {remote.at.warp.who} {remote.what}: no warp of CTA"
                    f" {cta.rank} waits for that", remote.at,
                )  # fmt: skip
        for warp in self.warps:
            for agent, what in ((BULK, "a TMA store still reads shared memory"), (MMA, "its products are in flight")):
                value, at = warp.last.get(agent, (0, None))
                if max(each.clock[warp.agents[agent]] for each in self.warps) < value:
                    self.report("unfinished at exit", f"the CTA ends while {what}: nothing waits for {warp.who}'s last", at)
        for b in self.barriers():
            if isinstance(b, Mbarrier) and (b.pending != b.count or b.due):
                at = b.arrivals[-1][0] if b.arrivals else None
                sentence = f"phase {b.completed} of {b.label} never completes: it has {b.lacks()}"
                self.report("arrival count", sentence, at, barrier=b)

    def barriers(self) -> list[Mbarrier | Named]:
        return list(dict.fromkeys(b for cta in self.ctas for b in cta.barriers()))

    # --- findings ---

    def report(
        self, kind: str, sentence: str, at: At | None, other: At | None = None, *, barrier: Mbarrier | Named | None = None,
        phase: int | None = None, cell: Cell | None = None, tag: str = "",
    ) -> None:  # fmt: skip
        """Keep the first finding of a kind for a pair of ops and what they meet in."""
        warps = {a.warp: None for a in (other, at) if a is not None}
        events = [str(event) for warp in warps for event in warp.log]
        self._add(
            Finding(
                kind=kind, sentence=sentence, kernel=self.program.name,
                at=at.site() if at else None, other=other.site() if other else None,
                buffer=(tag or cell.name) if cell else "", stage=cell.stage if cell else None,
                barrier=barrier.label if barrier else "",
                phase=phase if phase is not None else barrier.completed if barrier else None,
                events=tuple(events),
            ),
            at,
            other,
        )  # fmt: skip

    def _add(self, f: Finding, at: At | None, other: At | None = None) -> None:
        pair = tuple((site.role, site.op) for site in (f.at, f.other) if site)
        key = (f.kind, pair, f.buffer, f.barrier.partition("[")[0])
        if key not in self.findings:
            self.findings[key], self.culprits[f] = f, (at, other)

    def _race(self, kind: str, cell: Cell, earlier: Record | None, record: Record) -> None:
        if earlier is not None and too_soon(self, earlier, record):
            kind, earlier, record = OVERWRITE if record.writes else WRITE_EARLY, record, earlier
        barrier, phase = responsible(self, cell, earlier, record) if earlier else (None, None)
        sentence = race_sentence(kind, cell, earlier, record, barrier, phase)
        self.report(
            kind, sentence, record.at, earlier.at if earlier else None, barrier=barrier, phase=phase, cell=cell, tag=record.tag
        )

    def orders(self) -> Orders:
        """Which op each pair of accesses owes its order to, keyed by the two statements and what they meet in."""
        out: Orders = {}
        for key, (earlier, record) in self.memory.ordered.items():
            event = record.at.warp.why(earlier.place, earlier.value)
            ops = [f"{at.warp.who}: {at.site().op}" for at in (earlier.at, record.at, *([event.at] if event else []))]
            order = Order(earlier=ops[0], later=ops[1], buffer=key[2], by=ops[2] if event else "")
            out[key] = (order, event.at.statement if event else None)
        return out
