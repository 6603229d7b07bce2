"""The tile arguments that attention grids share: which K/V blocks a Q block needs, and which of them need a mask."""

from __future__ import annotations

import numpy as np

from ..attention import Attention
from ..program import IntArray, Tensor, Tiles


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def kv_blocks(attention: Attention, block_q: int, block_kv: int, q_block: IntArray) -> tuple[IntArray, IntArray]:
    """(blocks needed, blocks that need a mask) of each Q block. Causal is bottom-right aligned; no block may be needed."""
    rows_q, rows_kv = attention.seqlen_q, attention.seqlen_kv
    first, last = q_block * block_q, np.minimum((q_block + 1) * block_q, rows_q) - 1
    if attention.causal:
        offset = rows_kv - rows_q
        seen_last = np.clip(last + offset + 1, 0, rows_kv)
        seen_first = np.clip(first + offset + 1, 0, rows_kv)
    else:
        seen_last = seen_first = np.full_like(q_block, rows_kv)
    needed = -(-seen_last // block_kv)
    unmasked = seen_first // block_kv
    return needed, needed - unmasked


def qkv_tensors(attention: Attention, block_q: int, block_kv: int, element: int) -> dict[str, Tensor]:
    """Q, K, V, O and LSE as grids of blocks."""
    b, hq, hkv = attention.batch, attention.heads_q, attention.heads_kv
    nq, nkv, d, dv = attention.seqlen_q, attention.seqlen_kv, attention.head_dim, attention.head_dim_v

    def tensor(name: str, heads: int, rows: int, cols: int, block: int, size: int, head_arg: str) -> Tensor:
        return Tensor(
            name=name,
            heads=b * heads,
            rows=rows,
            cols=cols,
            block_rows=block,
            bytes_per_element=size,
            head_arg=head_arg,
            vector=name == "LSE",
        )

    return {
        "Q": tensor("Q", hq, nq, d, block_q, element, "plane_q"),
        "K": tensor("K", hkv, nkv, d, block_kv, element, "plane_kv"),
        "V": tensor("V", hkv, nkv, dv, block_kv, element, "plane_kv"),
        "O": tensor("O", hq, nq, dv, block_q, element, "plane_q"),
        "LSE": tensor("LSE", hq, nq, 1, block_q, 4, "plane_q"),
    }


def planes(attention: Attention, batch: IntArray, head: IntArray) -> tuple[IntArray, IntArray]:
    """(Q plane, K/V plane) of each (batch, query head): query heads share a K/V head in groups."""
    group = attention.heads_q // attention.heads_kv
    return batch * attention.heads_q + head, batch * attention.heads_kv + head // group


def head_grid(attention: Attention, block_q: int, block_kv: int) -> Tiles:
    """One CTA per batch x head, heads fastest, with how many Q and K/V blocks it walks through."""
    batch, head = (a.ravel() for a in np.meshgrid(np.arange(attention.batch), np.arange(attention.heads_q), indexing="ij"))
    plane_q, plane_kv = planes(attention, batch, head)
    n_q = np.full_like(batch, ceil_div(attention.seqlen_q, block_q))
    n_kv = np.full_like(batch, ceil_div(attention.seqlen_kv, block_kv))
    return Tiles(names=("plane_q", "plane_kv", "n_q", "n_kv"), values=np.stack([plane_q, plane_kv, n_q, n_kv], axis=1))
