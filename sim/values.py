"""Run a schedule's Programs in numpy: the same statements that the engines time, executed for their numbers.

    out = run(schedule, gpu, attention, q, k, v)     # {"O": ..., "LSE": ...}

Products accumulate in fp32; operands are rounded as a row of FORMATS says. How the roles of a tile wait for each other is in
:mod:`.roles`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..model.attention import Attention
from ..model.gpu import GPU
from ..model.lowprecision import quantise_e4m3, round_e4m3
from ..model.program import Program, Statement, Tensor
from ..model.reference import round_bf16, round_fp16
from ..model.schedule import Schedule
from .roles import Cta, run_tile

Array = NDArray[Any]
Rounding = Callable[[Array], Array]


@dataclass(frozen=True, kw_only=True)
class Format:
    """``operand`` rounds what products read, ``result`` what leaves the kernel.

    ``scaled``: each of Q, K and V is divided by one scale, its largest magnitude over 448, so that it fills e4m3 and nothing
    saturates; the scales of Q and K go into softmax's, that of V multiplies O. ``offset_log2``: P is multiplied by this power
    of two, which the row sum undoes. P is at most 1, so 8 gives at most 256 of e4m3's 448, and only what is below 2^-18 is lost.
    """

    operand: Rounding
    result: Rounding
    scaled: bool = False
    offset_log2: float = 0.0


def _float32(x: Array) -> Array:
    return x.astype(np.float32)


FORMATS: dict[str, Format] = {
    "bf16": Format(operand=round_bf16, result=round_bf16),
    "fp16": Format(operand=round_fp16, result=round_fp16),
    "fp32": Format(operand=_float32, result=_float32),
    "fp8": Format(operand=round_e4m3, result=round_bf16, scaled=True, offset_log2=8.0),
}


class Memory:
    """Global memory: arrays of shape (planes, rows, cols) by storage name ("S@tile" and "S@rows" are both "S")."""

    def __init__(self, attention: Attention, q: Array, k: Array, v: Array, form: Format) -> None:
        self.attention, self.form = attention, form
        self.arrays: dict[str, Array] = {}
        scales = {"Q": 1.0, "K": 1.0, "V": 1.0}
        for name, x, rows, cols in (
            ("Q", q, attention.seqlen_q, attention.head_dim),
            ("K", k, attention.seqlen_kv, attention.head_dim),
            ("V", v, attention.seqlen_kv, attention.head_dim_v),
        ):
            values = np.asarray(x, np.float32)
            if form.scaled:
                values, scale = quantise_e4m3(values)
                scales[name] = scale.item()
            self.arrays[name] = values.reshape(-1, rows, cols)
        self.scale = attention.softmax_scale * scales["Q"] * scales["K"]
        self.descale = scales["V"]

    def array(self, tensor: Tensor) -> Array:
        name = tensor.name.split("@")[0]
        if name not in self.arrays:  # poisoned: a read before the write shows
            self.arrays[name] = np.full((tensor.heads, tensor.rows, tensor.cols), np.nan, np.float32)
        return self.arrays[name]


class TileState:
    """What one role of a CTA tile computes on; implements ``meaning.State``."""

    def __init__(self, program: Program, memory: Memory, tile: int) -> None:
        self.program, self.memory = program, memory
        self.tiles: MutableMapping[str, Array] = {}
        self.args: Mapping[str, int] = program.tiles.row(tile)
        self.loops: Mapping[str, int] = {}
        self.scale, self.descale = memory.scale, memory.descale
        self.operand, self.offset_log2 = memory.form.operand, memory.form.offset_log2
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

    def converted(self, tile: Array, into: str) -> Array:
        """``tile`` as buffer ``into`` holds it: an operand, or, where operands have 8 bits and the buffer has more, a result."""
        wide = self.memory.form.scaled and self.buffers[into].bytes_per_element > 1
        return self.memory.form.result(tile) if wide else self.operand(tile)

    def load(self, tensor: str, block: int, into: str, *, clipped: bool = False) -> Array:
        """A block, padded with zeros to the shape of buffer ``into`` (what predicated loads leave); vectors come flat.

        ``clipped``: so is a block beyond the tensor's last, which otherwise raises IndexError.
        """
        t, plane, rows, cols, shape = self._window(tensor, block)
        if block < 0 or (block >= t.blocks and not clipped):
            raise IndexError(f"{self.program.name} reads block {block} of {tensor}, which has {t.blocks}")
        buffer = self.buffers[into]
        tile = np.zeros((max(shape[0], buffer.rows), max(shape[1], buffer.cols)), np.float32)
        part = plane[rows, cols]
        tile[: part.shape[0], : part.shape[1]] = part
        return tile[:, 0] if t.vector else tile

    def store(self, tensor: str, block: int, tile: Array, *, clipped: bool = False) -> None:
        """``clipped``: a block beyond the tensor's last is dropped; otherwise it raises IndexError."""
        t, plane, rows, cols, _ = self._window(tensor, block)
        if block < 0 or (block >= t.blocks and not clipped):
            raise IndexError(f"{self.program.name} writes block {block} of {tensor}, which has {t.blocks}")
        tile = tile[:, None] if tile.ndim == 1 else tile
        height, width = plane[rows, cols].shape
        plane[rows, cols] = tile[:height, :width]

    def visible(self, q_block: int, kv_block: int, shape: tuple[int, int]) -> Array:
        """Which (row, column) pairs of a tile the problem's mask and lengths leave."""
        a = self.memory.attention
        rows = q_block * shape[0] + np.arange(shape[0])[:, None]
        cols = kv_block * shape[1] + np.arange(shape[1])[None, :]
        inside: Array = cols < a.seqlen_kv
        return inside & (cols <= rows + a.seqlen_kv - a.seqlen_q) if a.causal else inside & (rows >= 0)


def execute(program: Program, memory: Memory, rng: random.Random | None = None) -> None:
    """Run every tile of one launch."""
    for tile in range(len(program.tiles)):
        run_tile(Cta(program, tile), [TileState(program, memory, tile) for _ in program.roles], rng)


def run(
    schedule: Schedule,
    gpu: GPU,
    attention: Attention,
    q: Array,
    k: Array,
    v: Array,
    *,
    operands: str | None = None,
    seed: int | None = None,
) -> dict[str, Array]:
    """O (batch, heads, rows, head_dim_v) and LSE (batch, heads, rows) of ``schedule``; LSE is absent where it writes none.

    ``operands``: how matrix operands are rounded, a name in FORMATS (default: the problem's dtype). ``seed``: roles go on in a
    random order instead of in turn, which must change nothing. Inputs are (batch, heads, rows, head_dim) arrays. Raises
    ValueError where the schedule cannot run, RuntimeError where its roles wait for each other.
    """
    memory = Memory(attention, q, k, v, FORMATS[operands or attention.dtype])
    for program in schedule.lower(gpu, attention):
        execute(program, memory, None if seed is None else random.Random(seed))
    b, h, n = attention.batch, attention.heads_q, attention.seqlen_q
    out: dict[str, Array] = {"O": memory.arrays["O"].reshape(b, h, n, attention.head_dim_v)}
    if "LSE" in memory.arrays:
        out["LSE"] = memory.arrays["LSE"].reshape(b, h, n)
    return out
