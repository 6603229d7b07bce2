"""FA4's tiles, grid and refusals: which block sizes, stages and CTA pairs it runs with, and the order of its tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..attention import Attention
from ..gpu import GPU
from ..program import Index, IntArray, Tensor, Tiles
from .grid import ceil_div, kv_blocks, planes, qkv_tensors

if TYPE_CHECKING:
    from .fa4 import FA4

#: Rows of a Q tile: the lanes of tensor memory.
LANES = 128
#: Head dimensions that run as any others up to STANDARD; of larger ones DeepSeek's pair alone.
STANDARD, DEEPSEEK = 128, (192, 128)
#: (head_dim, pair, causal) -> exponentials of a row of 128 that the FMA pipe computes, and the share of the row from which it
#: does, else OTHERWISE, as flash-attn-4 4.0.0b36 compiles it (its rule: of every ``freq`` values the last four, but of no value
#: in the last quarter; freq 10, 16 and 32). The code of March 2026, when the paper appeared, had freq 10 for causal head_dim 128
#: and 12 for pairs. Chips with a faster MUFU emulate none.
EMULATED = {
    (128, True, False): (24, 0.25),
    (192, True, False): (24, 0.0),
    (192, False, True): (8, 0.25),
    (192, False, False): (0, 0.25),
}
#: As above, of 8-bit operands (freq 8).
EMULATED_FP8 = {(128, False, True): (32, 0.25)}
OTHERWISE = (16, 0.25)
#: MUFU cycles of a warp's exponential from which emulation pays.
SLOW_MUFU_CYCLES = 8
#: Registers per thread of softmax, correction and the other warps after setmaxnreg, below head_dim 96 and from there on.
REGISTERS = {2: ((200, 64, 48), (192, 80, 48)), 1: ((168, 96, 80), (192, 80, 48))}
#: O leaves in 16 bits whatever comes in.
O_BYTES = 2
#: log2 of what P leaves of e4m3's 448 when it is times 2^4, the least that was released (2^8 goes with a threshold of 0).
E4M3_ROOM_LOG2 = 4.8
#: SMEM that Q, O and the K/V stages may take (flash_fwd_sm100.py).
TILE_SMEM_BYTES = 224 * 1024
#: Bytes of K and V that the causal order keeps in L2 at a time (tile_scheduler.py).
L2_SECTION_BYTES = 50 * 2**20
#: Of the rescales at threshold 0 those that remain at others, of normally distributed scores in 32 blocks of 128 keys at head_dim
#: 128 (model/lowprecision.py: conditional_rescale, warps of 32 rows, blocks from the last to the first).
RESCALES_LEFT = ((0.0, 1.0), (1.0, 0.58), (2.0, 0.25), (3.0, 0.024), (4.0, 0.0))
WARP_ROWS = 32


@dataclass(frozen=True, kw_only=True)
class FA4Tile:
    """What a problem runs with. ``element``: bytes of Q, K and V; ``emulated``: exponentials of a row on the FMA pipe, from the
    share ``emulated_from`` of the row on; ``rescale_rate``: rescales of O a block, None those of independent scores;
    ``max_loaded``: the chip's loads give row maxima; ``persistent``: CTAs take tile after tile (causal tiles, of unequal
    length, are a CTA each)."""

    head_dim: int
    head_dim_v: int
    block_kv: int
    q_stages: int
    pair: bool
    kv_stages: int
    element: int
    registers: tuple[int, int, int]
    emulated: int
    emulated_from: float
    threshold_log2: float
    rescale_rate: float | None
    max_loaded: bool
    causal: bool
    longest_first: bool
    persistent: bool

    @property
    def block_q(self) -> int:
        return LANES * self.q_stages

    @property
    def ctas(self) -> int:
        return 2 if self.pair else 1

    @property
    def tmem_columns(self) -> int:
        """S (with P in its place) and O of each Q tile, 32 bits an element."""
        return self.q_stages * (self.block_kv + self.head_dim_v)

    @property
    def shared(self) -> bool:
        """O leaves through Q's place: at DeepSeek's shape both and three stages do not fit."""
        return self.head_dim > STANDARD

    @property
    def q_bytes(self) -> int:
        return LANES * self.head_dim * self.element

    @property
    def o_bytes(self) -> int:
        return LANES * self.head_dim_v * O_BYTES

    @property
    def k_buffer(self) -> str:
        """K and V share stages; the larger of the two names them."""
        return "KV" if self.head_dim >= self.head_dim_v else "KV.k"

    @property
    def v_buffer(self) -> str:
        return "KV.v" if self.head_dim >= self.head_dim_v else "KV"

    def q_buffer(self, w: int) -> str:
        """Where Q tile ``w`` lies: of two tiles in one place the larger names it."""
        return f"Os{w}.Q" if self.shared and self.o_bytes > self.q_bytes else f"Qs{w}"

    def o_buffer(self, w: int) -> str:
        return f"Qs{w}.O" if self.shared and self.o_bytes <= self.q_bytes else f"Os{w}"

    @property
    def uneven(self) -> bool:
        """Three stages of which only two at a time have room for a K: V, a third smaller, lies between them."""
        return (self.head_dim, self.head_dim_v) == DEEPSEEK and self.kv_stages == 3

    @property
    def saved_bytes(self) -> int:
        """What uneven stages take less than three of K."""
        return self.block_kv * (self.head_dim - self.head_dim_v) * self.element // self.ctas if self.uneven else 0


def check(gpu: GPU, attention: Attention) -> None:
    """Refuse what FA4's forward cannot run, in a sentence."""
    if gpu.tmem is None or gpu.tcgen05 is None:
        instead = "fa3" if gpu.wgmma is not None else "fa2"
        raise ValueError(f"fa4 keeps S and O in TMEM; {gpu.name} has none: choose {instead}, or gpu b200")
    if attention.pass_ != "fwd":
        raise ValueError(f"fa4 has a forward schedule only, got pass {attention.pass_!r}: choose --pass fwd")
    if attention.dtype not in ("bf16", "fp16", "fp8"):
        raise ValueError(f"fa4 runs bf16, fp16 or fp8, got dtype {attention.dtype!r}: change dtype")
    dims = (attention.head_dim, attention.head_dim_v)
    if max(dims) > STANDARD and dims != DEEPSEEK:
        raise ValueError(
            f"fa4 has no tile for head_dim {dims[0]} with head_dim_v {dims[1]}; each may be up to {STANDARD}, or"
            f" {DEEPSEEK[0]} with {DEEPSEEK[1]}: change head_dim or head_dim_v"
        )


def tile(schedule: FA4, gpu: GPU, attention: Attention) -> FA4Tile:
    element = attention.dtype_bytes
    # a k-step of Q K^T has 32 bytes of head_dim, O's columns come in sixteens
    d, dv = ceil_div(attention.head_dim, 32 // element) * (32 // element), ceil_div(attention.head_dim_v, 16) * 16
    block_kv = schedule.block_kv
    if block_kv % 32 or not 32 <= block_kv <= 128:
        raise ValueError(f"fa4 has block_kv={block_kv}; it must be 32, 64, 96 or 128 (a thread holds a row): change block_kv")
    q_stages = schedule.q_stages if schedule.q_stages is not None else 2 if attention.seqlen_q > LANES else 1
    if q_stages not in (1, 2):
        raise ValueError(f"fa4 has q_stages={q_stages}; it must be 1 or 2 (two S and two O fill TMEM): change q_stages")
    pair = _pair(schedule, attention, (d, dv), q_stages)
    threshold = _threshold(schedule, element)
    rate = schedule.rescale_rate
    if rate is not None and not 0 <= rate <= 1:
        raise ValueError(f"fa4 has rescale_rate={rate:g}; it must lie between 0 and 1: change rescale_rate")
    emulated, emulated_from = _emulated(schedule, gpu, attention, d, pair)
    t = FA4Tile(
        head_dim=d,
        head_dim_v=dv,
        block_kv=block_kv,
        q_stages=q_stages,
        pair=pair,
        kv_stages=1,
        element=element,
        registers=REGISTERS[element][d >= 96],
        emulated=emulated,
        emulated_from=emulated_from,
        threshold_log2=threshold,
        rescale_rate=rate,
        max_loaded=gpu.architecture == "sm_103",
        causal=attention.causal,
        longest_first=schedule.longest_first,
        persistent=not attention.causal,
    )
    return replace(t, kv_stages=_kv_stages(schedule, t))


def _threshold(schedule: FA4, element: int) -> float:
    """8 in log2 units as released. 0 for 8-bit P, which times 2^8 has no more room above; it was 4 until July 2026 (849f660f)."""
    threshold = schedule.rescale_threshold
    if threshold is None:
        return 8.0 if element > 1 else 0.0
    most = 64.0 if element > 1 else E4M3_ROOM_LOG2
    if not 0 <= threshold <= most:
        raise ValueError(f"fa4 has rescale_threshold={threshold:g}; it must lie between 0 and {most:g}: change rescale_threshold")
    return threshold


def _emulated(schedule: FA4, gpu: GPU, attention: Attention, d: int, pair: bool) -> tuple[int, float]:
    """How many exponentials of a row the FMA pipe computes, and from which share of the row on."""
    share = schedule.exp2_emulation
    if share is not None:
        if not 0 <= share <= 0.5:
            raise ValueError(f"fa4 has exp2_emulation={share:g}; it must lie between 0 and 0.5 of a row: change exp2_emulation")
        return 2 * round(share * schedule.block_kv / 2), OTHERWISE[1]
    if gpu.pipe.ex2 < SLOW_MUFU_CYCLES:
        return 0, OTHERWISE[1]
    key = (d, pair, attention.causal)
    of_row, start = EMULATED.get(key, OTHERWISE)
    if attention.dtype == "fp8":
        of_row, start = EMULATED_FP8.get(key, (of_row, start))
    return of_row * schedule.block_kv // LANES // 2 * 2, start


def _pair(schedule: FA4, attention: Attention, dims: tuple[int, int], q_stages: int) -> bool:
    released = not attention.causal and dims in ((STANDARD, STANDARD), DEEPSEEK) and attention.seqlen_q > LANES * q_stages
    pair = released if schedule.cta_pair is None else schedule.cta_pair
    if pair and attention.causal:
        raise ValueError("fa4 runs causal tiles one CTA at a time (a pair's rows end at different blocks): set cta_pair=false")
    return pair


def _kv_stages(schedule: FA4, t: FA4Tile) -> int:
    """Stages of the ring that K and V share: what Q and O leave, or as asked. Two at least: V is used with the next K."""
    stage = t.block_kv * max(t.head_dim, t.head_dim_v) * t.element // t.ctas
    beside = t.q_stages * (max(t.q_bytes, t.o_bytes) if t.shared else t.q_bytes + t.o_bytes)
    room = (TILE_SMEM_BYTES - beside) // stage
    if room == 2 and (t.head_dim, t.head_dim_v) == DEEPSEEK:
        room = 3  # uneven ones
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
    named["O"] = replace(named["O"], bytes_per_element=O_BYTES)
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

    A pair's two CTAs follow each other: its product's 256 rows are 128 of each. ``n_jumps`` blocks after the first rescale O;
    ``n_thirds``: groups of three after the first block, in which K comes back to a stage.
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
    jumps = _rescales(t, needed)
    q = [(cluster * t.q_stages + stage) * t.ctas + rank for stage in range(t.q_stages)]
    columns = [*q, needed, rest, np.maximum(needed - 1 - rest, 0), jumps, needed - 1 - jumps]
    columns += [(needed - 1) // 3, (needed - 1) % 3]
    counted = ("n_blocks", "n_masked", "n_full", "n_jumps", "n_plain", "n_thirds", "n_rest")
    names = (*(f"q{stage}" for stage in range(t.q_stages)), *counted)
    return Tiles(names=("plane_q", "plane_kv", *names), values=np.stack([plane_q, plane_kv, *columns], axis=1))


def _rescales(t: FA4Tile, blocks: IntArray) -> IntArray:
    """Rescales of a warp's O in a tile of so many blocks.

    Of independent scores, block k holds a row's largest so far with probability 1/k, and one of a warp's 32 rows is enough.
    """
    if t.rescale_rate is not None:
        return np.asarray(np.rint(t.rescale_rate * (blocks - 1)), np.int64)
    k = np.arange(1, int(blocks.max()) + 1)
    grown = np.cumsum(np.where(k > 1, 1 - (1 - 1 / k) ** WARP_ROWS, 0.0))[blocks - 1]
    left = np.interp(t.threshold_log2, [x for x, _ in RESCALES_LEFT], [y for _, y in RESCALES_LEFT])
    return np.asarray(np.rint(left * grown), np.int64)
