"""Gluon's attention kernel for Blackwell (triton-lang/triton, python/examples/gluon/01-attention-forward.py), forward.

As it was from October 2025 to March 2026, when the FA4 paper measured it. FA4's roles and tiles in the hands of Triton's
compiler, without what that paper added: all exponentials run on the MUFU, the correction warps rescale O in every block, and P
is handed over whole. What one thread stores for another passes a barrier of its warpgroup, several a block. The row's factor
passes through tensor memory, in S's place, and so do its sum and maximum at a tile's end: the softmax warps wait for the tile's
last product, store them, and wait until the correction warps have read them; only then may the next tile's scores be written.
All tiles run persistent, a CTA an SM; causal ones in order of rows, so that the longest come last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..attention import Attention
from ..gpu import GPU
from ..profiles import kernel_profile
from ..program import Index, Program
from ..schedule import Builder
from .fa2 import check_counts
from .fa4_correction import advance, counted
from .gluon_softmax import Correction, Softmax, rows
from .gluon_tiles import BLOCK_KV, LANES, O_BYTES, GluonTile, grid, tensors, tile

#: Registers of softmax, correction and the other warps: what warp_specialize asks for, and what that leaves of 16 warps of 128.
REGISTERS = (192, 104, 24)
#: Head dimensions whose binaries were read; a smaller one takes the counts of the first.
COMPILED = (64, 128)
#: Channels of the kernel, each with two mbarriers a buffer that four warps initialise one after the other: Q, O, the epilogue's O
#: (two buffers each), two S, two of row factors, and the turnstile; K and V come on top.
CHANNEL_BUFFERS = 11
#: Bytes of a row that one bulk copy takes: swizzled by 128 bytes.
BOX_BYTES = 128


@dataclass(frozen=True, kw_only=True)
class Gluon:
    """``kv_stages`` (None: as many as the kernel has), ``counts``: "binary" takes the compiled kernel's instructions, "ideal" the
    algorithm's own."""

    kv_stages: int | None = None
    counts: str = "binary"

    @property
    def name(self) -> str:
        return "gluon"

    def lower(self, gpu: GPU, attention: Attention) -> tuple[Program, ...]:
        check_counts("gluon", self.counts, ("binary", "ideal"))
        t = tile(self, gpu, attention)
        return (_write(attention, t, _read(gpu, t) if self.counts == "binary" else None),)


def _read(gpu: GPU, t: GluonTile) -> Mapping[str, Any] | None:
    """What the compiled kernel issues, where one was read."""
    keys = {"head_dim": max(t.head_dim, COMPILED[0]), "causal": t.causal, "dtype": "bf16" if t.element == 2 else "fp8"}
    return kernel_profile("gluon", architecture=gpu.architecture, **keys)


def _write(attention: Attention, t: GluonTile, profile: Mapping[str, Any] | None) -> Program:
    tiles = grid(attention, t)
    softmax, correction, other = REGISTERS
    b = Builder(name="gluon_fwd", registers=128)
    _buffers(b, t)
    with b.role("correction", warps=4, registers=correction):
        _initialise(b, t)
        Correction(b, t, profile).write()
        with b.ending():
            b.op("named_arrive", barrier="join")
    masks = bool(tiles.column("n_masked").any())
    for w in range(2):
        with b.role(f"softmax{w}", warps=4, registers=softmax):
            _begin(b)
            Softmax(b, t, w, profile, masks=masks).write()
            with b.ending():
                b.op("named_arrive", barrier="join")
    with b.role("mma", warps=1, registers=other):
        b.op("tmem_alloc")
        _begin(b)
        _Products(b, t, profile).write()
        with b.ending():
            b.op("named_sync", barrier="join")
            b.op("tmem_free")
    with b.role("load", warps=1, registers=other):
        _begin(b)
        _load(b, t)
    with b.role("epilogue", warps=1, registers=other):
        _begin(b)
        _epilogue(b, t)
    return b.build(
        tensors=tensors(attention, t),
        tiles=tiles,
        profile=f"{profile['kind']}: {profile['source']}" if profile else "ideal",
        persistent=True,
        strided=True,
        launch_registers=128,
        idle_warps=1,
        tmem_columns=t.tmem_columns,
    )


# --- buffers and barriers ---


def _buffers(b: Builder, t: GluonTile) -> None:
    e, d = t.element, t.head_dim
    for ring in ("k", "v"):  # two places in one ring of buffers: K and V of a block follow each other
        b.ring(ring, t.kv_stages)
        b.ring(f"{ring}_done", t.kv_stages)
    b.mbarrier("kv_full", count=1, stages=t.kv_stages)
    b.mbarrier("kv_empty", count=1, stages=t.kv_stages)
    b.smem("KV", rows=BLOCK_KV, cols=d, bytes_per_element=e, stages=t.kv_stages, ring="k")
    b.smem("KV.v", rows=BLOCK_KV, cols=d, bytes_per_element=e, stages=t.kv_stages, ring="v")
    b.named_barrier("start", warps=15)
    b.named_barrier("join", warps=13)
    b.named_barrier("correction", warps=4)
    if t.turns:
        b.ring("turn", 1)
        b.mbarrier("turn_full", count=4)
        b.mbarrier("turn_empty", count=4)
    for w in range(2):
        b.named_barrier(f"softmax{w}", warps=4)
        for ring in ("q", "s", "p", "stats", "stats_done", "o", "out"):
            b.ring(f"{ring}{w}", 1)
        for name in ("q_full", "q_empty", "s_full", "o_full", "out_empty"):
            b.mbarrier(f"{name}{w}", count=1)
        for name in ("p_full", "o_rescaled", "stats_full", "stats_empty", "out_full"):
            b.mbarrier(f"{name}{w}", count=4)
        b.smem(f"Qs{w}", rows=LANES, cols=d, bytes_per_element=e)
        b.smem(f"Os{w}", rows=LANES, cols=d, bytes_per_element=O_BYTES)
        b.tmem(f"S{w}", rows=LANES, cols=BLOCK_KV)
        b.tmem(f"S{w}.P", rows=LANES, cols=BLOCK_KV, bytes_per_element=e)
        b.tmem(f"S{w}.stat", rows=LANES, cols=1)  # the row factor, at the end the row sum
        b.tmem(f"S{w}.max", rows=LANES, cols=1)
        b.tmem(f"O{w}", rows=LANES, cols=d)
        b.registers_tile(f"scores{w}", rows=LANES, cols=BLOCK_KV)
        b.registers_tile(f"P{w}", rows=LANES, cols=BLOCK_KV, bytes_per_element=e)
        b.registers_tile(f"out{w}", rows=LANES, cols=d)
        b.registers_tile(f"packed{w}", rows=LANES, cols=d, bytes_per_element=O_BYTES)
        for name in ("m", "l", "factor", "scale", "sum", "max", "LSE"):
            b.registers_tile(f"{name}{w}", rows=LANES, cols=1)


def _initialise(b: Builder, t: GluonTile) -> None:
    """The CTA's first four warps initialise and prime all mbarriers: two barriers of theirs a channel's buffer.

    One of them allocates tensor memory too; here the MMA warp does.
    """
    with b.loop("i", Index(const=2 * (CHANNEL_BUFFERS + t.kv_stages))):
        b.op("named_sync", barrier="correction")
    _begin(b)


def _begin(b: Builder) -> None:
    b.op("setmaxnreg")
    b.op("named_sync", barrier="start")


# --- loads and stores ---


def _load(b: Builder, t: GluonTile) -> None:
    """Q tile by tile with K and V of the first block, then K and V block by block: the order in which products ask for them."""
    advance(b, "v")
    b.op("tile")
    for w, name in enumerate(("K", "V")):
        b.op("mbarrier_wait", barrier=f"q_empty{w}", ring=f"q{w}", previous=True)
        b.op("mbarrier_expect", barrier=f"q_full{w}", ring=f"q{w}", of=(f"Qs{w}",))
        where: dict[str, Any] = {"barrier": f"q_full{w}", "ring": f"q{w}", "copies": _boxes(t)}
        b.op("tma_load", writes=f"Qs{w}", reads="Q", index=rows(w), **where)
        advance(b, f"q{w}")
        _load_kv(b, t, name, Index())
    with b.loop("i", Index(arg="n_blocks", const=-1)):
        for name in ("K", "V"):
            _load_kv(b, t, name, Index(const=1, loop="i"))


def _load_kv(b: Builder, t: GluonTile, name: str, index: Index) -> None:
    ring, buffer = name.lower(), "KV" if name == "K" else "KV.v"
    b.op("mbarrier_wait", barrier="kv_empty", ring=ring, previous=True)
    b.op("mbarrier_expect", barrier="kv_full", ring=ring, of=(buffer,))
    b.op("tma_load", writes=buffer, reads=name, index=index, copies=_boxes(t), barrier="kv_full", ring=ring)
    advance(b, ring, ring)


def _boxes(t: GluonTile) -> int:
    """Bulk copies of a tile."""
    return -(-t.head_dim * t.element // BOX_BYTES)


def _epilogue(b: Builder, t: GluonTile) -> None:
    """Both tiles of O leave; then each one's place is free."""
    b.op("tile")
    for w in range(2):
        b.op("mbarrier_wait", barrier=f"out_full{w}", ring=f"out{w}")
        b.op("tma_store", writes="O", reads=f"Os{w}", index=rows(w), wait="read")
    for w in range(2):
        b.op("mbarrier_arrive", barrier=f"out_empty{w}", ring=f"out{w}")
        advance(b, f"out{w}")


# --- products ---


class _Products:
    """The MMA warp: Q K^T of tile 0, P V of tile 1, Q K^T of tile 1, P V of tile 0, and so on.

    S is given back by its softmax warps with P in it, or at a tile's end with the row's sums.
    """

    def __init__(self, b: Builder, t: GluonTile, profile: Mapping[str, Any] | None) -> None:
        self.b, self.t = b, t
        self.phases = {p["name"]: p for p in profile["mma"]} if profile else {}

    def write(self) -> None:
        b = self.b
        advance(b, "v", "v_done")
        b.op("tile")
        for w in range(2):
            b.op("mbarrier_wait", barrier=f"q_full{w}", ring=f"q{w}")
            if w == 0:
                b.op("mbarrier_wait", barrier="kv_full", ring="k")
            self._p(w)
            self._scores(w)
        self._release("k")
        b.op("mbarrier_wait", barrier="kv_full", ring="v")
        self._o(0)
        self._p(0)
        self._weighted(0, first=True)
        with b.loop("i", Index(arg="n_blocks", const=-1)):
            self._block()
        for w in range(2):
            self._commit(f"q_empty{w}", f"q{w}")
            advance(b, f"q{w}")
        self._o(1)
        self._p(1)
        self._weighted(1, at=Index(arg="n_blocks", arg_coef=-1, const=1))
        self._release("v")
        for w in range(2):  # the softmax warps may store the row's sums
            self._commit(f"s_full{w}", f"s{w}")
            advance(b, f"s{w}")

    def _block(self) -> None:
        b = self.b
        with self._counted("k_wait"):
            b.op("mbarrier_wait", barrier="kv_full", ring="k")
        with self._counted("qk0"):
            self._scores(0)
        with self._counted("o_wait1"):
            self._o(1)
        with self._counted("p_wait1"):
            self._p(1)
        with self._counted("pv1_qk1"):
            self._weighted(1, at=Index(loop="i", coef=-1))
            self._release("v")
            self._scores(1)
            self._release("k")
        with self._counted("v_wait"):
            b.op("mbarrier_wait", barrier="kv_full", ring="v")
        with self._counted("o_wait0"):
            self._o(0)
        with self._counted("p_wait0"):
            self._p(0)
        with self._counted("pv0"):
            self._weighted(0)

    def _counted(self, name: str) -> Any:
        return counted(self.b, self.phases, name)

    def _p(self, w: int) -> None:
        """S's place: P is in it, or at a tile's beginning it is free."""
        self.b.op("mbarrier_wait", barrier=f"p_full{w}", ring=f"p{w}", previous=True)
        advance(self.b, f"p{w}")

    def _o(self, w: int) -> None:
        """O is rescaled, or at a tile's beginning the last tile's has been read."""
        self.b.op("mbarrier_wait", barrier=f"o_rescaled{w}", ring=f"o{w}", previous=True)

    def _scores(self, w: int) -> None:
        self.b.op("umma", writes=f"S{w}", reads=(f"Qs{w}", "KV"), transpose_b=True)
        self._commit(f"s_full{w}", f"s{w}")
        advance(self.b, f"s{w}")

    def _weighted(self, w: int, *, first: bool = False, at: Index | None = None) -> None:
        """O += P V; in the tile's ``first`` block, or where ``at`` >= 0, O begins at zero."""
        b = self.b
        if first or at is not None:
            with b.when(at or Index()):
                b.op("zero", writes=f"O{w}", shape=(LANES, self.t.head_dim))
        b.op("umma", writes=f"O{w}", reads=(f"S{w}.P", "KV.v"), accumulate=True)
        self._commit(f"o_full{w}", f"o{w}")
        advance(b, f"o{w}")

    def _release(self, ring: str) -> None:
        """The stage is free when what was issued so far is done; K and V take turns in the ring."""
        self._commit("kv_empty", f"{ring}_done")
        advance(self.b, ring, ring, f"{ring}_done", f"{ring}_done")

    def _commit(self, barrier: str, ring: str) -> None:
        self.b.op("mbarrier_arrive", barrier=barrier, ring=ring, products=True)
