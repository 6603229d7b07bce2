"""Run a schedule's Programs in numpy: the same statements that the engines time, executed for their numbers.

    out = run(schedule, gpu, attention, q, k, v)     # {"O": ..., "LSE": ...}

Products accumulate in fp32; operands are rounded as ``operand`` says (bf16, fp16, or not at all).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..model.attention import Attention
from ..model.gpu import GPU
from ..model.ops import OPS
from ..model.program import Program, Statement, Tensor
from ..model.reference import round_bf16, round_fp16
from ..model.schedule import Schedule

Array = NDArray[Any]
ROUNDING: dict[str, Callable[[Array], Array]] = {
    "bf16": round_bf16,
    "fp16": round_fp16,
    "fp32": lambda x: x.astype(np.float32),
}


class Memory:
    """Global memory: arrays of shape (planes, rows, cols) by storage name ("S@tile" and "S@rows" are both "S")."""

    def __init__(self, attention: Attention, q: Array, k: Array, v: Array) -> None:
        self.attention = attention
        self.arrays: dict[str, Array] = {
            "Q": _planes(q, attention.seqlen_q, attention.head_dim),
            "K": _planes(k, attention.seqlen_kv, attention.head_dim),
            "V": _planes(v, attention.seqlen_kv, attention.head_dim_v),
        }

    def array(self, tensor: Tensor) -> Array:
        name = tensor.name.split("@")[0]
        if name not in self.arrays:  # poisoned: a read before the write shows
            self.arrays[name] = np.full((tensor.heads, tensor.rows, tensor.cols), np.nan, np.float32)
        return self.arrays[name]


def _planes(x: Array, rows: int, cols: int) -> Array:
    return np.asarray(x, np.float32).reshape(-1, rows, cols)


class TileState:
    """One CTA tile's arrays; implements ``ops.State``."""

    def __init__(self, program: Program, memory: Memory, tile: int, operand: Callable[[Array], Array]) -> None:
        self.program, self.memory, self.tile, self.operand = program, memory, tile, operand
        self.tiles: dict[str, Array] = {}
        self.args: Mapping[str, int] = program.tiles.row(tile)
        self.loops: Mapping[str, int] = {}
        self.scale = memory.attention.softmax_scale
        self.buffers = {b.name: b for b in program.buffers}

    def index(self, statement: Statement) -> int:
        assert statement.index is not None
        return statement.index.value(self.args, self.loops)

    def _window(self, name: str, block: int) -> tuple[Tensor, Array, slice, slice, tuple[int, int]]:
        tensor = self.program.tensor(name)
        plane = self.memory.array(tensor)[self.args[tensor.head_arg]]
        row, col = divmod(block, tensor.col_blocks)
        width = tensor.cols_per_block or tensor.cols
        rows = slice(row * tensor.block_rows, min((row + 1) * tensor.block_rows, tensor.rows))
        cols = slice(col * width, min((col + 1) * width, tensor.cols))
        return tensor, plane, rows, cols, (tensor.block_rows, width)

    def load(self, tensor: str, block: int, into: str) -> Array:
        """A block, padded with zeros to the shape of buffer ``into`` (what predicated loads leave); vectors come flat."""
        t, plane, rows, cols, shape = self._window(tensor, block)
        if not 0 <= block < t.blocks:
            raise IndexError(f"{self.program.name} reads block {block} of {tensor}, which has {t.blocks}")
        buffer = self.buffers[into]
        tile = np.zeros((max(shape[0], buffer.rows), max(shape[1], buffer.cols)), np.float32)
        part = plane[rows, cols]
        tile[: part.shape[0], : part.shape[1]] = part
        return tile[:, 0] if t.vector else tile

    def store(self, tensor: str, block: int, tile: Array) -> None:
        t, plane, rows, cols, _ = self._window(tensor, block)
        if not 0 <= block < t.blocks:
            raise IndexError(f"{self.program.name} writes block {block} of {tensor}, which has {t.blocks}")
        tile = tile[:, None] if tile.ndim == 1 else tile
        plane[rows, cols] = tile[: rows.stop - rows.start, : cols.stop - cols.start]

    def visible(self, q_block: int, kv_block: int, shape: tuple[int, int]) -> Array:
        """Which (row, column) pairs of a tile the problem's mask and lengths leave."""
        a = self.memory.attention
        rows = q_block * shape[0] + np.arange(shape[0])[:, None]
        cols = kv_block * shape[1] + np.arange(shape[1])[None, :]
        inside: Array = cols < a.seqlen_kv
        return inside & (cols <= rows + a.seqlen_kv - a.seqlen_q) if a.causal else inside & (rows >= 0)

    def run(self) -> None:
        for statement, args, loops in self.program.walk(self.tile):
            self.args, self.loops = args, loops
            OPS[statement.kind].meaning(self, statement)


def execute(program: Program, memory: Memory, operand: Callable[[Array], Array]) -> None:
    """Run every tile of one launch."""
    for tile in range(len(program.tiles)):
        TileState(program, memory, tile, operand).run()


def run(
    schedule: Schedule, gpu: GPU, attention: Attention, q: Array, k: Array, v: Array, *, operands: str | None = None
) -> dict[str, Array]:
    """O (batch, heads, rows, head_dim_v) and LSE (batch, heads, rows) of ``schedule``; LSE is absent where it writes none.

    ``operands``: how matrix operands are rounded, "bf16", "fp16" or "fp32" (default: the problem's dtype). Inputs are
    (batch, heads, rows, head_dim) arrays. Raises ValueError where the schedule cannot run.
    """
    operand = ROUNDING[operands or attention.dtype]
    memory = Memory(attention, q, k, v)
    for program in schedule.lower(gpu, attention):
        execute(program, memory, operand)
    b, h, n = attention.batch, attention.heads_q, attention.seqlen_q
    out: dict[str, Array] = {"O": memory.arrays["O"].reshape(b, h, n, attention.head_dim_v)}
    if "LSE" in memory.arrays:
        out["LSE"] = memory.arrays["LSE"].reshape(b, h, n)
    return out
