"""FlashAttention-4 forward: a warp feeds a K/V ring, a warp issues all products, two warpgroups do softmax, one corrects O.

arXiv 2603.05451. Against FA3: S and O live in tensor memory, so that a single thread issues products and each Q tile of 128
rows has a softmax warpgroup of its own, one thread a row; P takes the place of S, handed over in three quarters and one. A
correction warpgroup rescales O, only where a row maximum grew by more than a threshold, and stores it at the end. Part of the
exponentials run on the FMA pipe. Non-causal tiles run persistent, in CTA pairs that share each product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..attention import Attention
from ..gpu import GPU
from ..profiles import kernel_profile
from ..program import Index, Program
from ..schedule import Builder
from .fa2 import check_counts
from .fa4_softmax import Softmax
from .fa4_tiles import LANES, O_BYTES, FA4Tile, check, grid, rows, tensors, tile

COUNTERS = ("fma", "alu", "xu", "lsu", "other")
#: Head dimensions whose binaries were read (192: with head_dim_v 128).
COMPILED = (64, 96, 128, 192)
#: Bytes of a row that one bulk copy takes: swizzled by 128 bytes.
BOX_BYTES = 128
#: Share of P's columns that the first arrival promises (split_P_arrive).
FIRST_PART = 0.75


@dataclass(frozen=True, kw_only=True)
class FA4:
    """Switches: ``block_kv``, ``q_stages`` (Q tiles in flight, None: 2 where there are rows for them), ``kv_stages`` (None: what
    fits), ``cta_pair`` (None: the released rule), ``exp2_emulation`` (share of a row's exponentials on the FMA pipe, None: as
    released), ``rescale_threshold`` (log2 units, None: 8, in FP8 0), ``rescale_rate`` (rescales a block that the timing run takes, None: that of
    normally distributed scores), and whose instruction counts to use: ``counts="binary"`` where the compiled kernel was read,
    ``"ideal"`` the algorithm's own."""

    block_kv: int = 128
    q_stages: int | None = None
    kv_stages: int | None = None
    cta_pair: bool | None = None
    exp2_emulation: float | None = None
    rescale_threshold: float | None = None
    rescale_rate: float | None = None
    counts: str = "binary"

    @property
    def name(self) -> str:
        return "fa4"

    def lower(self, gpu: GPU, attention: Attention) -> tuple[Program, ...]:
        check(gpu, attention)
        check_counts("fa4", self.counts, ("binary", "ideal"))
        t = tile(self, gpu, attention)
        profile = None
        if self.counts == "binary" and t.q_stages == 2:
            keys = {"head_dim": _compiled(t), "block_kv": t.block_kv, "causal": t.causal, "pair": t.pair}
            keys["dtype"] = "bf16" if t.element == 2 else "fp8"
            profile = kernel_profile("fa4", architecture=gpu.architecture, **keys)
        softmax, correction, other = profile["registers"] if profile else t.registers
        b = Builder(name="fa4_fwd", registers=128)
        _buffers(b, t)
        for w in range(t.q_stages):
            with b.role(f"softmax{w}", warps=4, registers=softmax):
                _enter(b)
                Softmax(b, t, w, profile).write()
        with b.role("correction", warps=4, registers=correction):
            _enter(b)
            _Correction(b, t, profile).write()
        with b.role("mma", warps=1, registers=other):
            b.op("setmaxnreg")
            b.op("tmem_alloc")
            b.op("named_sync", barrier="tmem")
            _Products(b, t, profile).write()
        with b.role("epilogue", warps=1, registers=other):
            b.op("setmaxnreg")
            _epilogue(b, t)
        with b.role("load", warps=1, registers=other):
            b.op("setmaxnreg")
            _load(b, t)
        return (
            b.build(
                tensors=tensors(attention, t),
                tiles=grid(gpu, attention, t),
                profile=f"{profile['kind']}: {profile['source']}" if profile else "ideal",
                persistent=t.persistent,
                cluster=t.ctas,
                launch_registers=128,
                idle_warps=1 if t.q_stages == 2 else 5,
                tmem_columns=t.tmem_columns,
            ),
        )


def _compiled(t: FA4Tile) -> int:
    """The head_dim whose binary stands for this tile: its own, or the next larger one that was read."""
    return next(size for size in COMPILED if size >= max(t.head_dim, t.head_dim_v))


# --- buffers and barriers ---


def _buffers(b: Builder, t: FA4Tile) -> None:
    e = t.element
    for ring in ("k", "v"):  # two places in one ring of buffers: K and V of a block follow each other
        b.ring(ring, t.kv_stages)
        b.ring(f"{ring}_done", t.kv_stages)
    b.mbarrier("kv_full", count=1, stages=t.kv_stages)
    b.mbarrier("kv_empty", count=1, stages=t.kv_stages)
    stages, half = t.kv_stages, e / t.ctas  # of a pair's K and V a CTA holds half
    kv = {"rows": t.block_kv, "bytes_per_element": half, "stages": stages}
    b.smem(t.k_buffer, cols=t.head_dim, ring="k", saved_bytes=t.saved_bytes, **kv)
    b.smem(t.v_buffer, cols=t.head_dim_v, ring="v", **kv)
    b.ring("o_stored", 1)
    b.mbarrier("o_stored", count=1)
    b.named_barrier("tmem", warps=4 * t.q_stages + 5)
    for w in range(t.q_stages):
        for ring in ("q", "s", "p", "stats", "stats_done", "o", "out"):
            b.ring(f"{ring}{w}", 1)
        for name in ("q_full", "q_empty", "s_full", "o_full", "out_empty"):
            b.mbarrier(f"{name}{w}", count=1)
        for name in ("p_full", "p_full_last", "o_rescaled", "stats_full", "stats_empty", "out_full"):
            b.mbarrier(f"{name}{w}", count=4)
        b.smem(t.q_buffer(w), rows=LANES, cols=t.head_dim, bytes_per_element=e)
        b.smem(t.o_buffer(w), rows=LANES, cols=t.head_dim_v, bytes_per_element=O_BYTES)
        b.smem(f"Stat{w}", rows=LANES, cols=1, bytes_per_element=4)  # the row factor, at the end the row sum
        b.smem(f"Max{w}", rows=LANES, cols=1, bytes_per_element=4)
        b.tmem(f"S{w}", rows=LANES, cols=t.block_kv)
        b.tmem(f"S{w}.P", rows=LANES, cols=t.block_kv, bytes_per_element=e)
        b.tmem(f"O{w}", rows=LANES, cols=t.head_dim_v)
        b.registers_tile(f"scores{w}", rows=LANES, cols=t.block_kv)
        b.registers_tile(f"P{w}", rows=LANES, cols=t.block_kv, bytes_per_element=e)
        b.registers_tile(f"out{w}", rows=LANES, cols=t.head_dim_v)
        b.registers_tile(f"packed{w}", rows=LANES, cols=t.head_dim_v, bytes_per_element=O_BYTES)
        for name in ("m", "l", "factor", "LSE"):
            b.registers_tile(f"{name}{w}", rows=LANES, cols=1)


def _enter(b: Builder) -> None:
    """Before its first tile: registers are traded, tensor memory is allocated."""
    b.op("setmaxnreg")
    b.op("named_sync", barrier="tmem")


def _advance(b: Builder, *rings: str) -> None:
    for ring in rings:
        b.op("advance", ring=ring)


@contextmanager
def _counted(b: Builder, phases: Mapping[str, Mapping[str, Any]], name: str) -> Iterator[None]:
    """What the binary issues in the phase of this name."""
    p = phases.get(name)
    with b.phase(counts={c: p[c] for c in COUNTERS} if p else None, stall_cycles=p["stall_cycles"] if p else None):
        yield


# --- loads ---


def _load(b: Builder, t: FA4Tile) -> None:
    """K of the last block, Q tile by tile, V, then K and V block by block: the order in which products ask for them."""
    _advance(b, "v")
    b.op("tile")
    always = t.uneven and t.persistent  # where K comes to the first stage depends on the tiles before
    _load_k(b, t, Index(arg="n_blocks", const=-1), beside=always)
    for w in range(t.q_stages):
        b.op("mbarrier_wait", barrier=f"q_empty{w}", ring=f"q{w}", previous=True)
        b.op("mbarrier_expect", barrier=f"q_full{w}", ring=f"q{w}", of=(t.q_buffer(w),))
        b.op(
            "tma_load", writes=t.q_buffer(w), reads="Q", index=rows(w), barrier=f"q_full{w}", ring=f"q{w}", copies=_boxes(t.head_dim, t)
        )  # fmt: skip
        _advance(b, f"q{w}")
    _load_v(b, t, Index(arg="n_blocks", const=-1))
    if t.uneven and not always:  # K is back in the first stage every third block
        with b.loop("third", Index(arg="n_thirds")):
            for i in range(3):
                index = Index(arg="n_blocks", const=-2 - i, loop="third", coef=-3)
                _load_k(b, t, index, beside=i == 2)
                _load_v(b, t, index)
        trips, index = Index(arg="n_rest"), Index(arg="n_rest", const=-1, loop="i", coef=-1)
    else:
        trips, index = Index(arg="n_blocks", const=-1), Index(arg="n_blocks", const=-2, loop="i", coef=-1)
    with b.loop("i", trips):
        _load_k(b, t, index, beside=always)
        _load_v(b, t, index)
    if t.shared and t.persistent:  # the next Q goes where this tile's O leaves from
        b.op("mbarrier_wait", barrier="o_stored", ring="o_stored")
        _advance(b, "o_stored")


def _boxes(columns: int, t: FA4Tile) -> int:
    """Bulk copies of a tile this wide."""
    return -(-columns * t.element // BOX_BYTES)


def _load_k(b: Builder, t: FA4Tile, index: Index, *, beside: bool) -> None:
    """``beside``: it also takes a part of the place that the K of the next stage had."""
    if beside:
        b.op("mbarrier_wait", barrier="kv_empty", ring="v", previous=True)
    _load_kv(b, t, "K", t.k_buffer, index, copies=_boxes(t.head_dim, t))


def _load_v(b: Builder, t: FA4Tile, index: Index) -> None:
    """In a pair each CTA has half of the columns of V, and half of the rows of K."""
    _load_kv(b, t, "V", t.v_buffer, index, copies=_boxes(t.head_dim_v // t.ctas, t))


def _load_kv(b: Builder, t: FA4Tile, name: str, buffer: str, index: Index, *, copies: int) -> None:
    ring = name.lower()
    b.op("mbarrier_wait", barrier="kv_empty", ring=ring, previous=True)
    b.op("mbarrier_expect", barrier="kv_full", ring=ring, of=(buffer,), ctas=t.ctas)
    b.op("tma_load", writes=buffer, reads=name, index=index, barrier="kv_full", ring=ring, copies=copies, ctas=t.ctas)
    _advance(b, ring, ring)


# --- products ---


class _Products:
    """The MMA warp: per K/V block P V and the next Q K^T of tile 0, then of tile 1. In a pair its CTA issues for both."""

    def __init__(self, b: Builder, t: FA4Tile, profile: Mapping[str, Any] | None) -> None:
        self.b, self.t = b, t
        self.phases = {p["name"]: p for p in profile["mma"]} if profile else {}

    def write(self) -> None:
        b, t = self.b, self.t
        _advance(b, "v", "v_done")
        b.op("tile")
        for w in range(t.q_stages):
            b.op("mbarrier_wait", barrier=f"q_full{w}", ring=f"q{w}")
            if w == 0:
                b.op("mbarrier_wait", barrier="kv_full", ring="k")
            self._scores(w)
        self._release("k")
        with b.loop("i", Index(arg="n_blocks", const=-1)):
            for w in range(t.q_stages):
                self._weighted(w, Index(loop="i", coef=-1), counted=True)
                if w == t.q_stages - 1:
                    self._release("v")
                if w == 0:
                    with _counted(b, self.phases, "k_wait"):
                        b.op("mbarrier_wait", barrier="kv_full", ring="k")
                with _counted(b, self.phases, f"qk{w}"):
                    self._scores(w)
            self._release("k")
        for w in range(t.q_stages):
            b.op("mbarrier_arrive", barrier=f"q_empty{w}", ring=f"q{w}", products=True)
            _advance(b, f"q{w}")
        for w in range(t.q_stages):
            self._weighted(w, Index(arg="n_blocks", arg_coef=-1, const=1), counted=False)
            b.op("mbarrier_arrive", barrier=f"o_full{w}", ring=f"o{w}", products=True)
            _advance(b, f"o{w}")
        self._release("v")

    def _scores(self, w: int) -> None:
        """S = Q K^T; the softmax warpgroup has read the last S, since P V of it was issued before."""
        self.b.op("umma", writes=f"S{w}", reads=(self.t.q_buffer(w), self.t.k_buffer), transpose_b=True, pair=self.t.pair)
        self.b.op("mbarrier_arrive", barrier=f"s_full{w}", ring=f"s{w}", products=True)
        _advance(self.b, f"s{w}")

    def _weighted(self, w: int, first: Index, *, counted: bool) -> None:
        """O += P V in two parts; where ``first`` >= 0 the block is the tile's first, and O begins at zero."""
        b, phases = self.b, self.phases if counted else {}
        product: dict[str, Any] = {"writes": f"O{w}", "reads": (f"S{w}.P", self.t.v_buffer), "accumulate": True, "pair": self.t.pair}
        if w == 0:
            with _counted(b, phases, "v_wait"):
                b.op("mbarrier_wait", barrier="kv_full", ring="v")
        with _counted(b, phases, f"p_wait{w}"):
            b.op("mbarrier_wait", barrier=f"p_full{w}", ring=f"p{w}")
            b.op("mbarrier_wait", barrier=f"o_rescaled{w}", ring=f"p{w}")
        with b.when(first):
            b.op("zero", writes=f"O{w}", shape=(LANES, self.t.head_dim_v))
        with _counted(b, phases, f"pv_first{w}"):
            b.op("umma", **product, share=(0.0, FIRST_PART))
        with _counted(b, phases, f"p2_wait{w}"):
            b.op("mbarrier_wait", barrier=f"p_full_last{w}", ring=f"p{w}")
        with _counted(b, phases, f"pv_last{w}"):
            b.op("umma", **product, share=(FIRST_PART, 1.0))
        _advance(b, f"p{w}")

    def _release(self, ring: str) -> None:
        """The stage is free when what was issued so far is done; K and V take turns in the ring."""
        self.b.op("mbarrier_arrive", barrier="kv_empty", ring=f"{ring}_done", products=True)
        _advance(self.b, ring, ring, f"{ring}_done", f"{ring}_done")


# --- correction and epilogue ---


class _Correction:
    """Rescales O of both tiles between their products, by the factors that the softmax warps leave in shared memory.

    That a factor is there means that the block's S is done, and so is the P V before it. A tile's factor is given back while the
    other one's is at work.
    """

    def __init__(self, b: Builder, t: FA4Tile, profile: Mapping[str, Any] | None) -> None:
        self.b, self.t = b, t
        self.phases = {p["name"]: p for p in profile["correction"]} if profile else {}

    def write(self) -> None:
        b, t = self.b, self.t
        for w in range(t.q_stages):
            self._rescaled(w)
        b.op("tile")
        for w in range(t.q_stages):  # of the first block there is nothing to correct
            self._wait(w)
            if w == 0:
                self._give_back(0)
            _advance(b, f"stats{w}")
        with b.loop("i", Index(arg="n_jumps")):  # maxima grow early, so the blocks that rescale come first
            self._block(taken=True)
        with b.loop("i", Index(arg="n_plain")):
            self._block(taken=False)
        if t.q_stages == 2:
            self._give_back(1)
        for w in range(t.q_stages):
            self._final(w)

    def _wait(self, w: int) -> None:
        self.b.op("mbarrier_wait", barrier=f"stats_full{w}", ring=f"stats{w}")

    def _give_back(self, w: int) -> None:
        self.b.op("mbarrier_arrive", barrier=f"stats_empty{w}", ring=f"stats_done{w}")
        _advance(self.b, f"stats_done{w}")

    def _rescaled(self, w: int) -> None:
        self.b.op("mbarrier_arrive", barrier=f"o_rescaled{w}", ring=f"p{w}")
        _advance(self.b, f"p{w}")

    def _block(self, *, taken: bool) -> None:
        b, t = self.b, self.t
        for w in range(t.q_stages):
            with _counted(b, self.phases, "" if taken else "vote"):
                self._wait(w)
                b.op("from_smem", writes=f"scale{w}", reads=f"Stat{w}")
                b.op("vote_scale", writes=f"O{w}", reads=f"scale{w}", taken=taken)
            with _counted(b, self.phases, "release"):
                self._rescaled(w)
                self._give_back(t.q_stages - 1 - w)
                _advance(b, f"stats{w}")

    def _final(self, w: int) -> None:
        """O / l to shared memory, LSE to global; then O's place is free for the next tile."""
        b = self.b
        self._wait(w)
        b.op("from_smem", writes=f"sum{w}", reads=f"Stat{w}")
        b.op("from_smem", writes=f"max{w}", reads=f"Max{w}")
        self._give_back(w)
        _advance(b, f"stats{w}")
        b.op("mbarrier_wait", barrier=f"o_full{w}", ring=f"o{w}")
        b.op("mbarrier_wait", barrier=f"out_empty{w}", ring=f"out{w}", previous=True)
        b.op("tmem_load", writes=f"out{w}", reads=f"O{w}")
        b.op("lane_divide", writes=(f"out{w}", f"LSE{w}"), reads=(f"sum{w}", f"max{w}"))
        b.op("lane_pack", writes=f"packed{w}", reads=f"out{w}")
        b.op("to_smem", writes=self.t.o_buffer(w), reads=f"packed{w}")
        b.op("fence_async")
        self._rescaled(w)
        b.op("mbarrier_arrive", barrier=f"out_full{w}", ring=f"out{w}")
        _advance(b, f"o{w}", f"out{w}")
        b.op("store", writes="LSE", reads=f"LSE{w}", index=rows(w), clipped=True)


def _epilogue(b: Builder, t: FA4Tile) -> None:
    b.op("tile")
    for w in range(t.q_stages):
        b.op("mbarrier_wait", barrier=f"out_full{w}", ring=f"out{w}")
        b.op("tma_store", writes="O", reads=t.o_buffer(w), index=rows(w), wait="read")
        b.op("mbarrier_arrive", barrier=f"out_empty{w}", ring=f"out{w}")
        _advance(b, f"out{w}")
    if t.shared and t.persistent:
        b.op("mbarrier_arrive", barrier="o_stored", ring="o_stored")
        _advance(b, "o_stored")
