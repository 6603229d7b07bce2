"""Moves that a schedule has a switch for, each run by the engine: the steady loop's interval with that switch set otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from ..model.program import Program
from ..model.schedule import Schedule
from .dependence import PRODUCTS
from .loop_graph import LoopGraph

ON = "on"
#: Fields that shape a steady loop, how they are set otherwise, and what that means.
SWITCHES: tuple[tuple[str, str, str], ...] = (
    ("pingpong", ON, "the warpgroups' softmaxes take turns"),
    ("intra_overlap", ON, "Q K^T of the next block runs under softmax of this one"),
    ("warp_specialization", ON, "a warp of its own loads"),
    ("warp_specialize", ON, "roles have warps of their own"),
    ("q_stages", "tiles", "Q tiles in flight in a CTA"),
    ("cta_pair", ON, "two CTAs share the operands of their products"),
    ("deferred_divide", ON, "O is divided once, after the loop"),
    ("stages", "deeper", "K/V blocks in flight"),
    ("kv_stages", "deeper", "K/V blocks in flight"),
    ("num_stages", "deeper", "K/V blocks in flight"),
    ("block_q", "rows", "another Q tile"),
    ("block_kv", "columns", "another K/V tile"),
)
#: An interval that differs by less is the same loop.
SAME = 0.0005


@dataclass(frozen=True, kw_only=True)
class Loops:
    """The steady loop of one run: cycles a trip, elements of S a trip, and its program."""

    interval: float
    work: float
    program: Program


@dataclass(frozen=True, kw_only=True)
class Tried:
    """``fields`` set to other values: the engine's interval, and for as much work as a trip does now ``comparable`` cycles. Where
    it could not run, ``refused`` says why."""

    fields: tuple[tuple[str, Any], ...]
    says: str
    interval: float = 0.0
    comparable: float = 0.0
    refused: str = ""

    @property
    def switch(self) -> str:
        return ",".join(f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in self.fields)


def tried(
    schedule: Schedule, own: Loops, run: Callable[[Schedule], Loops], until: float
) -> tuple[tuple[Tried, ...], tuple[str, ...]]:
    """What each switch makes of the loop, as far as there is time ``until`` (monotonic); and switches that were not tried."""
    found: list[Tried] = []
    left_out: list[str] = []
    longest = 0.0

    def look(one: Tried) -> None:
        nonlocal longest
        began = time.monotonic()
        if began + longest >= until:
            left_out.append(one.switch)
            return
        changed: Any = schedule
        try:
            loops = run(replace(changed, **dict(one.fields)))
        except (ValueError, ArithmeticError) as error:
            found.append(replace(one, refused=str(error)))
            return
        finally:
            longest = max(longest, time.monotonic() - began)
        comparable = loops.interval * own.work / loops.work
        if abs(comparable / own.interval - 1) > SAME:
            found.append(replace(one, interval=loops.interval, comparable=comparable))

    for field, value, says in _candidates(schedule, own.program):
        look(Tried(fields=((field, value),), says=says))
    gains = sorted((t for t in found if not t.refused and t.comparable < own.interval), key=lambda t: t.comparable)
    together = {field: value for t in reversed(gains) for field, value in t.fields}
    if len(together) > 1:
        look(Tried(fields=tuple(together.items()), says="all that gain"))
    return tuple(sorted(found, key=lambda t: (bool(t.refused), t.comparable))), tuple(left_out)


def _candidates(schedule: Schedule, program: Program) -> Iterator[tuple[str, Any, str]]:
    known: dict[str, Any] = {}
    if is_dataclass(schedule):
        known = {f.name: getattr(schedule, f.name) for f in fields(schedule)}
    rows, columns = _tile(program)
    for field, how, says in SWITCHES:
        if field not in known:
            continue
        now = known[field]
        values: tuple[Any, ...] = ()
        if how == ON:
            values = tuple(value for value in (True, False) if value != now)
        elif how == "tiles":
            values = tuple(value for value in (1, 2) if value != now)
        elif how == "deeper":
            values = ((now or max((ring.stages for ring in program.rings), default=1)) + 1,)
        elif rows and columns:
            more = (rows + 64, 2 * rows) if rows >= 64 else (2 * rows,)
            values = more if how == "rows" else (columns // 32 * 16, 2 * columns)
        for value in dict.fromkeys(values):
            yield field, value, says if value is not False else ""


def _tile(program: Program) -> tuple[int, int]:
    """Rows of S in a CTA and its columns."""
    buffers = {b.name: b for b in program.buffers}
    names = dict.fromkeys(
        s.writes[0] for s in program.statements if s.kind in PRODUCTS and s.attrs.get("transpose_b") and s.writes[0] in buffers
    )
    return sum(buffers[name].rows for name in names), max((buffers[name].cols for name in names), default=0)


def work_of(program: Program, graph: LoopGraph) -> float:
    """Elements of S that one trip of all CTAs of an SM makes, or of whatever its products write where it makes none."""
    statements, buffers = program.statements, {b.name: b for b in program.buffers}
    made = {True: 0.0, False: 0.0}
    for op in graph.operations:
        for i in op.statements if op.kind != "issue" else ():
            s = statements[i]
            if s.kind in PRODUCTS and s.writes and s.writes[0] in buffers:
                b, share = buffers[s.writes[0]], s.attrs.get("share", (0.0, 1.0))
                made[bool(s.attrs.get("transpose_b"))] += b.rows * b.cols * (float(share[1]) - float(share[0]))
    return made[True] or made[False] or 1.0

