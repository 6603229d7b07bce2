"""A CTA's tiles as the checker sees them: who wrote and who read each stage last, and whether the next access knows.

A buffer named "X.Y", where X is a buffer of shared or tensor memory, lies in X's memory (all stages of it): FA3's O leaves
through V's. Registers are each warp's own. Of uneven stages (``saved_bytes``) the first two share a strip: a tile as large as a
stage reaches into it, a smaller one that lies there does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ..model.program import Buffer, Program, Statement
from .hazard_clocks import At, Warp
from .hazard_ops import IN_ORDER, MMA, OUTSIDE, ROWS, SHARE, WARP, WHOLE, Effect, effect

READ_EARLY, WRITE_EARLY, OVERWRITE = "read before data", "write before release", "write before write"
Part = tuple[float, float]
ALL: Part = (0.0, 1.0)
#: What a program that allocates tensor memory must have done before it uses any.
TENSOR_MEMORY = "tensor memory"

#: What two stages of an uneven ring share, as a stage of its own.
STRIP, OVERLAPPING = -1, (0, 1)

UNWRITTEN, NO_FENCE = "read without data", "missing proxy fence"


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """A tile that a statement touches: where it lives, how much of it, and whether it is written.

    ``memory``: the buffer whose bytes it uses; ``tag``: its own name where it lies in another's. Of ``stages`` it is its ring's,
    or without a ring all. ``part``: first and last share of its columns. ``uneven``: it fills stages of which two overlap.
    """

    memory: str
    tag: str
    extent: str
    writes: bool
    space: str
    ring: str | None
    stages: int
    part: Part = ALL
    uneven: bool = False


class Record(NamedTuple):
    """An access: over for those whose clock has ``value`` in ``place``."""

    place: int
    value: int
    extent: str
    tag: str
    at: At
    agent: str
    writes: bool
    generic: bool
    part: Part = ALL


@dataclass(eq=False, slots=True)
class Cell:
    """One stage of a buffer: the accesses that a further one must know to be over.

    ``valid``: tiles whose data it holds, in the rows of a role's first warp and in those of the others.
    """

    name: str
    stage: int | None
    space: str
    rank: int = 0
    writes: dict[tuple[int, str, str, Part], Record] = field(default_factory=dict)
    reads: dict[tuple[int, str, str, Part], Record] = field(default_factory=dict)
    valid: tuple[set[str], set[str]] = field(default_factory=lambda: (set(), set()))

    def rows(self, warp: Warp, extent: str) -> list[set[str]]:
        """What a warp's part of the tile holds."""
        return [self.valid[warp.weight > 1]] if extent != WHOLE and warp.shared else list(self.valid)

    @property
    def holds(self) -> set[str]:
        return self.valid[0] | self.valid[1]


def operands(program: Program, statement: Statement) -> tuple[Effect, tuple[Operand, ...]]:
    """The row of a statement's op and the CTA's tiles that it touches, reads first."""
    buffers = {b.name: b for b in program.buffers}
    spaces = [buffers[name].space for name in statement.writes if name in buffers]
    row = effect(statement.kind, split=str(statement.attrs.get("split", "rows")), space=spaces[0] if spaces else "register")
    share = tuple(statement.attrs.get("share", ALL))
    loader = statement.attrs["ring"] if statement.kind == "tma_load" else None
    found = []
    for names, extents, writes in ((statement.reads, row.reads, False), (statement.writes, row.writes, True)):
        for i, name in enumerate(names):
            extent = extents[min(i, len(extents) - 1)]
            part = share if row.share == "tiles" or (row.share == "a" and not writes and i == 0) else ALL
            if extent != OUTSIDE:
                found.append(_operand(buffers, name, extent, writes, row.from_smem and not writes, part, loader))
    if row.step == "exchange":  # through shared memory of its own: each warp stores its part, all read all
        name = f"exchange of {statement.writes[0]}"
        found += [_whole(name, "smem", ROWS, writes=True), _whole(name, "smem", WHOLE, writes=False)]
    if statement.kind in ("tmem_alloc", "tmem_free"):
        found.append(_whole(TENSOR_MEMORY, "tmem", WHOLE, writes=True))
    elif any(each.space == "tmem" for each in found) and any(s.kind == "tmem_alloc" for s in program.statements):
        found.insert(0, _whole(TENSOR_MEMORY, "tmem", ROWS, writes=False))
    return row, tuple(found)


def _whole(name: str, space: str, extent: str, *, writes: bool) -> Operand:
    return Operand(memory=name, tag="", extent=extent, writes=writes, space=space, ring=None, stages=1)


def _operand(
    buffers: dict[str, Buffer], name: str, extent: str, writes: bool, from_smem: bool, part: Part, loader: str | None
) -> Operand:
    """``loader``: the ring whose stage a load fills, where the buffer has stages."""
    buffer = buffers.get(name)
    if buffer is not None and buffer.space == "register" and from_smem:
        name, buffer = f"{name}.smem", None
    if buffer is None:
        return _whole(name, "smem" if name.endswith(".smem") else "register", extent, writes=writes)
    parent = buffers.get(name.partition(".")[0], buffer)
    if parent.space == "register" or parent is buffer:
        memory, tag, stages = name, "", buffer.stages
    else:
        memory, tag, stages = parent.name, name, parent.stages
    ring = buffer.ring and (loader or buffer.ring)
    return Operand(
        memory=memory, tag=tag, extent=extent, writes=writes, space=buffer.space, ring=ring, stages=stages, part=part,
        uneven=buffer.saved_bytes > 0,
    )  # fmt: skip


#: (kind, cell, earlier access, its successor): what the machine turns into a finding.
Report = Callable[[str, Cell, Record | None, Record], None]


class Memory:
    """All cells of a cluster's CTAs. ``ordered`` keeps, per pair of ops that met in a cell, through what the later one knew."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.cells: dict[tuple[str, int, int, Warp | None], Cell] = {}
        self.ordered: dict[tuple[int, int, str], tuple[Record, Record]] = {}

    def of(self, operand: Operand, warp: Warp, rank: int) -> Iterator[Cell]:
        """The cells that a warp's operand means in the CTA of this rank."""
        owner = warp if operand.space == "register" else None
        stages = range(operand.stages)
        if operand.ring is not None:
            turn = warp.turns[operand.ring] % operand.stages
            stages = range(turn, turn + 1)
        strip = [STRIP] if operand.uneven and stages[0] in OVERLAPPING else []
        for stage in (*stages, *strip):
            key = (operand.memory, stage, rank, owner)
            if key not in self.cells:
                shown = stage if operand.stages > 1 and stage != STRIP else None
                self.cells[key] = Cell(operand.memory, shown, operand.space, rank)
            yield self.cells[key]

    def touch(self, cell: Cell, record: Record) -> None:
        """Hold an access against those before it, then remember it. What is wrong is reported once, here."""
        skip = record.place if record.agent in IN_ORDER else -1  # a queue that keeps its order
        for earlier in cell.writes.values():
            if earlier.place != skip:
                self._compare(cell, earlier, record)
        key = (record.place, record.extent, record.tag, record.part)
        if not record.writes:
            rows = cell.rows(record.at.warp, record.extent) if record.extent == ROWS else [cell.holds]
            if all(record.tag not in tags for tags in rows):
                self.report(UNWRITTEN, cell, None, record)
                cell.valid[0].add(record.tag)
                cell.valid[1].add(record.tag)
            cell.reads[key] = record
            return
        for earlier in cell.reads.values():
            if earlier.place != skip:
                self._compare(cell, earlier, record)
        for tags in cell.rows(record.at.warp, record.extent):
            if record.tag:
                tags.discard("")
            else:
                tags.clear()
            tags.add(record.tag)
        if not record.tag and record.part == ALL and (record.extent == WHOLE or cell.space == "register"):
            cell.writes.clear()
            cell.reads.clear()
        cell.writes[key] = record

    def _compare(self, cell: Cell, earlier: Record, record: Record) -> None:
        if not _meet(earlier, record):
            return
        warp = record.at.warp
        own = earlier.place == warp.own
        if earlier.place == record.place and earlier.value == record.value and not own:
            return  # copies that one phase counts
        if warp.clock[earlier.place] < earlier.value:
            if record.writes and not earlier.writes and _first_write(cell, record):
                self.report(READ_EARLY, cell, record, earlier)  # its part was not there when the other read
            else:
                in_place = earlier.agent == MMA and record.agent == WARP and earlier.at.warp is warp  # it reads its accumulator
                kind = READ_EARLY if not record.writes or in_place else OVERWRITE if earlier.writes else WRITE_EARLY
                self.report(kind if earlier.writes else WRITE_EARLY, cell, earlier, record)
            return
        if earlier.generic and not record.generic and earlier.writes and cell.space == "smem":
            self._fenced(cell, earlier, record)
        key = (id(earlier.at.statement), id(record.at.statement), cell.name)
        if not own and key not in self.ordered:
            self.ordered[key] = (earlier, record)

    def _fenced(self, cell: Cell, earlier: Record, record: Record) -> None:
        if record.at.warp.fenced[earlier.place] < earlier.value:
            self.report(NO_FENCE, cell, earlier, record)


def _first_write(cell: Cell, record: Record) -> bool:
    """Whether a warp that writes its part of a tile has not written there before."""
    return record.extent != WHOLE and all(r.at.warp is not record.at.warp for r in cell.writes.values())


def _meet(a: Record, b: Record) -> bool:
    """Whether two accesses can touch the same bytes."""
    if (a.tag != b.tag and a.tag and b.tag) or (a.tag == b.tag and (a.part[1] <= b.part[0] or b.part[1] <= a.part[0])):
        return False
    if a.extent == WHOLE or b.extent == WHOLE or a.at.warp is b.at.warp:
        return True
    same_role = (a.at.warp.role, a.at.warp.rank) == (b.at.warp.role, b.at.warp.rank)
    if a.extent == b.extent == ROWS:
        return not same_role
    if a.extent == b.extent == SHARE:
        return not (same_role and a.at.statement.kind == b.at.statement.kind)
    return True

