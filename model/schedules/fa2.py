"""FlashAttention-2 forward: one CTA a Q block, warps split Q, K and V single-buffered through cp.async, mma.sync.

Dao 2023 (arXiv 2307.08691), algorithm 1 and section 3. Q-block parallelism fills the chip when batch x heads is small; warps own
rows, so no warp waits for another's partial sums; O stays unscaled until the end (one divide per row), LSE alone is saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..attention import Attention
from ..gpu import GPU
from ..profiles import TYPICAL, TYPICAL_OVERHEAD, loop_counts
from ..program import Index, Program, Tiles
from ..schedule import Builder
from .grid import ceil_div, kv_blocks, planes, qkv_tensors

#: head_dim -> (block_q, block_kv, warps), the released kernel's table (flash_fwd_launch_template.h, no dropout).
TILES = {
    32: (128, 128, 4),
    64: (128, 128, 4),
    96: (128, 64, 4),
    128: (128, 64, 4),
    192: (128, 64, 8),
    256: (128, 64, 8),
}
BUILDS = ("pytorch", "flash-attn")
TILE_256_SM90 = (64, 64, 4)


@dataclass(frozen=True, kw_only=True)
class FA2:
    """Switches: the tile (``block_q`` x ``block_kv``, None: the released table), ``warps``, and whose instruction counts to use.

    ``counts="binary"`` takes the compiled kernel's counts, or a compiler's usual overhead for tiles that were not read;
    ``"ideal"`` takes the algorithm's own.
    """

    block_q: int | None = None
    block_kv: int | None = None
    warps: int | None = None
    registers: int | None = None
    counts: str = "binary"
    #: Whose compiled kernel: "pytorch" (in PyTorch 2.11, without fast math), or "flash-attn" (the package, with it).
    build: str = "pytorch"

    @property
    def name(self) -> str:
        return "fa2"

    def tile(self, gpu: GPU, attention: Attention) -> tuple[int, int, int, int]:
        """(block_q, block_kv, warps, padded head_dim); the kernel rounds head_dim up to the next size it was built for."""
        need = max(attention.head_dim, attention.head_dim_v)
        sizes = [d for d in TILES if d >= need]
        if not sizes:
            raise ValueError(f"fa2 has no tile for head_dim {need}; the largest is {max(TILES)}: reduce head_dim")
        d = sizes[0]
        base = TILE_256_SM90 if d == 256 and gpu.architecture != "sm_80" else TILES[d]
        return self.block_q or base[0], self.block_kv or base[1], self.warps or base[2], d

    def lower(self, gpu: GPU, attention: Attention) -> tuple[Program, ...]:
        check_forward("fa2", attention)
        check_counts("fa2", self.counts, ("binary", "ideal"))
        if self.build not in BUILDS:
            raise ValueError(f"fa2 has build={self.build!r}; it must be one of {', '.join(BUILDS)}: change build")
        block_q, block_kv, warps, d = self.tile(gpu, attention)
        if block_q % (16 * warps) or block_kv % 16:
            raise ValueError(
                f"fa2 tile {block_q}x{block_kv} with {warps} warps: block_q must be a multiple of 16 x warps = {16 * warps}"
                " and block_kv of 16; change block_q, block_kv or warps"
            )
        profile = (
            loop_counts("fa2", gpu.architecture, d, block_q, block_kv, warps, self.build) if self.counts == "binary" else None
        )
        registers = self.registers or (profile.registers if profile else _registers(block_q, block_kv, d, warps))
        b = Builder(name="fa2_fwd", warps=warps, registers=registers)
        e = attention.dtype_bytes
        b.smem("Qs", rows=block_q, cols=d, bytes_per_element=e)
        b.smem("Ks", rows=block_kv, cols=d, bytes_per_element=e)
        b.smem("Vs", rows=block_kv, cols=d, bytes_per_element=e)
        b.registers_tile("S", rows=block_q, cols=block_kv)
        b.registers_tile("P", rows=block_q, cols=block_kv, bytes_per_element=e)
        b.registers_tile("Oacc", rows=block_q, cols=d)
        b.registers_tile("Oout", rows=block_q, cols=d, bytes_per_element=e)
        b.registers_tile("LSEout", rows=block_q, cols=1)
        self._prologue(b, block_q, d)
        for phase, (trips, last) in {"masked": ("n_masked", "n_blocks"), "full": ("n_full", "n_full")}.items():
            counts = profile.per_block if profile else None
            overhead = TYPICAL_OVERHEAD if self.counts == "binary" else None
            with b.loop(
                "i", Index(arg=trips), counts=counts, overhead=overhead, stall_cycles=profile.stall_cycles if profile else None
            ):
                self._block(b, Index(arg=last, const=-1, loop="i", coef=-1), masked=phase == "masked")
        epilogue(b)
        return (
            b.build(
                tensors=tuple(qkv_tensors(attention, block_q, block_kv, e).values()),
                tiles=grid(attention, block_q, block_kv),
                profile=profile.label if profile else TYPICAL if self.counts == "binary" else "ideal",
                local_bytes=profile.local_bytes * warps if profile else 0,
            ),
        )

    def _prologue(self, b: Builder, block_q: int, d: int) -> None:
        b.op("zero", writes="Oacc", shape=(block_q, d))
        b.op("zero", writes="m", shape=(block_q,), value=-np.inf)
        b.op("zero", writes="l", shape=(block_q,))
        b.op("load_async", writes="Qs", reads="Q", index=Index(arg="q_block"))
        with b.when(Index(arg="n_blocks", const=-1)):
            b.op("load_async", writes="Ks", reads="K", index=Index(arg="n_blocks", const=-1))
        b.op("commit")

    def _block(self, b: Builder, j: Index, *, masked: bool) -> None:
        """One K/V block: V loads under Q K^T, the next K under softmax and P V."""
        b.op("wait_group", arg=0)
        b.op("barrier")
        b.op("load_async", writes="Vs", reads="V", index=j)
        b.op("commit")
        b.op("mma", writes="S", reads=("Qs", "Ks"), transpose_b=True)
        if masked:
            b.op("mask", writes="S", index=j)
        b.op("wait_group", arg=0)
        b.op("barrier")
        following = Index(arg=j.arg, const=j.const - 1, loop="i", coef=-1)
        with b.when(following):
            b.op("load_async", writes="Ks", reads="K", index=following)
            b.op("commit")
        b.op("row_max", writes=("m", "m_old"), reads="S")
        with b.interleaved():
            b.op("rescale", writes=("Oacc", "l"), reads=("m", "m_old"))
            b.op("exp2", writes="S", reads=("S", "m"))
            b.op("row_sum", writes="l", reads="S")
            b.op("convert", writes="P", reads="S")
        b.op("mma", writes="Oacc", reads=("P", "Vs"), accumulate=True)


def epilogue(b: Builder) -> None:
    """The deferred divide, then O through shared memory for whole-row stores, and LSE."""
    b.op("quad_sum", like="S")
    b.op("divide", writes=("Oacc", "LSEout"), reads=("l", "m"))
    b.op("convert", writes="Oout", reads="Oacc")
    b.op("to_smem", writes="Oout.smem", reads="Oout")
    b.op("barrier")
    b.op("from_smem", writes="Oout", reads="Oout")
    b.op("store", writes="O", reads="Oout", index=Index(arg="q_block"))
    b.op("store", writes="LSE", reads="LSEout", index=Index(arg="q_block"))


def check_forward(name: str, attention: Attention) -> None:
    """Refuse what a 16-bit forward schedule cannot run, in a sentence."""
    if attention.pass_ != "fwd":
        raise ValueError(f"{name} has a forward schedule only, got pass {attention.pass_!r}: choose --pass fwd")
    if attention.dtype not in ("bf16", "fp16"):
        raise ValueError(f"{name} runs bf16 or fp16, got dtype {attention.dtype!r}: change dtype")


def check_counts(name: str, counts: str, allowed: tuple[str, ...]) -> None:
    if counts not in allowed:
        raise ValueError(f"{name} has counts={counts!r}; it must be one of {', '.join(allowed)}")


def grid(attention: Attention, block_q: int, block_kv: int) -> Tiles:
    """Launch order of the released kernel: Q blocks fastest, then batch, then head."""
    n_q = ceil_div(attention.seqlen_q, block_q)
    head, batch, q_block = (
        a.ravel() for a in np.meshgrid(np.arange(attention.heads_q), np.arange(attention.batch), np.arange(n_q), indexing="ij")
    )
    needed, masked = kv_blocks(attention, block_q, block_kv, q_block)
    plane_q, plane_kv = planes(attention, batch, head)
    names = ("plane_q", "plane_kv", "q_block", "n_blocks", "n_masked", "n_full")
    return Tiles(names=names, values=np.stack([plane_q, plane_kv, q_block, needed, masked, needed - masked], axis=1))


def _registers(block_q: int, block_kv: int, d: int, warps: int) -> int:
    """Ideal registers per thread: S and O in fp32, P in 16 bits, one k-step of fragments twice, 40 for addresses and state."""
    threads = 32 * warps
    accumulators = (block_q * block_kv + block_q * d) // threads
    packed = block_q * block_kv // threads // 2
    fragments = 2 * (block_q * 16 + max(block_kv, d) * 16 * warps) // threads // 2
    return min(255, accumulators + packed + fragments + 40)
