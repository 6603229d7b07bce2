"""Program: what a schedule lowers to. Flat and finite: loops stay loops, so its size does not grow with sequence length.

A Program holds the same kernel twice, step for step: *statements* (tile operations with a numpy meaning, read by
``sim.values`` and by the traffic replay) and *code* (the warp instructions each statement issues, read by the engines).
``print(program)`` shows both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .instructions import COUNTERS, INSTRUCTIONS

IntArray = NDArray[np.int64]


class Opcode(IntEnum):
    """What one row of ``Program.code`` does."""

    ISSUE = 0  # one bundle of warp instructions, `count` times
    WAIT_SCOREBOARD = 1  # until every load that set scoreboard `arg` has landed
    COMMIT = 2  # close the warp's open cp.async group
    WAIT_GROUP = 3  # until at most `arg` of the warp's groups are in flight
    BARRIER = 4  # named barrier `arg` of the CTA: all its warps arrive and wait
    LOOP = 5  # expression `arg` gives the trips; `jump` is the matching END, `index` the loop variable
    END = 6  # `jump` is the matching LOOP, `index` the nesting depth
    SKIP_IF_NEGATIVE = 7  # jump to `jump` where expression `arg` < 0
    EXIT = 8
    DEPEND = 9  # until the result of the warp's last instruction can be read


CODE_COLUMNS = ("opcode", "bundle", "count", "arg", "bytes", "tensor", "index", "jump", "statement")


@dataclass(frozen=True, kw_only=True)
class Index:
    """``const + arg_coef * tile argument + coef * loop + outer_coef * outer``: names a block, a trip count or a guard."""

    const: int = 0
    arg: str | None = None
    arg_coef: int = 1
    loop: str | None = None
    coef: int = 1
    outer: str | None = None
    outer_coef: int = 1

    def value(self, args: Mapping[str, int], loops: Mapping[str, int]) -> int:
        total = self.const
        if self.arg is not None:
            total += self.arg_coef * args[self.arg]
        if self.loop is not None:
            total += self.coef * loops[self.loop]
        if self.outer is not None:
            total += self.outer_coef * loops[self.outer]
        return total

    def __str__(self) -> str:
        text = ""
        for name, coef in ((self.arg, self.arg_coef), (self.outer, self.outer_coef), (self.loop, self.coef)):
            if name:
                factor = "" if abs(coef) == 1 else f"{abs(coef)}*"
                text += ("-" if coef < 0 else "+" if text else "") + factor + name
        return f"{text}{self.const:+d}" if text and self.const else text or str(self.const)


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """A tile and where it lives: ``space`` is "smem" or "register"; register tiles are spread over their role's warps."""

    name: str
    space: str
    rows: int
    cols: int
    bytes_per_element: float

    @property
    def size_bytes(self) -> int:
        return int(self.rows * self.cols * self.bytes_per_element)


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One tile operation: kind (a row of ``ops.OPS``), what it writes, what it reads, and its parameters."""

    kind: str
    role: int = 0
    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    index: Index | None = None
    attrs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "attrs", MappingProxyType(dict(self.attrs)))

    def __str__(self) -> str:
        where = f"[{self.index}]" if self.index is not None else ""
        extra = "".join(f" {key}={value}" for key, value in self.attrs.items())
        return f"{self.kind} {', '.join(self.writes)}{' <- ' if self.reads else ''}{', '.join(self.reads)}{where}{extra}"


@dataclass(frozen=True, kw_only=True)
class Role:
    """Warps that run the same code: their number, registers per thread and first row of ``Program.code``."""

    name: str
    warps: int
    registers: int
    start: int


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """The grid in launch order: one row of integer arguments per CTA tile. ``values`` has shape (tiles, len(names))."""

    names: tuple[str, ...]
    values: IntArray

    def __len__(self) -> int:
        return int(self.values.shape[0])

    def row(self, tile: int) -> dict[str, int]:
        return {name: int(v) for name, v in zip(self.names, self.values[tile], strict=True)}

    def column(self, name: str) -> IntArray:
        return self.values[:, self.names.index(name)]


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A global-memory array as a grid of tiles (``heads`` x ``rows`` x ``cols``); a block is ``block_rows`` of its rows.

    ``head_arg`` names the tile argument that picks the head plane. ``cols_per_block`` splits columns as well (S, P).
    """

    name: str
    heads: int
    rows: int
    cols: int
    bytes_per_element: int
    block_rows: int
    head_arg: str = "head"
    cols_per_block: int = 0
    vector: bool = False  # one value a row (LSE, m, l): tiles are flat

    @property
    def col_blocks(self) -> int:
        return -(-self.cols // self.cols_per_block) if self.cols_per_block else 1

    @property
    def row_blocks(self) -> int:
        return -(-self.rows // self.block_rows)

    @property
    def blocks(self) -> int:
        """Blocks of one head plane."""
        return self.row_blocks * self.col_blocks

    def block_bytes(self, block: int) -> int:
        """Bytes of one block; the last row and column blocks are clipped to the tensor."""
        row, col = divmod(block, self.col_blocks)
        rows = min(self.block_rows, self.rows - row * self.block_rows)
        width = self.cols_per_block or self.cols
        cols = min(width, self.cols - col * width)
        return max(rows, 0) * max(cols, 0) * self.bytes_per_element

    @property
    def size_bytes(self) -> int:
        return self.heads * self.rows * self.cols * self.bytes_per_element


@dataclass(frozen=True, kw_only=True)
class Program:
    """One kernel launch, lowered. ``code`` has the columns of CODE_COLUMNS; ``expressions`` the rows of :class:`Index`.

    A bundle is a handful of instructions that one warp issues mixed, as (instruction, number) pairs: what a compiler's
    scheduler makes of independent work, and the engines' grain.
    """

    name: str
    roles: tuple[Role, ...]
    buffers: tuple[Buffer, ...]
    barriers: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    tiles: Tiles
    statements: tuple[Statement, ...]
    code: IntArray
    expressions: tuple[Index, ...]
    loops: tuple[str, ...]
    smem_bytes: int
    bundles: tuple[tuple[tuple[str, int], ...], ...]
    profile: str = "ideal"
    constants: Mapping[str, float] = field(default_factory=dict)

    @property
    def warps(self) -> int:
        return sum(role.warps for role in self.roles)

    @property
    def registers(self) -> int:
        return max(role.registers for role in self.roles)

    def tensor(self, name: str) -> Tensor:
        return next(t for t in self.tensors if t.name == name)

    @cached_property
    def expression_table(self) -> IntArray:
        """Shape (n, 7): const, tile-argument column or -1, its coefficient, then depth or -1 and coefficient of two loops."""
        names = self.tiles.names
        rows = [
            (
                e.const,
                names.index(e.arg) if e.arg else -1,
                e.arg_coef,
                self.loop_depth[e.loop] if e.loop else -1,
                e.coef,
                self.loop_depth[e.outer] if e.outer else -1,
                e.outer_coef,
            )
            for e in self.expressions
        ]
        return np.array(rows or np.zeros((0, 7)), dtype=np.int64).reshape(-1, 7)

    @cached_property
    def loop_depth(self) -> dict[str, int]:
        """Nesting depth of each loop variable; loops at the same depth share a counter."""
        depth: dict[str, int] = {}
        level = 0
        for s in self.statements:
            if s.kind == "loop":
                depth[s.attrs["var"]] = level
                level += 1
            elif s.kind == "end":
                level -= 1
        return depth

    def walk(self, tile: int, role: int = 0) -> Iterator[tuple[Statement, dict[str, int], dict[str, int]]]:
        """Yield (statement, tile arguments, loop counters) in program order for one tile and one role."""
        args = self.tiles.row(tile)
        loops: dict[str, int] = {}
        stack: list[tuple[int, str, int]] = []
        pc, body = 0, [s for s in self.statements if s.role == role]
        ends = _matching(body)
        while pc < len(body):
            s = body[pc]
            if s.kind == "loop":
                assert s.index is not None
                trips, var = s.index.value(args, loops), s.attrs["var"]
                if trips <= 0:
                    pc = ends[pc] + 1
                    continue
                loops[var] = 0
                stack.append((pc, var, trips))
            elif s.kind == "end":
                start, var, trips = stack[-1]
                loops[var] += 1
                if loops[var] < trips:
                    pc = start + 1
                    continue
                stack.pop()
                del loops[var]
            elif s.kind == "when":
                assert s.index is not None
                if s.index.value(args, loops) < 0:
                    pc = ends[pc] + 1
                    continue
            elif s.kind != "end_when":
                yield s, args, loops
            pc += 1

    def instruction_counts(self, tile: int) -> dict[str, int]:
        """Warp instructions that one CTA issues for ``tile``, by instruction name."""
        counts = dict.fromkeys(INSTRUCTIONS, 0)
        args = self.tiles.row(tile)
        for role in self.roles:
            for row, times in _dynamic_rows(self, role.start, args):
                if row[0] == Opcode.ISSUE:
                    for name, n in self.bundles[row[1]]:
                        counts[name] += n * int(row[2]) * times * role.warps
        return counts

    def __str__(self) -> str:
        return render(self)


def _matching(body: list[Statement]) -> dict[int, int]:
    ends: dict[int, int] = {}
    stack: list[int] = []
    for i, s in enumerate(body):
        if s.kind in ("loop", "when"):
            stack.append(i)
        elif s.kind in ("end", "end_when"):
            ends[stack.pop()] = i
    return ends


def _dynamic_rows(program: Program, start: int, args: dict[str, int]) -> Iterator[tuple[IntArray, int]]:
    """Rows of one role with how often each runs: trip counts multiplied out, guards evaluated trip by trip."""

    def run(pc: int, end: int, loops: dict[str, int], times: int) -> Iterator[tuple[IntArray, int]]:
        code = program.code
        while pc < end:
            row = code[pc]
            op = row[0]
            if op == Opcode.EXIT:
                return
            if op == Opcode.LOOP:
                trips = program.expressions[row[3]].value(args, loops)
                var = program.loops[row[6]]
                guarded = [e for e in program.code[pc : row[7]] if e[0] in (Opcode.SKIP_IF_NEGATIVE, Opcode.LOOP)]
                if guarded:
                    for i in range(trips):
                        yield from run(pc + 1, int(row[7]), {**loops, var: i}, times)
                elif trips > 0:
                    yield from run(pc + 1, int(row[7]), {**loops, var: 0}, times * trips)
                pc = int(row[7]) + 1
                continue
            if op == Opcode.SKIP_IF_NEGATIVE and program.expressions[row[3]].value(args, loops) < 0:
                pc = int(row[7])
                continue
            yield row, times
            pc += 1

    yield from run(start, len(program.code), {}, 1)


def counters(counts: Mapping[str, int]) -> dict[str, int]:
    """Sum instruction counts into the profiler's pipes (COUNTERS) plus ``total``."""
    out = dict.fromkeys(COUNTERS, 0)
    for name, n in counts.items():
        out[INSTRUCTIONS[name].counter] += n
    out["total"] = sum(counts.values())
    return out


def render(program: Program) -> str:
    """The Program as text: roles, buffers, then each statement with the instructions it issues per warp."""
    lines = [f"program {program.name}: {len(program.tiles)} tiles, {program.smem_bytes} B SMEM, counts: {program.profile}"]
    lines += [f"  role {r.name}: {r.warps} warps, {r.registers} registers per thread" for r in program.roles]
    lines += [f"  {b.space} {b.name}: {b.rows} x {b.cols}, {b.size_bytes} B" for b in program.buffers]
    depth = 1
    for i, s in enumerate(program.statements):
        if s.kind in ("end", "end_when"):
            depth -= 1
        issued: dict[str, int] = {}
        for row in program.code[program.code[:, -1] == i]:
            if row[0] == Opcode.ISSUE:
                for name, n in program.bundles[row[1]]:
                    issued[name] = issued.get(name, 0) + n * int(row[2])
        text = ", ".join(f"{n} {name}" for name, n in issued.items())
        lines.append(f"{'  ' * depth}{s}" + (f"    # per warp: {text}" if text else ""))
        if s.kind in ("loop", "when"):
            depth += 1
    return "\n".join(lines)
