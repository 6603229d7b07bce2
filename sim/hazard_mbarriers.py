"""The checker's steps at mbarriers: arrivals, bytes and waits, of the own CTA's barriers and of another's in its cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..model.lowering_async import expected_bytes
from .hazard_clocks import At, Mbarrier, joined
from .hazard_ops import MMA, WARP
from .hazard_script import reaches
from .hazard_words import byte_sentence, too_many

if TYPE_CHECKING:
    from .hazard_machine import Machine


def _instance(machine: Machine, at: At, rank: int) -> Mbarrier:
    stages = machine.ctas[rank].mbarriers[at.statement.attrs["barrier"]]
    return stages[at.warp.turns[at.statement.attrs["ring"]] % len(stages)]


def _turn(machine: Machine, at: At) -> int:
    """The phase that the warp's ring is at."""
    stages = machine.ctas[at.warp.rank].mbarriers[at.statement.attrs["barrier"]]
    return at.warp.turns[at.statement.attrs["ring"]] // len(stages)


def _reached(machine: Machine, at: At) -> list[Mbarrier]:
    """The barrier that an op names, in each CTA in which it counts the op."""
    sender = at.warp.rank
    return [_instance(machine, at, cta.rank) for cta in machine.ctas if reaches(at.statement, sender, cta.rank)]


def arrive(machine: Machine, at: At) -> None:
    """With ``products``: once all products that the warp has issued are done."""
    _arrivals(machine, at, int(at.statement.attrs.get("count", 1)), 0)


def expect(machine: Machine, at: At) -> None:
    attrs = at.statement.attrs
    _arrivals(machine, at, 1, expected_bytes(at.statement, machine.buffers) * int(attrs.get("each", attrs.get("ctas", 1))))


def _arrivals(machine: Machine, at: At, count: int, size: int) -> None:
    """What the warp knows goes to every barrier that the arrival reaches; each CTA has to know that it has come."""
    warp, agent = at.warp, MMA if at.statement.attrs.get("products") else WARP
    place, value = warp.agents[agent], warp.clock[warp.own] if agent == WARP else warp.closed[agent] + 1
    targets = _reached(machine, at)
    for b in targets:
        _early(machine, at, b)
        machine.cross(at, b.rank, place, value, f"arrives at {b.label}")
    given = warp.release(agent)
    for b in targets:
        left = count * warp.weight
        if left > b.pending > 0 and left > count:
            machine.report(
                "arrival count", f"phase {b.completed} of {b.label} is complete with {b.count} arrivals while {warp.who} still"
                f" makes {left - b.pending} of the same op: {too_many(b, at)}", at, barrier=b,
            )  # fmt: skip
        b.due += size * warp.weight
        while left > 0 and b.pending > 0:
            taken = min(left, b.pending)
            b.gathered = joined(b.gathered, given)
            b.arrivals.append((at, taken))
            b.pending -= taken
            left -= taken
            if b.pending == 0 and b.due == 0:
                _complete(machine, b)
        if left > 0:
            sentence = f"{left} arrivals too many at {b.label} in phase {b.completed}, which waits for bytes: {too_many(b, at)}"
            machine.report("arrival count", sentence, at, barrier=b)


def _early(machine: Machine, at: At, b: Mbarrier) -> None:
    at.warp.note(at, b.label, b.completed)
    if at.warp.clock[b.place] < b.completed:
        passed = next((other for _, _, other in b.passes.values()), None)  # someone who has waited for the barrier
        machine.report(
            "early arrival", f"an arrival at {b.label} may be counted in phase {b.completed - 1} or {b.completed}:"
            f" nothing tells {at.warp.who} that phase {b.completed - 1} is over", at, passed, barrier=b,
        )  # fmt: skip


def _complete(machine: Machine, b: Mbarrier) -> None:
    phase = b.completed
    knowledge = b.complete()
    for warp, (passed, epoch, at) in b.passes.items():
        if passed == phase - 1 and knowledge[0, warp.own] < epoch:
            machine.report(
                "phase", f"phase {phase} of {b.label} may complete before {warp.who} has passed its wait for phase {passed},"
                " which then does not see the change of parity", at, barrier=b, phase=passed,
            )  # fmt: skip


def deliver(machine: Machine, at: At) -> None:
    """The bytes of a TMA load, all at once; ``landing`` has the clock entry of the phase that counts them, by CTA.

    A copy that another CTA issued comes after all that its issuer waited for.
    """
    warp, turn = at.warp, _turn(machine, at)
    size = machine.buffers[at.statement.writes[0]].size_bytes // int(at.statement.attrs.get("multicast", 1)) * warp.weight
    machine.landing = {}
    for b in _reached(machine, at):
        warp.note(at, b.label, b.completed)
        machine.landing[b.rank] = (b.place, b.completed + 1)
        machine.cross(at, b.rank, b.place, b.completed + 1, f"copies for {b.label}")
        if b.rank != warp.rank:
            b.gathered = joined(b.gathered, warp.known)
        b.due -= size
        b.copied.add(warp)
        if b.rank != warp.rank and warp.clock[b.place] < turn:
            machine.report(
                "early arrival", f"{size} B belong to phase {turn} of {b.label}, and nothing tells {warp.who} that phase"
                f" {turn - 1} is over", at, barrier=b, phase=turn,
            )  # fmt: skip
        elif b.completed != turn or (b.pending == 0 and b.due < 0):
            machine.report("bytes", byte_sentence(b, turn, size), at, barrier=b, phase=turn)
        if b.pending == 0 and b.due == 0:
            _complete(machine, b)


def wait(machine: Machine, at: At) -> Iterator[None]:
    warp, b = at.warp, _instance(machine, at, at.warp.rank)
    phase = _turn(machine, at) - bool(at.statement.attrs.get("previous", False))
    if phase < 0:
        return
    if warp.clock[b.place] < phase:
        machine.report(
            "phase", f"a wait for phase {phase} of {b.label} may pass on the stale phase {phase - 2} of the same parity:"
            f" nothing tells {warp.who} that phase {phase - 1} is over", at, barrier=b, phase=phase,
        )  # fmt: skip
    warp.blocked = (at, b, phase)
    while b.completed == phase:
        yield
    warp.blocked = None
    if b.completed > phase + 1:
        machine.report(
            "phase", f"{b.label} is {b.completed - phase - 1} phase on when {warp.who} waits for phase {phase}: the parity"
            " is that of a phase that is not over", at, barrier=b, phase=phase,
        )  # fmt: skip
    if b.completed > phase:
        warp.learn(b.released[phase], warp.note(at, b.label, phase))
        b.passes[warp] = (phase, warp.clock[warp.own], at)
