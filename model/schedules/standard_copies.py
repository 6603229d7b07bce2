"""The copies that an eager framework makes where Q, K and V lie as (batch, row, head, dim), in three arrays or packed in one.

``einsum('bthd,bshd->bhts', q, k / sqrt(d))`` permutes its operands and hands them to a batched product, which takes one stride
for batch and head together. Such an array has none, so each operand becomes a contiguous copy: Q and V row by row, K turned,
because the product's second operand is (batch head, dim, row). PyTorch: aten/src/ATen/native/Linear.cpp, sumproduct_pair. The
division is a pass of its own. Elementwise kernels that are not contiguous run 128 threads with four elements each, one element
an access (CUDALoops.cuh, launch_legacy_kernel).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..attention import Attention
from ..profiles import kernel_profile
from ..program import Index, IntArray, Program, Tensor, Tiles
from ..schedule import Builder
from .grid import ceil_div

THREADS, EACH = 128, 4  # threads of an elementwise CTA, and elements of each, one after the other
SECTOR_BYTES = 32  # what one access brings from L2, however little of it the thread asked for


def rows_copy(attention: Attention, name: str, source: str, target: str, *, dims: int, counts: str) -> Program:
    """``target`` = ``source`` row by row; ``dims``: dimensions that the kernel's offsets divide by (profiles/eager.toml)."""
    width = _width(attention, source)
    rows, cols = max(1, THREADS // width), min(width, THREADS)
    tensors = tuple(view(attention, source, f"{each}@rows", rows, cols) for each in (source, target))
    b, profile = _elementwise(f"eager_{name}", dims, counts)
    b.registers_tile("rows", rows=rows, cols=cols, bytes_per_element=attention.dtype_bytes)
    at = Index(arg="first", loop="element")
    with _elements(b, profile):
        b.op("load", writes="rows", reads=f"{source}@rows", index=at)
        b.op("wait_load", scoreboard=2)
        b.op("store", writes=f"{target}@rows", reads="rows", index=at)
    plane, first, left = _threads(tensors[0].heads, tensors[0].blocks)
    tiles = Tiles(names=("plane", "first", "left"), values=np.stack([plane, first, left], axis=1))
    return b.build(tensors=tensors, tiles=tiles, profile=_label(profile))


def turned_copy(attention: Attention, source: str, target: str, *, counts: str) -> Program:
    """``target`` = K turned: threads go along the rows of ``source``, so each value they read costs a sector of L2."""
    lanes = SECTOR_BYTES // attention.dtype_bytes
    rows = min(THREADS, attention.seqlen_kv)
    tensors = (view(attention, "K", f"{source}@sectors", rows, lanes), view(attention, "K", f"{target}@column", rows, 1))
    b, profile = _elementwise("eager_turn_k", 3, counts)
    b.registers_tile("sectors", rows=rows, cols=lanes, bytes_per_element=attention.dtype_bytes)
    b.registers_tile("column", rows=rows, cols=1, bytes_per_element=attention.dtype_bytes)
    step = tensors[0].col_blocks  # from one block of rows to the next
    with _elements(b, profile):
        b.op("load", writes="sectors", reads=f"{source}@sectors", index=Index(arg="sector", loop="element", coef=step))
        b.op("wait_load", scoreboard=2)
        b.op("column", writes="column", reads="sectors", index=Index(arg="lane"))
        at = Index(arg="column", loop="element", coef=attention.head_dim)
        b.op("store", writes=f"{target}@column", reads="column", index=at)
    plane, first, left = _threads(tensors[0].heads * attention.head_dim, tensors[0].row_blocks)
    plane, col = np.divmod(plane, attention.head_dim)
    columns = [plane, first * step + col // lanes, col % lanes, first * attention.head_dim + col, left]
    tiles = Tiles(names=("plane", "sector", "lane", "column", "left"), values=np.stack(columns, axis=1))
    return b.build(tensors=tensors, tiles=tiles, profile=_label(profile))


def _elementwise(name: str, dims: int, counts: str) -> tuple[Builder, Mapping[str, Any] | None]:
    profile = kernel_profile("eager", name="copy", dims=dims) if counts == "binary" else None
    return Builder(name=name, warps=THREADS // 32, registers=profile["registers"] if profile else 32), profile


@contextmanager
def _elements(b: Builder, profile: Mapping[str, Any] | None) -> Iterator[None]:
    """A thread's elements one after the other, as many as the CTA has left."""
    counts, stalls = (profile["per_trip"], profile["stall_cycles"]) if profile else (None, None)
    with b.loop("element", Index(arg="left"), counts=counts, stall_cycles=stalls):
        yield


def _threads(planes: int, blocks: int) -> tuple[IntArray, IntArray, IntArray]:
    """(plane, first block, blocks) of each CTA: EACH blocks of a plane, planes slowest."""
    plane, cta = (a.ravel() for a in np.meshgrid(np.arange(planes), np.arange(ceil_div(blocks, EACH)), indexing="ij"))
    return plane, cta * EACH, np.minimum(EACH, blocks - cta * EACH)


def _label(profile: Mapping[str, Any] | None) -> str:
    return f"{profile['kind']}: {profile['source']}" if profile else "ideal"


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
