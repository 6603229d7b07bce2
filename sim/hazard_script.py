"""A Program's statements made ready for the checker: the row of each, its operands, and what a role does in a tile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from ..model.program import Program, Statement
from .hazard_memory import Operand, operands
from .hazard_ops import STRUCTURE, WARP

SHORT = 20_000  # steps of a role in a tile that are kept
BLOCKING = ("wait", "sync", "exchange", "allocate")
#: Steps that touch their operands themselves.
TOUCHING = ("exchange", "allocate")


class Plan:
    """A statement made ready: its row, its operands, whether its step may block.

    ``plain``: operands that only their warp ever touches, in program order, so that nothing but a first write can be missing.
    ``read``: a TMA store whose warp waits until it has read shared memory.
    """

    __slots__ = ("blocks", "effect", "operands", "plain", "read", "statement")

    def __init__(self, program: Program, statement: Statement) -> None:
        self.statement = statement
        self.effect, self.operands = operands(program, statement)
        self.plain: tuple[Operand, ...] = ()
        self.blocks = self.effect.step in BLOCKING
        self.read = statement.attrs.get("wait") == "read"

    def set_apart(self, queued: set[tuple[int, str]]) -> None:
        """Make plain what is in registers that no queue and no exchange of the role (``queued``: role, name) works on."""
        role = self.statement.role
        self.plain = tuple(o for o in self.operands if o.space == "register" and (role, o.memory) not in queued)
        self.operands = tuple(o for o in self.operands if o not in self.plain)


#: A statement with its loop counters.
Planned = tuple[Plan, tuple[tuple[str, int], ...]]


class Script:
    """A Program's statements made ready once, and what each role does in a tile, kept where it is short."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.plans = {id(s): Plan(program, s) for s in program.statements if s.kind not in STRUCTURE}
        queued = {
            (p.statement.role, o.memory)
            for p in self.plans.values()
            if p.effect.agent != WARP or p.effect.step == "exchange"
            for o in p.operands
        }
        for plan in self.plans.values():
            plan.set_apart(queued)
        self.again = [any(s.kind == "tile" for s in program.statements if s.role == i) for i in range(len(program.roles))]
        self.known: dict[tuple[int, int, bool], list[Planned]] = {}

    def steps(self, tile: int, role: int, rank: int) -> Iterable[Planned]:
        """What ``role`` does in ``tile`` in the cluster's CTA ``rank``: statements with their loop counters."""
        key = (tile, role, rank == 0)
        if key not in self.known:
            found = list(islice(self._walk(tile, role, rank), SHORT))
            if len(found) == SHORT:
                return self._walk(tile, role, rank)
            self.known[key] = found
        return self.known[key]

    def last(self, role: int, rank: int) -> list[Planned]:
        """What it does after its CTA's last tile."""
        return [(self.plans[id(s)], ()) for s in self.program.ending(role) if takes_part(s, rank)]

    def _walk(self, tile: int, role: int, rank: int) -> Iterator[Planned]:
        for statement, _, loops in self.program.walk(tile, role):
            if takes_part(statement, rank):
                yield self.plans[id(statement)], tuple(loops.items())


def takes_part(statement: Statement, rank: int) -> bool:
    """Whether a cluster's CTA of this rank does what a statement says."""
    return rank == 0 or not statement.attrs.get("leader")


def reaches(statement: Statement, sender: int, receiver: int) -> bool:
    """Whether an arrival or a copy that CTA ``sender`` makes is counted by the barrier in CTA ``receiver``."""
    to = statement.attrs.get("to")
    if to is None:
        return sender == receiver or int(statement.attrs.get("multicast", 1)) > 1
    return {"all": True, "leader": receiver == 0, "peer": sender != receiver}[to]
