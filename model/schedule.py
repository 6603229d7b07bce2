"""The schedule DSL: a kernel written as roles, buffers, loop and epilogue, lowered once into a :class:`Program`.

b = Builder(name="fa2 fwd", warps=4, registers=255)
b.smem("K", rows=64, cols=128, bytes_per_element=2)
with b.loop("i", Index(arg="n_blocks")):
    b.op("mma", writes="S", reads=("Q", "K"), transpose_b=True)
program = b.build(tensors=..., tiles=...)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np

from .attention import Attention
from .gpu import GPU
from .instructions import COUNTERS, INSTRUCTIONS
from .ops import OPS
from .program import Buffer, Index, Opcode, Program, Role, Statement, Tensor, Tiles

#: Which instruction stands for a binary's extra work in each pipe (moves, address arithmetic, loop control).
EXTRA_INSTRUCTION = {"fma": "mov", "alu": "int_alu", "other": "control", "lsu": "control", "xu": "ex2", "stl": "stl"}


@runtime_checkable
class Schedule(Protocol):
    """A pipeline with its tile and switches: a frozen dataclass with these members (see ``schedules/``)."""

    @property
    def name(self) -> str: ...

    def lower(self, gpu: GPU, attention: Attention) -> tuple[Program, ...]:
        """The kernels it launches, in order. Raises ValueError where ``gpu`` or ``attention`` cannot run it."""
        ...


#: Issue cycles of a bundle, about: the grain at which warps share a sub-partition. An mma.sync counts as MMA_WEIGHT.
BUNDLE_WEIGHT = 14
MMA_WEIGHT = 6


class Builder:
    """Collects statements and their instructions. ``extra`` is a binary's instruction counts per warp and loop trip."""

    def __init__(self, *, name: str, warps: int, registers: int, role: str = "compute") -> None:
        self.name, self.warps, self.registers, self.role = name, warps, registers, role
        self.buffers: dict[str, Buffer] = {}
        self.statements: list[Statement] = []
        self.code: list[list[int]] = []
        self.expressions: list[Index] = []
        self.loops: list[str] = []
        self.depth = 0
        self.tensors: dict[str, int] = {}
        self.bundles: list[tuple[tuple[str, int], ...]] = []

    # --- buffers ---

    def smem(self, name: str, *, rows: int, cols: int, bytes_per_element: float) -> None:
        self.buffers[name] = Buffer(name=name, space="smem", rows=rows, cols=cols, bytes_per_element=bytes_per_element)

    def registers_tile(self, name: str, *, rows: int, cols: int, bytes_per_element: float = 4) -> None:
        self.buffers[name] = Buffer(name=name, space="register", rows=rows, cols=cols, bytes_per_element=bytes_per_element)

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
            raise ValueError(f"op {kind!r} is unknown; the vocabulary is {', '.join(OPS)}")
        writes = (writes,) if isinstance(writes, str) else writes
        reads = (reads,) if isinstance(reads, str) else reads
        s = Statement(kind=kind, writes=writes, reads=reads, index=index, attrs=attrs)
        self.statements.append(s)
        OPS[kind].lower(self, s, self.buffers, self.warps)

    @contextmanager
    def loop(
        self, var: str, trips: Index, *, counts: Mapping[str, float] | None = None, overhead: Mapping[str, float] | None = None
    ) -> Iterator[None]:
        """Repeat the body ``trips`` times; ``counts`` are a binary's instructions per warp and trip, by counter.

        ``overhead``: where no binary was read, how many times the ideal count it issues (``profiles.TYPICAL_OVERHEAD``).
        """
        self.loops.append(var)
        self.op("loop", index=trips, var=var)
        start = len(self.code)
        self._row(Opcode.LOOP, arg=self._expression(trips), index=len(self.loops) - 1)
        self.depth += 1
        yield
        self.depth -= 1
        if counts is None and overhead is not None:
            ideal = self._ideal(start + 1)
            counts = {c: ideal[c] * factor for c, factor in overhead.items()}
        if counts is not None:
            self._spread(start + 1, counts)
        self.op("end")
        self._row(Opcode.END, jump=start, index=self.depth)
        self.code[start][7] = len(self.code) - 1

    @contextmanager
    def when(self, index: Index) -> Iterator[None]:
        """Run the body only where ``index`` >= 0."""
        self.op("when", index=index)
        start = len(self.code)
        self._row(Opcode.SKIP_IF_NEGATIVE, arg=self._expression(index))
        yield
        self.op("end_when")
        self.code[start][7] = len(self.code)

    @contextmanager
    def interleaved(self) -> Iterator[None]:
        """Ops whose instructions a compiler mixes: only the waits of the first one stay, and they come first."""
        start = len(self.code)
        yield
        rows = self.code[start:]
        issued = next((i for i, row in enumerate(rows) if row[0] == Opcode.ISSUE), len(rows))
        self.code[start:] = rows[:issued] + [row for row in rows[issued:] if row[0] != Opcode.DEPEND]

    # --- Emitter ---

    def issue(self, name: str, count: int, *, scoreboard: int = -1, total_bytes: int = 0) -> None:
        if count <= 0:
            return
        s = self.statements[-1]
        tensor = index = -1
        if s.index is not None and total_bytes:
            tensor = self.tensors.setdefault((s.reads + s.writes)[0] if s.kind != "store" else s.writes[0], len(self.tensors))
            index = self._expression(s.index)
        self._row(
            Opcode.ISSUE,
            bundle=self._bundle({name: 1}),
            count=count,
            arg=scoreboard,
            total_bytes=total_bytes,
            tensor=tensor,
            index=index,
        )

    def wait_scoreboard(self, scoreboard: int) -> None:
        self._row(Opcode.WAIT_SCOREBOARD, arg=scoreboard)

    def depend(self) -> None:
        self._row(Opcode.DEPEND)

    def marker(self, kind: str, arg: int) -> None:
        self._row({"commit": Opcode.COMMIT, "wait_group": Opcode.WAIT_GROUP, "barrier": Opcode.BARRIER}[kind], arg=arg)

    # --- result ---

    def build(self, *, tensors: tuple[Tensor, ...], tiles: Tiles, profile: str = "ideal", **constants: float) -> Program:
        self._row(Opcode.EXIT)
        self._pack()
        order = sorted(tensors, key=lambda t: self.tensors.get(t.name, len(self.tensors)))
        smem = sum(b.size_bytes for b in self.buffers.values() if b.space == "smem" and "." not in b.name)
        barriers = sorted({int(row[3]) for row in self.code if row[0] == Opcode.BARRIER})
        return Program(
            name=self.name,
            roles=(Role(name=self.role, warps=self.warps, registers=self.registers, start=0),),
            buffers=tuple(self.buffers.values()),
            barriers=tuple(f"bar{i}" for i in barriers),
            tensors=tuple(order),
            tiles=tiles,
            statements=tuple(self.statements),
            code=np.array(self.code, dtype=np.int64),
            expressions=tuple(self.expressions),
            loops=tuple(self.loops),
            smem_bytes=smem,
            bundles=tuple(self.bundles),
            profile=profile,
            constants=constants,
        )

    def _row(
        self,
        opcode: Opcode,
        *,
        bundle: int = -1,
        count: int = 0,
        arg: int = -1,
        total_bytes: int = 0,
        tensor: int = -1,
        index: int = -1,
        jump: int = -1,
    ) -> None:
        row = [int(opcode), bundle, count, arg, total_bytes, tensor, index, jump, len(self.statements) - 1]
        self.code.append(row)

    def _expression(self, index: Index) -> int:
        if index not in self.expressions:
            self.expressions.append(index)
        return self.expressions.index(index)

    def _bundle(self, counts: Mapping[str, int]) -> int:
        key = tuple((name, n) for name, n in counts.items() if n)
        if key not in self.bundles:
            self.bundles.append(key)
        return self.bundles.index(key)

    def _ideal(self, start: int) -> dict[str, int]:
        """Instructions by counter in the code from ``start`` on."""
        ideal = dict.fromkeys(COUNTERS, 0)
        for row in self.code[start:]:
            if row[0] == Opcode.ISSUE:
                for name, n in self.bundles[row[1]]:
                    ideal[INSTRUCTIONS[name].counter] += n * row[2]
        return ideal

    def _spread(self, start: int, counts: Mapping[str, float]) -> None:
        """Add what the binary issues beyond the ideal, spread over the loop body in proportion to its instructions.

        A compiler scatters moves and address arithmetic through the whole loop; where exactly is not modelled.
        """
        ideal = self._ideal(start)
        total = sum(ideal.values())
        extra = {c: counts[c] - ideal.get(c, 0) for c in counts if c in EXTRA_INSTRUCTION}
        body, passed, given = self.code[start:], 0, dict.fromkeys(extra, 0)
        edited: list[tuple[int, list[list[int]]]] = []
        for i, row in enumerate(body):
            added = [row]
            if row[0] == Opcode.ISSUE:
                passed += row[2] * sum(n for _, n in self.bundles[row[1]])
                for counter, n in extra.items():
                    due = round(n * passed / total) - given[counter]
                    if due > 0:
                        given[counter] += due
                        name = EXTRA_INSTRUCTION[counter]
                        added.append([int(Opcode.ISSUE), self._bundle({name: 1}), due, -1, 0, -1, -1, -1, row[8]])
            edited.append((i, added))
        self._replace(start, edited, len(body))

    def _pack(self) -> None:
        """Turn each run of instructions between waits into bundles of about BUNDLE_WEIGHT issue cycles, evenly mixed."""
        targets = {row[7] for row in self.code if row[7] >= 0}
        edited: list[tuple[int, list[list[int]]]] = []
        run: list[int] = []
        for i, row in enumerate(self.code):
            plain = row[0] == Opcode.ISSUE and row[4] == 0
            if run and (not plain or i in targets or _board(self.code, run, row)):
                edited.append((run[0], self._mixed([self.code[j] for j in run])))
                run = []
            if plain:
                run.append(i)
            else:
                edited.append((i, [row]))
        self._replace(0, edited, len(self.code))

    def _mixed(self, rows: list[list[int]]) -> list[list[int]]:
        counts: dict[str, int] = {}
        for row in rows:
            for name, n in self.bundles[row[1]]:
                counts[name] = counts.get(name, 0) + n * row[2]
        weight = sum(n * (MMA_WEIGHT if name == "hmma" else 1) for name, n in counts.items())
        parts = max(1, round(weight / BUNDLE_WEIGHT))
        board = max(row[3] for row in rows)
        out: list[list[int]] = []
        for i in range(parts):
            share = {name: n * (i + 1) // parts - n * i // parts for name, n in counts.items()}
            bundle = self._bundle(share)
            if out and out[-1][1] == bundle:
                out[-1][2] += 1
            else:
                out.append([int(Opcode.ISSUE), bundle, 1, board, 0, -1, -1, -1, rows[0][8]])
        return out

    def _replace(self, start: int, edited: list[tuple[int, list[list[int]]]], length: int) -> None:
        """Put ``edited`` (old offset, new rows) in place of the code from ``start`` on, and move the jumps along."""
        new: list[list[int]] = []
        moved = {}
        for old, rows in edited:
            moved[start + old] = start + len(new)
            new += rows
        moved[start + length] = start + len(new)
        self.code[start:] = new
        for row in self.code:
            if row[7] >= start:
                row[7] = moved[row[7]]


def _board(code: list[list[int]], run: list[int], row: list[int]) -> bool:
    """Whether ``row`` sets another scoreboard than the run before it."""
    held = max(code[j][3] for j in run)
    return row[3] >= 0 and held >= 0 and row[3] != held
