"""FlashAttention-4 forward: a warp feeds a K/V ring, a warp issues all products, two warpgroups do softmax, one corrects O.

arXiv 2603.05451. Against FA3: S and O live in tensor memory, so that a single thread issues products and each Q tile of 128
rows has a softmax warpgroup of its own, one thread a row; P takes the place of S, handed over in three quarters and one. A
correction warpgroup rescales O, only where a row maximum grew by more than a threshold, and stores it at the end. Part of the
exponentials run on the FMA pipe. Non-causal tiles run persistent, in CTA pairs that share each product: the first CTA's MMA warp
issues for both, its commits arrive in both, and it waits for what the loads and warpgroups of both send it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from ..attention import Attention
from ..gpu import GPU
from ..profiles import kernel_profile
from ..program import Index, Program
from ..schedule import Builder
from .fa2 import check_counts
from .fa4_softmax import Softmax
from .fa4_tiles import LANES, FA4Tile, both, check, grid, leader, rows, tensors, tile

COUNTERS = ("fma", "alu", "xu", "lsu", "other")
#: Share of P's columns that the first arrival promises (split_P_arrive).
FIRST_PART = 0.75


@dataclass(frozen=True, kw_only=True)
class FA4:
    """Switches: ``block_kv``, ``q_stages`` (Q tiles in flight, None: 2 where there are rows for them), ``kv_stages`` (None: what
    fits), ``cta_pair`` (None: the released rule), ``exp2_emulation`` (share of a row's exponentials on the FMA pipe, None: as
    released), ``rescale_threshold`` (log2 units), ``rescale_rate`` (rescales a block that the timing run takes, None: that of
    normally distributed scores), and whose instruction counts to use: ``counts="binary"`` where the compiled kernel was read,
    ``"ideal"`` the algorithm's own."""

    block_kv: int = 128
    q_stages: int | None = None
    kv_stages: int | None = None
    cta_pair: bool | None = None
    exp2_emulation: float | None = None
    rescale_threshold: float = 8.0
    rescale_rate: float | None = None
    #: Causal tiles of most K/V blocks first (LPT), heads in sections that fit in L2; without it in the order of the others.
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
        profile = None
        if self.counts == "binary" and t.q_stages == 2:
            keys = {"head_dim": t.head_dim, "block_kv": t.block_kv, "causal": t.causal, "pair": t.pair}
            profile = kernel_profile("fa4", architecture=gpu.architecture, **keys)
        softmax, correction, other = profile["registers"] if profile else t.registers
        b = Builder(name="fa4_fwd", registers=128)
        _buffers(b, t)
        for w in range(t.q_stages):
            with b.role(f"softmax{w}", warps=4, registers=softmax):
                _enter(b, t)
                Softmax(b, t, w, profile).write()
                _leave(b)
        with b.role("correction", warps=4, registers=correction):
            _enter(b, t)
            _Correction(b, t, profile).write()
            _leave(b)
        with b.role("mma", warps=1, registers=other):
            _start(b, t)
            b.op("tmem_alloc", pair=t.pair)
            b.op("named_sync", barrier="tmem")
            _Products(b, t, profile).write()
        with b.role("epilogue", warps=1, registers=other):
            _start(b, t)
            _epilogue(b, t)
        with b.role("load", warps=1, registers=other):
            _start(b, t)
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


# --- buffers and barriers ---


def _buffers(b: Builder, t: FA4Tile) -> None:
    e = t.element
    for ring in ("k", "v"):  # two places in one ring of buffers: K and V of a block follow each other
        b.ring(ring, t.kv_stages)
        b.ring(f"{ring}_done", t.kv_stages)
    b.mbarrier("kv_full", count=1, stages=t.kv_stages)
    b.mbarrier("kv_empty", count=1, stages=t.kv_stages)
    for name, ring in (("KV", "k"), ("KV.v", "v")):  # of a pair's K and V a CTA holds half
        half = e / t.ctas
        b.smem(name, rows=t.block_kv, cols=t.head_dim, bytes_per_element=half, stages=t.kv_stages, ring=ring)
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
        b.smem(f"Qs{w}", rows=LANES, cols=t.head_dim, bytes_per_element=e)
        b.smem(f"Os{w}", rows=LANES, cols=t.head_dim, bytes_per_element=2)
        b.smem(f"Stat{w}", rows=LANES, cols=1, bytes_per_element=4)  # the row factor, at the end the row sum
        b.smem(f"Max{w}", rows=LANES, cols=1, bytes_per_element=4)
        b.tmem(f"S{w}", rows=LANES, cols=t.block_kv)
        b.tmem(f"S{w}.P", rows=LANES, cols=t.block_kv, bytes_per_element=e)
        b.tmem(f"O{w}", rows=LANES, cols=t.head_dim)
        b.registers_tile(f"scores{w}", rows=LANES, cols=t.block_kv)
        b.registers_tile(f"P{w}", rows=LANES, cols=t.block_kv, bytes_per_element=e)
        b.registers_tile(f"out{w}", rows=LANES, cols=t.head_dim)
        b.registers_tile(f"packed{w}", rows=LANES, cols=t.head_dim, bytes_per_element=2)
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
    _load_kv(b, t, "K", Index(arg="n_blocks", const=-1))
    for w in range(t.q_stages):
        b.op("mbarrier_wait", barrier=f"q_empty{w}", ring=f"q{w}", previous=True)
        _expect(b, t, f"q_full{w}", f"q{w}", f"Qs{w}", each=2)
        b.op("tma_load", writes=f"Qs{w}", reads="Q", index=rows(w), barrier=f"q_full{w}", ring=f"q{w}", copies=1, **leader(t))
        _advance(b, f"q{w}")
    _load_kv(b, t, "V", Index(arg="n_blocks", const=-1))
    with b.loop("i", Index(arg="n_blocks", const=-1)):
        for name in ("K", "V"):
            _load_kv(b, t, name, Index(arg="n_blocks", const=-2, loop="i", coef=-1))
    if t.pair:
        with b.ending():  # a CTA stays until the products of both have released the last stage, which is V's
            _advance(b, *["v"] * (t.kv_stages - 2))
            b.op("mbarrier_wait", barrier="kv_empty", ring="v", previous=True)


def _expect(b: Builder, t: FA4Tile, barrier: str, ring: str, buffer: str, **both: int) -> None:
    """The bytes of a tile; a pair's first CTA expects those of ``both``."""
    of: dict[str, Any] = {"of": (buffer,), **(both if t.pair else {})}
    with b.leader() if t.pair else nullcontext():
        b.op("mbarrier_expect", barrier=barrier, ring=ring, **of)


def _load_kv(b: Builder, t: FA4Tile, name: str, index: Index) -> None:
    ring, buffer = name.lower(), "KV" if name == "K" else "KV.v"
    b.op("mbarrier_wait", barrier="kv_empty", ring=ring, previous=True)
    where: dict[str, Any] = {"barrier": "kv_full", "ring": ring, "ctas": t.ctas, **leader(t)}
    _expect(b, t, "kv_full", ring, buffer, ctas=t.ctas)
    b.op("tma_load", writes=buffer, reads=name, index=index, copies=2 // t.ctas, **where)
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
            self._commit(f"q_empty{w}", f"q{w}")
            _advance(b, f"q{w}")
        for w in range(t.q_stages):
            self._weighted(w, Index(arg="n_blocks", arg_coef=-1, const=1), counted=False)
            self._commit(f"o_full{w}", f"o{w}")
            _advance(b, f"o{w}")
        self._release("v")

    def _scores(self, w: int) -> None:
        """S = Q K^T; the softmax warpgroup has read the last S, since P V of it was issued before."""
        self.b.op("umma", writes=f"S{w}", reads=(f"Qs{w}", "KV"), transpose_b=True, pair=self.t.pair)
        self._commit(f"s_full{w}", f"s{w}")
        _advance(self.b, f"s{w}")

    def _weighted(self, w: int, first: Index, *, counted: bool) -> None:
        """O += P V in two parts; where ``first`` >= 0 the block is the tile's first, and O begins at zero."""
        b, phases = self.b, self.phases if counted else {}
        product: dict[str, Any] = {"writes": f"O{w}", "reads": (f"S{w}.P", "KV.v"), "accumulate": True, "pair": self.t.pair}
        if w == 0:
            with _counted(b, phases, "v_wait"):
                b.op("mbarrier_wait", barrier="kv_full", ring="v")
        with _counted(b, phases, f"p_wait{w}"):
            b.op("mbarrier_wait", barrier=f"p_full{w}", ring=f"p{w}")
            b.op("mbarrier_wait", barrier=f"o_rescaled{w}", ring=f"p{w}")
        with b.when(first):
            b.op("zero", writes=f"O{w}", shape=(LANES, self.t.head_dim), pair=self.t.pair)
        with _counted(b, phases, f"pv_first{w}"):
            b.op("umma", **product, share=(0.0, FIRST_PART))
        with _counted(b, phases, f"p2_wait{w}"):
            b.op("mbarrier_wait", barrier=f"p_full_last{w}", ring=f"p{w}")
        with _counted(b, phases, f"pv_last{w}"):
            b.op("umma", **product, share=(FIRST_PART, 1.0))
        _advance(b, f"p{w}")

    def _release(self, ring: str) -> None:
        """The stage is free when what was issued so far is done; K and V take turns in the ring."""
        self._commit("kv_empty", f"{ring}_done")
        _advance(self.b, ring, ring, f"{ring}_done", f"{ring}_done")

    def _commit(self, barrier: str, ring: str) -> None:
        """An arrival when what was issued so far is done; a pair's in both CTAs."""
        to: dict[str, Any] = {"to": "all"} if self.t.pair else {}
        self.b.op("mbarrier_arrive", barrier=barrier, ring=ring, products=True, **to)


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
        if t.rescale_every:
            with b.loop("jump", Index(arg="n_jumps")):
                if t.rescale_every > 1:
                    with b.loop("i", Index(const=t.rescale_every - 1)):
                        self._block(taken=False)
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
        self.b.op("mbarrier_arrive", barrier=f"o_rescaled{w}", ring=f"p{w}", **both(self.t))
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
        b.op("to_smem", writes=f"Os{w}", reads=f"packed{w}")
        b.op("fence_async")
        self._rescaled(w)
        b.op("mbarrier_arrive", barrier=f"out_full{w}", ring=f"out{w}")
        _advance(b, f"o{w}", f"out{w}")
        b.op("store", writes="LSE", reads=f"LSE{w}", index=rows(w), clipped=True)


def _epilogue(b: Builder, t: FA4Tile) -> None:
    b.op("tile")
    for w in range(t.q_stages):
        b.op("mbarrier_wait", barrier=f"out_full{w}", ring=f"out{w}")
        b.op("tma_store", writes="O", reads=f"Os{w}", index=rows(w), wait="read")
        b.op("mbarrier_arrive", barrier=f"out_empty{w}", ring=f"out{w}")
        _advance(b, f"out{w}")
