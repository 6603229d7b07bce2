"""Which statement of the steady loop waits for which, read off a run of the Program itself, with distances in trips.

One tile is followed by the checker's machine (:mod:`.hazard_machine`), which takes every role through its barriers in an order
that they allow; the CTAs of a cluster together. The last write before a read is then the value that it reads, and what was read
before a write must be over before its buffer is used again. The order in which a role happens to issue its statements is not
in the graph, nor are barriers that only take turns: those are the schedule's choice, and what a better one may change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from ..model.program import Program, Statement
from .hazard_clocks import At, Warp
from .hazard_machine import Machine
from .hazard_memory import ALL, Cell, Memory, Part, Record
from .hazard_script import Script

#: Steps of all warps that are followed: some hundred trips of the longest loop of a shipped schedule.
FOLLOWED = 30_000
#: Trips that a role must make in step with the others for its loop to count as steady.
STEADY_TRIPS = 3

#: Ops that change what they write: every operand they write, or (FIRST) the first one. All others write anew.
CHANGES = frozenset(
    ("mask", "exp2", "row_sum", "rescale", "scale_rows", "merge", "lane_exp2", "lane_sum", "vote_scale", "divide", "lane_divide")
)
CHANGES_FIRST = frozenset(("row_max", "lane_max", "lane_masked_max", "row_scale", "lane_factor"))
PRODUCTS = frozenset(("mma", "wgmma", "umma"))


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The steady loop of a role: the statement that opens it, the one that ends it, and its trips in the tile followed."""

    role: int
    start: int
    end: int
    trips: int


@dataclass(frozen=True, kw_only=True)
class Dependence:
    """Statement ``after`` of trip i + ``distance`` may begin when ``before`` of trip i is over.

    ``buffer`` is set where ``after`` only needs the place in which ``before``'s value lies: with one more copy of that buffer the
    distance is one more.
    """

    before: int
    after: int
    distance: int
    buffer: str = ""


def steady_loops(program: Program, tile: int) -> tuple[Loop, ...]:
    """Of each role that has loops, the innermost one with most trips in ``tile``."""
    found = []
    for role in range(len(program.roles)):
        mine = [i for i, s in enumerate(program.statements) if s.role == role]
        counts: dict[int, int] = {}
        for s, _, _ in islice(program.walk(tile, role), FOLLOWED):
            counts[id(s)] = counts.get(id(s), 0) + 1
        best: Loop | None = None
        stack: list[tuple[int, bool]] = []
        for i in mine:
            kind = program.statements[i].kind
            if kind == "loop":
                stack = [(start, False) for start, _ in stack] + [(i, True)]
            elif kind == "end":
                start, innermost = stack.pop()
                inside = [counts.get(id(program.statements[j]), 0) for j in range(start + 1, i)]
                trips = max(inside, default=0)
                if innermost and trips > (best.trips if best else 0):
                    best = Loop(role=role, start=start, end=i, trips=trips)
        if best is not None:
            found.append(best)
    return tuple(found)


def dependences(program: Program, tile: int, loops: Sequence[Loop]) -> tuple[tuple[Dependence, ...], frozenset[int]]:
    """What the statements of ``loops`` wait for while all roles are in their loops; and the guarded ones that do not run there.

    Raises ValueError where they are not in step for STEADY_TRIPS trips, and where the tile cannot be followed to there.
    """
    script = Script(program)
    for plan in script.plans.values():  # here registers matter as much as what is shared
        plan.operands, plan.plain = (*plan.plain, *plan.operands), ()
    machine = _Follower(script, [tile // max(1, program.cluster)])
    flow = _Flow(machine, program)
    machine.memory = flow
    machine.run()
    first, last = _window(program, flow, loops)
    inside = {i for loop in loops for i in range(loop.start + 1, loop.end)}
    seen: dict[tuple[int, int, str], int] = {}
    for before, after, buffer in flow.edges:
        a, b = flow.steps[before], flow.steps[after]
        if a.statement in inside and b.statement in inside and first <= a.order and b.order <= last:
            seen[a.statement, b.statement, buffer] = b.trip - a.trip
    if not seen:
        raise ValueError(f"{program.name} has no steady loop of {STEADY_TRIPS} trips in this problem: give it more keys")
    found = tuple(Dependence(before=a, after=b, distance=n, buffer=name) for (a, b, name), n in seen.items())
    ran = {step.statement for step in flow.steps.values() if first <= step.order <= last}
    return found, frozenset(_left_out(program, script, loops, ran))


def _left_out(program: Program, script: Script, loops: Sequence[Loop], ran: set[int]) -> Iterator[int]:
    """Statements in a guard none of whose accesses happened."""
    for loop in loops:
        opened: list[int] = []
        for i in range(loop.start + 1, loop.end):
            kind = program.statements[i].kind
            if kind == "when":
                opened.append(i)
            elif kind == "end_when":
                inside = range(opened.pop() + 1, i)
                touching = [j for j in inside if (p := script.plans.get(id(program.statements[j]))) and p.operands]
                if touching and not ran & set(touching):
                    yield from inside


class _Follower(Machine):
    """Follows a tile only as far as its loops become steady; findings do not stop it."""

    @property
    def full(self) -> bool:
        return self.followed >= FOLLOWED


@dataclass(frozen=True, slots=True)
class _Step:
    """A statement as a role's first warp ran it: when, counting the statements of all roles, and in which trip of its loop."""

    order: int
    statement: int
    trip: int


#: A stage of a buffer in a CTA, or a warp's own registers.
Place = tuple[str, int | None, int, Warp | None]


@dataclass(frozen=True, slots=True)
class _Access:
    at: At
    part: Part
    tag: str

    def meets(self, part: Part, tag: str) -> bool:
        return (not self.tag or not tag or self.tag == tag) and self.part[0] < part[1] and part[0] < self.part[1]


class _Flow(Memory):
    """Keeps who wrote and who read each stage since it was last written whole, and what each access has to wait for."""

    def __init__(self, machine: Machine, program: Program) -> None:
        super().__init__(lambda *_: None)
        self.numbers = {id(s): i for i, s in enumerate(program.statements)}
        leads: dict[tuple[int, int], Warp] = {}
        for warp in machine.warps:
            leads.setdefault((warp.rank, warp.role), warp)
        self.leads = set(leads.values())
        self.steps: dict[At, _Step] = {}
        self.roles: dict[int, list[_Step]] = {}
        self.writers: dict[Place, list[_Access]] = {}
        self.readers: dict[Place, list[_Access]] = {}
        self.edges: list[tuple[At, At, str]] = []

    def touch(self, cell: Cell, record: Record) -> None:
        """The other warps of a role run the same code; what the first one does stands for them."""
        at = record.at
        if at.warp not in self.leads:
            return
        self._note(at)
        key: Place = (cell.name, cell.stage, cell.rank, at.warp if cell.space == "register" else None)
        writers, readers = self.writers.setdefault(key, []), self.readers.setdefault(key, [])
        changes = record.writes and changes_value(at.statement, cell.name, record.tag)
        if not record.writes or changes:
            self._reads(at, record, writers)
        if not record.writes:
            readers.append(_Access(at, record.part, record.tag))
            return
        anew = "" if changes or record.tag else cell.name
        for other in (*readers, *(w for w in writers if not changes)):
            if other.meets(record.part, record.tag) and other.at is not at:
                self.edges.append((other.at, at, anew))
        self._covered(writers, record)
        self._covered(readers, record)
        writers.append(_Access(at, record.part, record.tag))

    def _note(self, at: At) -> None:
        if at in self.steps:
            return
        step = _Step(len(self.steps), self.numbers[id(at.statement)], at.loops[-1][1] if at.loops else 0)
        self.steps[at] = step
        if at.warp.rank == 0:
            self.roles.setdefault(at.warp.role, []).append(step)

    def _reads(self, at: At, record: Record, writers: list[_Access]) -> None:
        """Each column's last writer."""
        left = [record.part]
        for writer in reversed(writers):
            if writer.at is at or not any(writer.meets(part, record.tag) for part in left):
                continue
            self.edges.append((writer.at, at, ""))
            left = [rest for part in left for rest in _without(part, writer.part)]

    @staticmethod
    def _covered(accesses: list[_Access], record: Record) -> None:
        """Forget what was accessed before in the columns that are written now: who comes later waits for the writer."""
        part, tag = record.part, record.tag
        accesses[:] = [
            a
            for a in accesses
            if not (a.meets(part, tag) and (a.tag == tag or not tag) and part[0] <= a.part[0] and a.part[1] <= part[1])
        ]


def _without(part: Part, gone: Part) -> list[Part]:
    pieces = [(part[0], min(part[1], gone[0])), (max(part[0], gone[1]), part[1])]
    return [(a, b) for a, b in pieces if a < b]


def changes_value(s: Statement, buffer: str, tag: str = "") -> bool:
    """Whether ``s``, which writes ``buffer``, goes on with the value that is there."""
    name = tag or buffer
    if name in s.reads or s.kind in CHANGES:
        return True
    if s.kind in PRODUCTS:
        return bool(s.attrs.get("accumulate")) or float(s.attrs.get("share", ALL)[0]) > 0
    if s.kind in CHANGES_FIRST:
        return len(s.writes) > 1 and name == s.writes[0]
    return False


def _window(program: Program, flow: _Flow, loops: Sequence[Loop]) -> tuple[int, int]:
    """The stretch of the run in which every role with a steady loop is in it, of most trips; of several the middle one, since
    the first and last passes of an outer loop begin and end what the others go on with."""
    windows = [(0, len(flow.steps))]
    for loop in loops:
        stretches = list(_stretches(flow.roles.get(loop.role, []), loop))
        windows = [(max(a, c), min(b, d)) for a, b in windows for c, d in stretches if max(a, c) < min(b, d)]

    def trips(loop: Loop, window: tuple[int, int]) -> int:
        inside = (s for s in flow.roles.get(loop.role, []) if window[0] <= s.order <= window[1])
        return len({s.trip for s in inside if loop.start < s.statement < loop.end})

    made = [min(trips(loop, window) for loop in loops) for window in windows]
    longest = [window for window, n in zip(windows, made, strict=True) if n == max(made)] or [(0, 0)]
    chosen = longest[len(longest) // 2]
    for loop in loops:
        if trips(loop, chosen) < STEADY_TRIPS:
            raise ValueError(
                f"{program.name} has no steady loop of {STEADY_TRIPS} trips in this problem:"
                f" {program.roles[loop.role].name} makes {trips(loop, chosen)}; give it more keys"
            )
    return chosen


def _stretches(steps: Sequence[_Step], loop: Loop) -> Iterator[tuple[int, int]]:
    """When a role goes round ``loop`` without leaving it: first and last step."""
    begun = last = -1
    for step in steps:
        inside = loop.start < step.statement < loop.end
        if inside and begun < 0:
            begun = step.order
        elif not inside and begun >= 0:
            yield begun, step.order - 1
            begun = -1
        last = step.order
    if begun >= 0:
        yield begun, last
