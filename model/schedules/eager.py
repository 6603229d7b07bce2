"""The copies that an eager framework makes before its matrix products when Q, K and V lie packed as (batch, row, 3, head, dim).

``einsum('bthd,bshd->bhts', q, k / sqrt(d))`` permutes its operands and hands them to a batched product, which takes one stride
for batch and head together. A packed array has none, so each operand becomes a contiguous copy: Q and V row by row, K turned,
because the product's second operand is (batch head, dim, row). PyTorch: aten/src/ATen/native/Linear.cpp, sumproduct_pair. The
division is a pass of its own. Elementwise kernels that are not contiguous run 128 threads with four elements each, one element
an access (CUDALoops.cuh, launch_legacy_kernel).
"""

from __future__ import annotations

import numpy as np

from ..attention import Attention
from ..program import Index, Program, Tensor, Tiles
from ..schedule import Builder
from .grid import ceil_div

THREADS, ELEMENTS = 128, 512  # of a CTA of an elementwise kernel
SECTOR_BYTES = 32  # what one access brings from L2, however little of it the thread asked for


def rows_copy(attention: Attention, name: str, source: str, target: str) -> Program:
    """``target`` = ``source`` row by row; a CTA copies as many whole rows as it has elements for."""
    rows, width = attention.seqlen_q if source == "Q" else attention.seqlen_kv, _width(attention, source)
    block = max(1, ELEMENTS // width)
    b = Builder(name=f"eager_{name}", warps=THREADS // 32, registers=32)
    b.registers_tile("rows", rows=block, cols=width, bytes_per_element=attention.dtype_bytes)
    b.op("load", writes="rows", reads=source, index=Index(arg="block"))
    b.op("wait_load", scoreboard=2)
    b.op("store", writes=f"{target}@rows", reads="rows", index=Index(arg="block"))
    tensors = tuple(view(attention, source, each, block) for each in (source, f"{target}@rows"))
    plane, index = (a.ravel() for a in np.meshgrid(np.arange(tensors[0].heads), np.arange(ceil_div(rows, block)), indexing="ij"))
    return b.build(tensors=tensors, tiles=Tiles(names=("plane", "block"), values=np.stack([plane, index], axis=1)))


def turned_copy(attention: Attention, source: str, target: str) -> Program:
    """``target`` = K turned: threads go along the rows of ``source``, so each value they read costs a sector of L2."""
    rows, width, e = attention.seqlen_kv, attention.head_dim, attention.dtype_bytes
    block, lanes = min(ELEMENTS, rows), SECTOR_BYTES // e
    b = Builder(name="eager_turn_k", warps=THREADS // 32, registers=32)
    b.registers_tile("sectors", rows=block, cols=lanes, bytes_per_element=e)
    b.registers_tile("column", rows=block, cols=1, bytes_per_element=e)
    b.op("load", writes="sectors", reads=f"{source}@sectors", index=Index(arg="sector"))
    b.op("wait_load", scoreboard=2)
    b.op("column", writes="column", reads="sectors", index=Index(arg="lane"))
    b.op("store", writes=f"{target}@column", reads="column", index=Index(arg="column"))
    tensors = (
        view(attention, "K", f"{source}@sectors", block, lanes),
        view(attention, "K", f"{target}@column", block, 1),
    )
    plane, col, part = (
        a.ravel()
        for a in np.meshgrid(np.arange(tensors[0].heads), np.arange(width), np.arange(ceil_div(rows, block)), indexing="ij")
    )
    sector = part * tensors[0].col_blocks + col // lanes
    values = np.stack([plane, sector, col % lanes, part * width + col], axis=1)
    return b.build(tensors=tensors, tiles=Tiles(names=("plane", "sector", "lane", "column"), values=values))


def view(
    attention: Attention, like: str, name: str, block_rows: int, cols_per_block: int = 0, head_arg: str = "plane"
) -> Tensor:
    """Tensor ``name``, shaped as Q, K or V (``like``), in blocks of ``block_rows``."""
    query = like == "Q"
    return Tensor(
        name=name,
        heads=attention.batch * (attention.heads_q if query else attention.heads_kv),
        rows=attention.seqlen_q if query else attention.seqlen_kv,
        cols=_width(attention, like),
        bytes_per_element=attention.dtype_bytes,
        block_rows=block_rows,
        cols_per_block=cols_per_block,
        head_arg=head_arg,
    )


def _width(attention: Attention, like: str) -> int:
    return attention.head_dim_v if like == "V" else attention.head_dim
