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
from .instructions import COUNTERS, INSTRUCTION_ID, INSTRUCTIONS
from .ops import OPS
from .program import Buffer, Index, Opcode, Program, Role, Statement, Tensor, Tiles

#: Which instruction stands for a binary's extra work in each pipe (moves, address arithmetic, loop control).
EXTRA_INSTRUCTION = {"fma": "mov", "alu": "int_alu", "other": "control", "lsu": "control", "xu": "ex2"}


@runtime_checkable
class Schedule(Protocol):
    """A pipeline with its tile and switches: a frozen dataclass with these members (see ``schedules/``)."""

    @property
    def name(self) -> str: ...

    def lower(self, gpu: GPU, attention: Attention) -> tuple[Program, ...]:
        """The kernels it launches, in order. Raises ValueError where ``gpu`` or ``attention`` cannot run it."""
        ...


class Builder:
    """Collects statements and their instructions. ``extra`` is a binary's instruction counts per warp and loop trip."""

    def __init__(self, *, name: str, warps: int, registers: int, role: str = "compute") -> None:
        self.name, self.warps, self.registers, self.role = name, warps, registers, role
        self.buffers: dict[str, Buffer] = {}
        self.statements: list[Statement] = []
        self.code: list[list[int]] = []
        self.expressions: list[Index] = []
        self.loops: list[str] = []
        self.tensors: dict[str, int] = {}

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
    def loop(self, var: str, trips: Index, *, counts: Mapping[str, float] | None = None) -> Iterator[None]:
        """Repeat the body ``trips`` times; ``counts`` are a binary's instructions per warp and trip, by counter."""
        self.loops.append(var)
        self.op("loop", index=trips, var=var)
        start = len(self.code)
        self._row(Opcode.LOOP, arg=self._expression(trips), index=len(self.loops) - 1)
        yield
        if counts is not None:
            self._spread(start + 1, counts)
        self.op("end")
        self._row(Opcode.END, jump=start)
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
            Opcode.ISSUE, instruction=INSTRUCTION_ID[name], count=count, arg=scoreboard, total_bytes=total_bytes,
            tensor=tensor, index=index,
        )

    def wait_scoreboard(self, scoreboard: int) -> None:
        self._row(Opcode.WAIT_SCOREBOARD, arg=scoreboard)

    def depend(self) -> None:
        self._row(Opcode.DEPEND)

    def marker(self, kind: str, arg: int) -> None:
        self._row({"commit": Opcode.COMMIT, "wait_group": Opcode.WAIT_GROUP, "barrier": Opcode.BARRIER}[kind], arg=arg)

    # --- result ---

    def build(
        self, *, tensors: tuple[Tensor, ...], tiles: Tiles, profile: str = "ideal", **constants: float
    ) -> Program:
        self._row(Opcode.EXIT)
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
            profile=profile,
            constants=constants,
        )

    def _row(
        self, opcode: Opcode, *, instruction: int = -1, count: int = 0, arg: int = -1, total_bytes: int = 0,
        tensor: int = -1, index: int = -1, jump: int = -1,
    ) -> None:
        row = [int(opcode), instruction, count, arg, total_bytes, tensor, index, jump, len(self.statements) - 1]
        self.code.append(row)

    def _expression(self, index: Index) -> int:
        if index not in self.expressions:
            self.expressions.append(index)
        return self.expressions.index(index)

    def _spread(self, start: int, counts: Mapping[str, float]) -> None:
        """Add what the binary issues beyond the ideal, spread over the loop body in proportion to its instructions.

        A compiler scatters moves and address arithmetic through the whole loop; where exactly is not modelled.
        """
        names = tuple(INSTRUCTIONS)
        ideal = dict.fromkeys(COUNTERS, 0)
        rows = [i for i in range(start, len(self.code)) if self.code[i][0] == Opcode.ISSUE]
        for i in rows:
            ideal[INSTRUCTIONS[names[self.code[i][1]]].counter] += self.code[i][2]
        total = sum(ideal.values())
        extra = {c: counts[c] - ideal[c] for c in counts if c in EXTRA_INSTRUCTION}
        body, passed, given = self.code[start:], 0, dict.fromkeys(extra, 0)
        del self.code[start:]
        shift = []
        for row in body:
            shift.append(len(self.code))
            self.code.append(row)
            if row[0] != Opcode.ISSUE:
                continue
            passed += row[2]
            for counter, n in extra.items():
                due = round(n * passed / total) - given[counter]
                if due > 0:
                    given[counter] += due
                    name = EXTRA_INSTRUCTION[counter]
                    self.code.append([int(Opcode.ISSUE), INSTRUCTION_ID[name], due, -1, 0, -1, -1, -1, row[8]])
        for row in self.code[start:]:  # jumps inside the body moved with it
            if row[7] >= start:
                row[7] = shift[row[7] - start] if row[7] - start < len(shift) else len(self.code)
