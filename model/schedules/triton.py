"""FlashAttention-2's algorithm as Triton compiles its tutorial kernel (06-fused-attention.py): all warps do everything.

One CTA a Q block and head; K and V go through a ring that ``num_stages`` sizes. What ``tl.dot`` becomes depends on the chip:

* mma.sync: each warp owns rows; K of a later block loads under P V, V under Q K^T of the next block.
* wgmma: P V of a block is left running and waited for together with the next Q K^T, since only then is O touched again
  (the compiler's rule 3b for asynchronous dots). No softmax hides under it but that of another CTA.
* tcgen05.mma: S, O and P in tensor memory, see :mod:`.triton_tmem`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..attention import Attention
from ..gpu import GPU
from ..profiles import TYPICAL
from ..program import Index, Program
from ..schedule import Builder
from .fa2 import epilogue
from .grid import qkv_tensors
from .triton_tiles import MMA, TCGEN05, TritonTile, grid, registers, tile
from .triton_tmem import lower_tmem


@dataclass(frozen=True, kw_only=True)
class Triton:
    """Switches: the tile (``block_q`` x ``block_kv``, BLOCK_M and BLOCK_N of the kernel), ``num_warps`` and ``num_stages`` (None:
    as the tutorial's autotuner would), ``warp_specialize`` (Blackwell: load, product, softmax and correction warps), and
    ``counts``: "binary" where the compiled kernel was read (else as "typical"), "typical" a compiler's usual overhead, "ideal"
    the algorithm's own instructions."""

    block_q: int | None = None
    block_kv: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    warp_specialize: bool = False
    counts: str = "binary"

    @property
    def name(self) -> str:
        return "triton"

    def lower(self, gpu: GPU, attention: Attention) -> tuple[Program, ...]:
        t = tile(self, gpu, attention)
        read = t.profile
        profile = f"{read['kind']}: {read['source']}" if read else TYPICAL["pytorch"] if t.overhead else "ideal"
        tensors = tuple(qkv_tensors(attention, t.block_q, t.block_kv, t.element).values())
        if t.instruction == TCGEN05:
            return (lower_tmem(t, tensors, grid(attention, t), profile),)
        b = Builder(name="triton_fwd", warps=t.warps, registers=registers(t))
        _buffers(b, t)
        _prologue(b, t)
        for phase in ("full", "masked"):
            first = Index() if phase == "full" else Index(arg="n_full")
            left = Index(arg="n_blocks" if phase == "full" else "n_masked", loop="i", coef=-1)
            with b.loop("i", Index(arg=f"n_{phase}"), **_counts(t, phase)):
                if t.instruction == MMA:
                    _block_sync(b, t, first, left, masked=phase == "masked")
                else:
                    _block_async(b, t, first, left, masked=phase == "masked")
        _epilogue(b, t)
        return (b.build(tensors=tensors, tiles=grid(attention, t), profile=profile),)


def _counts(t: TritonTile, phase: str) -> dict[str, Any]:
    """What a trip of a loop issues: the binary's, or so many times the ideal."""
    if t.profile and phase in t.profile:
        row = t.profile[phase]
        return {"counts": {c: n for c, n in row.items() if c != "stall_cycles"}, "stall_cycles": row["stall_cycles"]}
    return {"overhead": t.overhead}


def _buffers(b: Builder, t: TritonTile) -> None:
    e, q, kv, d = t.element, t.block_q, t.block_kv, t.head_dim
    b.smem("Qs", rows=q, cols=d, bytes_per_element=e)
    for name in ("K", "V"):
        b.ring(name.lower(), t.buffers)
        b.smem(f"{name}s", rows=kv, cols=d, bytes_per_element=e, stages=t.buffers, ring=name.lower())
    b.registers_tile("S", rows=q, cols=kv)
    b.registers_tile("P", rows=q, cols=kv, bytes_per_element=e)
    b.registers_tile("Oacc", rows=q, cols=d)
    b.registers_tile("Oout", rows=q, cols=d, bytes_per_element=e)
    b.registers_tile("LSEout", rows=q, cols=1)


def _advance(b: Builder, ring: str, steps: int) -> None:
    for _ in range(steps):
        b.op("advance", ring=ring)


def _load(b: Builder, name: str, block: Index, guard: Index) -> None:
    """A block by cp.async, if there is one; its group is closed either way, so that counts of groups hold."""
    with b.when(guard):
        b.op("load_async", writes=f"{name}s", reads=name, index=block)
    b.op("commit")


def _prologue(b: Builder, t: TritonTile) -> None:
    b.op("zero", writes="Oacc", shape=(t.block_q, t.head_dim))
    b.op("zero", writes="m", shape=(t.block_q,), value=-np.inf)
    b.op("zero", writes="l", shape=(t.block_q,))
    b.op("load_async", writes="Qs", reads="Q", index=Index(arg="q_block"))
    b.op("commit")
    for j in range(t.ahead):
        for name in ("K", "V"):
            if name == "K" or j < t.ahead - 1 or t.instruction != MMA:  # with mma.sync the last V loads in the loop
                _load(b, name, Index(const=j), Index(arg="n_blocks", const=-1 - j))
            _advance(b, name.lower(), 1)
    for ring in ("k", "v"):
        _advance(b, ring, t.buffers - t.ahead)


def _arrived(b: Builder, groups: int, *, proxy: bool = False) -> None:
    """Until at most ``groups`` of cp.async are in flight in any warp; ``proxy``: and the tensor cores may read them."""
    b.op("wait_group", arg=groups)
    if proxy:
        b.op("fence_async")
    b.op("barrier")


def _later(first: Index, ahead: int) -> Index:
    return Index(arg=first.arg, const=ahead, loop="i")


def _left(left: Index, ahead: int) -> Index:
    """>= 0 where the block ``ahead`` of this one exists."""
    return Index(arg=left.arg, const=-1 - ahead, loop="i", coef=-1)


def _block_sync(b: Builder, t: TritonTile, first: Index, left: Index, *, masked: bool) -> None:
    """mma.sync: a ring of num_stages - 1 blocks; a stage is loaded again once a barrier tells that all warps are done with it."""
    flight = 2 * (t.ahead - 1)
    _arrived(b, flight)
    _advance(b, "v", t.ahead - 1)
    _load(b, "V", _later(first, t.ahead - 1), _left(left, t.ahead - 1))
    _advance(b, "v", 1)
    b.op("mma", writes="S", reads=("Qs", "Ks"), transpose_b=True)
    _softmax(b, first, masked)
    _arrived(b, flight)
    _load(b, "K", _later(first, t.ahead), _left(left, t.ahead))
    b.op("mma", writes="Oacc", reads=("P", "Vs"), accumulate=True)
    _advance(b, "k", 1)
    _advance(b, "v", 1)


def _block_async(b: Builder, t: TritonTile, first: Index, left: Index, *, masked: bool) -> None:
    """wgmma: a ring of num_stages blocks, of which the one that the last P V reads is loaded again after the second barrier."""
    _arrived(b, 2 * t.ahead - 1, proxy=True)
    b.op("wgmma", writes="S", reads=("Qs", "Ks"), transpose_b=True)
    b.op("mma_commit")
    b.op("mma_wait", arg=0)
    _softmax(b, first, masked)
    _arrived(b, 2 * t.ahead - 2, proxy=True)
    b.op("wgmma", writes="Oacc", reads=("P", "Vs"), accumulate=True)
    b.op("mma_commit")
    for name in ("K", "V"):
        _advance(b, name.lower(), t.ahead)
        _load(b, name, _later(first, t.ahead), _left(left, t.ahead))
        _advance(b, name.lower(), 2)


def _softmax(b: Builder, first: Index, masked: bool) -> None:
    if masked:
        b.op("mask", writes="S", index=_later(first, 0))
    b.op("row_max", writes=("m", "m_old"), reads="S")
    with b.interleaved():
        b.op("rescale", writes=("Oacc", "l"), reads=("m", "m_old"))
        b.op("exp2", writes="S", reads=("S", "m"))
        b.op("row_sum", writes="l", reads="S")
        b.op("convert", writes="P", reads="S")


def _epilogue(b: Builder, t: TritonTile) -> None:
    if t.instruction != MMA:
        b.op("mma_wait", arg=0)
    epilogue(b)
