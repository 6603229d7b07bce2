"""Follows a Program's statements role by role, for a few tiles, and keeps book of who knows what.

Each warp is a coroutine that runs until it waits for something that has not happened. One order of running them is enough: a
hazard is an access that the clocks do not order, whatever came first here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..model.lowering_async import expected_bytes
from ..model.program import Statement
from .hazard_clocks import At, Event, Mbarrier, Named, Places, Warp, joined
from .hazard_findings import Finding, Order
from .hazard_memory import OVERWRITE, WRITE_EARLY, Cell, Memory, Operand, Record
from .hazard_ops import BULK, EFFECTS, GENERIC, MBARRIER, MMA, WARP, Effect
from .hazard_script import BLOCKING, Script
from .hazard_words import barrier_name, byte_sentence, deadlock_finding, race_sentence, responsible, too_soon

#: Ops of one run that are followed at most, and findings after which a run ends.
LIMIT, ENOUGH = 200_000, 8

Blocking = Iterator[None]
ACTING = ("deliver", "posted", "close", "drain", "announce", "expect", "arrive", "fence", "advance")
#: By the ids of two statements and what they meet in: their order, and the statement that the later one owes it to.
Orders = dict[tuple[int, int, str], tuple[Order, Statement | None]]


class Machine:
    """One CTA that runs ``tiles`` one after the other. ``backwards``: take the warps in the other order."""

    def __init__(self, script: Script, tiles: Sequence[int], *, backwards: bool = False, enough: int = ENOUGH) -> None:
        self.script, self.program, self.tiles, self.enough = script, script.program, tiles, enough
        program, places = script.program, Places()
        self.warps = [
            Warp(number, role, lead, places)
            for number, role in enumerate(program.roles)
            for lead in ((True, False) if role.warps > 1 else (True,))
        ]
        self.mbarriers: dict[str, list[Mbarrier]] = {}
        self.named: dict[str, Named] = {}
        for b in program.barriers:
            if b.kind == "mbarrier":
                shown = b.stages > 1
                self.mbarriers[b.name] = [
                    Mbarrier(b.name, i if shown else None, b.count, places.new()) for i in range(b.stages)
                ]
            else:
                self.named[b.name] = Named(b.name, b.count, places.new())
        for warp in self.warps:
            warp.begin(places.size, tuple(ring.name for ring in program.rings))
        self.buffers = {b.name: b for b in program.buffers}
        self.memory = Memory(self._race)
        self.findings: dict[tuple[Any, ...], Finding] = {}
        self.landing = (0, 0)
        self.open_exchanges: dict[Warp, list[At]] = {warp: [] for warp in self.warps}
        self.order = self.warps[::-1] if backwards else self.warps
        self.blocking: dict[str, Callable[[At], Blocking]] = {name: getattr(self, f"_{name}") for name in BLOCKING}
        self.acting: dict[str, Callable[[At], None]] = {name: getattr(self, f"_{name}") for name in ACTING}

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
                self._add(deadlock_finding(self))
                break
        if not lives and not self.findings:
            self._leftovers()
        return list(self.findings.values())

    def _life(self, warp: Warp) -> Iterator[None]:
        """A persistent warp goes on with its next tile after its ``tile`` op, or from its beginning where it has none."""
        for number, tile in enumerate(self.tiles):
            skip = number > 0 and self.script.again[warp.role]
            for plan, loops in self.script.steps(tile, warp.role):
                if skip:
                    skip = plan.statement.kind != "tile"
                    continue
                warp.followed += 1
                at = At(warp, tile, plan.statement, loops)
                if plan.blocks:
                    yield from self.blocking[plan.effect.step](at)
                elif plan.effect.step:
                    self.acting[plan.effect.step](at)
                for operand in plan.plain:
                    if operand.memory not in warp.written:
                        if not operand.writes:
                            self._touch(at, plan.effect, operand)
                        warp.written.add(operand.memory)
                if plan.effect.step != "exchange":
                    for operand in plan.operands:
                        self._touch(at, plan.effect, operand)
                if plan.read:
                    warp.drain(BULK, 0, warp.note(at))

    def _touch(self, at: At, row: Effect, operand: Operand) -> None:
        warp, agent = at.warp, row.agent
        if agent == MBARRIER:
            place, value = self.landing
        elif agent == WARP:
            place, value = warp.own, warp.clock[warp.own]
        else:
            place, value = warp.agents[agent], warp.closed[agent] + (agent != BULK)
            warp.last[agent] = (value, at)
        record = Record(
            place, value, operand.extent, operand.tag, at, agent, operand.writes, row.proxy == GENERIC, operand.part
        )
        for cell in self.memory.of(operand, warp):
            self.memory.touch(cell, record)

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

    # --- mbarriers ---

    def _instance(self, at: At) -> Mbarrier:
        stages = self.mbarriers[at.statement.attrs["barrier"]]
        return stages[at.warp.turns[at.statement.attrs["ring"]] % len(stages)]

    def _turn(self, at: At) -> int:
        """The phase that the warp's ring is at."""
        return at.warp.turns[at.statement.attrs["ring"]] // len(self.mbarriers[at.statement.attrs["barrier"]])

    def _arrive(self, at: At) -> None:
        """With ``products``: once all products that the warp has issued are done."""
        self._arrivals(at, int(at.statement.attrs.get("count", 1)), 0)

    def _expect(self, at: At) -> None:
        ctas = int(at.statement.attrs.get("ctas", 1))
        self._arrivals(at, 1, expected_bytes(at.statement, self.buffers) * ctas)

    def _arrivals(self, at: At, count: int, size: int) -> None:
        warp, b = at.warp, self._instance(at)
        warp.note(at, b.label, b.completed)
        if warp.clock[b.place] < b.completed:
            self.report(
                "early arrival", f"an arrival at {b.label} may be counted in phase {b.completed - 1} or {b.completed}:"
                f" nothing tells {warp.name} that phase {b.completed - 1} is over", at, self._passed(b), barrier=b,
            )  # fmt: skip
        given = warp.release(MMA if at.statement.attrs.get("products") else WARP)
        left = count * warp.weight
        if left > b.pending > 0 and left > count:
            self.report(
                "arrival count", f"phase {b.completed} of {b.label} is complete with {b.count} arrivals while {warp.name} still"
                f" makes {left - b.pending} of the same op: its count is too small, or someone arrives too often", at, barrier=b,
            )  # fmt: skip
        b.due += size * warp.weight
        while left > 0 and b.pending > 0:
            taken = min(left, b.pending)
            b.gathered = joined(b.gathered, (given[0][:], given[1][:]))
            b.arrivals.append((at, taken))
            b.pending -= taken
            left -= taken
            if b.pending == 0 and b.due == 0:
                self._complete(b)
        if left > 0:
            sentence = f"{left} arrivals too many at {b.label} in phase {b.completed}, which waits for bytes"
            self.report("arrival count", sentence, at, barrier=b)

    def _passed(self, b: Mbarrier) -> At | None:
        """Someone who has waited for the barrier."""
        return next((at for _, _, at in b.passes.values()), None)

    def _complete(self, b: Mbarrier) -> None:
        phase = b.completed
        knowledge = b.complete()
        for warp, (passed, epoch, at) in b.passes.items():
            if passed == phase - 1 and knowledge[0][warp.own] < epoch:
                self.report(
                    "phase", f"phase {phase} of {b.label} may complete before {warp.name} has passed its wait for phase {passed},"
                    " which then does not see the change of parity", at, barrier=b, phase=passed,
                )  # fmt: skip

    def _deliver(self, at: At) -> None:
        """The bytes of a TMA load, all at once; ``landing`` is the clock entry of the phase that counts them."""
        b, turn = self._instance(at), self._turn(at)
        at.warp.note(at, b.label, b.completed)
        size = self.buffers[at.statement.writes[0]].size_bytes * int(at.statement.attrs.get("ctas", 1)) * at.warp.weight
        self.landing = (b.place, b.completed + 1)
        b.due -= size
        if b.completed != turn or (b.pending == 0 and b.due < 0):
            self.report("bytes", byte_sentence(b, turn, size), at, barrier=b, phase=turn)
        if b.pending == 0 and b.due == 0:
            self._complete(b)

    def _wait(self, at: At) -> Blocking:
        warp, b = at.warp, self._instance(at)
        phase = self._turn(at) - bool(at.statement.attrs.get("previous", False))
        if phase < 0:
            return
        if warp.clock[b.place] < phase:
            self.report(
                "phase", f"a wait for phase {phase} of {b.label} may pass on the stale phase {phase - 2} of the same parity:"
                f" nothing tells {warp.name} that phase {phase - 1} is over", at, barrier=b, phase=phase,
            )  # fmt: skip
        warp.blocked = (at, b, phase)
        while b.completed == phase:
            yield
        warp.blocked = None
        if b.completed > phase + 1:
            self.report(
                "phase", f"{b.label} is {b.completed - phase - 1} phase on when {warp.name} waits for phase {phase}: the parity"
                " is that of a phase that is not over", at, barrier=b, phase=phase,
            )  # fmt: skip
        if b.completed > phase:
            warp.learn(b.released[phase], warp.note(at, b.label, phase))
            b.passes[warp] = (phase, warp.clock[warp.own], at)

    # --- named barriers ---

    def _barrier_of(self, at: At) -> Named:
        return self.named[barrier_name(at.statement)]

    def _announce(self, at: At) -> None:
        warp, b = at.warp, self._barrier_of(at)
        warp.note(at, b.label, b.completed)
        twice = [earlier for earlier, _ in b.arrivals if earlier.warp is warp]
        if warp.clock[b.place] < b.completed or twice:
            self.report(
                "named barrier", f"{warp.name} arrives at {b.label} again while nothing tells it that the barrier's last"
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

    # --- the end ---

    def _leftovers(self) -> None:
        """Queues that nobody knows to be done, and phases that have begun."""
        for warp in self.warps:
            for agent, what in ((BULK, "a TMA store still reads shared memory"), (MMA, "its products are in flight")):
                value, at = warp.last.get(agent, (0, None))
                if max(each.clock[warp.agents[agent]] for each in self.warps) < value:
                    self.report("unfinished at exit", f"the CTA ends while {what}: nothing waits for {warp.name}'s last", at)
        for b in self.barriers():
            if isinstance(b, Mbarrier) and (b.pending != b.count or b.due):
                at = b.arrivals[-1][0] if b.arrivals else None
                sentence = f"phase {b.completed} of {b.label} never completes: it has {b.lacks()}"
                self.report("arrival count", sentence, at, barrier=b)

    def barriers(self) -> list[Mbarrier | Named]:
        return [*(b for stages in self.mbarriers.values() for b in stages), *self.named.values()]

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
            )
        )  # fmt: skip

    def _add(self, f: Finding) -> None:
        pair = tuple((site.role, site.op) for site in (f.at, f.other) if site)
        self.findings.setdefault((f.kind, pair, f.buffer, f.barrier.partition("[")[0]), f)

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
            ops = [f"{at.warp.name}: {at.site().op}" for at in (earlier.at, record.at, *([event.at] if event else []))]
            order = Order(earlier=ops[0], later=ops[1], buffer=key[2], by=ops[2] if event else "")
            out[key] = (order, event.at.statement if event else None)
        return out
