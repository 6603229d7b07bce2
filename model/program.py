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
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .instructions import INSTRUCTIONS

IntArray = NDArray[np.int64]


class Opcode(IntEnum):
    """What one row of ``Program.code`` does."""

    ISSUE = 0  # one bundle of warp instructions, `count` times
    WAIT_SCOREBOARD = 1  # until every load that set scoreboard `arg` has landed
    COMMIT = 2  # close the warp's open cp.async group
    WAIT_GROUP = 3  # until at most `arg` of the warp's groups are in flight
    BARRIER = 4  # named barrier `arg` of the CTA: arrive, and wait until `count` warps have
    LOOP = 5  # expression `arg` gives the trips; `jump` is the matching END, `index` the loop variable
    END = 6  # `jump` is the matching LOOP, `index` the nesting depth
    SKIP_IF_NEGATIVE = 7  # jump to `jump` where expression `arg` < 0
    EXIT = 8
    DEPEND = 9  # until the result of the warp's last instruction can be read
    NAMED_ARRIVE = 10  # named barrier `arg`: count as one of `count` warps, without waiting
    MB_ARRIVE = 11  # mbarrier `barrier` at its ring's stage: `count` arrivals, and `bytes` more to expect; with `arg` = 1 when
    # all products that the warp has issued so far are done (tcgen05.commit)
    MB_WAIT = 12  # until the phase of mbarrier `barrier` that its ring is over (`count` = 1: the one before; `arg` = 1: a lane)
    ADVANCE = 13  # the warp's `ring` goes one stage on
    MMA_COMMIT = 14  # close the warp's open group of asynchronous products
    MMA_WAIT = 15  # until at most `arg` of the warp's product groups are unfinished
    TILE = 16  # where a persistent warp goes on with its CTA's next tile


_ISSUE, _LOOP, _SKIP, _EXIT = (int(op) for op in (Opcode.ISSUE, Opcode.LOOP, Opcode.SKIP_IF_NEGATIVE, Opcode.EXIT))
CODE_COLUMNS = ("opcode", "bundle", "count", "arg", "bytes", "tensor", "index", "jump", "statement", "barrier", "ring")


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
    """A tile and where it lives: ``space`` is "smem", "tmem" or "register"; register tiles are spread over their role's warps.

    With ``ring`` it is a ring buffer of ``stages`` tiles; a statement uses the stage its role has reached. ``saved_bytes``:
    by how much neighbouring stages overlap, where they hold whole tiles only in turn.
    """

    name: str
    space: str
    rows: int
    cols: int
    bytes_per_element: float
    stages: int = 1
    ring: str | None = None
    saved_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Of one tile."""
        return int(self.rows * self.cols * self.bytes_per_element)

    @property
    def all_bytes(self) -> int:
        return self.size_bytes * self.stages - self.saved_bytes


@dataclass(frozen=True, kw_only=True)
class Barrier:
    """A barrier of the CTA: ``kind`` "named" or "mbarrier", ``count`` arrivals complete a phase, one for each of ``stages``."""

    name: str
    kind: str
    count: int
    stages: int = 1


@dataclass(frozen=True, kw_only=True)
class Ring:
    """A role's place in a pipeline of ``stages``: stage = steps % stages, phase parity = steps // stages % 2."""

    name: str
    stages: int


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
    """Warps that run the same code: their number, registers per thread and first row of ``Program.code``. ``code``: what roles
    have in common that run the same code of a binary, each with its own barriers."""

    name: str
    warps: int
    registers: int
    start: int
    code: str = ""


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
    multicast: int = 1  # CTAs of a cluster that share one request to L2
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

    def block_sizes(self) -> IntArray:
        """Bytes of each block of a head plane; the last row and column blocks are clipped to the tensor."""
        width = self.cols_per_block or self.cols
        rows = np.diff(np.minimum(np.arange(self.row_blocks + 1) * self.block_rows, self.rows))
        cols = np.diff(np.minimum(np.arange(self.col_blocks + 1) * width, self.cols))
        return np.asarray(np.outer(rows, cols).ravel() * self.bytes_per_element, np.int64)

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
    barriers: tuple[Barrier, ...]
    tensors: tuple[Tensor, ...]
    tiles: Tiles
    statements: tuple[Statement, ...]
    code: IntArray
    expressions: tuple[Index, ...]
    loops: tuple[str, ...]
    smem_bytes: int
    bundles: tuple[tuple[tuple[str, int], ...], ...]
    profile: str = "ideal"
    rings: tuple[Ring, ...] = ()
    persistent: bool = False  # a warp that ends a tile goes on with the CTA's next one
    dynamic: bool = False  # and takes the next one of the grid, not one fixed at launch
    strided: bool = False  # a persistent CTA's tiles are every so-manieth from its first, however long they take
    cluster: int = 1  # CTAs that run in step on neighbouring SMs and share loads
    launch_registers: int = 0  # per thread at launch, where roles then trade them (setmaxnreg)
    idle_warps: int = 0  # of the launch, beside the roles' warps
    tmem_columns: int = 0
    local_bytes: int = 0  # registers that a CTA's binary spills once, at its start, and reads at its end

    @property
    def warps(self) -> int:
        return sum(role.warps for role in self.roles)

    @property
    def registers(self) -> int:
        """Per thread, at launch."""
        return self.launch_registers or max(role.registers for role in self.roles)

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
    def barrier_table(self) -> IntArray:
        """Shape (mbarriers, 3): its first instance in the CTA's array of mbarriers, arrivals of a phase, stages."""
        mbarriers = [each for each in self.barriers if each.kind == "mbarrier"]
        bases = accumulate((0, *(each.stages for each in mbarriers)))
        rows = [(base, each.count, each.stages) for base, each in zip(bases, mbarriers, strict=False)]
        return np.array(rows or np.zeros((0, 3)), dtype=np.int64).reshape(-1, 3)

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
        """Yield (statement, tile arguments, loop counters) in program order for one tile and one role, up to its ``ending``."""
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
            elif s.kind == "ending":
                return
            elif s.kind != "end_when":
                yield s, args, loops
            pc += 1

    def ending(self, role: int) -> tuple[Statement, ...]:
        """What a role does once, after its CTA's last tile."""
        body = iter([s for s in self.statements if s.role == role])
        return tuple(body) if any(s.kind == "ending" for s in body) else ()

    def instruction_counts(self, tile: int) -> dict[str, int]:
        """Warp instructions that one CTA issues for ``tile``, by instruction name."""
        counts = dict.fromkeys(INSTRUCTIONS, 0)
        args, code = self.tiles.row(tile), self.code.tolist()
        for role in self.roles:
            for row, times in _dynamic_rows(self, code, role.start, args):
                if row[0] == _ISSUE:
                    for name, n in self.bundles[row[1]]:
                        counts[name] = counts.get(name, 0) + n * row[2] * times * role.warps
        return counts

    def __str__(self) -> str:
        from .listing import render
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


def _dynamic_rows(
    program: Program, code: list[list[int]], start: int, args: dict[str, int]
) -> Iterator[tuple[list[int], int]]:
    """Rows of one role with how often each runs: trip counts multiplied out, guards evaluated trip by trip."""

    def run(pc: int, end: int, loops: dict[str, int], times: int) -> Iterator[tuple[list[int], int]]:
        while pc < end:
            row = code[pc]
            op = row[0]
            if op == _EXIT:
                return
            if op == _LOOP:
                trips = program.expressions[row[3]].value(args, loops)
                var = program.loops[row[6]]
                if any(e[0] in (_SKIP, _LOOP) for e in code[pc : row[7]]):
                    for i in range(trips):
                        yield from run(pc + 1, row[7], {**loops, var: i}, times)
                elif trips > 0:
                    yield from run(pc + 1, row[7], {**loops, var: 0}, times * trips)
                pc = row[7] + 1
                continue
            if op == _SKIP and program.expressions[row[3]].value(args, loops) < 0:
                pc = row[7]
                continue
            yield row, times
            pc += 1

    yield from run(start, len(code), {}, 1)
