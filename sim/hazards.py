"""Races, deadlocks and budgets of a schedule, whatever the timing: ``print(check(schedule, gpu, attention))``.

A few of its tiles are followed op by op (:mod:`.hazard_machine`), a cluster's CTAs together, while vector clocks keep who knows
what (:mod:`.hazard_clocks`): one tile of each pattern of trip counts, and for a persistent kernel runs of several tiles, so that
rings carry their phases on. An access is right when the clocks order it after every access it collides with
(:mod:`.hazard_memory`); what an op does to memory is a table (:mod:`.hazard_ops`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..model.attention import Attention
from ..model.gpu import GPU
from ..model.program import Index, Program
from ..model.schedule import Schedule, lowered
from .hazard_budgets import budgets
from .hazard_findings import KINDS, Finding, Order, Site, Verdict
from .hazard_machine import ENOUGH, LIMIT, Machine, Orders
from .hazard_script import Script

PATTERNS = 12  # tiles of different trip counts that are followed at most


def check(schedule: Schedule, gpu: GPU, attention: Attention, *, orders: bool = False) -> Verdict:
    """The verdict on every kernel of ``schedule``; with ``orders`` also which op orders which accesses.

    Raises ValueError where ``gpu`` or ``attention`` cannot run it.
    """
    return check_programs(
        lowered(schedule, gpu, attention), gpu, schedule=schedule.name, problem=attention.label, orders=orders
    )  # fmt: skip


def check_programs(
    programs: Sequence[Program], gpu: GPU, *, schedule: str = "", problem: str = "as lowered", orders: bool = False,
    enough: int = ENOUGH,
) -> Verdict:  # fmt: skip
    """The verdict on kernels that are lowered already. A kernel is left after ``enough`` findings."""
    followed = [follow(program, gpu, orders=orders, enough=enough) for program in programs]
    return verdict(programs, gpu, followed, schedule=schedule, problem=problem)


def verdict(
    programs: Sequence[Program], gpu: GPU, followed: Sequence[Followed], *, schedule: str = "", problem: str = "as lowered"
) -> Verdict:
    """What came of following ``programs``, taken together."""
    findings = dict.fromkeys(finding for each in followed for finding in each.findings)
    return Verdict(
        schedule=schedule or ", ".join(p.name for p in programs),
        gpu=gpu.name,
        problem=problem,
        kernels=tuple(p.name for p in programs),
        findings=tuple(findings),
        tiles=sum(each.tiles for each in followed),
        followed=sum(each.ops for each in followed),
        notes=tuple(note for each in followed for note in each.notes),
        orders=tuple(dict.fromkeys(order for each in followed for order, _ in each.orders.values())),
    )


def spare(program: Program, gpu: GPU, number: int) -> str:
    """Why the ordering op that is statement ``number`` could go: what orders already what it does. "" where it is needed."""
    op, role = program.statements[number], program.roles[program.statements[number].role].name
    less = replace(program, statements=(*program.statements[:number], *program.statements[number + 1 :]))
    before, after = (follow(each, gpu, orders=True, enough=1) for each in (program, less))
    if after.findings:
        return ""
    by_id = {id(s): s for s in program.statements}
    owed = [key for key, (_, by) in before.orders.items() if by is op]
    if not owed and op.kind == "mbarrier_wait":  # what it would tell is known when it is reached
        name, ring = op.attrs["barrier"], op.attrs["ring"]
        arriving = {s.role for s in program.statements if s.kind == "mbarrier_arrive" and s.attrs["barrier"] == name}
        tiles = {b.name for b in program.buffers if b.ring == ring}
        owed = [
            key
            for key in before.orders
            if by_id[key[1]].role == op.role
            and (by_id[key[0]].attrs.get("barrier") == name or (by_id[key[0]].role in arriving and key[2] in tiles))
        ]
    if owed:
        instead = dict.fromkeys(after.orders[key][0].by for key in owed if key in after.orders)
        order = before.orders[owed[0]][0]
        return f"{order.later} comes after {order.earlier} by {' or '.join(instead)} too"
    same = [s for s in program.statements if s.role == op.role and s.attrs.get("ring") == op.attrs.get("ring")]
    single = all(ring.stages == 1 for ring in program.rings if ring.name == op.attrs.get("ring"))
    if op.kind == "advance" and single and not any(s.kind == "mbarrier_wait" for s in same):
        return f"ring {op.attrs['ring']} has one stage and {role} never waits with it"
    if op.kind in ("commit", "mma_commit"):
        return f"what it closes ends with the group that {role} closes next, and is waited for with that in time"
    return f"no access of {role} owes its order to it"


@dataclass(frozen=True, kw_only=True)
class Followed:
    """What became of one kernel; ``machine``: the last run, with what it keeps of it."""

    findings: list[Finding]
    tiles: int
    ops: int
    notes: list[str]
    orders: Orders
    machine: Machine | None


def follow(program: Program, gpu: GPU, *, orders: bool = False, enough: int = ENOUGH, keep: int = 0) -> Followed:
    """Budgets, then run after run until one goes wrong; ``keep``: steps of the last run to remember."""
    found, script = list(budgets(program, gpu)), Script(program)
    tiles = ops = 0
    notes: list[str] = []
    known: Orders = {}
    machine: Machine | None = None
    for number, run in enumerate(runs(program)):
        if found:
            break
        machine = Machine(script, run, backwards=bool(number % 2), enough=enough, keep=keep)
        found += machine.run()
        tiles, ops = tiles + len(run) * program.cluster, ops + machine.followed
        if machine.full:
            first = run[0] * program.cluster
            notes.append(f"{program.name}: the first {LIMIT:,} ops from tile {first} on were followed, not all")
        if orders:
            known = machine.orders() | known
    found.sort(key=lambda each: KINDS[each.kind])
    return Followed(findings=found, tiles=tiles, ops=ops, notes=notes, orders=known, machine=machine)


def runs(program: Program) -> list[list[int]]:
    """Tiles to follow, a list a CTA, each taken by the warps in the other order than the one before. In clusters number i stands
    for as many tiles as a cluster has CTAs, from i times that on.

    Persistent: each pattern twice in a row, then on to the next and round to the first; and the same from the end. Otherwise a
    tile a CTA, the first and the last of each pattern.
    """
    patterns = _patterns(program)
    if program.persistent:
        there = [tile for tiles in patterns for tile in (tiles[0], tiles[-1])]
        back = [tile for tiles in reversed(patterns) for tile in (tiles[-1], tiles[0])]
        return [[*there, there[0]], [*back, back[0]]]
    chosen = list(dict.fromkeys(tile for tiles in patterns for tile in (tiles[0], tiles[-1])))
    return [[tile] for tile in (chosen if len(chosen) > 1 else chosen * 2)]


def _patterns(program: Program) -> list[list[int]]:
    """Tiles grouped by their trip counts and guards, shortest first; counts beyond two turns of the longest ring are alike."""
    most = 2 * max([3, *(ring.stages for ring in program.rings)]) + 1
    names = sorted(set(_arguments(program)))
    groups: dict[tuple[int, ...], list[int]] = {}
    columns = [program.tiles.column(name).tolist() for name in names]
    size = program.cluster
    for share in range(len(program.tiles) // size):
        tiles = range(share * size, (share + 1) * size)
        groups.setdefault(tuple(min(column[tile], most) for tile in tiles for column in columns), []).append(share)
    found = [groups[key] for key in sorted(groups)]
    if len(found) > PATTERNS:
        half = PATTERNS // 2
        found = found[:half] + found[-half:]
    return found


def _arguments(program: Program) -> Iterator[str]:
    """Tile arguments that a loop or guard depends on."""
    for s in program.statements:
        if s.kind in ("loop", "when"):
            assert isinstance(s.index, Index)
            if s.index.arg is not None:
                yield s.index.arg


__all__ = ["Finding", "Followed", "Order", "Site", "Verdict", "check", "check_programs", "follow", "runs", "spare", "verdict"]
