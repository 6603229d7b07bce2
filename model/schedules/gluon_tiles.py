"""Gluon's tiles, grid and refusals: what its attention kernel runs with, and the order of its tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..attention import Attention
from ..gpu import GPU
from ..program import Tensor, Tiles
from .grid import ceil_div, kv_blocks, planes, qkv_tensors

if TYPE_CHECKING:
    from .gluon import Gluon

#: Both head dimensions are padded to one of these.
HEAD_DIMS = (32, 64, 128)
#: O leaves in 16 bits. (The kernel writes 8 bits where Q has 8; nothing else here does, and comparisons of numbers need more.)
O_BYTES = 2
#: Rows of a Q tile, of which a CTA has two, and keys of a K/V block (SPLIT_M and BLOCK_N).
LANES, BLOCK_KV = 128, 128
#: Heads whose causal tiles take turns (GROUP_SIZE_N); without a mask one head follows the other.
CAUSAL_HEADS = 4
#: Stages that K and V share, of 16-bit and of 8-bit elements, by head dimension (num_kv_buffers).
STAGES = {2: {32: 6, 64: 6, 128: 3}, 1: {32: 8, 64: 8, 128: 4}}
#: The head dimension at which the two softmax warpgroups take turns at their exponentials (use_exp2_turnstile).
TURNS = 64
#: Exponentials of a row are computed and stored in 256 / head_dim pieces (SPLIT_EXP_FACTOR).
PIECES = 256


@dataclass(frozen=True, kw_only=True)
class GluonTile:
    """What a problem runs with. ``element``: bytes of Q, K and V; ``kv_stages``: places of the ring that K and V share."""

    head_dim: int
    kv_stages: int
    element: int
    causal: bool

    @property
    def pieces(self) -> int:
        return PIECES // self.head_dim

    @property
    def turns(self) -> bool:
        return self.head_dim == TURNS

    @property
    def tmem_columns(self) -> int:
        """S (with P, the row's factor and its sums in its place) and O of both Q tiles, up to a power of two."""
        return 1 << (2 * (BLOCK_KV + self.head_dim) - 1).bit_length()


def tile(schedule: Gluon, gpu: GPU, attention: Attention) -> GluonTile:
    """The tile, or a ValueError with what to change."""
    if gpu.tcgen05 is None or gpu.tmem is None:
        raise ValueError(f"gluon keeps S and O in TMEM; {gpu.name} has none: choose triton, or gpu b200")
    if attention.pass_ != "fwd":
        raise ValueError(f"gluon has a forward schedule only, got pass {attention.pass_!r}: choose --pass fwd")
    if attention.dtype not in ("bf16", "fp16", "fp8"):
        raise ValueError(f"gluon runs bf16, fp16 or fp8, got dtype {attention.dtype!r}: change dtype")
    need = max(attention.head_dim, attention.head_dim_v)
    if need > HEAD_DIMS[-1]:
        raise ValueError(f"gluon has no tile for head_dim {need}; the largest is {HEAD_DIMS[-1]}: reduce head_dim")
    head_dim = min(size for size in HEAD_DIMS if size >= need)
    most = STAGES[attention.dtype_bytes][head_dim]
    stages = most if schedule.kv_stages is None else schedule.kv_stages
    if not 2 <= stages <= most:
        raise ValueError(
            f"gluon has kv_stages={stages}; it keeps {most} at head_dim {head_dim} in {attention.dtype}, and 2 are needed:"
            " change kv_stages"
        )
    return GluonTile(head_dim=head_dim, kv_stages=stages, element=attention.dtype_bytes, causal=attention.causal)


def tensors(attention: Attention, t: GluonTile) -> tuple[Tensor, ...]:
    """Q, K, V, O and LSE; a Q block is one tile of 128 rows."""
    named = qkv_tensors(attention, LANES, BLOCK_KV, t.element)
    named["O"] = replace(named["O"], bytes_per_element=O_BYTES)
    return tuple(named.values())


def grid(attention: Attention, t: GluonTile) -> Tiles:
    """Order of tiles (ProgramScheduler): Q blocks fastest; causal ones in order of rows, the heads of a group in turns."""
    shape = (attention.batch, attention.heads_q, ceil_div(attention.seqlen_q, 2 * LANES))
    batch, head, block = (a.ravel() for a in np.indices(shape))
    if t.causal:
        plane = batch * attention.heads_q + head
        order = np.lexsort((plane, block, plane // CAUSAL_HEADS))
        batch, head, block = batch[order], head[order], block[order]
    needed, masked = kv_blocks(attention, 2 * LANES, BLOCK_KV, block)
    full = needed - masked
    needed = np.maximum(needed, 1)  # rows that see no key still take one block, all of it masked
    plane_q, plane_kv = planes(attention, batch, head)
    names = ("plane_q", "plane_kv", "q0", "q1", "n_blocks", "n_full", "n_masked")
    values = np.stack([plane_q, plane_kv, 2 * block, 2 * block + 1, needed, full, needed - full], axis=1)
    return Tiles(names=names, values=values)
