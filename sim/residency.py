"""Which tiles L2 holds: a replay of a Program's global accesses, tile by tile, that turns requests into HBM traffic.

Resident CTAs advance in turn, one access each, in launch order; L2 is one LRU list of tiles with write-back, as large as what
really survives there (``l2.resident_bytes``). Bytes are exact for the tensors' clipped blocks. A CTA slot's local memory is a
tile too: the frame that a binary spills once a CTA lies idle between a CTA's first and last use and may have to leave. What
the replay leaves out is time: CTAs of unequal speed drift apart on a real chip.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..model.instructions import INSTRUCTIONS, Path
from ..model.program import IntArray, Opcode, Program, Tensor
from .engine import LOOP_DEPTH
from .fast_parts import control, expression, jit

ISSUE, LOOP, END = int(Opcode.ISSUE), int(Opcode.LOOP), int(Opcode.END)
SKIP, EXIT = int(Opcode.SKIP_IF_NEGATIVE), int(Opcode.EXIT)
L2_READ, L2_WRITE, HBM_READ, HBM_WRITE = range(4)
STORES = (Path.GLOBAL_STORE, Path.TMA_STORE)
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


@jit
def _unlink(i: int, older: Any, newer: Any) -> None:
    older[newer[i]] = older[i]
    newer[older[i]] = newer[i]


@jit
def _touch(i: int, older: Any, newer: Any, root: int) -> None:
    """Put tile ``i`` at the recent end of the list."""
    newest = older[root]
    older[i], newer[i] = newest, root
    newer[newest] = i
    older[root] = i


@jit
def _access(
    i: int,
    size: int,
    write: bool,
    t: int,
    share: int,
    owner: Any,
    older: Any,
    newer: Any,
    resident: Any,
    dirty: Any,
    state: Any,
    capacity: int,
    out: Any,
) -> None:
    """Tile ``i`` of tensor ``t`` is read or written: count it, bring it in, and let the oldest tiles go.

    ``share``: CTAs that one request serves; each is counted for its part of it.
    """
    root = resident.shape[0]
    out[t, L2_WRITE if write else L2_READ] += size // share
    if resident[i] > 0:
        _unlink(i, older, newer)
    else:
        resident[i] = size
        state[0] += size
        if not write:
            out[t, HBM_READ] += size
    if write:
        dirty[i] = 1
    _touch(i, older, newer, root)
    while state[0] > capacity:
        victim = newer[root]
        _unlink(victim, older, newer)
        state[0] -= resident[victim]
        if dirty[victim]:
            out[owner[victim], HBM_WRITE] += resident[victim]
            dirty[victim] = 0
        resident[victim] = 0


@jit
def _replay(
    code: Any,
    expressions: Any,
    tile_args: Any,
    starts: Any,
    slots: int,
    is_write: Any,
    multicast: Any,
    base: Any,
    blocks: Any,
    plane_col: Any,
    size_base: Any,
    sizes: Any,
    owner: Any,
    older: Any,
    newer: Any,
    resident: Any,
    dirty: Any,
    state: Any,
    capacity: int,
    local: int,
    local_base: int,
    local_bytes: int,
    out: Any,
) -> None:
    n_tiles, roles = tile_args.shape[0], starts.shape[0]
    agents = slots * roles
    pc = np.full(agents, -1, np.int64)
    tile = np.full(agents, -1, np.int64)
    loops = np.zeros((agents, LOOP_DEPTH), np.int64)
    trips = np.zeros((agents, LOOP_DEPTH), np.int64)
    left = np.zeros(slots, np.int64)
    head = 0
    running = 0
    for slot in range(slots):
        if head < n_tiles:
            for r in range(roles):
                pc[slot * roles + r], tile[slot * roles + r] = starts[r], head
            left[slot] = roles
            head += 1
            running += 1
            if local_bytes > 0:
                frame = local_base + slot
                _access(frame, local_bytes, True, local, 1, owner, older, newer, resident, dirty, state, capacity, out)
    while running > 0:
        for a in range(agents):
            if pc[a] < 0:
                continue
            args = tile_args[tile[a]]
            while True:
                row = code[pc[a]]
                op = row[0]
                if op in (LOOP, END, SKIP):
                    pc[a] = control(code, pc[a], expressions, args, loops[a], trips[a])
                elif op == EXIT:
                    pc[a] = -1
                    slot = a // roles
                    left[slot] -= 1
                    if left[slot] == 0:
                        if local_bytes > 0:
                            frame = local_base + slot
                            _access(
                                frame, local_bytes, False, local, 1, owner, older, newer, resident, dirty, state, capacity, out
                            )
                        if head < n_tiles:
                            for r in range(roles):
                                pc[slot * roles + r], tile[slot * roles + r] = starts[r], head
                            left[slot] = roles
                            head += 1
                            if local_bytes > 0:
                                _access(
                                    frame, local_bytes, True, local, 1, owner, older, newer, resident, dirty, state, capacity, out
                                )
                        else:
                            running -= 1
                    break
                elif op == ISSUE and row[5] >= 0:
                    t = row[5]
                    block = expression(expressions[row[6]], args, loops[a])
                    pc[a] += 1
                    if block < 0 or block >= blocks[t]:
                        continue
                    i = base[t] + args[plane_col[t]] * blocks[t] + block
                    size = sizes[size_base[t] + block]
                    write = is_write[row[1]]
                    _access(i, size, write, t, multicast[t], owner, older, newer, resident, dirty, state, capacity, out)
                    break
                else:
                    pc[a] += 1


class Residency:
    """L2 of one chip over the launches of a schedule. Tiles stay between launches; :meth:`flush` writes back the dirty ones."""

    def __init__(self, programs: tuple[Program, ...], capacity: int) -> None:
        tensors: dict[str, Tensor] = {}
        for program in programs:
            for tensor in program.tensors:
                known = tensors.setdefault(tensor.name, tensor)
                if (known.blocks, known.heads) != (tensor.blocks, tensor.heads):
                    raise ValueError(
                        f"tensor {tensor.name} has two block shapes in {program.name}; name the views {tensor.name}@a and @b"
                    )
        if any(program.local_bytes for program in programs):
            frames = max(min(len(program.tiles), MOST_SLOTS) for program in programs)
            tensors[LOCAL] = Tensor(name=LOCAL, heads=1, rows=frames, cols=1, bytes_per_element=1, block_rows=1)
        self.tensors, self.capacity = list(tensors.values()), capacity
        self.number = {name: i for i, name in enumerate(tensors)}
        self.blocks = np.array([t.blocks for t in self.tensors], np.int64)
        counts = np.array([t.blocks * t.heads for t in self.tensors], np.int64)
        self.base = np.concatenate(([0], np.cumsum(counts)))[:-1]
        self.size_base = np.concatenate(([0], np.cumsum(self.blocks)))[:-1]
        self.sizes = np.array([t.block_bytes(b) for t in self.tensors for b in range(t.blocks)], np.int64)
        total = int(counts.sum())
        self.multicast = np.array([t.multicast for t in self.tensors], np.int64)
        self.owner = np.repeat(np.arange(len(self.tensors)), counts)
        self.older, self.newer = np.full(total + 1, total, np.int64), np.full(total + 1, total, np.int64)
        self.resident, self.dirty = np.zeros(total, np.int64), np.zeros(total, np.int8)
        self.state = np.zeros(1, np.int64)

    def launch(self, program: Program, slots: int) -> Traffic:
        """Replay one launch with ``slots`` resident CTAs on the whole chip."""
        writes = np.array(
            [any(INSTRUCTIONS[name].path in STORES for name, _ in bundle) for bundle in program.bundles], np.bool_
        )
        order = np.array([self.number[t.name] for t in program.tensors], np.int64)
        out = np.zeros((len(self.tensors), 4), np.int64)
        code = program.code.copy()
        mask = code[:, 5] >= 0
        code[mask, 5] = order[code[mask, 5]]
        planes = np.zeros(len(self.tensors), np.int64)
        for t in program.tensors:
            planes[self.number[t.name]] = program.tiles.names.index(t.head_arg)
        starts = np.array([role.start for role in program.roles], np.int64)
        for tensor in program.tensors:
            self._inherit(tensor, out)
        _replay(
            code,
            program.expression_table,
            program.tiles.values.astype(np.int64),
            starts,
            slots,
            writes,
            self.multicast,
            self.base,
            self.blocks,
            planes,
            self.size_base,
            self.sizes,
            self.owner,
            self.older,
            self.newer,
            self.resident,
            self.dirty,
            self.state,
            self.capacity,
            self.number.get(LOCAL, 0),
            int(self.base[self.number[LOCAL]]) if LOCAL in self.number else 0,
            program.local_bytes,
            out,
        )
        return self._traffic(out)

    def _inherit(self, tensor: Tensor, out: IntArray) -> None:
        """Other views of the same storage ("S@tile" for "S@rows") hand over: whole if they fit in L2, else by write-back.

        A storage larger than L2 has lost its beginning by the time the next kernel starts there, so nothing of it would hit.
        """
        mine, storage = self.number[tensor.name], tensor.name.split("@")[0]
        for other in self.tensors:
            if other.name == tensor.name or other.name.split("@")[0] != storage:
                continue
            span = slice(
                int(self.base[self.number[other.name]]), int(self.base[self.number[other.name]]) + other.blocks * other.heads
            )
            held = self.resident[span] > 0
            if not held.any():
                continue
            whole = bool(held.all())
            was_dirty = bool(self.dirty[span].any())
            if not whole:
                out[self.number[other.name], HBM_WRITE] += int((self.resident[span] * self.dirty[span]).sum())
            for i in np.flatnonzero(held) + span.start:
                self._drop(int(i))
            if whole:
                for block in range(tensor.blocks * tensor.heads):
                    self._insert(
                        int(self.base[mine]) + block, int(self.sizes[self.size_base[mine] + block % tensor.blocks]), was_dirty
                    )

    def _drop(self, i: int) -> None:
        _unlink(i, self.older, self.newer)
        self.state[0] -= self.resident[i]
        self.resident[i] = self.dirty[i] = 0

    def _insert(self, i: int, size: int, dirty: bool) -> None:
        _touch(i, self.older, self.newer, len(self.resident))
        self.resident[i], self.dirty[i] = size, dirty
        self.state[0] += size

    def flush(self) -> Traffic:
        """Write back what is still dirty; nothing stays dirty."""
        out = np.zeros((len(self.tensors), 4), np.int64)
        np.add.at(out[:, HBM_WRITE], self.owner, self.resident * self.dirty)
        self.dirty[:] = 0
        return self._traffic(out)

    def _traffic(self, out: IntArray) -> Traffic:
        rows = {t.name: tuple(int(v) for v in row) for t, row in zip(self.tensors, out, strict=True)}
        return Traffic(by_tensor={name: (row[0], row[1], row[2], row[3]) for name, row in rows.items()})
