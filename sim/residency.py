"""Which tiles L2 holds: a replay of a Program's global accesses, tile by tile, that turns requests into HBM traffic.

Resident CTAs advance in turn, one access each, in launch order; L2 is one LRU list of tiles with write-back, as large as what
really survives there (``l2.resident_bytes``). Bytes are exact for the tensors' clipped blocks. A CTA slot's local memory is a
tile too: the frame that a binary spills once a CTA lies idle between a CTA's first and last use and may have to leave. What
the replay leaves out is time: CTAs of unequal speed drift apart on a real chip.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..model.instructions import INSTRUCTIONS, Path
from ..model.program import IntArray, Opcode, Program
from ..model.program import Tensor as GlobalTensor
from ..model.rows import BUNDLE, INDEX, JUMP, OPCODE, TENSOR, tabulated

# isort: off
from .engine import LOOP_DEPTH, SharedL2
from .fast_lru import (
    BASE, BLOCKS, DIRTY, FILLED, FIRST_SIZE, HBM_READ, HBM_WRITE, L2_READ, L2_WRITE, NEWER, OLDER, OWNER, PLANE, RESIDENT,
    SHARERS, TILE_SIZE, TO_ASK, access, touch, unlink,
)  # fmt: skip
from .fast_parts import control, jit, part
# isort: on

ISSUE, LOOP, END = int(Opcode.ISSUE), int(Opcode.LOOP), int(Opcode.END)
SKIP, EXIT = int(Opcode.SKIP_IF_NEGATIVE), int(Opcode.EXIT)
STORES = frozenset(name for name, kind in INSTRUCTIONS.items() if kind.path in (Path.GLOBAL_STORE, Path.TMA_STORE))
LOCAL = "local"  # the frames of registers spilled once a CTA, one a CTA slot
MOST_SLOTS = 8192  # more than any chip has


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of one launch by tensor name: [L2 read, L2 written, HBM read, HBM written]."""

    by_tensor: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)

    def __add__(self, other: Traffic) -> Traffic:
        rows = {}
        for name, a in self.by_tensor.items():
            b = other.by_tensor[name]
            rows[name] = (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3])
        return Traffic(by_tensor=rows)

    def with_local(self, other: Traffic) -> Traffic:
        """The same with the frames of spilled registers as ``other`` counts them."""
        return Traffic(by_tensor={name: other.by_tensor[name] if name == LOCAL else row for name, row in self.by_tensor.items()})

    def total(self, column: int) -> int:
        return sum(row[column] for row in self.by_tensor.values())

    def miss_ppm(self, program: Program) -> IntArray:
        """Share of each tensor's requests that HBM serves or takes, in millionths."""
        out = []
        for tensor in program.tensors:
            row = self.by_tensor[tensor.name]
            asked = row[L2_READ] + row[L2_WRITE]
            out.append(min(1_000_000, round(1e6 * (row[HBM_READ] + row[HBM_WRITE]) / asked)) if asked else 0)
        return np.array(out, dtype=np.int64)


#: Columns of a row that moves a block: which block (the coefficients of what does not occur are 0), in which tile of which
#: plane, its size, how many CTAs it serves, whether it writes, and the tensor.
(
    CONST, ARGUMENT, ARG_COEF, LOOP_AT, COEF, OUTER_AT, OUTER_COEF, FIRST, WITHIN, PLANE_AT, SIZES, SERVES, WRITES, MOVED,
    MOVE_SIZE,
) = range(15)  # fmt: skip


@part
def _frame(tiles: Any, held: Any, capacity: int, out: Any, local: int, i: Any, size: int, write: bool) -> None:
    """A CTA writes its spilled registers, or reads them at its end."""
    out[local, L2_WRITE if write else L2_READ] += size
    access(tiles, held, capacity, out, i, size, write)


@jit
def _replay(
    code: Any, expressions: Any, tile_args: Any, starts: Any, slots: int, moves: Any, tensors: Any, sizes: Any, tiles: Any,
    held: Any, capacity: int, local: int, local_bytes: int, out: Any,
) -> None:  # fmt: skip
    """Resident CTAs advance in turn, one access each. ``local``: the tensor of frames, of ``local_bytes`` each (0: none)."""
    n_tiles, roles = tile_args.shape[0], starts.shape[0]
    agents = slots * roles
    pc = np.full(agents, -1, np.int64)
    tile = np.full(agents, -1, np.int64)
    loops = np.zeros((agents, LOOP_DEPTH), np.int64)
    trips = np.zeros((agents, LOOP_DEPTH), np.int64)
    left = np.zeros(slots, np.int64)
    head = running = min(slots, n_tiles)
    frames = tensors[local, BASE]
    for slot in range(head):
        for a in range(slot * roles, (slot + 1) * roles):
            pc[a], tile[a] = starts[a - slot * roles], slot
        left[slot] = roles
        if local_bytes > 0:
            _frame(tiles, held, capacity, out, local, frames + slot, local_bytes, True)
    while running > 0:
        for a in range(agents):
            if pc[a] < 0:
                continue
            while True:
                op = code[pc[a], OPCODE]
                if op == ISSUE:
                    move, args = moves[pc[a]], tile_args[tile[a]]
                    block = move[CONST] + move[ARG_COEF] * args[move[ARGUMENT]]
                    block += move[COEF] * loops[a, move[LOOP_AT]] + move[OUTER_COEF] * loops[a, move[OUTER_AT]]
                    pc[a] += 1
                    if block < 0 or block >= move[WITHIN]:
                        continue
                    i = move[FIRST] + args[move[PLANE_AT]] * move[WITHIN] + block
                    size, write = sizes[move[SIZES] + block], move[WRITES] == 1
                    # each CTA that a request serves is counted for its part of it
                    out[move[MOVED], L2_WRITE if write else L2_READ] += size // move[SERVES] if move[SERVES] > 1 else size
                    access(tiles, held, capacity, out, i, size, write)
                    break
                if op != EXIT:
                    pc[a] = control(code, pc[a], expressions, tile_args[tile[a]], loops[a], trips[a])
                    continue
                pc[a] = -1
                slot = a // roles
                left[slot] -= 1
                if left[slot] == 0:
                    if local_bytes > 0:
                        _frame(tiles, held, capacity, out, local, frames + slot, local_bytes, False)
                    if head < n_tiles:
                        for k in range(slot * roles, (slot + 1) * roles):
                            pc[k], tile[k] = starts[k - slot * roles], head
                        left[slot] = roles
                        head += 1
                        if local_bytes > 0:
                            _frame(tiles, held, capacity, out, local, frames + slot, local_bytes, True)
                    else:
                        running -= 1
                break


@jit
def _drop(tiles: Any, held: Any, i: int) -> None:
    unlink(tiles, i)
    held[0] -= tiles[i, RESIDENT]
    tiles[i, RESIDENT] = tiles[i, DIRTY] = 0


@jit
def _insert(tiles: Any, held: Any, i: int, size: int, dirty: bool) -> None:
    touch(tiles, i)
    tiles[i, RESIDENT], tiles[i, DIRTY] = size, dirty
    held[0] += size


def _accesses(program: Program) -> tuple[IntArray, IntArray]:
    """(code, first row of each role) for a replay: the rows that move global bytes, and the loops and guards around them."""
    code = program.code
    moves = (code[:, OPCODE] == ISSUE) & (code[:, TENSOR] >= 0)
    before = np.concatenate(([0], np.cumsum(moves)))
    kept = moves | (code[:, OPCODE] == EXIT)
    guards = np.flatnonzero(np.isin(code[:, OPCODE], (LOOP, SKIP)))
    guards = guards[before[code[guards, JUMP]] > before[guards]]  # those that have such rows inside
    kept[guards] = True
    kept[code[guards[code[guards, OPCODE] == LOOP], JUMP]] = True  # a loop's END
    place = np.concatenate(([0], np.cumsum(kept)))  # of each row, or of the next one that is kept
    out = code[kept]
    jumps = out[:, JUMP] >= 0
    out[jumps, JUMP] = place[out[jumps, JUMP]]
    return out, place[[role.start for role in program.roles]]


def _moves(code: IntArray, expressions: IntArray, tensors: IntArray, writing: Any) -> IntArray:
    """Of each row of ``code`` all that its access takes to know, in one place; rows of control have zeros."""
    out = np.zeros((len(code), MOVE_SIZE), np.int64)
    rows = np.flatnonzero(code[:, OPCODE] == ISSUE)
    out[rows, CONST : OUTER_COEF + 1] = expressions[code[rows, INDEX]]
    for at, coef in ((ARGUMENT, ARG_COEF), (LOOP_AT, COEF), (OUTER_AT, OUTER_COEF)):
        out[rows, coef] *= out[rows, at] >= 0
        out[rows, at] = np.maximum(out[rows, at], 0)
    out[rows[:, None], [FIRST, WITHIN, PLANE_AT, SIZES, SERVES]] = tensors[code[rows, TENSOR]]
    out[rows, WRITES], out[rows, MOVED] = writing[code[rows, BUNDLE]], code[rows, TENSOR]
    return out


#: The last replays into an empty L2, by all that they depend on: traffic, and what L2 holds at the end.
_replays: dict[bytes, tuple[IntArray, IntArray, IntArray]] = {}
KEPT_REPLAYS = 16


def _digest(*parts: Any) -> bytes:
    digest = hashlib.sha256()
    for part_ in parts:
        array = np.ascontiguousarray(part_)
        digest.update(repr((array.shape, array.dtype.str)).encode() + array.tobytes())
    return digest.digest()


def writes(program: Program) -> Any:
    """Which bundles write to global memory."""
    names, counts = tabulated(program.bundles)
    return np.asarray((counts[:, [name in STORES for name in names]] > 0).any(axis=1))


class Residency:
    """L2 of one chip over the launches of a schedule. Tiles stay between launches; :meth:`flush` writes back the dirty ones."""

    def __init__(self, programs: tuple[Program, ...], capacity: int) -> None:
        tensors: dict[str, GlobalTensor] = {}
        for program in programs:
            for tensor in program.tensors:
                known = tensors.setdefault(tensor.name, tensor)
                if (known.blocks, known.heads) != (tensor.blocks, tensor.heads):
                    raise ValueError(
                        f"tensor {tensor.name} has two block shapes in {program.name}; name the views {tensor.name}@a and @b"
                    )
        if any(program.local_bytes for program in programs):
            frames = max(min(len(program.tiles), MOST_SLOTS) for program in programs)
            tensors[LOCAL] = GlobalTensor(name=LOCAL, heads=1, rows=frames, cols=1, bytes_per_element=1, block_rows=1)
        self.tensors, self.capacity = list(tensors.values()), capacity
        self.number = {name: i for i, name in enumerate(tensors)}
        blocks = [t.blocks for t in self.tensors]
        counts = np.array([t.blocks * t.heads for t in self.tensors], np.int64)
        self.table = np.zeros((len(self.tensors), 5), np.int64)
        self.table[:, BASE] = np.cumsum(counts) - counts
        self.table[:, BLOCKS] = blocks
        self.table[:, FIRST_SIZE] = np.cumsum(blocks) - blocks
        self.table[:, SHARERS] = [t.multicast for t in self.tensors]
        self.sizes = np.concatenate([t.block_sizes() for t in self.tensors])
        total = int(counts.sum())
        self.tiles = np.zeros((total + 1, TILE_SIZE), np.int64)
        self.tiles[:, [OLDER, NEWER]] = total
        self.tiles[:-1, OWNER] = np.repeat(np.arange(len(self.tensors)), counts)
        self.held = np.zeros(1, np.int64)

    def launch(self, program: Program, slots: int) -> Traffic:
        """Replay one launch with ``slots`` resident CTAs on the whole chip."""
        code, starts = _accesses(program)
        tensors = self.tensors_of(program)
        order = np.array([self.number[t.name] for t in program.tensors], np.int64)
        moves = code[:, TENSOR] >= 0
        code[moves, TENSOR] = order[code[moves, TENSOR]]
        out = np.zeros((len(self.tensors), 4), np.int64)
        for tensor in program.tensors:
            self._inherit(tensor, out)
        tiles = program.tiles.values.astype(np.int64)
        expressions = program.expression_table
        accesses = _moves(code, expressions, tensors, writes(program))
        arguments = (code, expressions, tiles, starts, slots, accesses, tensors)
        local = (self.number.get(LOCAL, 0), program.local_bytes)
        if self.held[0]:
            _replay(*arguments, self.sizes, self.tiles, self.held, self.capacity, *local, out)
            return self.traffic(out)
        key = _digest(*arguments, self.sizes, len(self.tiles), self.capacity, *local)
        if key not in _replays:
            _replay(*arguments, self.sizes, self.tiles, self.held, self.capacity, *local, out)
            _replays[key] = out, self.tiles.copy(), self.held.copy()
            while len(_replays) > KEPT_REPLAYS:
                _replays.pop(next(iter(_replays)), None)
            return self.traffic(out)
        out, self.tiles[:], self.held[:] = _replays[key]
        return self.traffic(out)

    def tensors_of(self, program: Program) -> IntArray:
        """The table of tensors with the tile arguments that pick ``program``'s planes."""
        table = self.table.copy()
        for tensor in program.tensors:
            table[self.number[tensor.name], PLANE] = program.tiles.names.index(tensor.head_arg)
        return table

    def _inherit(self, tensor: GlobalTensor, out: IntArray) -> None:
        """Other views of the same storage ("S@tile" for "S@rows") hand over: whole if they fit in L2, else by write-back.

        A storage larger than L2 has lost its beginning by the time the next kernel starts there, so nothing of it would hit.
        """
        mine, storage = self.number[tensor.name], tensor.name.split("@")[0]
        for other in self.tensors:
            if other.name == tensor.name or other.name.split("@")[0] != storage:
                continue
            first = int(self.table[self.number[other.name], BASE])
            theirs = self.tiles[first : first + other.blocks * other.heads]
            held = theirs[:, RESIDENT] > 0
            if not held.any():
                continue
            whole = bool(held.all())
            was_dirty = bool(theirs[:, DIRTY].any())
            if not whole:
                out[self.number[other.name], HBM_WRITE] += int((theirs[:, RESIDENT] * theirs[:, DIRTY]).sum())
            for i in np.flatnonzero(held) + first:
                _drop(self.tiles, self.held, i)
            if whole:
                sizes = self.sizes[self.table[mine, FIRST_SIZE] :]
                for block in range(tensor.blocks * tensor.heads):
                    _insert(self.tiles, self.held, int(self.table[mine, BASE]) + block, sizes[block % tensor.blocks], was_dirty)

    def shared(self, program: Program) -> SharedL2:
        """L2 as ``program`` finds it, for a run of the whole chip."""
        for tensor in program.tensors:
            self._inherit(tensor, np.zeros((len(self.tensors), 4), np.int64))
        return SharedL2(
            tensors=self.tensors_of(program), numbers=np.array([self.number[t.name] for t in program.tensors], np.int64),
            sizes=self.sizes, tiles=self.tiles.copy(), held=int(self.held[0]), capacity=self.capacity,
            writes=writes(program).astype(np.int64),
        )  # fmt: skip

    def leave(self, tiles: IntArray) -> None:
        """L2 as a run of the whole chip left it (``Run.l2``)."""
        self.tiles[:] = tiles
        self.tiles[:, [FILLED, TO_ASK]] = 0
        self.held[0] = self.tiles[:, RESIDENT].sum()

    def flush(self) -> Traffic:
        """Write back what is still dirty; nothing stays dirty."""
        out = np.zeros((len(self.tensors), 4), np.int64)
        tiles = self.tiles[:-1]
        out[:, HBM_WRITE] = np.add.reduceat(tiles[:, RESIDENT] * tiles[:, DIRTY], self.table[:, BASE])
        tiles[:, DIRTY] = 0
        return self.traffic(out)

    def traffic(self, out: IntArray) -> Traffic:
        rows = {t.name: tuple(int(v) for v in row) for t, row in zip(self.tensors, out, strict=True)}
        return Traffic(by_tensor={name: (row[0], row[1], row[2], row[3]) for name, row in rows.items()})
