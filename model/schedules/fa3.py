"""FlashAttention-3 forward: a producer warp feeds K/V rings by TMA, two or three warpgroups multiply with wgmma and take turns.

Shah et al. 2024 (arXiv 2407.08608). Ping-pong: named barriers let one warpgroup's products be issued before the other's, so that
its softmax hides under them. Intra-warpgroup overlap: Q K^T of block j is issued before P V of block j - 1, whose time the first
part of softmax uses. CTAs are persistent; where the tile count is even two neighbouring ones share K/V loads by multicast: each
copies half of a block to both, so that a stage is free when the consumers of both have released it to both.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..attention import Attention
from ..gpu import GPU
from ..profiles import kernel_profile
from ..program import Program
from ..schedule import Builder
from .fa2 import check_counts
from .fa3_2024 import FirstConsumer
from .fa3_consumer import Consumer
from .fa3_loads import WARPS
from .fa3_producer import producer, transpose
from .fa3_tiles import FA3Tile, check, grid, tensors, tile


@dataclass(frozen=True, kw_only=True)
class FA3:
    """Switches: the tile (``block_q`` x ``block_kv``, None: the released table), ``stages`` of the K/V ring, ``pingpong``,
    ``intra_overlap``, ``warp_specialization`` (without it consumers load their own tiles), ``cluster`` (CTAs that share K/V
    loads, None: the released rule), and whose instruction counts to use: ``counts="binary"`` where the compiled kernel was
    read, ``"ideal"`` the algorithm's own."""

    block_q: int | None = None
    block_kv: int | None = None
    stages: int = 2
    pingpong: bool | None = None
    intra_overlap: bool = True
    warp_specialization: bool = True
    cluster: int | None = None
    #: One CTA an SM that goes on from tile to tile; without it a CTA a tile (the paper's FP8 kernels).
    persistent: bool = True
    #: Causal tiles of most K/V blocks first (LPT), heads in sections that fit in L2; without it in the order of the others.
    longest_first: bool = True
    counts: str = "binary"
    #: ``2024-07``: as first published (flash-attention 5018ac6a), see :mod:`.fa3_2024`; FP8 without overlap, in larger tiles.
    build: str = "released"

    @property
    def name(self) -> str:
        return "fa3"

    def lower(self, gpu: GPU, attention: Attention) -> tuple[Program, ...]:
        check(gpu, attention)
        check_counts("fa3", self.counts, ("binary", "ideal"))
        t = tile(self, gpu, attention)
        profile = None
        if self.counts == "binary":
            profile = kernel_profile(
                "fa3", head_dim=t.head_dim, block_q=t.block_q, block_kv=t.block_kv, dtype=t.profile_dtype,
                causal=attention.causal, build=t.build, **({"cluster": t.cluster} if t.build is None else {}),
            )  # fmt: skip
        b = Builder(name="fa3_fwd", registers=profile["registers"] if profile and t.specialized else t.launch_registers)
        _buffers(b, t, self.stages)
        if t.specialized:
            with b.role("producer", warps=1, registers=t.producer_registers):
                producer(b, t, self.stages, profile)
        if t.fp8:
            with b.role("transpose", warps=WARPS, registers=t.producer_registers):
                transpose(b, t, profile)
        for w in range(t.groups):
            with b.role(f"consumer{w}", warps=WARPS, registers=t.consumer_registers, code="consumer"):
                (FirstConsumer if t.build else Consumer)(b, t, self, w, profile).write()
        return (
            b.build(
                tensors=tensors(attention, t),
                tiles=grid(gpu, attention, t),
                profile=f"{profile['kind']}: {profile['source']}" if profile else "ideal",
                persistent=self.persistent,
                dynamic=attention.causal,
                cluster=t.cluster,
                launch_registers=b.registers if t.specialized else 0,
                idle_warps=(-1 if t.fp8 else 3) if t.specialized else 0,
            ),
        )


def _buffers(b: Builder, t: FA3Tile, stages: int) -> None:
    e = t.element
    height = t.block_q // t.groups
    for name in ("k", "v"):
        own = name == "v" and t.fp8  # V as transposed stays in the CTA
        b.ring(name, stages)
        if not t.specialized:
            b.ring(f"{name}_in", stages)  # the loader's place, ahead of the readers'
        b.mbarrier(f"{name}_full", count=WARPS if own or not t.specialized else 1, stages=stages)
        b.mbarrier(f"{name}_empty", count=WARPS * t.groups * (1 if own else t.cluster), stages=stages)
        b.smem(f"{name.upper()}s", rows=t.block_kv, cols=t.head_dim, bytes_per_element=e, stages=stages, ring=name)
    b.ring("q", 1)
    b.mbarrier("q_full", count=1 if t.specialized else WARPS * t.groups)
    if t.specialized:
        b.ring("o", 1)
        b.mbarrier("q_empty", count=WARPS * t.groups)
        if t.o_told != "never":
            b.mbarrier("o_free", count=WARPS * (t.groups if t.o_told == "end" else 1) * t.cluster)
    if t.fp8:
        b.ring("vt", stages)
        b.mbarrier("vt_full", count=1, stages=stages)
        b.mbarrier("vt_empty", count=WARPS * t.cluster, stages=stages)
        b.smem("Vts", rows=t.block_kv, cols=t.head_dim, bytes_per_element=e, stages=stages, ring="vt")
    for w in range(t.groups):
        b.smem(f"Qs{w}", rows=height, cols=t.head_dim, bytes_per_element=e)
        b.registers_tile(f"S{w}", rows=height, cols=t.block_kv)
        if t.p_in_smem:
            b.smem(f"P{w}", rows=height, cols=t.block_kv, bytes_per_element=e)
            b.registers_tile(f"Pregs{w}", rows=height, cols=t.block_kv, bytes_per_element=e)
        else:
            b.registers_tile(f"P{w}", rows=height, cols=t.block_kv, bytes_per_element=e)
        b.registers_tile(f"O{w}", rows=height, cols=t.head_dim)
        b.registers_tile(f"Oout{w}", rows=height, cols=t.head_dim, bytes_per_element=2)
        b.smem(f"Vs.O{w}", rows=height, cols=t.head_dim, bytes_per_element=2)  # O leaves through V's buffer
        b.registers_tile(f"LSE{w}", rows=height, cols=1)
    for w in range(t.groups):
        b.named_barrier(f"turn{w}", warps=8 if t.build is None else WARPS * t.groups)
    b.named_barrier("epilogue", warps=WARPS * t.groups)
    if t.build is not None:
        b.named_barrier("stored", warps=WARPS * t.groups)
    if not t.specialized:
        b.named_barrier("loads", warps=WARPS * t.groups)
