"""The checker's sentences: which barrier should have ordered two accesses, and who waits on whom in a deadlock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..model.program import Program, Statement
from .hazard_clocks import At, Mbarrier, Named, Warp
from .hazard_cta import MEETINGS
from .hazard_findings import Finding
from .hazard_memory import NO_FENCE, OVERWRITE, READ_EARLY, UNWRITTEN, Cell, Record
from .hazard_ops import BULK, CP_ASYNC, EFFECTS, MBARRIER, MMA, WARP
from .hazard_script import reaches, takes_part

if TYPE_CHECKING:
    from .hazard_machine import Machine

Barrier = Mbarrier | Named
ARRIVES = ("arrive", "expect", "announce", "sync", "allocate", "deliver")  # copies last
WAITS = ("wait", "sync", "allocate")
AGENT_NOUNS = {WARP: "earlier op", MMA: "product", CP_ASYNC: "cp.async", BULK: "TMA store", MBARRIER: "TMA load"}


def barrier_name(statement: Statement) -> str:
    """The barrier that an ordering statement names; a CTA's own barriers are numbered."""
    if statement.kind in MEETINGS:
        return statement.kind
    name = statement.attrs.get("barrier")
    return name if isinstance(name, str) else f"bar{statement.attrs.get('arg', 0)}"


def _step(statement: Statement) -> str:
    return EFFECTS[statement.kind].step if statement.kind in EFFECTS else ""


def _doing(program: Program, role: int, steps: tuple[str, ...], after: Statement | None = None) -> list[Statement]:
    """A role's statements with one of ``steps``, from ``after`` on."""
    body = [s for s in program.statements if s.role == role]
    start = next((i for i, s in enumerate(body) if s is after), -1) + 1
    return [s for s in body[start:] if _step(s) in steps]


def _named(statements: Sequence[Statement], barrier: str) -> bool:
    return any(barrier_name(each) == barrier for each in statements)


def responsible(machine: Machine, cell: Cell, earlier: Record, record: Record) -> tuple[Barrier | None, int | None]:
    """The barrier instance and phase that orders two accesses in a right schedule, as far as the Program shows.

    The phase that counts a TMA load; otherwise a barrier at which the earlier warp arrives after its access, on which the later
    one waits, and whose ring is the buffer's: the one for which most of this holds.
    """
    if earlier.agent == MBARRIER:
        found = next(b for b in machine.barriers() if isinstance(b, Mbarrier) and b.place == earlier.place)
        return found, earlier.value - 1
    warp, other = record.at.warp, earlier.at.warp
    if other is warp:
        return None, None
    buffer, cta = machine.buffers.get(cell.name), machine.ctas[warp.rank]
    rings = {record.at.statement.attrs.get("ring"), buffer.ring if buffer else None} - {None}
    if earlier.tag or record.tag:
        rings = set()
    arrives = _doing(machine.program, other.role, ARRIVES, earlier.at.statement)
    waits = _doing(machine.program, warp.role, WAITS)
    score: dict[str, int] = {}
    for s in arrives + waits:
        name = barrier_name(s)
        if other.role == warp.role and not (_named(arrives, name) and _named(waits, name)):
            continue  # warps of one role tell each other something only where they meet
        taking_part = name in cta.mbarriers or _named(waits, name)
        points = 3 * _named(arrives, name) + 2 * _named(waits, name)
        score[name] = points + 3 * (s.attrs.get("ring") in rings) - 2 * (not taking_part)
    if not score:
        return None, None
    name = max(score, key=lambda each: score[each])
    if name in cta.named:
        return cta.named[name], cta.named[name].completed
    ring = next(s.attrs["ring"] for s in arrives + waits if barrier_name(s) == name)
    stages = cta.mbarriers[name]
    turn = warp.turns[ring]
    return stages[turn % len(stages)], max(0, turn // len(stages) - (not earlier.writes or bool(earlier.tag)))


def too_soon(machine: Machine, earlier: Record, record: Record) -> bool:
    """Whether a TMA load that an access collides with is for a later phase than the access: it is the load that comes too soon.

    An access to another tile in the same memory never waits for the load either.
    """
    if earlier.agent != MBARRIER or record.agent == MBARRIER:
        return False
    if earlier.tag != record.tag:
        return True
    name, warp = barrier_name(earlier.at.statement), record.at.warp
    rings = [s.attrs["ring"] for s in _doing(machine.program, warp.role, WAITS) if barrier_name(s) == name]
    return bool(rings) and earlier.value - 1 > warp.turns[rings[0]] // len(machine.ctas[warp.rank].mbarriers[name])


def _what(cell: Cell, record: Record) -> str:
    """The tile that an access means, with its CTA where that is not the warp's."""
    name = record.tag or cell.name
    elsewhere = f" of CTA {cell.rank}" if cell.rank != record.at.warp.rank else ""
    return (f"{name} stage {cell.stage}" if cell.stage is not None and not record.tag else name) + elsewhere


def race_sentence(
    kind: str, cell: Cell, earlier: Record | None, record: Record, barrier: Barrier | None, phase: int | None
) -> str:
    who, what = record.at.warp.label, _what(cell, record)
    if earlier is None or kind == UNWRITTEN:
        instead = f"holds {' and '.join(sorted(cell.holds)) or cell.name} instead" if cell.holds else "nothing has written"
        return f"{who} reads {what}, which {instead}"
    other = earlier.at.warp.label if earlier.at.warp is not record.at.warp else "it"
    if kind == NO_FENCE:
        verb = "writes" if record.writes else "reads"
        return (
            f"{who} {verb} {what} through the async proxy after {other} wrote it with ordinary stores, and no fence_async lies"
            " between"
        )
    whose, reader = f"{other}'s write", other
    if other == "it":
        reader = f"its own {AGENT_NOUNS[earlier.agent]}"
        whose = f"{reader}'s write"
    first = {READ_EARLY: f"reads {what} before {whose} of it is known to be over"}
    first[OVERWRITE] = f"writes {what} while {whose} of it may be under way"
    text = first.get(kind, f"writes {what} while {reader} may still read it")
    return f"{who} {text}: {_why(cell, earlier, record, barrier, phase)}"


def _why(cell: Cell, earlier: Record, record: Record, barrier: Barrier | None, phase: int | None) -> str:
    own = earlier.at.warp is record.at.warp
    if earlier.agent == MBARRIER and barrier is not None:
        return f"the copy lands with {barrier.label} phase {phase}, for which {record.at.warp.who} has not waited"
    if earlier.agent == MMA and own:
        return f"no mma_wait covers its product group {earlier.value}"
    if earlier.agent == CP_ASYNC and own:
        return f"no wait_group covers its cp.async group {earlier.value}"
    if earlier.agent == BULK:
        return "nothing waits until its TMA store has read shared memory"
    queue = {MMA: "a product in flight, ", CP_ASYNC: "a cp.async in flight, "}.get(earlier.agent, "")
    ending = f"; {barrier.label} phase {phase} would order them" if barrier is not None else ""
    return f"{queue}and nothing orders the two{ending}" if queue else f"nothing orders the two{ending}"


def too_many(b: Mbarrier, at: At) -> str:
    """Why a phase may get more arrivals than it counts; a warp whose op has come to the same phase before stood still."""
    come = [(other.warp, id(other.statement)) for other, _ in b.arrivals] + [(at.warp, id(at.statement))]
    again = next((warp.who for i, (warp, op) in enumerate(come) if (warp, op) in come[:i]), "")
    still = f", or {again} lacks an advance of ring {at.statement.attrs['ring']} between two of its arrivals" if again else ""
    return f"its count is too small, or someone arrives too often{still}"


def byte_sentence(b: Mbarrier, turn: int, size: int) -> str:
    if b.completed != turn:
        return (
            f"{size} B belong to phase {turn} of {b.label} and count for phase {b.completed}: phase {turn}"
            f" {'was over without them, so too few bytes are expected' if b.completed > turn else 'has not begun'}"
        )
    return f"phase {turn} of {b.label} gets {-b.due} B more than it expects"


def deadlock_finding(machine: Machine) -> tuple[Finding, At]:
    """Who waits on what, what would complete it, and why that does not come; named after the barrier to blame, with its wait."""
    program, warps = machine.program, machine.warps
    stuck = [warp for warp in warps if warp.blocked]
    cause = min(stuck, key=lambda each: _rank(machine, each))
    assert cause.blocked is not None
    at, barrier, phase = cause.blocked
    wrong = _miscounted(program, warps, barrier)
    told: dict[str, None] = {}
    for warp in sorted(stuck, key=lambda each: each is not cause):
        assert warp.blocked is not None
        told.setdefault(_waiting(warps, program, warp.who, warp.blocked[1], warp.blocked[2]))
    events = [str(event) for warp in warps for event in warp.log if warp.weight == 1]
    finding = Finding(
        kind="bytes" if wrong else "deadlock",
        sentence="; ".join(told),
        kernel=program.name,
        at=at.site(),
        barrier=barrier.label,
        phase=phase,
        events=tuple(events),
    )
    return finding, at


def _rank(machine: Machine, warp: Warp) -> tuple[bool | int, ...]:
    """How likely the cause lies with the barrier that ``warp`` waits for, smallest first.

    Nobody is left to arrive there; its bytes do not add up; who should arrive has ended; another of its stages is two phases
    ahead; it is part of the circle of those who wait for each other, some of its arrivals have come, and its waiter has come
    least far.
    """
    assert warp.blocked is not None
    program, warps, barrier = machine.program, machine.warps, warp.blocked[1]
    stages: Sequence[Barrier] = machine.ctas[warp.rank].mbarriers.get(barrier.name, [barrier])
    skewed = max(b.completed for b in stages) > barrier.completed + 1
    missing = _missing(program, warps, warp)
    wrong = _miscounted(program, warps, barrier)
    partial = any(at.warp.who != warp.who for at, _ in barrier.arrivals)
    ended = bool(missing) and all(each.ended for each in missing)
    circle = warp in _reached(program, warps, warp)
    return bool(missing), not wrong, not ended, not skewed, not circle, not partial, warp.followed


def _miscounted(program: Program, warps: Sequence[Warp], barrier: Barrier) -> bool:
    """Whether the bytes of the barrier's phase do not add up, and nobody who copies for it stands somewhere before its copy."""
    if not isinstance(barrier, Mbarrier) or not (barrier.open_bytes or barrier.due < 0):
        return False
    return barrier.due < 0 or not _copying(program, warps, barrier)


def _copying(program: Program, warps: Sequence[Warp], barrier: Barrier) -> list[Warp]:
    """Those whose copies the barrier counts and who have not come to theirs in this phase."""
    if not isinstance(barrier, Mbarrier) or not barrier.open_bytes:
        return []
    return [
        warp for warp in warps if warp.blocked and warp not in barrier.copied and _arrivals(program, warp, barrier, ("deliver",))
    ]


def _missing(program: Program, warps: Sequence[Warp], warp: Warp) -> list[Warp]:
    """Those who arrive at the barrier that ``warp`` waits for, or copy for it, and have not in this phase."""
    assert warp.blocked is not None
    barrier = warp.blocked[1]
    here = {at.warp for at, _ in barrier.arrivals}
    copying = _copying(program, warps, barrier)
    return copying or [each for each in warps if each not in here and _arrivals(program, each, barrier)]


def _reached(program: Program, warps: Sequence[Warp], warp: Warp) -> set[Warp]:
    """Whom ``warp`` waits for, directly or through others."""
    found: set[Warp] = set()
    heads = [warp]
    while heads:
        head = heads.pop()
        new = [each for each in _missing(program, warps, head) if each not in found and each.blocked]
        found.update(new)
        heads += new
    return found


def _arrivals(program: Program, warp: Warp, barrier: Barrier, steps: tuple[str, ...] = ARRIVES[:-1]) -> list[Statement]:
    """The statements with which a warp arrives at a barrier (or copies for it), of its CTA or another."""
    return [
        s
        for s in _doing(program, warp.role, steps)
        if barrier_name(s) == barrier.name and takes_part(s, warp.rank)
        and (barrier.name in MEETINGS or reaches(s, warp.rank, barrier.rank))
    ]  # fmt: skip


def _waiting(warps: Sequence[Warp], program: Program, who: str, barrier: Barrier, phase: int) -> str:
    """One clause: "consumer0 waits for k_full[0] phase 1 (0 of 1 arrivals), where producer would arrive and waits for ..."."""
    reasons = []
    copying = {warp.who for warp in _copying(program, warps, barrier)}
    for name in dict.fromkeys(warp.who for warp in warps):
        same = [warp for warp in warps if warp.who == name]
        arrived = any(at.warp.who == name for at, _ in barrier.arrivals)
        if name not in copying and (not _arrivals(program, same[0], barrier) or (name == who and arrived)):
            continue
        blocked = next((warp.blocked for warp in same if warp.blocked), None)
        now = f"waits for {blocked[1].label} phase {blocked[2]}" if blocked else "has ended"
        does = "would copy" if name in copying else "has arrived" if arrived else "would arrive"
        reasons.append(f"{name} {does} and {now}")
    text = f"{who} waits for {barrier.label} phase {phase} ({barrier.lacks()})"
    return text + (f", where {' and '.join(reasons)}" if reasons else ", and nobody is left to arrive there")

