"""FA3's tiles, grid and refusals: which block sizes and warpgroups it runs with, and in which order tiles are handed out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..attention import Attention
from ..gpu import GPU
from ..profiles import in_order_profile
from ..program import Tensor, Tiles
from .grid import ceil_div, kv_blocks, planes, qkv_tensors

if TYPE_CHECKING:
    from .fa3 import FA3

#: (head_dim, 8-bit) -> (block_q, block_kv causal, block_kv otherwise), as released (tile_size.h).
TILES = {
    (64, False): (192, 128, 192),
    (96, False): (192, 144, 144),
    (128, False): (128, 128, 176),
    (192, False): (128, 112, 112),
    (256, False): (128, 80, 80),
    (64, True): (192, 160, 160),
    (96, True): (192, 128, 128),
    (128, True): (128, 224, 224),
    (192, True): (128, 160, 160),
    (256, True): (128, 128, 128),
}
#: The same of July 2024, as far as its binaries were read; None: not with a causal mask.
TILES_2024: Mapping[tuple[int, bool], tuple[int, int | None, int]] = {
    (64, False): (192, 128, 128),
    (128, False): (128, 128, 176),
    (256, False): (128, None, 80),
    (128, True): (128, None, 256),
    (256, True): (128, None, 128),
}
#: What a phase's counts are of, beside its products.
COUNTED = ("fma", "alu", "xu", "lsu", "other")
#: Consumer warpgroups -> registers per thread of the producer and of consumers after setmaxnreg.
REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}
MOST_REGISTERS, REGISTER_FILE = 255, 65536  # a thread's, a multiprocessor's
#: Bytes of K and V that the causal order keeps in L2 at a time (flash_fwd_launch_template.h).
L2_SECTION_BYTES = 32 * 2**20


@dataclass(frozen=True, kw_only=True)
class FA3Tile:
    """What a problem runs with. ``groups``: consumer warpgroups of 64 rows each; ``element``: bytes of Q, K and V."""

    head_dim: int
    block_q: int
    block_kv: int
    groups: int
    cluster: int
    element: int
    pingpong: bool
    p_in_smem: bool
    #: Whether O is rescaled before P V instead of after it, and that while Q K^T is issued.
    rescale_first: bool
    rescale_in_qk: bool
    longest_first: bool
    specialized: bool
    overlap: bool
    build: str | None
    #: Without overlap: whether a turn begins at P V (else at Q K^T), and lasts until S is known (else until Q K^T is issued).
    pv_in_turn: bool
    scores_in_turn: bool
    #: When a tile's O has left V's buffer and the producer is told: at the tile's "end", in the "next" tile, or "never".
    o_told: str

    @property
    def fp8(self) -> bool:
        return self.element == 1

    @property
    def profile_dtype(self) -> str:
        return "fp8_e4m3" if self.fp8 else "bf16"

    @property
    def producer_registers(self) -> int:
        return REGISTERS[self.groups][0]

    @property
    def consumer_registers(self) -> int:
        return REGISTERS[self.groups][1] if self.specialized else self.launch_registers

    @property
    def launch_registers(self) -> int:
        """Of the register file, what a thread can hold at launch."""
        return min(MOST_REGISTERS, REGISTER_FILE // (128 * (self.groups + self.specialized)) // 8 * 8)


def check(gpu: GPU, attention: Attention) -> None:
    """Refuse what FA3's forward cannot run, in a sentence."""
    if gpu.wgmma is None:
        raise ValueError(f"fa3 multiplies with wgmma and {gpu.name} has none: choose fa2, or gpu h100 or h200")
    if attention.pass_ != "fwd":
        raise ValueError(f"fa3 has a forward schedule only, got pass {attention.pass_!r}: choose --pass fwd")
    if attention.dtype not in ("bf16", "fp16", "fp8"):
        raise ValueError(f"fa3 runs bf16, fp16 or fp8, got dtype {attention.dtype!r}: change dtype")


def tile(schedule: FA3, gpu: GPU, attention: Attention) -> FA3Tile:
    need, fp8 = max(attention.head_dim, attention.head_dim_v), attention.dtype == "fp8"
    sizes = [d for d, small in TILES if d >= need and small == fp8]
    if not sizes:
        raise ValueError(f"fa3 has no tile for head_dim {need}; the largest is 256: reduce head_dim")
    d = min(sizes)
    released_q, causal_kv, other_kv = TILES[d, fp8]
    first = schedule.build == "2024-07"
    if first:
        released_q, causal_kv, other_kv = _first_tile(d, fp8, attention)
    elif schedule.build != "released":
        raise ValueError(f"fa3 has no build {schedule.build!r}; it has released and 2024-07 (as published first): set one")
    block_q, block_kv = schedule.block_q or released_q, schedule.block_kv or (causal_kv if attention.causal else other_kv)
    step = 32 if fp8 else 16
    if block_q % 64 or not 64 <= block_q <= 192 or block_kv % step or not step <= block_kv <= 256:
        raise ValueError(
            f"fa3 tile {block_q}x{block_kv}: block_q must be 64, 128 or 192 (one to three warpgroups of 64 rows) and block_kv"
            f" a multiple of {step} up to 256 (wgmma's N and k-step); change block_q or block_kv"
        )
    if schedule.stages < 1:
        raise ValueError(f"fa3 has stages={schedule.stages}; the K/V ring needs at least 1: change stages")
    _check_own_loads(schedule, fp8)
    groups = block_q // 64
    cluster = schedule.cluster if schedule.warp_specialization else 1
    if cluster is None:
        even = ceil_div(attention.seqlen_q, block_q) % 2 == 0
        cluster = 2 if even and not attention.causal and d >= 128 and (not fp8 or d == 192 or first) else 1
    if cluster not in (1, 2):
        raise ValueError(f"fa3 has cluster={cluster}; it must be 1 or 2: change cluster")
    if cluster == 2 and (attention.causal or ceil_div(attention.seqlen_q, block_q) % 2):
        raise ValueError(
            "fa3 has cluster=2, in which two neighbouring Q blocks share each K/V block: that takes an even number of Q blocks"
            f" of {block_q} rows and no mask; set cluster=1"
        )
    released = d >= 128 if fp8 else d <= 128
    overlap = schedule.intra_overlap and not (first and fp8)
    wide = not fp8 and d > 128 and schedule.intra_overlap  # in order no product of Q K^T is under way to hide it
    t = FA3Tile(
        head_dim=d,
        block_q=block_q,
        block_kv=block_kv,
        groups=groups,
        cluster=cluster,
        element=1 if fp8 else 2,
        pingpong=(released if schedule.pingpong is None else schedule.pingpong) and groups > 1,
        p_in_smem=not fp8 and d <= 96 and not (attention.causal and d <= 64) and not first,
        longest_first=schedule.longest_first and not first,
        rescale_first=wide or (first and overlap),
        rescale_in_qk=wide,
        specialized=schedule.warp_specialization,
        overlap=overlap,
        build=schedule.build if first else None,
        pv_in_turn=not first or d == 128,
        scores_in_turn=first and not overlap,
        o_told="end" if not first else "next" if schedule.persistent and schedule.warp_specialization else "never",
    )
    _check_accumulators(t)
    return t


def _first_tile(head_dim: int, fp8: bool, attention: Attention) -> tuple[int, int, int]:
    """July 2024's block_q and block_kv with a mask and without one, where its kernels were read."""
    block_q, causal_kv, other_kv = TILES_2024.get((head_dim, fp8), (0, None, 0))
    if max(attention.head_dim, attention.head_dim_v) not in (64, 128, 256) or not block_q or (attention.causal and not causal_kv):
        raise ValueError(
            "fa3's build 2024-07 was read for bf16 and fp16 at head_dim 64, 128 and (without a mask) 256, and for FP8 without a"
            f" mask at 128 and 256, got {attention.dtype}, head_dim {attention.head_dim}, causal={attention.causal}:"
            " set build=released"
        )
    return block_q, causal_kv or other_kv, other_kv


def _check_accumulators(t: FA3Tile) -> None:
    """S, P (unless it goes through shared memory) and O of 64 rows live in the registers of a warpgroup's 128 threads at once."""
    p = 0 if t.p_in_smem else t.block_kv * t.element // 8
    needed = t.block_kv // 2 + p + t.head_dim // 2
    if needed > t.consumer_registers:
        raise ValueError(
            f"fa3 tile {t.block_q}x{t.block_kv} holds {needed} registers a thread of S, P and O at head_dim {t.head_dim}, and"
            f" {t.groups} consumer warpgroups have {t.consumer_registers} each: change block_q or block_kv"
        )


def _check_own_loads(schedule: FA3, fp8: bool) -> None:
    """What needs the producer: a ring of one stage, V transposed for FP8, loads shared with another CTA."""
    if schedule.warp_specialization:
        return
    if schedule.stages < 2:
        raise ValueError(
            f"fa3 without warp specialization has stages={schedule.stages}; a warpgroup loads one block while it multiplies"
            " another, so that the ring needs at least 2: change stages"
        )
    if fp8:
        raise ValueError("fa3 in fp8 has V transposed by its producer's warpgroup: keep warp_specialization, or choose bf16")
    if schedule.cluster not in (None, 1):
        raise ValueError(
            f"fa3 has cluster={schedule.cluster}, and consumers that load for themselves load for their own CTA alone:"
            " keep warp_specialization, or set cluster=1"
        )


def tensors(attention: Attention, t: FA3Tile) -> tuple[Tensor, ...]:
    """Q, K, V (with what a cluster shares), O and LSE; a Q block is one warpgroup's rows."""
    from dataclasses import replace

    named = qkv_tensors(attention, t.block_q // t.groups, t.block_kv, t.element)
    named |= {name: replace(named[name], multicast=t.cluster) for name in ("K", "V")}
    named["O"] = replace(named["O"], bytes_per_element=2)
    return tuple(named.values())


def grid(gpu: GPU, attention: Attention, t: FA3Tile) -> Tiles:
    """Order of the persistent CTAs' tiles: Q blocks fastest; causal: longest first within sections of heads that fit in L2."""
    n_q = ceil_div(attention.seqlen_q, t.block_q)
    shape = (attention.batch, attention.heads_q, n_q)
    batch, head, q_block = (a.ravel() for a in np.indices(shape))
    if attention.causal and t.longest_first:
        kv_bytes = attention.seqlen_kv * (attention.head_dim + attention.head_dim_v) * t.element
        group = attention.heads_q // attention.heads_kv
        section = max(1, 1 << max(0, int(np.log2(max(1, L2_SECTION_BYTES // kv_bytes))))) * group
        plane = batch * attention.heads_q + head
        order = np.lexsort((plane % section, -q_block, plane // section))
        batch, head, q_block = batch[order], head[order], q_block[order]
    needed, masked = kv_blocks(attention, t.block_q, t.block_kv, q_block)
    plane_q, plane_kv = planes(attention, batch, head)
    rest = np.maximum(masked - 1, 0)
    if t.build and attention.causal:  # so many steps with a mask, needed or not
        rest = np.clip(needed - 1, 0, ceil_div(t.block_q, t.block_kv))
    elif t.build and t.fp8:  # the blocks beside the first that are peeled off the loop: one less than its stages
        rest = np.clip(needed - 1, 0, 1)
    names = ("plane_q", "plane_kv", "q_block", "n_blocks", "n_masked", "n_full")
    values = np.stack([plane_q, plane_kv, q_block, needed, rest, np.maximum(needed - 1 - rest, 0)], axis=1)
    return Tiles(names=names, values=values)


def peeled(t: FA3Tile) -> dict[str, Mapping[str, Any]]:
    """Phases of the block that July 2024's FP8 peels off its loop."""
    own = in_order_profile(
        "fa3", head_dim=t.head_dim, block_q=t.block_q, block_kv=t.block_kv, dtype=t.profile_dtype, build=t.build
    )
    return {phase["name"]: phase for phase in own["peeled"]} if own else {}


def in_order(t: FA3Tile, overlapped: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Phases of the loop without overlap: of its own binary, or where none was read the overlapped one's with softmax in one."""
    turns = {"ping_pong": t.pingpong} if t.build and not t.fp8 else {}
    own = in_order_profile(
        "fa3", head_dim=t.head_dim, block_q=t.block_q, block_kv=t.block_kv, dtype=t.profile_dtype, build=t.build, **turns
    )
    if own:
        return {phase["name"]: phase for phase in own["phases"]}
    parts = [overlapped[name] for name in ("softmax_beside_pv", "softmax_after_pv")]
    return {**overlapped, "softmax": {c: sum(p[c] for p in parts) for c in (*COUNTED, "stall_cycles")}}
