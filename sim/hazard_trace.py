"""A verdict as Chrome trace JSON, for ui.perfetto.dev: what the checker followed, and the hazards where they lie.

A process per CTA, a track per warp (one for all further warps of a role), a track "hazards". Time is the checker's own: a step an
op, each as early as what it waits for allows (Lamport's logical time). A hazard holds in any timing, also in one that no engine
runs to its end; so it is drawn in the order in which it was found, not on a timeline of cycles.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..model.attention import Attention
from ..model.gpu import GPU
from ..model.schedule import Schedule, lowered
from .hazard_clocks import TIME, At, Warp
from .hazard_findings import Finding, Verdict
from .hazard_machine import Machine, Step
from .hazards import Followed, follow, verdict
from .trace import Event, Trace

#: Ops of a kernel that are drawn: those followed last, where a run ends that has found something.
KEPT = 20_000
#: Track of the findings in each CTA; warps come after it.
HAZARDS = 1
KERNEL_PIDS = 100  # process numbers of one kernel


def check_and_trace(schedule: Schedule, gpu: GPU, attention: Attention) -> tuple[Verdict, Trace]:
    """The verdict of :func:`.hazards.check` and its picture. Raises ValueError as that does."""
    programs = lowered(schedule, gpu, attention)
    followed = [follow(program, gpu, keep=KEPT) for program in programs]
    found = verdict(programs, gpu, followed, schedule=schedule.name, problem=attention.label)
    notes = [*found.notes]
    for program, each in zip(programs, followed, strict=True):
        if each.machine is not None and each.machine.followed > KEPT:
            notes.append(f"{program.name}: the last {KEPT:,} ops that were followed are in the trace")
    events = [
        event
        for number, (program, each) in enumerate(zip(programs, followed, strict=True))
        for event in _kernel(program.name, each, number)
    ]
    document = {
        "displayTimeUnit": "ns",
        "otherData": {
            "schedule": found.schedule, "gpu": found.gpu, "attention": found.problem, "verdict": found.sentence,
            "time": "logical: a step an op", "notes": notes,
        },
        "traceEvents": events,
    }  # fmt: skip
    return found, Trace(document=document, notes=tuple(notes))


def _kernel(name: str, followed: Followed, number: int) -> Iterator[Event]:
    machine = followed.machine
    ctas = len(machine.ctas) if machine else 1
    for rank in range(ctas):
        pid = number * KERNEL_PIDS + rank
        label = f"{name}, CTA {rank}" if ctas > 1 else name
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": label}}
        tracks = ["hazards", *(warp.label for warp in (machine.ctas[rank].warps if machine else ()))]
        for tid, track in enumerate(tracks, HAZARDS):
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": track}}
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
    if machine is None:  # budgets: nothing was followed
        for finding in followed.findings:
            yield _instant(number * KERNEL_PIDS, HAZARDS, 0, finding)
        return
    steps = {id(step.event.at): step for step in machine.steps}
    for step in machine.steps:
        yield _slice(machine, number, step)
    last = max((step.end for step in machine.steps), default=0) + 1
    for warp in machine.warps:
        if warp.blocked is not None:
            yield _waiting(machine, number, warp, last)
    for i, finding in enumerate(followed.findings):
        yield from _finding(machine, number, finding, steps, number * 10_000 + i)


def _finding(machine: Machine, number: int, finding: Finding, steps: dict[int, Step], arrow: int) -> Iterator[Event]:
    """The hazard on its track and at its two ops, with an arrow from the op that comes into its way."""
    at, other = machine.culprits.get(finding, (None, None))
    when = _begin(at, steps) if at else 0
    yield _instant(number * KERNEL_PIDS + (at.warp.rank if at else 0), HAZARDS, when, finding)
    for op in (at, other):
        if op is not None:
            yield _instant(*_track(machine, number, op.warp), _begin(op, steps), finding)
    if at is not None and other is not None and at is not other:
        for phase, op in (("s", other), ("f", at)):
            pid, tid = _track(machine, number, op.warp)
            event = {"ph": phase, "id": arrow, "pid": pid, "tid": tid, "name": finding.kind, "cat": "hazard"}
            yield {**event, "ts": _begin(op, steps)} | ({"bp": "e"} if phase == "f" else {})


def _instant(pid: int, tid: int, ts: int, finding: Finding) -> Event:
    where: dict[str, Any] = {name: getattr(finding, name) for name in ("buffer", "stage", "barrier", "phase")}
    sites = {name: str(site) for name, site in (("at", finding.at), ("against", finding.other)) if site}
    args = {"sentence": finding.sentence, **sites, **{name: value for name, value in where.items() if value not in ("", None)}}
    return {"ph": "i", "s": "t", "pid": pid, "tid": tid, "name": finding.kind, "cat": "hazard", "ts": ts, "args": args}


def _slice(machine: Machine, number: int, step: Step) -> Event:
    at = step.event.at
    pid, tid = _track(machine, number, at.warp)
    written = at.statement.writes
    args: dict[str, Any] = {"op": at.site().op, "tile": at.tile, **dict(at.loops)}
    if step.event.barrier:
        args |= {"barrier": step.event.barrier, "phase": step.event.phase}
    name = f"{at.statement.kind} {written[0] if written else step.event.barrier}".strip()
    return _span(pid, tid, name, "op", step.begin, step.end, args)


def _waiting(machine: Machine, number: int, warp: Warp, last: int) -> Event:
    """A wait that does not end: from where the warp came to it to the end of the picture."""
    assert warp.blocked is not None
    at, barrier, phase = warp.blocked
    pid, tid = _track(machine, number, warp)
    begin = int(warp.clock[TIME]) - 1
    where = {"op": at.site().op, "tile": at.tile, **dict(at.loops)}
    args = {**where, "barrier": barrier.label, "phase": phase, "has": barrier.lacks()}
    return _span(pid, tid, f"waits for {barrier.label} phase {phase}", "wait", begin, max(begin + 1, last), args)


def _span(pid: int, tid: int, name: str, kind: str, begin: int, end: int, args: dict[str, Any]) -> Event:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": kind, "ts": begin, "dur": end - begin, "args": args}


def _track(machine: Machine, number: int, warp: Warp) -> tuple[int, int]:
    return number * KERNEL_PIDS + warp.rank, HAZARDS + 1 + machine.ctas[warp.rank].warps.index(warp)


def _begin(at: At, steps: dict[int, Step]) -> int:
    """When an op began; one that has not ended is the warp's latest."""
    return steps[id(at)].begin if id(at) in steps else int(at.warp.clock[TIME]) - 1
