"""Standard attention: S = Q K^T, softmax and P V as separate kernels, S and P in global memory (the papers' baseline).

GEMM kernels are tiled 128 x 128 with cp.async and mma.sync like a library's; softmax keeps its rows in registers; the mask is an
elementwise kernel of its own, as in an eager framework: S travels to HBM and back for each of them. FA1 sec. 2.2, algorithm 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..attention import Attention
from ..gpu import GPU
from ..profiles import kernel_profile
from ..program import Index, IntArray, Program, Tensor, Tiles
from ..schedule import Builder
from .fa2 import check_counts, check_forward
from .grid import ceil_div, planes, qkv_tensors
from .standard_copies import rows_copy, turned_copy

TILE = 128
CHUNK = 64  # keys per step of the second GEMM
LAYOUTS = ("heads", "rows")
ROWS = 4  # rows per CTA of the row kernels, one a warp


@dataclass(frozen=True, kw_only=True)
class Standard:
    """Switches: ``mask_kernel`` runs masking as its own pass over S (None: where the problem is causal), ``warps`` a GEMM CTA."""

    mask_kernel: bool | None = None
    warps: int = 4
    #: "heads": Q, K and V are contiguous per head and the products read them in place; "rows": they lie as (batch, row, head,
    #: dim), in one array or in three, and an eager framework copies them first (:mod:`.standard_copies`).
    layout: str = "heads"
    #: "binary": what PyTorch's softmax and copy kernels issue, where they were read; "ideal": the algorithm's own.
    counts: str = "binary"
    #: Calls that the framework makes for one attention: scale, einsum (views, bmm), mask, softmax, dropout, einsum.
    host_ops: int = 12

    @property
    def name(self) -> str:
        return "standard"

    def lower(self, gpu: GPU, attention: Attention) -> tuple[Program, ...]:
        check_forward("standard", attention)
        if self.warps not in (1, 2, 4, 8):
            raise ValueError(f"standard has warps={self.warps}; its 128-row GEMM tile takes 1, 2, 4 or 8 warps")
        masked = attention.causal if self.mask_kernel is None else self.mask_kernel
        if attention.causal and not masked:
            raise ValueError("standard attention masks in a kernel of its own: a causal problem needs mask_kernel=true")
        if self.layout not in LAYOUTS:
            raise ValueError(f"standard has layout={self.layout!r}; it must be one of {', '.join(LAYOUTS)}: change layout")
        check_counts("standard", self.counts, ("binary", "ideal"))
        copied = self.layout == "rows"
        d = ceil_div(max(attention.head_dim, attention.head_dim_v), 16) * 16
        programs = _copies(attention, self.counts) if copied else []
        programs.append(self._scores(attention, d, ("Qc@tile", "Kt@tile") if copied else ("Q", "K")))
        if masked:
            programs.append(_rows(attention, "mask", self.counts))
        programs.append(_rows(attention, "softmax", self.counts))
        if copied:
            programs.append(rows_copy(attention, "copy_v", "V", "Vc", dims=4, counts=self.counts))
        programs.append(self._values(attention, d, "Vc@chunk" if copied else "V"))
        return tuple(programs)

    def _scores(self, attention: Attention, d: int, names: tuple[str, str]) -> Program:
        """S = Q K^T, one 128 x 128 tile of S a CTA, the whole head_dim in one stage."""
        e = attention.dtype_bytes
        q, k = names
        b = Builder(name="standard_qk", warps=self.warps, registers=168)
        b.smem("Qs", rows=TILE, cols=d, bytes_per_element=e)
        b.smem("Ks", rows=TILE, cols=d, bytes_per_element=e)
        b.registers_tile("Sacc", rows=TILE, cols=TILE)
        b.registers_tile("Sout", rows=TILE, cols=TILE, bytes_per_element=e)
        b.op("load_async", writes="Qs", reads=q, index=Index(arg="q_block"))
        b.op("load_async", writes="Ks", reads=k, index=Index(arg="kv_block"))
        b.op("commit")
        b.op("wait_group", arg=0)
        b.op("barrier")
        b.op("mma", writes="Sacc", reads=("Qs", "Ks"), transpose_b=True)
        b.op("convert", writes="Sout", reads="Sacc")
        b.op("to_smem", writes="Sout.smem", reads="Sout")
        b.op("barrier")
        b.op("from_smem", writes="Sout", reads="Sout")
        b.op("store", writes="S@tile", reads="Sout", index=Index(arg="s_block"))
        t = qkv_tensors(attention, TILE, TILE, e)
        scores = _scores_tensor("S@tile", attention, TILE, TILE)
        return b.build(tensors=(replace(t["Q"], name=q), replace(t["K"], name=k), scores), tiles=_tile_grid(attention, scores))

    def _values(self, attention: Attention, d: int, v: str) -> Program:
        """O = P V, one Q block a CTA, P and V in chunks of 64 keys through three stages of shared memory."""
        e = attention.dtype_bytes
        b = Builder(name="standard_pv", warps=self.warps, registers=168)
        for stage in range(3):
            b.smem(f"Ps{stage}", rows=TILE, cols=CHUNK, bytes_per_element=e)
            b.smem(f"Vs{stage}", rows=CHUNK, cols=d, bytes_per_element=e)
        b.registers_tile("Oacc", rows=TILE, cols=d)
        b.registers_tile("Oout", rows=TILE, cols=d, bytes_per_element=e)
        b.op("zero", writes="Oacc", shape=(TILE, d))
        for stage in range(2):
            with b.when(Index(arg="n_kv", const=-1 - stage)):
                _load_stage(b, v, stage, Index(const=stage), Index(arg="first_chunk", const=stage))
            b.op("commit")
        with b.loop("group", Index(arg="n_groups")):
            for stage in range(3):
                self._chunk(b, v, stage)
        b.op("convert", writes="Oout", reads="Oacc")
        b.op("to_smem", writes="Oout.smem", reads="Oout")
        b.op("barrier")
        b.op("from_smem", writes="Oout", reads="Oout")
        b.op("store", writes="O", reads="Oout", index=Index(arg="q_block"))
        t = qkv_tensors(attention, TILE, CHUNK, e)
        weights = _scores_tensor("P@chunk", attention, TILE, CHUNK)
        return b.build(tensors=(weights, replace(t["V"], name=v), t["O"]), tiles=_row_block_grid(attention))

    def _chunk(self, b: Builder, v: str, stage: int) -> None:
        inside = Index(arg="n_kv", const=-1 - stage, loop="group", coef=-3)
        with b.when(inside):
            b.op("wait_group", arg=1)
            b.op("barrier")
            ahead = Index(arg="n_kv", const=-3 - stage, loop="group", coef=-3)
            with b.when(ahead):
                at = stage + 2
                _load_stage(
                    b, v, at % 3, Index(const=at, loop="group", coef=3), Index(arg="first_chunk", const=at, loop="group", coef=3)
                )
            b.op("commit")
            b.op("mma", writes="Oacc", reads=(f"Ps{stage}", f"Vs{stage}"), accumulate=True)


def _copies(attention: Attention, counts: str) -> list[Program]:
    """What runs before the first product: K / sqrt(d) row by row (the factor itself is softmax's here), Q, and K turned."""
    return [
        rows_copy(attention, "scale_k", "K", "Ks", dims=2, counts=counts),
        rows_copy(attention, "copy_q", "Q", "Qc", dims=4, counts=counts),
        turned_copy(attention, "Ks", "Kt", counts=counts),
    ]


def _load_stage(b: Builder, values: str, stage: int, v: Index, p: Index) -> None:
    b.op("load_async", writes=f"Ps{stage}", reads="P@chunk", index=p)
    b.op("load_async", writes=f"Vs{stage}", reads=values, index=v)


def _rows(attention: Attention, kind: str, counts: str) -> Program:
    """A row kernel over S: four warps, a row each. "mask" rewrites S, "softmax" writes P."""
    e = attention.dtype_bytes
    width = attention.seqlen_kv
    columns = 1 << max(0, width - 1).bit_length()  # the kernel is compiled for powers of two
    read = kernel_profile("eager", name=kind, columns=columns) if counts == "binary" else None
    b = Builder(name=f"standard_{kind}", warps=ROWS, registers=read["registers"] if read else 64)
    b.registers_tile("Sin", rows=ROWS, cols=width, bytes_per_element=e)
    b.registers_tile("S", rows=ROWS, cols=width)
    b.registers_tile("out", rows=ROWS, cols=width, bytes_per_element=e)
    b.registers_tile("LSEout", rows=ROWS, cols=1)
    b.op("load", writes="S", reads="S@rows", index=Index(arg="q_block"))
    b.op("wait_load", scoreboard=2)
    if kind == "mask":
        b.op("mask", writes="S", index=Index(const=0))
        b.op("convert", writes="out", reads="S")
        b.op("store", writes="S@rows", reads="out", index=Index(arg="q_block"))
        return b.build(tensors=(_scores_tensor("S@rows", attention, ROWS, 0),), tiles=_row_grid(attention))
    with b.phase(counts=read["per_row"] if read else None, stall_cycles=read["stall_cycles"] if read else None):
        b.op("zero", writes="l", shape=(ROWS,))
        b.op("row_max", writes="m", reads="S")
        b.op("exp2", writes="S", reads=("S", "m"))
        b.op("row_sum", writes="l", reads="S")
        b.op("quad_sum", like="S")
        b.op("divide", writes=("S", "LSEout"), reads=("l", "m"))
        b.op("convert", writes="out", reads="S")
        b.op("store", writes="P@rows", reads="out", index=Index(arg="q_block"))
    tensors = (_scores_tensor("S@rows", attention, ROWS, 0), _scores_tensor("P@rows", attention, ROWS, 0))
    label = f"{read['kind']}: {read['source']}" if read else "ideal"
    return b.build(tensors=tensors, tiles=_row_grid(attention), profile=label)


def _scores_tensor(name: str, attention: Attention, rows: int, cols: int) -> Tensor:
    return Tensor(
        name=name,
        heads=attention.batch * attention.heads_q,
        rows=attention.seqlen_q,
        cols=attention.seqlen_kv,
        bytes_per_element=attention.dtype_bytes,
        block_rows=rows,
        cols_per_block=cols,
        head_arg="plane_q",
    )


def _grid(attention: Attention, per_plane: int) -> tuple[IntArray, IntArray, IntArray]:
    """(Q plane, K/V plane, index within the plane) of every CTA, planes slowest."""
    batch, head, index = (
        a.ravel()
        for a in np.meshgrid(np.arange(attention.batch), np.arange(attention.heads_q), np.arange(per_plane), indexing="ij")
    )
    return (*planes(attention, batch, head), index)


def _tile_grid(attention: Attention, scores: Tensor) -> Tiles:
    plane_q, plane_kv, block = _grid(attention, scores.blocks)
    q_block, kv_block = np.divmod(block, scores.col_blocks)
    names = ("plane_q", "plane_kv", "s_block", "q_block", "kv_block")
    return Tiles(names=names, values=np.stack([plane_q, plane_kv, block, q_block, kv_block], axis=1))


def _row_grid(attention: Attention) -> Tiles:
    plane_q, plane_kv, block = _grid(attention, ceil_div(attention.seqlen_q, ROWS))
    return Tiles(names=("plane_q", "plane_kv", "q_block"), values=np.stack([plane_q, plane_kv, block], axis=1))


def _row_block_grid(attention: Attention) -> Tiles:
    plane_q, plane_kv, block = _grid(attention, ceil_div(attention.seqlen_q, TILE))
    chunks = ceil_div(attention.seqlen_kv, CHUNK)
    columns = [plane_q, plane_kv, block, block * chunks, np.full_like(block, chunks), np.full_like(block, ceil_div(chunks, 3))]
    names = ("plane_q", "plane_kv", "q_block", "first_chunk", "n_kv", "n_groups")
    return Tiles(names=names, values=np.stack(columns, axis=1))
