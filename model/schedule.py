"""The schedule DSL: a kernel written as roles, buffers, barriers, loop and epilogue, lowered once into a :class:`Program`.

b = Builder(name="fa2 fwd", warps=4, registers=255)
b.smem("K", rows=64, cols=128, bytes_per_element=2)
with b.loop("i", Index(arg="n_blocks")):
    b.op("mma", writes="S", reads=("Q", "K"), transpose_b=True)
program = b.build(tensors=..., tiles=...)

A kernel with several roles opens each with ``with b.role(name, warps=..., registers=...)``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from .attention import Attention
from .gpu import GPU
from .named import Table, guess
from .ops import OPS
from .placement import Parts, Placement
from .profiles import Usual
from .program import CODE_COLUMNS, Barrier, Buffer, Index, Opcode, Program, Ring, Role, Statement, Tensor, Tiles
from .rows import DEPEND, ISSUE, JUMP, OPCODE, Rows, Segments

#: Query rows over all heads: what the tiles of one problem may need of memory.
MOST_QUERY_ROWS = 2**28


@runtime_checkable
class Schedule(Protocol):
    """A pipeline with its tile and switches: a frozen dataclass with these members (see ``schedules/``)."""

    @property
    def name(self) -> str: ...

    def lower(self, gpu: GPU, attention: Attention) -> tuple[Program, ...]:
        """The kernels it launches, in order. Raises ValueError where ``gpu`` or ``attention`` cannot run it."""
        ...


def lowered(schedule: Schedule, gpu: GPU, attention: Attention) -> tuple[Program, ...]:
    """What ``schedule`` lowers to; the last few are kept. Raises ValueError where it is not at least one Program, or the problem
    has more tiles than memory has room for."""
    check_size(attention)
    try:
        return _kept(cast(Hashable, schedule), gpu, attention)
    except TypeError:
        if isinstance(schedule, Hashable):
            raise
        return _lowered(schedule, gpu, attention)


def check_size(attention: Attention) -> None:
    """Raises ValueError where the problem has more tiles than memory has room for."""
    rows = attention.batch * attention.heads_q * attention.seqlen_q
    if rows > MOST_QUERY_ROWS:
        raise ValueError(f"batch x heads_q x seqlen_q is {rows}; at most {MOST_QUERY_ROWS} query rows can be predicted")


def _lowered(schedule: Schedule, gpu: GPU, attention: Attention) -> tuple[Program, ...]:
    try:
        programs = schedule.lower(gpu, attention)
    except SystemExit:
        raise ValueError(f"{schedule.name} ends the program in lower(gpu, attention): raise ValueError with a reason") from None
    if not isinstance(programs, tuple | list) or not programs or not all(isinstance(p, Program) for p in programs):
        raise ValueError(f"{schedule.name} lowers to {programs!r:.60}; lower(gpu, attention) must return a tuple of Programs")
    return tuple(programs)


_kept = lru_cache(maxsize=8)(_lowered)


def choices(schedule: Schedule, gpu: GPU, attention: Attention) -> dict[str, float]:
    """Fields left open whose value follows the chip: name -> what the schedule takes there. Empty for schedules that name none
    (their member ``choices`` says it). Raises ValueError where it cannot run."""
    found: dict[str, float] = schedule.choices(gpu, attention) if hasattr(schedule, "choices") else {}
    return found


class Builder:
    """Collects statements and their instructions. Without ``role`` blocks all of it belongs to one role of ``warps``."""

    def __init__(self, *, name: str, warps: int = 0, registers: int, role: str = "compute") -> None:
        self.name, self.warps, self.registers = name, warps, registers
        self.buffers: Table[Buffer] = Table(f"{name} has no buffer")
        self.statements: list[Statement] = []
        self.rows = Rows()
        self.expressions: dict[Index, int] = {}
        self.loops: list[str] = []
        self.depth = 0
        self.tensors: dict[str, int] = {}
        self.barriers: dict[str, Barrier] = {}
        self.rings: dict[str, Ring] = {}
        self.numbers: dict[str, dict[str, int]] = {"mbarrier": {}, "named barrier": {}, "ring": {}}  # by which code names them
        self.roles: list[Role] = [Role(name=role, warps=warps, registers=registers, start=0)] if warps else []
        self.single = bool(warps)
        self.leading = False

    # --- roles, buffers, barriers ---

    @contextmanager
    def role(self, name: str, *, warps: int, registers: int, code: str = "") -> Iterator[None]:
        """Warps that run what the block adds; ``registers`` per thread after they have traded (setmaxnreg). ``code``: a name
        that roles share whose warps a binary runs through the same instructions."""
        if self.single:
            raise ValueError(f"{self.name} was opened with its one role; leave warps out to add role {name!r}")
        self.roles.append(Role(name=name, warps=warps, registers=registers, start=len(self.rows), code=code))
        self.warps = warps
        yield
        self._exit()

    def smem(
        self, name: str, *, rows: int, cols: int, bytes_per_element: float, stages: int = 1, ring: str | None = None,
        saved_bytes: int = 0,
    ) -> None:  # fmt: skip
        self._buffer(name, "smem", rows, cols, bytes_per_element, stages, ring, saved_bytes)

    def registers_tile(self, name: str, *, rows: int, cols: int, bytes_per_element: float = 4) -> None:
        self._buffer(name, "register", rows, cols, bytes_per_element)

    def tmem(self, name: str, *, rows: int, cols: int, bytes_per_element: float = 4) -> None:
        self._buffer(name, "tmem", rows, cols, bytes_per_element)

    def _buffer(
        self, name: str, space: str, rows: int, cols: int, element: float, stages: int = 1, ring: str | None = None,
        saved_bytes: int = 0,
    ) -> None:  # fmt: skip
        self.buffers[name] = Buffer(
            name=name, space=space, rows=rows, cols=cols, bytes_per_element=element, stages=stages, ring=ring,
            saved_bytes=saved_bytes,
        )  # fmt: skip

    def ring(self, name: str, stages: int) -> None:
        self.rings[name] = Ring(name=name, stages=stages)
        self._count("ring", name)

    def mbarrier(self, name: str, *, count: int, stages: int = 1) -> None:
        self.barriers[name] = Barrier(name=name, kind="mbarrier", count=count, stages=stages)
        self._count("mbarrier", name)

    def named_barrier(self, name: str, *, warps: int) -> None:
        self.barriers[name] = Barrier(name=name, kind="named", count=warps)
        self._count("named barrier", name)

    def _count(self, kind: str, name: str) -> None:
        self.numbers[kind].setdefault(name, len(self.numbers[kind]))

    # --- statements ---

    def op(
        self,
        kind: str,
        *,
        writes: str | tuple[str, ...] = (),
        reads: str | tuple[str, ...] = (),
        index: Index | None = None,
        **attrs: Any,
    ) -> None:
        """Add one tile operation; ``kind`` names a row of ``ops.OPS``."""
        if kind not in OPS:
            raise ValueError(f"{self.name}: op {kind!r} is unknown{guess(kind, OPS)} model/ops.py has all")
        writes = (writes,) if isinstance(writes, str) else writes
        reads = (reads,) if isinstance(reads, str) else reads
        attrs |= {"leader": True} if self.leading else {}
        role = max(0, len(self.roles) - 1)
        self.rows.statement = len(self.statements)
        self.statements.append(Statement(kind=kind, role=role, writes=writes, reads=reads, index=index, attrs=attrs))
        OPS[kind].lower(self, self.statements[-1], self.buffers, self.warps)

    @contextmanager
    def loop(
        self, var: str, trips: Index, *, counts: Mapping[str, float] | None = None, overhead: Mapping[str, float] | None = None,
        stall_cycles: float | None = None,
    ) -> Iterator[None]:  # fmt: skip
        """Repeat the body ``trips`` times; ``counts`` are a binary's instructions per warp and trip, by counter.

        ``overhead``: where no binary was read, how many times the ideal count it issues (``profiles.TYPICAL_OVERHEAD``).
        """
        self.loops.append(var)
        self.op("loop", index=trips, var=var)
        start = len(self.rows)
        self.rows.add(Opcode.LOOP, arg=self._expression(trips), index=len(self.loops) - 1)
        self.depth += 1
        with self.phase(counts=counts, overhead=overhead, stall_cycles=stall_cycles):
            yield
        self.depth -= 1
        self.op("end")
        self.rows.add(Opcode.END, jump=start, index=self.depth)
        self.rows.code[start][JUMP] = len(self.rows) - 1

    @contextmanager
    def phase(
        self,
        *,
        counts: Mapping[str, float] | None = None,
        overhead: Mapping[str, float] | None = None,
        stall_cycles: float | None = None,
        serial: bool = False,
        segments: Segments | None = None,
        at_products: bool = False,
    ) -> Iterator[None]:
        """A stretch of code whose instruction ``counts`` and stall counts were read in a binary (as in :meth:`loop`).

        ``serial``: each of its instructions waits for the one before it, as where an address leads to a wait. ``segments``:
        where in the stretch the binary has them, if it does not mix them evenly. ``at_products``: what is not in the ops prepares
        products (descriptors), and stands at them.
        """
        start = len(self.rows)
        yield
        if counts is None and overhead is not None:
            ideal = self.rows.ideal(start)
            counts = {c: ideal[c] * factor for c, factor in overhead.items()}
        if counts is not None:
            self.rows.spread(start, counts, others=not at_products)
        if stall_cycles is not None:
            self.rows.pad(start, stall_cycles, others=not at_products)
        if serial:
            self.rows.line_up(start)
        if segments:
            self.rows.arrange(start, segments)

    @contextmanager
    def placed(self, parts: Parts | Usual | None, *, masks: bool = False) -> Iterator[None]:
        """A loop's body that begins and ends with products (S, then P V), its vector work where a compiler puts it: where the
        binary has it, or where one that was not read usually would. None: in the order of the ops. ``masks``: the parts hold
        what masks a block too, which otherwise comes on top of them."""
        start = len(self.rows)
        yield
        if parts is not None:
            apart = () if masks else {i for i, s in enumerate(self.statements) if s.kind == "mask"}
            placement = Placement(self.rows, start, apart)
            placement.apply(placement.usual(parts) if isinstance(parts, Usual) else parts)

    @contextmanager
    def when(self, index: Index) -> Iterator[None]:
        """Run the body only where ``index`` >= 0."""
        self.op("when", index=index)
        start = len(self.rows)
        self.rows.add(Opcode.SKIP_IF_NEGATIVE, arg=self._expression(index))
        yield
        self.op("end_when")
        self.rows.code[start][JUMP] = len(self.rows)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Ops that a warp does once, after its CTA's last tile. They are ordered, not timed: they wait for what other warps and
        other CTAs do last, and a CTA's time is that of its last warp anyway."""
        self.op("ending")
        start = len(self.rows)
        yield
        del self.rows.code[start:]

    @contextmanager
    def leader(self) -> Iterator[None]:
        """Ops that only the first CTA of a cluster does; a timing follows that one."""
        self.leading = True
        yield
        self.leading = False

    @contextmanager
    def interleaved(self) -> Iterator[None]:
        """Ops whose instructions a compiler mixes: only the waits of the first one stay, and they come first."""
        start = len(self.rows)
        yield
        rows = self.rows.code[start:]
        issued = next((i for i, row in enumerate(rows) if row[OPCODE] == ISSUE), len(rows))
        self.rows.code[start:] = rows[:issued] + [row for row in rows[issued:] if row[OPCODE] != DEPEND]

    # --- Emitter ---

    def issue(
        self, name: str, count: int, *, scoreboard: int = -1, total_bytes: int = 0, barrier: str = "", ring: str = ""
    ) -> None:
        if count <= 0:
            return
        s = self.statements[-1]
        tensor = index = -1
        if s.index is not None and total_bytes:
            stores = s.kind in ("store", "tma_store")
            tensor = self.tensors.setdefault(s.writes[0] if stores else (s.reads + s.writes)[0], len(self.tensors))
            index = self._expression(s.index)
        self.rows.add(
            Opcode.ISSUE,
            bundle=self.rows.bundle(((name, 1),)),
            count=count,
            arg=scoreboard,
            total_bytes=total_bytes,
            tensor=tensor,
            index=index,
            barrier=self._number("mbarrier", barrier) if barrier else -1,
            ring=self._number("ring", ring) if ring else -1,
        )

    def wait_scoreboard(self, scoreboard: int) -> None:
        self.rows.add(Opcode.WAIT_SCOREBOARD, arg=scoreboard)

    def depend(self) -> None:
        self.rows.add(Opcode.DEPEND)

    def marker(self, kind: str, arg: int) -> None:
        """cp.async groups, and the CTA's own barrier number ``arg``."""
        if kind == "barrier":
            self.named_barrier(f"bar{arg}", warps=self.warps)
            self.order("named_sync", f"bar{arg}")
        else:
            self.rows.add({"commit": Opcode.COMMIT, "wait_group": Opcode.WAIT_GROUP}[kind], arg=arg)

    def order(self, kind: str, barrier: str = "", ring: str = "", *, count: int = 0, total_bytes: int = 0, arg: int = -1) -> None:
        """A row that orders roles: barriers, rings, product groups."""
        opcode = ORDER[kind]
        if opcode in (Opcode.BARRIER, Opcode.NAMED_ARRIVE):
            arg, count = self._number("named barrier", barrier), count or self.barriers[barrier].count
            barrier = ""
        self.rows.add(
            opcode,
            arg=arg,
            count=count,
            total_bytes=total_bytes,
            barrier=self._number("mbarrier", barrier) if barrier else -1,
            ring=self._number("ring", ring) if ring else -1,
        )

    def _number(self, kind: str, name: str) -> int:
        numbers = self.numbers[kind]
        if name not in numbers:
            raise ValueError(f"{self.name} has no {kind} {name!r}; it has {', '.join(numbers) or 'none'}")
        return numbers[name]

    # --- result ---

    @property
    def smem_bytes(self) -> int:
        """Of a CTA, with all buffers declared so far."""
        return sum(b.all_bytes for b in self.buffers.values() if b.space == "smem" and "." not in b.name)

    def build(self, *, tensors: tuple[Tensor, ...], tiles: Tiles, profile: str = "ideal", **fields: Any) -> Program:
        """``fields``: further fields of :class:`Program` (persistent, cluster, local_bytes, ...)."""
        if self.single:
            self._exit()
        self.rows.pack()
        self._starts()
        code = np.fromiter(chain.from_iterable(self.rows.code), np.int64)
        order = sorted(tensors, key=lambda t: self.tensors.get(t.name, len(self.tensors)))
        return Program(
            name=self.name,
            roles=tuple(self.roles),
            buffers=tuple(self.buffers.values()),
            barriers=tuple(sorted(self.barriers.values(), key=lambda each: each.kind)),
            rings=tuple(self.rings.values()),
            tensors=tuple(order),
            tiles=tiles,
            statements=tuple(self.statements),
            code=code.reshape(-1, len(CODE_COLUMNS)),
            expressions=tuple(self.expressions),
            loops=tuple(self.loops),
            smem_bytes=self.smem_bytes,
            bundles=tuple(self.rows.bundles),
            profile=profile,
            **fields,
        )

    def _exit(self) -> None:
        self.rows.add(Opcode.EXIT)

    def _starts(self) -> None:
        """Where each role's code begins now that it is packed: after the EXIT of the role before it."""
        exits = [i for i, row in enumerate(self.rows.code) if row[OPCODE] == Opcode.EXIT]
        starts = [0, *(i + 1 for i in exits[:-1])]
        self.roles = [replace(role, start=start) for role, start in zip(self.roles, starts, strict=True)]

    def _expression(self, index: Index) -> int:
        return self.expressions.setdefault(index, len(self.expressions))


ORDER = {
    "named_sync": Opcode.BARRIER,
    "named_arrive": Opcode.NAMED_ARRIVE,
    "mbarrier_arrive": Opcode.MB_ARRIVE,
    "mbarrier_wait": Opcode.MB_WAIT,
    "advance": Opcode.ADVANCE,
    "mma_commit": Opcode.MMA_COMMIT,
    "mma_wait": Opcode.MMA_WAIT,
    "tile": Opcode.TILE,
}
