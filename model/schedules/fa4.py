"""FlashAttention-4 forward: a warp feeds a K/V ring, a warp issues all products, two warpgroups do softmax, one corrects O.

arXiv 2603.05451. Against FA3: S and O live in tensor memory, so that a single thread issues products and each Q tile of 128
rows has a softmax warpgroup of its own, one thread a row; P takes the place of S, handed over in three quarters and one. A
correction warpgroup rescales O, only where a row maximum grew by more than a threshold, and stores it at the end. Part of the
exponentials run on the FMA pipe. Non-causal tiles run persistent, in CTA pairs that share each product: the first CTA's MMA warp
issues for both, its commits arrive in both, and it waits for what the loads and warpgroups of both send it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from ..attention import Attention
from ..gpu import GPU
from ..profiles import kernel_profile
from ..program import Index, Program
from ..schedule import Builder
from .fa2 import check_counts
from .fa4_correction import Correction, advance, counted, write_epilogue
from .fa4_softmax import Softmax
from .fa4_tiles import LANES, O_BYTES, FA4Tile, check, grid, leader, rows, tensors, tile

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
    released), ``rescale_threshold`` (log2 units, None: 8, in FP8 0), ``rescale_rate`` (rescales a block that the timing run
    takes; None: those of normally distributed scores; 1: O goes through registers in every block), ``longest_first`` (causal
    tiles of most K/V blocks first, heads in sections that fit in L2; without it in the order of the others), and whose
    instruction counts to use: ``counts="binary"`` where the compiled kernel was read, ``"ideal"`` the algorithm's own."""

    block_kv: int = 128
    q_stages: int | None = None
    kv_stages: int | None = None
    cta_pair: bool | None = None
    exp2_emulation: float | None = None
    rescale_threshold: float | None = None
    rescale_rate: float | None = None
    longest_first: bool = True
    counts: str = "binary"

    @property
    def name(self) -> str:
        return "fa4"

    def choices(self, gpu: GPU, attention: Attention) -> dict[str, float]:
        """What follows the chip where it is left open: the share of emulated exponentials, by the MUFU's rate."""
        t = tile(self, gpu, attention)
        return {"exp2_emulation": t.emulated / t.block_kv} if self.exp2_emulation is None else {}

    def lower(self, gpu: GPU, attention: Attention) -> tuple[Program, ...]:
        check(gpu, attention)
        check_counts("fa4", self.counts, ("binary", "ideal"))
        t = tile(self, gpu, attention)
        profile = _read_profile(gpu, t) if self.counts == "binary" else None
        return (_write(gpu, attention, t, profile),)


def _read_profile(gpu: GPU, t: FA4Tile) -> Mapping[str, Any] | None:
    """What the compiled kernel issues, where one was read."""
    if t.q_stages != 2:
        return None
    keys = {"head_dim": _compiled(t), "block_kv": t.block_kv, "causal": t.causal, "pair": t.pair}
    return kernel_profile("fa4", architecture=gpu.architecture, dtype="bf16" if t.element == 2 else "fp8", **keys)


def _write(gpu: GPU, attention: Attention, t: FA4Tile, profile: Mapping[str, Any] | None) -> Program:
    """The Program of a tile."""
    softmax, correction, other = profile["registers"] if profile else t.registers
    b = Builder(name="fa4_fwd", registers=128)
    _buffers(b, t)
    for w in range(t.q_stages):
        with b.role(f"softmax{w}", warps=4, registers=softmax, code="softmax"):
            _enter(b, t)
            Softmax(b, t, w, profile).write()
            _leave(b)
    with b.role("correction", warps=4, registers=correction):
        _enter(b, t)
        Correction(b, t, profile).write()
        _leave(b)
    with b.role("mma", warps=1, registers=other):
        _start(b, t)
        b.op("tmem_alloc", pair=t.pair)
        b.op("named_sync", barrier="tmem")
        _Products(b, t, profile).write()
    with b.role("epilogue", warps=1, registers=other):
        _start(b, t)
        write_epilogue(b, t)
    with b.role("load", warps=1, registers=other):
        _start(b, t)
        _load(b, t)
    return b.build(
        tensors=tensors(attention, t),
        tiles=grid(gpu, attention, t),
        profile=f"{profile['kind']}: {profile['source']}" if profile else "ideal",
        persistent=t.persistent,
        strided=t.persistent,
        cluster=t.ctas,
        launch_registers=128,
        idle_warps=1 if t.q_stages == 2 else 5,
        tmem_columns=t.tmem_columns,
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
    kv: dict[str, Any] = {"rows": t.block_kv, "bytes_per_element": half, "stages": stages}
    b.smem(t.k_buffer, cols=t.head_dim, ring="k", saved_bytes=t.saved_bytes, **kv)
    b.smem(t.v_buffer, cols=t.head_dim_v, ring="v", **kv)
    b.ring("o_stored", 1)
    b.mbarrier("o_stored", count=1)
    b.named_barrier("tmem", warps=4 * t.q_stages + 5)
    if t.pair:
        b.ring("freed", 1)
        b.mbarrier("freed", count=1)
    for w in range(t.q_stages):
        for ring in ("q", "s", "p", "stats", "stats_done", "o", "out"):
            b.ring(f"{ring}{w}", 1)
        for name in ("q_full", "q_empty", "s_full", "o_full", "out_empty"):
            b.mbarrier(f"{name}{w}", count=1)
        for name in ("p_full", "p_full_last", "o_rescaled"):
            b.mbarrier(f"{name}{w}", count=4 * t.ctas)
        for name in ("stats_full", "stats_empty", "out_full"):
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


def _start(b: Builder, t: FA4Tile) -> None:
    """In a pair no CTA may signal the other before that one's barriers are initialised; then registers are traded."""
    if t.pair:
        b.op("cluster_sync")
    b.op("setmaxnreg")


def _enter(b: Builder, t: FA4Tile) -> None:
    """Before its first tile: tensor memory is allocated."""
    _start(b, t)
    b.op("named_sync", barrier="tmem")


def _leave(b: Builder) -> None:
    """After its last tile: tensor memory is no longer used."""
    with b.ending():
        b.op("named_arrive", barrier="tmem")


# --- loads ---


def _load(b: Builder, t: FA4Tile) -> None:
    """K of the last block, Q tile by tile, V, then K and V block by block: the order in which products ask for them."""
    advance(b, "v")
    b.op("tile")
    always = t.uneven and t.persistent  # where K comes to the first stage depends on the tiles before
    _load_k(b, t, Index(arg="n_blocks", const=-1), beside=always)
    for w in range(t.q_stages):
        b.op("mbarrier_wait", barrier=f"q_empty{w}", ring=f"q{w}", previous=True)
        _expect(b, t, f"q_full{w}", f"q{w}", t.q_buffer(w), each=2)
        b.op(
            "tma_load", writes=t.q_buffer(w), reads="Q", index=rows(w), barrier=f"q_full{w}", ring=f"q{w}",
            copies=_boxes(t.head_dim, t), **leader(t),
        )  # fmt: skip
        advance(b, f"q{w}")
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
        advance(b, "o_stored")
    if t.pair:
        with b.ending():  # a CTA stays until the products of both have released the last stage, which is V's
            advance(b, *["v"] * (t.kv_stages - 2))
            b.op("mbarrier_wait", barrier="kv_empty", ring="v", previous=True)


def _expect(b: Builder, t: FA4Tile, barrier: str, ring: str, buffer: str, **both: int) -> None:
    """The bytes of a tile; a pair's first CTA expects those of ``both``."""
    of: dict[str, Any] = {"of": (buffer,), **(both if t.pair else {})}
    with b.leader() if t.pair else nullcontext():
        b.op("mbarrier_expect", barrier=barrier, ring=ring, **of)


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
    where: dict[str, Any] = {"barrier": "kv_full", "ring": ring, "ctas": t.ctas, **leader(t)}
    _expect(b, t, "kv_full", ring, buffer, ctas=t.ctas)
    b.op("tma_load", writes=buffer, reads=name, index=index, copies=copies, **where)
    advance(b, ring, ring)


# --- products ---


class _Products:
    """The MMA warp: per K/V block P V and the next Q K^T of tile 0, then of tile 1. In a pair its CTA issues for both."""

    def __init__(self, b: Builder, t: FA4Tile, profile: Mapping[str, Any] | None) -> None:
        self.b, self.t = b, t
        self.phases = {p["name"]: p for p in profile["mma"]} if profile else {}

    def write(self) -> None:
        b, t = self.b, self.t
        advance(b, "v", "v_done")
        b.op("tile")
        with b.leader() if t.pair else nullcontext():
            self._tile()
        with b.ending():
            b.op("named_sync", barrier="tmem")
            if t.pair:  # the other CTA's products and accesses are over as well
                b.op("mbarrier_arrive", barrier="freed", ring="freed", to="peer")
                b.op("mbarrier_wait", barrier="freed", ring="freed")
            b.op("tmem_free")

    def _tile(self) -> None:
        b, t = self.b, self.t
        for w in range(t.q_stages):
            b.op("mbarrier_wait", barrier=f"q_full{w}", ring=f"q{w}")
            if w == 0:
                b.op("mbarrier_wait", barrier="kv_full", ring="k")
            self._scores(w)
        self._release("k")
        with b.loop("i", Index(arg="n_blocks", const=-1)):
            for w in range(t.q_stages):
                self._weighted(w, Index(loop="i", coef=-1), steady=True)
                if w == t.q_stages - 1:
                    self._release("v")
                if w == 0:
                    with counted(b, self.phases, "k_wait"):
                        b.op("mbarrier_wait", barrier="kv_full", ring="k")
                with counted(b, self.phases, f"qk{w}"):
                    self._scores(w)
            self._release("k")
        for w in range(t.q_stages):
            self._commit(f"q_empty{w}", f"q{w}")
            advance(b, f"q{w}")
        for w in range(t.q_stages):
            self._weighted(w, Index(arg="n_blocks", arg_coef=-1, const=1), steady=False)
            self._commit(f"o_full{w}", f"o{w}")
            advance(b, f"o{w}")
        self._release("v")

    def _scores(self, w: int) -> None:
        """S = Q K^T; the softmax warpgroup has read the last S, since P V of it was issued before."""
        self.b.op("umma", writes=f"S{w}", reads=(self.t.q_buffer(w), self.t.k_buffer), transpose_b=True, pair=self.t.pair)
        self._commit(f"s_full{w}", f"s{w}")
        advance(self.b, f"s{w}")

    def _weighted(self, w: int, first: Index, *, steady: bool) -> None:
        """O += P V in two parts; where ``first`` >= 0 the block is the tile's first, and O begins at zero."""
        b, phases = self.b, self.phases if steady else {}
        operands = (f"S{w}.P", self.t.v_buffer)
        product: dict[str, Any] = {"writes": f"O{w}", "reads": operands, "accumulate": True, "pair": self.t.pair}
        if w == 0:
            with counted(b, phases, "v_wait"):
                b.op("mbarrier_wait", barrier="kv_full", ring="v")
        with counted(b, phases, f"p_wait{w}"):
            b.op("mbarrier_wait", barrier=f"p_full{w}", ring=f"p{w}")
            b.op("mbarrier_wait", barrier=f"o_rescaled{w}", ring=f"p{w}")
        with b.when(first):
            b.op("zero", writes=f"O{w}", shape=(LANES, self.t.head_dim_v), pair=self.t.pair)
        with counted(b, phases, f"pv_first{w}"):
            b.op("umma", **product, share=(0.0, FIRST_PART))
        with counted(b, phases, f"p2_wait{w}"):
            b.op("mbarrier_wait", barrier=f"p_full_last{w}", ring=f"p{w}")
        with counted(b, phases, f"pv_last{w}"):
            b.op("umma", **product, share=(FIRST_PART, 1.0))
        advance(b, f"p{w}")

    def _release(self, ring: str) -> None:
        """The stage is free when what was issued so far is done; K and V take turns in the ring."""
        self._commit("kv_empty", f"{ring}_done")
        advance(self.b, ring, ring, f"{ring}_done", f"{ring}_done")

    def _commit(self, barrier: str, ring: str) -> None:
        """An arrival when what was issued so far is done; a pair's in both CTAs."""
        to: dict[str, Any] = {"to": "all"} if self.t.pair else {}
        self.b.op("mbarrier_arrive", barrier=barrier, ring=ring, products=True, **to)
