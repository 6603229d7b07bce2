"""FA4's tiles, grid and refusals: which block sizes, stages and CTA pairs it runs with, and the order of its tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..attention import Attention
from ..gpu import GPU
from ..program import Index, Tensor, Tiles
from .grid import ceil_div, kv_blocks, planes, qkv_tensors

if TYPE_CHECKING:
    from .fa4 import FA4

#: Rows of a Q tile: the lanes of tensor memory.
LANES = 128
HEAD_DIMS = (64, 128)
#: (head_dim, pair, causal) -> exponentials of a row of 128 that the FMA pipe computes, else OTHERWISE, as flash-attn-4 4.0.0b36
#: compiles it (its rule: of every ``freq`` values of the two middle quarters the last four; freq 10 and 16). The code of March
#: 2026, when the paper appeared, had freq 10 for causal head_dim 128 and 12 for pairs. Chips with a faster MUFU emulate none.
EMULATED = {(128, True, False): 24}
OTHERWISE = 16
#: MUFU cycles of a warp's exponential from which emulation pays.
SLOW_MUFU_CYCLES = 8
#: Registers per thread of softmax, correction and the other warps after setmaxnreg (code 7b1581fe).
REGISTERS = {64: (200, 64, 48), 128: (192, 80, 48)}
#: SMEM that Q, O and the K/V stages may take (flash_fwd_sm100.py).
TILE_SMEM_BYTES = 224 * 1024
#: Bytes of K and V that the causal order keeps in L2 at a time (tile_scheduler.py).
L2_SECTION_BYTES = 50 * 2**20
#: Rescales a warp and block after the first, of normally distributed scores in 32 blocks of 128 keys at head_dim 128, by
#: threshold (model/lowprecision.py: conditional_rescale, warps of 32 rows, blocks from the last to the first).
RESCALE_RATES = ((0.0, 0.83), (1.0, 0.48), (2.0, 0.21), (3.0, 0.02), (4.0, 0.0))


@dataclass(frozen=True, kw_only=True)
class FA4Tile:
    """What a problem runs with. ``element``: bytes of Q, K and V; ``emulated``: exponentials of a row on the FMA pipe;
    ``rescale_every``: blocks between two rescales of O, 0 for none; ``max_loaded``: the chip's loads give row maxima."""

    head_dim: int
    block_kv: int
    q_stages: int
    pair: bool
    kv_stages: int
    element: int
    registers: tuple[int, int, int]
    emulated: int
    threshold_log2: float
    rescale_every: int
    max_loaded: bool
    causal: bool
    longest_first: bool

    @property
    def block_q(self) -> int:
        return LANES * self.q_stages

    @property
    def persistent(self) -> bool:
        """Causal tiles, of unequal length, are a CTA each."""
        return not self.causal

    @property
    def ctas(self) -> int:
        return 2 if self.pair else 1

    @property
    def tmem_columns(self) -> int:
        """S (with P in its place) and O of each Q tile, 32 bits an element."""
        return self.q_stages * (self.block_kv + self.head_dim)


def check(gpu: GPU, attention: Attention) -> None:
    """Refuse what FA4's forward cannot run, in a sentence."""
    if gpu.tmem is None or gpu.tcgen05 is None:
        instead = "fa3" if gpu.wgmma is not None else "fa2"
        raise ValueError(f"fa4 keeps S and O in TMEM; {gpu.name} has none: choose {instead}, or gpu b200")
    if attention.pass_ != "fwd":
        raise ValueError(f"fa4 has a forward schedule only, got pass {attention.pass_!r}: choose --pass fwd")
    if attention.dtype not in ("bf16", "fp16"):
        raise ValueError(f"fa4 runs bf16 or fp16, got dtype {attention.dtype!r}: change dtype")


def tile(schedule: FA4, gpu: GPU, attention: Attention) -> FA4Tile:
    need = max(attention.head_dim, attention.head_dim_v)
    if need > HEAD_DIMS[-1]:
        raise ValueError(f"fa4 has no tile for head_dim {need}; the largest is {HEAD_DIMS[-1]}: reduce head_dim")
    d = min(size for size in HEAD_DIMS if size >= need)
    block_kv = schedule.block_kv
    if block_kv % 32 or not 32 <= block_kv <= 128:
        raise ValueError(f"fa4 has block_kv={block_kv}; it must be 32, 64, 96 or 128 (a thread holds a row): change block_kv")
    q_stages = schedule.q_stages if schedule.q_stages is not None else 2 if attention.seqlen_q > LANES else 1
    if q_stages not in (1, 2):
        raise ValueError(f"fa4 has q_stages={q_stages}; it must be 1 or 2 (two S and two O fill TMEM): change q_stages")
    pair = _pair(schedule, attention, d, q_stages)
    threshold, share = schedule.rescale_threshold, schedule.exp2_emulation
    if not 0 <= threshold <= 64:
        raise ValueError(f"fa4 has rescale_threshold={threshold:g}; it must lie between 0 and 64: change rescale_threshold")
    if share is not None and not 0 <= share <= 0.5:
        raise ValueError(f"fa4 has exp2_emulation={share:g}; it must lie between 0 and 0.5 of a row: change exp2_emulation")
    rate = schedule.rescale_rate
    if rate is None:
        rate = float(np.interp(threshold, [x for x, _ in RESCALE_RATES], [y for _, y in RESCALE_RATES]))
    if not 0 <= rate <= 1:
        raise ValueError(f"fa4 has rescale_rate={rate:g}; it must lie between 0 and 1: change rescale_rate")
    t = FA4Tile(
        head_dim=d,
        block_kv=block_kv,
        q_stages=q_stages,
        pair=pair,
        kv_stages=1,
        element=2,
        registers=REGISTERS[d],
        emulated=0 if share is None else 2 * round(share * block_kv / 2),
        threshold_log2=threshold,
        rescale_every=max(1, round(1 / rate)) if rate > 0 else 0,
        max_loaded=gpu.architecture == "sm_103",
        causal=attention.causal,
        longest_first=schedule.longest_first,
    )
    if share is None and gpu.pipe.ex2 >= SLOW_MUFU_CYCLES:
        t = replace(t, emulated=EMULATED.get((d, pair, attention.causal), OTHERWISE) * block_kv // LANES // 2 * 2)
    return replace(t, kv_stages=_kv_stages(schedule, t))


def _pair(schedule: FA4, attention: Attention, d: int, q_stages: int) -> bool:
    released = not attention.causal and d == 128 and attention.seqlen_q > LANES * q_stages
    pair = released if schedule.cta_pair is None else schedule.cta_pair
    if pair and attention.causal:
        raise ValueError("fa4 runs causal tiles one CTA at a time (a pair's rows end at different blocks): set cta_pair=false")
    return pair


def _kv_stages(schedule: FA4, t: FA4Tile) -> int:
    """Stages of the ring that K and V share: what Q and O leave, or as asked. Two at least: V is used with the next K."""
    stage = t.block_kv * t.head_dim * t.element // t.ctas
    room = (TILE_SMEM_BYTES - 2 * t.block_q * t.head_dim * t.element) // stage
    stages = min(room, 32) if schedule.kv_stages is None else schedule.kv_stages
    if not 2 <= stages <= room:
        raise ValueError(
            f"fa4 has kv_stages={stages}; tiles of {stage} B of K and V fit {room} times beside Q and O, and 2 are needed:"
            " change kv_stages"
        )
    return stages


def tensors(attention: Attention, t: FA4Tile) -> tuple[Tensor, ...]:
    """Q, K, V (of which each CTA of a pair loads half), O and LSE; a Q block is one tile of 128 rows."""
    named = qkv_tensors(attention, LANES, t.block_kv, t.element)
    named |= {name: replace(named[name], multicast=t.ctas) for name in ("K", "V")}
    return tuple(named.values())


def leader(t: FA4Tile) -> dict[str, Any]:
    """Of what a pair's CTAs send to the barriers of the first one, whose MMA warp waits for both."""
    return {"to": "leader"} if t.pair else {}


def both(t: FA4Tile) -> dict[str, Any]:
    """Of an arrival that both CTAs of a pair make there."""
    return {**leader(t), "ctas": t.ctas} if t.pair else {}


def rows(stage: int) -> Index:
    """The 128 rows of a CTA's Q tile ``stage``, as a block."""
    return Index(arg=f"q{stage}")


def grid(gpu: GPU, attention: Attention, t: FA4Tile) -> Tiles:
    """Order of tiles: Q blocks fastest; causal: longest first within sections of heads whose K and V fit in L2.

    A pair's two CTAs follow each other: its product's 256 rows are 128 of each. ``n_jumps`` groups of blocks end with a rescale.
    """
    clusters = ceil_div(attention.seqlen_q, t.block_q * t.ctas)
    shape = (attention.batch, attention.heads_q, clusters, t.ctas)
    batch, head, cluster, rank = (a.ravel() for a in np.indices(shape))
    if attention.causal and t.longest_first:
        kv_bytes = attention.seqlen_kv * (attention.head_dim + attention.head_dim_v) * t.element
        section = 1 << max(0, int(np.log2(max(1, L2_SECTION_BYTES // kv_bytes))))
        plane = batch * attention.heads_q + head
        order = np.lexsort((plane % section, -cluster, plane // section))
        batch, head, cluster, rank = batch[order], head[order], cluster[order], rank[order]
    needed, masked = kv_blocks(attention, t.block_q * t.ctas, t.block_kv, cluster)
    needed = np.maximum(needed, 1)  # rows that see no key still take one block, all of it masked
    plane_q, plane_kv = planes(attention, batch, head)
    rest = np.maximum(masked - 1, 0)
    jumps = (needed - 1) // t.rescale_every if t.rescale_every else np.zeros_like(needed)
    q = [(cluster * t.q_stages + stage) * t.ctas + rank for stage in range(t.q_stages)]
    columns = [*q, needed, rest, np.maximum(needed - 1 - rest, 0), jumps, needed - 1 - jumps * t.rescale_every]
    names = (*(f"q{stage}" for stage in range(t.q_stages)), "n_blocks", "n_masked", "n_full", "n_jumps", "n_plain")
    return Tiles(names=("plane_q", "plane_kv", *names), values=np.stack([plane_q, plane_kv, *columns], axis=1))
