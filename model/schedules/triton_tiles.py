"""Triton's tiles, grid, tensors and refusals: the tutorial kernel's block sizes, warps and stages per chip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..attention import Attention
from ..gpu import GPU
from ..profiles import TYPICAL_OVERHEAD, kernel_profile
from ..program import Tiles
from .fa2 import check_counts, check_forward
from .grid import ceil_div, kv_blocks, planes

if TYPE_CHECKING:
    from .triton import Triton

#: The tensor cores' instructions by chip: what Triton's ``tl.dot`` becomes.
MMA, WGMMA, TCGEN05 = "mma.sync", "wgmma", "tcgen05.mma"
HEAD_DIMS = (16, 32, 64, 128)
#: (instruction, head_dim > 64) -> (block_q, block_kv, num_warps, num_stages). The tutorial's autotuner tries
#: blocks of 64 or 128 by 32, 64 or (with TMA descriptors) 128, 4 or (with the largest blocks) 8 warps and 2 to 7 stages. With
#: wgmma what it set for H100 before it tuned itself (516234648 of April 2024, when the FA3 paper measured it).
TILES = {
    (MMA, False): (128, 64, 4, 3),
    (MMA, True): (128, 64, 8, 3),
    (WGMMA, False): (128, 64, 8, 7),
    (WGMMA, True): (128, 32, 8, 7),
    (TCGEN05, False): (128, 64, 4, 3),
    (TCGEN05, True): (128, 128, 8, 2),
}
TMEM_COLUMNS = 512
LANES = 128


@dataclass(frozen=True, kw_only=True)
class TritonTile:
    """What a problem runs with. ``element``: bytes of Q, K and V; ``profile``: what its compiled kernel issues, where that was
    read; ``overhead``: else a compiler's instructions over the ideal ones."""

    instruction: str
    head_dim: int
    block_q: int
    block_kv: int
    warps: int
    stages: int
    element: int
    warp_specialize: bool
    profile: Mapping[str, Any] | None
    overhead: Mapping[str, float] | None

    @property
    def ahead(self) -> int:
        """K/V blocks that are loaded ahead of their use: a load is in the pipeline's first stage, its product in the last."""
        return self.stages - 1

    @property
    def buffers(self) -> int:
        """Places in the ring: an asynchronous product still reads its block while the next one is in use."""
        return self.ahead + (self.instruction != MMA)

    @property
    def tmem_columns(self) -> int:
        """S (two of them where the loop is split over warps), O and P, 32 bits an element, up to a power of two."""
        scores = self.block_kv * (2 if self.warp_specialize else 1)
        need = scores + self.head_dim + self.block_kv * self.element // 4
        return 1 << (need - 1).bit_length()


def tile(schedule: Triton, gpu: GPU, attention: Attention) -> TritonTile:
    """The tile, or a ValueError with what to change."""
    check_forward("triton", attention)
    check_counts("triton", schedule.counts, ("binary", "typical", "ideal"))
    instruction = TCGEN05 if gpu.tcgen05 is not None else WGMMA if gpu.wgmma is not None else MMA
    need = max(attention.head_dim, attention.head_dim_v)
    if need > HEAD_DIMS[-1]:
        raise ValueError(f"triton has no tile for head_dim {need}; the largest is {HEAD_DIMS[-1]}: reduce head_dim")
    d = min(size for size in HEAD_DIMS if size >= need)
    base = TILES[instruction, d > 64]
    t = TritonTile(
        instruction=instruction,
        head_dim=d,
        block_q=schedule.block_q or base[0],
        block_kv=schedule.block_kv or base[1],
        warps=schedule.num_warps or (4 if schedule.warp_specialize else base[2]),
        stages=schedule.num_stages or base[3],
        element=attention.dtype_bytes,
        warp_specialize=schedule.warp_specialize,
        profile=None,
        overhead=None if schedule.counts == "ideal" else TYPICAL_OVERHEAD,
    )
    if schedule.num_stages is None:
        t = replace(t, stages=max(2, min(t.stages, _room(t, gpu))))
    _check(t, gpu)
    return replace(t, profile=_read(t, gpu, attention)) if schedule.counts == "binary" else t


def _room(t: TritonTile, gpu: GPU) -> int:
    """Stages of K and V that shared memory has room for beside Q."""
    beside = int(gpu.sm.smem_per_cta_bytes) - t.block_q * t.head_dim * t.element
    return beside // (2 * t.block_kv * t.head_dim * t.element) + t.stages - t.buffers


def _read(t: TritonTile, gpu: GPU, attention: Attention) -> Mapping[str, Any] | None:
    tile = {"head_dim": t.head_dim, "block_q": t.block_q, "block_kv": t.block_kv, "warps": t.warps}
    return kernel_profile("triton", architecture=gpu.architecture, causal=attention.causal, **tile)


def _check(t: TritonTile, gpu: GPU) -> None:
    for name, value in (("block_q", t.block_q), ("block_kv", t.block_kv), ("num_warps", t.warps)):
        if value < 1 or value & (value - 1):
            raise ValueError(f"triton has {name}={value}; Triton's blocks and warps are powers of two: change {name}")
    if not 2 <= t.stages <= 7:
        raise ValueError(f"triton has num_stages={t.stages}; it must lie between 2 and 7 (loads ahead of use): change num_stages")
    if not 16 <= t.block_kv <= 256:
        raise ValueError(f"triton has block_kv={t.block_kv}; it must be 16, 32, 64, 128 or 256: change block_kv")
    if t.warp_specialize and t.instruction != TCGEN05:
        raise ValueError(
            f"triton splits its loop over warps with tcgen05.mma only and {gpu.name} has none: set warp_specialize=false"
        )
    if t.instruction == MMA and t.block_q % (16 * t.warps):
        raise ValueError(
            f"triton has block_q={t.block_q} with {t.warps} warps; a warp multiplies 16 rows at a time: change block_q or"
            " num_warps"
        )
    if t.instruction == WGMMA and (t.warps % 4 or t.block_q % (16 * t.warps)):
        raise ValueError(
            f"triton has block_q={t.block_q} with {t.warps} warps; each warpgroup of 4 multiplies 64 rows at a time: change"
            " block_q or num_warps"
        )
    if t.instruction == TCGEN05:
        _check_tmem(t)


def _check_tmem(t: TritonTile) -> None:
    if t.block_q != LANES or t.warps not in (4, 8) or (t.warp_specialize and t.warps != 4):
        raise ValueError(
            f"triton has block_q={t.block_q} with {t.warps} warps; with tensor memory it is modelled with block_q=128 and 4 warps"
            " or (without warp_specialize) 8: change block_q or num_warps"
        )
    if not 32 <= t.block_kv <= 128:
        raise ValueError(f"triton has block_kv={t.block_kv}; with tensor memory it must be 32, 64 or 128: change block_kv")
    if t.tmem_columns > TMEM_COLUMNS:
        raise ValueError(f"triton needs {t.tmem_columns} columns of tensor memory; an SM has {TMEM_COLUMNS}: reduce block_kv")


def registers(t: TritonTile) -> int:
    """Per thread, the binary's or: S and O in fp32, P in 16 bits, fragments of one k-step twice (mma.sync), 40 for addresses
    and state."""
    if t.profile:
        return int(t.profile["registers"])
    threads = 32 * t.warps
    held = (t.block_q * t.block_kv + t.block_q * t.head_dim) // threads + t.block_q * t.block_kv // threads // 2
    if t.instruction == MMA:
        held += (t.block_q * 16 + max(t.block_kv, t.head_dim) * 16 * t.warps) // threads
    return min(255, held + 40)


def grid(attention: Attention, t: TritonTile) -> Tiles:
    """program_id(0) is the Q block and runs fastest, program_id(1) batch x heads + head; K/V blocks go in order."""
    shape = (attention.batch, attention.heads_q, ceil_div(attention.seqlen_q, t.block_q))
    batch, head, q_block = (a.ravel() for a in np.indices(shape))
    needed, masked = kv_blocks(attention, t.block_q, t.block_kv, q_block)
    plane_q, plane_kv = planes(attention, batch, head)
    names = ("plane_q", "plane_kv", "q_block", "n_blocks", "n_masked", "n_full")
    return Tiles(names=names, values=np.stack([plane_q, plane_kv, q_block, needed, masked, needed - masked], axis=1))
