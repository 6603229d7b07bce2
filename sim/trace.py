"""A Result as Chrome trace JSON, for ui.perfetto.dev: a process per SM, a track per warp and unit, flow arrows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..model.instructions import Path as ModelPath
from ..model.program import Program
from .engine import PATH, TICKS_PER_CYCLE
from .predict import Launch, Result
from .timeline import Interval, UnitSpan, flows, intervals, unit_spans, waits
from .whole_file import write_whole

Event = dict[str, Any]

#: Units that have tracks, in their order: those that bind most often first.
SHOWN = ("tensor", "mufu", "port", "fma", "alu", "lsu", "tmem")
#: Records of one kernel that a trace keeps unless told otherwise.
DEFAULT_LIMIT = 20_000


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The document and what was left out of it: ``notes`` has a sentence per cut."""

    document: dict[str, Any]
    notes: tuple[str, ...]

    @property
    def events(self) -> list[Event]:
        events: list[Event] = self.document["traceEvents"]
        return events


@dataclass(kw_only=True)
class _Tracks:
    """Thread numbers by (process, name), and the metadata events that name them."""

    numbers: dict[tuple[int, str], int] = field(default_factory=dict)
    order: dict[tuple[int, str], int] = field(default_factory=dict)

    def number(self, pid: int, name: str, order: int) -> int:
        key = (pid, name)
        if key not in self.numbers:
            self.numbers[key], self.order[key] = len(self.numbers) + 1, order
        return self.numbers[key]

    def in_order(self, events: list[Event]) -> list[Event]:
        """The events with threads numbered in the order of their tracks: some viewers go by that alone."""
        keys = sorted(self.numbers, key=lambda key: (key[0], self.order[key]))
        places = {self.numbers[key]: i for i, key in enumerate(keys, start=1)}
        self.numbers = {key: places[self.numbers[key]] for key in keys}
        return [{**event, "tid": places[event["tid"]]} for event in events]

    def metadata(self) -> Iterator[Event]:
        for pid in sorted({pid for pid, _ in self.numbers}):
            yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": "SM"}}  # viewers add the pid
        for (pid, name), tid in self.numbers.items():
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
            sort = {"sort_index": self.order[pid, name]}
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": sort}


def trace(result: Result, *, limit: int = DEFAULT_LIMIT, blocks: int | None = None) -> Trace:
    """Lay out ``result``, kernel after kernel; simulate with ``record_limit=limit + 1``, so that a cut shows.

    ``blocks``: keep the first so many CTAs. Raises ValueError where limit or blocks is below 1 or nothing was recorded.
    """
    for name, value in (("limit", limit), ("blocks", blocks)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be a whole number of at least 1: change --{name}")
    tracks, events, notes = _Tracks(), list[Event](), list[str]()
    at_ns = 0.0
    for i, launch in enumerate(result.launches):
        name, kept = launch.program.name, min(limit, len(launch.run.records))
        if not kept:
            raise ValueError(f"{name} has no records: simulate with record_limit={limit + 1}")
        ctas = _ctas(launch, kept)
        if len(launch.run.records) > limit:
            notes.append(f"{name}: only the first {limit} records are in the trace; raise --limit for more")
        if blocks is not None and blocks < ctas:
            notes.append(f"{name}: only the first {blocks} of the {ctas} CTAs recorded are in the trace")
        events += _kernel(launch, tracks, at_ns=at_ns, number=i, limit=limit, blocks=blocks)
        at_ns += launch.run.ticks * _ns_per_tick(launch)
    laid = tracks.in_order(events)
    document = {
        "displayTimeUnit": "ns",
        "otherData": {
            "schedule": result.schedule,
            "gpu": result.gpu,
            "attention": result.attention.label,
            "cycles": result.cycles,
            "clock_mhz": result.clock_mhz,
            "clock": result.clock_rule,
            "notes": notes,
        },
        "traceEvents": [*tracks.metadata(), *laid],
    }
    return Trace(document=document, notes=tuple(notes))


def write_trace(trace_: Trace, path: Path) -> None:
    """Write the JSON, whole or not at all. Raises OSError."""
    write_whole(json.dumps(trace_.document, separators=(",", ":")), path)


def _ns_per_tick(launch: Launch) -> float:
    return 1e3 / launch.clock.mhz / TICKS_PER_CYCLE


def _ctas(launch: Launch, kept: int) -> int:
    return len(set(launch.run.records[:kept, 5].tolist()))


def _kernel(launch: Launch, tracks: _Tracks, *, at_ns: float, number: int, limit: int, blocks: int | None) -> Iterator[Event]:
    program, scale = launch.program, _ns_per_tick(launch)
    statements = intervals(program, launch.job, launch.run, limit=limit, ctas=blocks)
    arrows = flows(program, statements)

    def us(ticks: int) -> float:
        return round(at_ns + ticks * scale) / 1e3

    def slice_(pid: int, tid: int, name: str, span: Interval | UnitSpan, args: dict[str, Any]) -> Event:
        begin, end = us(span.start), us(span.end)
        kind = "unit" if isinstance(span, UnitSpan) else "wait" if span.statement < 0 else "statement"
        args = {**args, "cycles": (span.end - span.start) / TICKS_PER_CYCLE}
        dur = round(end - begin, 3)
        return {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": kind, "ts": begin, "dur": dur, "args": args}

    bound = {id(x) for flow in arrows for x in (flow.producer, flow.consumer)}
    for x in sorted([*statements, *waits(program, statements)], key=lambda x: x.start):
        if us(x.end) > us(x.start) or id(x) in bound:  # viewers count in ns and draw what lasts none as an arrowhead
            yield slice_(x.sm, _warp_track(tracks, program, x), _name(program, x), x, _arguments(x, program.name))
    for span in unit_spans(statements, partial(_name, program)):
        if us(span.end) <= us(span.start) or span.unit not in SHOWN:
            continue
        shared = span.unit == "tensor" and (launch.job.bundles[:, PATH] == ModelPath.TCGEN05).any()
        place = "all sub-partitions" if shared else f"sub-partition {span.subpartition}"
        order = 1_000_000 + (0 if shared else 100 * (1 + span.subpartition)) + SHOWN.index(span.unit)
        tid = tracks.number(span.sm, f"{place} / {span.unit}", order)
        yield slice_(span.sm, tid, span.name, span, {"busy": round(span.share, 4), "kernel": program.name})
    for i, flow in enumerate(arrows):
        for phase, x in (("s", flow.producer), ("f", flow.consumer)):
            event = {
                "ph": phase,
                "id": number * 10_000_000 + i,
                "pid": x.sm,
                "tid": _warp_track(tracks, program, x),
                "name": flow.buffer,
                "cat": "flow",
                "ts": us(x.start),
            }
            yield {**event, "bp": "e"} if phase == "f" else event


def _name(program: Program, x: Interval) -> str:
    """The statement with what it writes, so that the two products have names and colours of their own."""
    written = program.statements[x.statement].writes if x.statement >= 0 else ()
    return f"{x.name} {written[0]}" if written else x.name


def _warp_track(tracks: _Tracks, program: Program, x: Interval) -> int:
    role, first = _role(program, x.warp)
    return tracks.number(x.sm, f"CTA slot {x.slot} / {role} (warp {x.warp - first})", x.slot * 1000 + x.warp)


def _role(program: Program, warp: int) -> tuple[str, int]:
    """Name of the role that warp of the CTA belongs to, and that role's first warp."""
    first = 0
    for role in program.roles:
        if warp < first + role.warps:
            return role.name, first
        first += role.warps
    raise ValueError(f"{program.name} has {program.warps} warps a CTA, got warp {warp}")


def _arguments(x: Interval, kernel: str) -> dict[str, Any]:
    args: dict[str, Any] = {"kernel": kernel, "tile": x.tile}
    if x.statement >= 0:
        args |= {"loop_row": x.trip, "code_rows": f"{x.first_row}-{x.last_row}", "instructions": dict(x.instructions)}
    return args
