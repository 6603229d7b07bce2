"""FA2's tiles, grids and registers: which block sizes it runs with, the order of its tiles, and what does not fit a thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..attention import Attention
from ..gpu import GPU
from ..program import Tiles
from ..tiling import Footprint, resident
from .grid import ceil_div, kv_blocks, planes

if TYPE_CHECKING:
    from .fa2 import FA2

#: head_dim -> (block_q, block_kv, warps), the released kernel's table (flash_fwd_launch_template.h, no dropout).
TILES = {
    32: (128, 128, 4),
    64: (128, 128, 4),
    96: (128, 64, 4),
    128: (128, 64, 4),
    192: (128, 64, 8),
    256: (128, 64, 8),
}
TILE_256_SM90 = (64, 64, 4)
#: Elements of the O that warps which split K add up: each holds all of it, and all of them pass through shared memory in fp32
#: (32 KB with four warps), so that two CTAs still fit on an SM.
SPLIT_K_OUTPUT = 2048
#: Registers a thread beside accumulators, P and one k-step's fragments: addresses, row statistics, loop state. The median of what
#: the six binaries in profiles/fa2_*.toml use that keep clear of the limit (head_dim 192 and 256).
STATE_REGISTERS = 45
MOST_REGISTERS = 255


@dataclass(frozen=True, kw_only=True)
class FA2Tile:
    """What a problem runs with; ``head_dim`` is the problem's, rounded up to the next size the kernel was built for."""

    block_q: int
    block_kv: int
    warps: int
    head_dim: int
    split_k: bool = False

    @property
    def parts(self) -> int:
        """Warps that share a row's keys."""
        return self.warps if self.split_k else 1


def tile(schedule: FA2, architecture: str, attention: Attention) -> FA2Tile:
    need = max(attention.head_dim, attention.head_dim_v)
    sizes = [d for d in TILES if d >= need]
    if not sizes:
        raise ValueError(f"fa2 has no tile for head_dim {need}; the largest is {max(TILES)}: reduce head_dim")
    d = sizes[0]
    base = TILE_256_SM90 if d == 256 and architecture != "sm_80" else TILES[d]
    split_k = schedule.split == "k"
    rows = max(16, SPLIT_K_OUTPUT // d // 16 * 16) if split_k else base[0]
    t = FA2Tile(
        block_q=schedule.block_q or rows, block_kv=schedule.block_kv or base[1], warps=schedule.warps or base[2], head_dim=d,
        split_k=split_k,
    )  # fmt: skip
    step_q, step_kv = (16, 16 * t.warps) if split_k else (16 * t.warps, 16)
    if t.block_q % step_q or t.block_kv % step_kv:
        shared = f"block_q must be a multiple of 16 x warps = {step_q} and block_kv of 16"
        if split_k:
            shared = f"with split=k block_kv must be a multiple of 16 x warps = {step_kv} and block_q of 16"
        raise ValueError(
            f"fa2 tile {t.block_q}x{t.block_kv} with {t.warps} warps: {shared}; change block_q, block_kv or warps"
        )
    return t


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Registers a thread at the three points of a K/V block where most are alive: in Q K^T, in softmax, in P V."""

    scores: int = 0
    softmax: int = 0
    values: int = 0

    @property
    def registers(self) -> int:
        """What the kernel gets."""
        return min(MOST_REGISTERS, max(self.scores, self.softmax, self.values))

    @property
    def frame_bytes(self) -> int:
        """Local memory a thread: a place for each of those below."""
        return 4 * (self.under_scores + self.under_softmax)

    @property
    def under_scores(self) -> int:
        """Registers of O that leave for local memory before Q K^T and come back after it."""
        return max(0, self.scores - MOST_REGISTERS)

    @property
    def under_softmax(self) -> int:
        """Registers of O that, rescaled, must leave again until S is gone, or of P V's own excess."""
        return max(0, max(self.softmax, self.values) - MOST_REGISTERS)


def l1_holds(gpu: GPU, cta: Footprint, frame_bytes: int) -> bool:
    """Whether the local memory of all resident threads fits in what their SMEM leaves of the SM's data cache; a loop walks
    through all of it, so that what does not fit misses throughout."""
    ctas = resident(gpu, cta).ctas_per_sm
    smem = ctas * (cta.smem_bytes + int(gpu.sm.smem_reserved_per_cta_bytes))
    return ctas * 32 * cta.warps * frame_bytes <= gpu.sm.l1_bytes - smem


def demand(t: FA2Tile) -> Demand:
    """Accumulators in fp32, P in 16 bits in S's place, one k-step of operand fragments at a time, and STATE_REGISTERS."""
    threads = 32 * t.warps
    scores, output = t.block_q * t.block_kv // threads, t.block_q * t.head_dim // threads
    rows = t.block_q if t.split_k else t.block_q // t.warps
    keys = t.block_kv // t.parts
    partial = output * t.parts if t.split_k else 0
    a, k, v = (n * 16 // 32 // 2 for n in (rows, keys, t.head_dim))  # 16 x 16 of 16 bits is four registers a thread
    return Demand(
        scores=scores + output + a + k + STATE_REGISTERS,
        softmax=scores + output + STATE_REGISTERS,
        values=scores // 2 + output + partial + v + STATE_REGISTERS,
    )


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
