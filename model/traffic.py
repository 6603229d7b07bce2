"""IO complexity in closed form: the bytes that standard attention, FA1 and FA2 move, by kernel and tensor.

Each function counts what the SMs request (the traffic at L2), which assumes that no cache helps: a block that is
loaded again counts again. ``Traffic.at_hbm`` turns that into HBM bytes for a given L2: where the data that the live
heads come back to fits, every byte crosses once. Bytes are those of real rows: a ragged last block counts its rows,
not its padding.

In the papers' letters, a head with N rows: standard attention moves Theta(N d + N^2) elements, FA1 Theta(N^2 d^2 / M)
with M elements of on-chip memory (FA1 theorem 2), and nothing does asymptotically better for every M in [d, N d] (FA1
proposition 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from .attention import Attention

IntArray = NDArray[np.int64]

FP32_BYTES = 4  # partial O and dQ, and the row statistics m, l, LSE and D
DROPOUT_MASK_BYTES = 1
MASKS = ("none", "add", "fill")


@dataclass(frozen=True, kw_only=True)
class Stream:
    """What one kernel moves of one tensor, in one direction.

    ``sm_bytes`` are requested by the SMs. Of these HBM sees ``once_bytes`` where the ``reuse_bytes`` that a live query
    head comes back to stay in L2, and ``spilled_bytes`` where they do not (more than requested for atomics, whose
    lines must be fetched first). A tensor that is never come back to has the same number three times.
    """

    kernel: str
    tensor: str
    write: bool
    sm_bytes: int
    once_bytes: int
    spilled_bytes: int
    reuse_bytes: int


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes moved by the kernels of one attention call, over ``heads`` (batch x heads_q) query heads."""

    heads: int
    streams: tuple[Stream, ...]

    @property
    def read_bytes(self) -> int:
        """Bytes read, over all tensors."""
        return sum(s.sm_bytes for s in self.streams if not s.write)

    @property
    def write_bytes(self) -> int:
        """Bytes written, over all tensors."""
        return sum(s.sm_bytes for s in self.streams if s.write)

    @property
    def total_bytes(self) -> int:
        """Bytes read plus bytes written."""
        return self.read_bytes + self.write_bytes

    @property
    def reads(self) -> dict[str, int]:
        """Bytes read by tensor, in the order of first use."""
        return _by_tensor(s for s in self.streams if not s.write)

    @property
    def writes(self) -> dict[str, int]:
        """Bytes written by tensor, in the order of first use."""
        return _by_tensor(s for s in self.streams if s.write)

    def at_hbm(self, *, l2_bytes: float, live_heads: int | None = None) -> Traffic:
        """The same call as HBM sees it behind an L2 of ``l2_bytes`` that ``live_heads`` query heads (None: all) share.

        All or nothing a stream: least-recently-used replacement of a set that is walked in order keeps all of it if it
        fits and none if it does not. Nothing is assumed to survive in L2 from one kernel to the next. ``l2_bytes=0``
        is the traffic without any reuse. Raises ValueError for a negative L2 or fewer than one live head.
        """
        if l2_bytes < 0:
            raise ValueError(f"l2_bytes is {l2_bytes}; it must be zero or more: change l2_bytes")
        if live_heads is not None and live_heads < 1:
            raise ValueError(f"live_heads is {live_heads}; it must be at least 1: change live_heads")
        live = self.heads if live_heads is None else min(live_heads, self.heads)
        streams = []
        for s in self.streams:
            moved = s.once_bytes if s.reuse_bytes * live <= l2_bytes else s.spilled_bytes
            streams.append(replace(s, sm_bytes=moved, once_bytes=moved, spilled_bytes=moved, reuse_bytes=0))
        return replace(self, streams=tuple(streams))


def standard_bytes(attention: Attention, *, tile: int = 128, mask: str | None = None, dropout: bool = False) -> Traffic:
    """Unfused attention: a kernel a product and an elementwise pass, S and P in memory (FA1 algorithms 0 and 3).

    Products run in ``tile`` x ``tile`` blocks, each with the whole head_dim, so Q is requested once a column of tiles
    and K once a row of tiles. ``mask``: "none"; "add", a pass that reads and writes S (its gradient is the identity,
    so backward has none); "fill", the same and once more over dS. None means "add" for a causal problem, else "none";
    the mask itself is shared by all heads and not counted. ``dropout`` adds a pass that reads P and writes P and a
    mask of one byte an element; backward reads the mask and rewrites dP. Raises ValueError for an unknown mask, none
    at all for a causal problem, or a tile below 1.
    """
    _check_sizes(tile=tile)
    chosen = mask if mask is not None else ("add" if attention.causal else "none")
    if chosen not in MASKS:
        raise ValueError(f"mask is {mask!r}; it must be one of {', '.join(MASKS)}: change mask")
    if attention.causal and chosen == "none":
        raise ValueError("mask is 'none' and the problem is causal; it must be add or fill: change mask or causal")
    forward, backward = (partial(f, attention, tile, chosen, dropout) for f in (_standard_forward, _standard_backward))
    return _traffic(attention, forward, backward)


def fa1_bytes(attention: Attention, *, block_q: int, block_kv: int, precompute_d: bool = True) -> Traffic:
    """FlashAttention-1: K/V blocks outside, Q blocks inside, one CTA a query head (FA1 algorithms 1, 2 and 4).

    A K/V block enters once. Every K/V block that a Q block needs costs a read of that Q block; between two of them its
    O (fp32), m and l go to memory and come back; after the last one O and LSE are written. Backward likewise: Q, dO,
    LSE and D are read at every visit, dQ (fp32) goes out and comes back between two. ``precompute_d``: a kernel of its
    own reads O and dO and writes D = rowsum(dO * O), as the released kernels do; otherwise every visit reads O, as
    algorithm 4 does. ``block_q`` matters only to a causal problem, which skips the pairs of blocks that the mask hides
    but for a Q block's first. Raises ValueError for a block size below 1.
    """
    _check_sizes(block_q=block_q, block_kv=block_kv)
    blocks = _Blocks(attention=attention, block_q=block_q, block_kv=block_kv)
    return _traffic(attention, lambda: _fa1_forward(blocks), lambda: _fa1_backward(blocks, precompute_d))


def fa2_bytes(attention: Attention, *, block_q: int, block_kv: int) -> Traffic:
    """FlashAttention-2: a CTA per Q block forward and per K/V block backward (FA2 algorithms 1 and 2, section 3.2).

    Forward reads a Q block once and, for it, the K/V blocks it needs; O and LSE leave once. Backward reads a K/V block
    once and, for it, Q, dO, LSE and D of the Q blocks that need it, adds to an fp32 dQ by atomics (counted as writes),
    and has a kernel before (D, dQ zeroed) and after (dQ to the dtype). With shared K/V heads, dK and dV are written
    per query head and summed by one more kernel. Raises ValueError for a block size below 1.
    """
    _check_sizes(block_q=block_q, block_kv=block_kv)
    blocks = _Blocks(attention=attention, block_q=block_q, block_kv=block_kv)
    return _traffic(attention, lambda: _fa2_forward(blocks), lambda: _fa2_backward(blocks))


def paper_block_sizes(sram_elements: int, head_dim: int) -> tuple[int, int]:
    """(block_q, block_kv) of FA1 algorithm 1 for M on-chip elements: ceil(M / 4 d) keys and min(that, d) queries."""
    _check_sizes(sram_elements=sram_elements, head_dim=head_dim)
    block_kv = -(-sram_elements // (4 * head_dim))
    return min(block_kv, head_dim), block_kv


def io_lower_bound_elements(n: int, d: int, m: int) -> float:
    """N^2 d^2 / M elements a head, up to a constant: no exact attention moves o of it for all M (FA1 proposition 3).

    ``m``: on-chip memory in elements. Raises ValueError outside d <= M <= N d, where the statement does not hold.
    """
    _check_sizes(n=n, d=d)
    if not d <= m <= n * d:
        raise ValueError(f"m is {m}; the bound holds from d = {d} to n * d = {n * d} elements: change m")
    return n * n * d * d / m


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    """How often the blocked forms come to which rows. A visit is one (Q block, K/V block) pair that is computed."""

    attention: Attention
    block_q: int
    block_kv: int

    @property
    def rows(self) -> IntArray:
        """Rows of each Q block."""
        first = np.arange(0, self.attention.seqlen_q, self.block_q, dtype=np.int64)
        return np.minimum(first + self.block_q, self.attention.seqlen_q) - first

    @property
    def needed(self) -> IntArray:
        """K/V blocks of which each Q block sees at least one key."""
        a = self.attention
        offset = a.seqlen_kv - a.seqlen_q if a.causal else a.seqlen_kv
        return -(-np.clip(np.cumsum(self.rows) + offset, 0, a.seqlen_kv) // self.block_kv)

    def visited_rows(self, visits: IntArray) -> int:
        """Rows of all Q blocks of a head, each counted as often as its block is visited."""
        return int((self.rows * visits).sum())

    def head_bytes(self, rows: int, columns: int, element: int) -> int:
        """Bytes of ``rows`` x ``columns`` of every query head."""
        return self.attention.batch * self.attention.heads_q * rows * columns * element


def _fa1_forward(b: _Blocks) -> list[Stream]:
    a, t = b.attention, b.attention.tensor_bytes
    visits = np.maximum(b.needed, 1)  # the first K/V block is computed for all, to give every row its O
    between, kept = b.visited_rows(visits - 1), b.visited_rows(np.minimum(visits - 1, 1))
    scratch = {"O_partial": a.head_dim_v, "m": 1, "l": 1}
    reuse = _per_head(a, t["Q"], *(b.head_bytes(kept, columns, FP32_BYTES) for columns in scratch.values()))
    queries = b.head_bytes(b.visited_rows(visits), a.head_dim, a.dtype_bytes)
    streams = [*_kv_once_a_head("fwd", a), _read("fwd", "Q", queries, once=t["Q"], reuse=reuse)]
    for name, columns in scratch.items():
        moved, once = (b.head_bytes(rows, columns, FP32_BYTES) for rows in (between, kept))
        streams.append(_read("fwd", name, moved, once=0, reuse=reuse))
        streams.append(_write("fwd", name, moved, once=once, reuse=reuse))
    return [*streams, _write("fwd", "O", t["O"]), _write("fwd", "LSE", t["LSE"])]


def _fa1_backward(b: _Blocks, precompute_d: bool) -> list[Stream]:
    a, t = b.attention, b.attention.tensor_bytes
    visits = np.maximum(b.needed, 1)
    moved = b.head_bytes(b.visited_rows(visits - 1), a.head_dim, FP32_BYTES)
    once = b.head_bytes(b.visited_rows(np.minimum(visits - 1, 1)), a.head_dim, FP32_BYTES)
    inputs = _visited_inputs(a, "D" if precompute_d else "O")
    reuse = _per_head(a, once, *(b.head_bytes(a.seqlen_q, *shape) for shape in inputs.values()))
    streams = [*(_row_sum_kernel(a) if precompute_d else []), *_kv_once_a_head("bwd", a)]
    streams += _visits(b, visits, inputs, reuse)
    streams.append(_read("bwd", "dQ_partial", moved, once=0, reuse=reuse))
    streams.append(_write("bwd", "dQ_partial", moved, once=once, reuse=reuse))
    return [*streams, _write("bwd", "dQ", t["Q"]), *_kv_gradient("bwd", a, "dK"), *_kv_gradient("bwd", a, "dV")]


def _fa2_forward(b: _Blocks) -> list[Stream]:
    a, t = b.attention, b.attention.tensor_bytes
    keys = int(np.minimum(b.needed * b.block_kv, a.seqlen_kv).sum())
    once = a.batch * a.heads_kv * int(np.minimum(b.needed.max() * b.block_kv, a.seqlen_kv)) * a.dtype_bytes
    reuse = _per_head(a, t["K"], t["V"])
    return [
        _read("fwd", "Q", t["Q"]),
        _read("fwd", "K", b.head_bytes(keys, a.head_dim, a.dtype_bytes), once=once * a.head_dim, reuse=reuse),
        _read("fwd", "V", b.head_bytes(keys, a.head_dim_v, a.dtype_bytes), once=once * a.head_dim_v, reuse=reuse),
        _write("fwd", "O", t["O"]),
        _write("fwd", "LSE", t["LSE"]),
    ]


def _fa2_backward(b: _Blocks) -> list[Stream]:
    a, t = b.attention, b.attention.tensor_bytes
    whole = b.head_bytes(a.seqlen_q, a.head_dim, FP32_BYTES)
    added = b.head_bytes(b.visited_rows(b.needed), a.head_dim, FP32_BYTES)
    once = b.head_bytes(b.visited_rows(np.minimum(b.needed, 1)), a.head_dim, FP32_BYTES)
    inputs = _visited_inputs(a, "D")
    reuse = _per_head(a, whole, *(b.head_bytes(a.seqlen_q, *shape) for shape in inputs.values()))
    fetched = _read("bwd", "dQ_sum", added, once=once, reuse=reuse)  # what atomics add to: from HBM, never to an SM
    return [
        *_row_sum_kernel(a),
        _write("bwd_row_sum", "dQ_sum", whole),
        *_kv_once_a_head("bwd", a),
        *_visits(b, b.needed, inputs, reuse),
        replace(fetched, sm_bytes=0),
        _write("bwd", "dQ_sum", added, once=once, reuse=reuse),
        *_kv_gradient("bwd", a, "dK"),
        *_kv_gradient("bwd", a, "dV"),
        _read("bwd_convert", "dQ_sum", whole),
        _write("bwd_convert", "dQ", t["Q"]),
    ]


def _standard_forward(a: Attention, tile: int, mask: str, dropout: bool) -> list[Stream]:
    t, scores, keep = a.tensor_bytes, _pairs(a, a.dtype_bytes), _pairs(a, DROPOUT_MASK_BYTES)
    streams = [*_product("qk", a, tile, q="Q", kv="K"), _write("qk", "S", scores)]
    if mask != "none":
        streams += [_read("mask", "S", scores), _write("mask", "S", scores)]
    streams += [_read("softmax", "S", scores), _write("softmax", "P", scores)]
    if dropout:
        streams += [_read("dropout", "P", scores), _write("dropout", "P", scores), _write("dropout", "keep", keep)]
    return [*streams, _read("pv", "P", scores), *_product("pv", a, tile, kv="V"), _write("pv", "O", t["O"])]


def _standard_backward(a: Attention, tile: int, mask: str, dropout: bool) -> list[Stream]:
    t, scores, keep = a.tensor_bytes, _pairs(a, a.dtype_bytes), _pairs(a, DROPOUT_MASK_BYTES)
    streams = [_read("dv", "P", scores), *_product("dv", a, tile, q="dO"), *_kv_gradient("dv", a, "dV")]
    streams += [*_product("dp", a, tile, q="dO", kv="V"), _write("dp", "dP", scores)]
    if dropout:
        streams += [_read("dropout_bwd", "dP", scores), _read("dropout_bwd", "keep", keep)]
        streams.append(_write("dropout_bwd", "dP", scores))
    streams += [*(_read("softmax_bwd", name, scores) for name in ("P", "dP")), _write("softmax_bwd", "dS", scores)]
    if mask == "fill":
        streams += [_read("mask_bwd", "dS", scores), _write("mask_bwd", "dS", scores)]
    streams += [_read("dq", "dS", scores), *_product("dq", a, tile, kv="K"), _write("dq", "dQ", t["Q"])]
    return [*streams, _read("dk", "dS", scores), *_product("dk", a, tile, q="Q"), *_kv_gradient("dk", a, "dK")]


def _product(kernel: str, a: Attention, tile: int, *, q: str = "", kv: str = "") -> list[Stream]:
    """Reads of a GEMM's thin operands: a query-side one once a tile of keys, a key-side one once a tile of queries."""
    t = {**a.tensor_bytes, "dO": a.tensor_bytes["O"]}
    reuse = _per_head(a, *(t[name] for name in (q, kv) if name))
    streams = []
    if q:
        streams.append(_read(kernel, q, t[q] * -(-a.seqlen_kv // tile), once=t[q], reuse=reuse))
    if kv:
        streams.append(_read(kernel, kv, t[kv] * a.group * -(-a.seqlen_q // tile), once=t[kv], reuse=reuse))
    return streams


def _kv_once_a_head(kernel: str, a: Attention) -> list[Stream]:
    """K and V, each read whole once by every query head (from HBM once a group, if its K and V stay in L2)."""
    t, reuse = a.tensor_bytes, _per_head(a, a.tensor_bytes["K"], a.tensor_bytes["V"])
    return [_read(kernel, name, t[name] * a.group, once=t[name], reuse=reuse) for name in ("K", "V")]


def _kv_gradient(kernel: str, a: Attention, name: str) -> list[Stream]:
    """dK or dV written by every query head; where these share K/V heads, one more kernel adds up each group."""
    final = a.tensor_bytes[name[1:]]
    if a.group == 1:
        return [_write(kernel, name, final)]
    each, add = f"{name}_per_head", f"{kernel}_group_sum"
    return [_write(kernel, each, final * a.group), _read(add, each, final * a.group), _write(add, name, final)]


def _row_sum_kernel(a: Attention) -> list[Stream]:
    """D = rowsum(dO * O) in fp32."""
    t = a.tensor_bytes
    return [_read("bwd_row_sum", "O", t["O"]), _read("bwd_row_sum", "dO", t["O"]), _write("bwd_row_sum", "D", t["LSE"])]


def _visited_inputs(a: Attention, last: str) -> dict[str, tuple[int, int]]:
    """(columns, element bytes) of what a backward visit reads of a Q block; ``last`` is D or, to compute D from, O."""
    of_o = (a.head_dim_v, a.dtype_bytes)
    inputs = {"Q": (a.head_dim, a.dtype_bytes), "dO": of_o, "LSE": (1, FP32_BYTES)}
    return {**inputs, last: of_o if last == "O" else (1, FP32_BYTES)}


def _visits(b: _Blocks, visits: IntArray, inputs: dict[str, tuple[int, int]], reuse: int) -> list[Stream]:
    """Reads of the Q-side inputs, as often as the backward visits their block."""
    moved, once = b.visited_rows(visits), b.visited_rows(np.minimum(visits, 1))
    return [
        _read("bwd", name, b.head_bytes(moved, *shape), once=b.head_bytes(once, *shape), reuse=reuse)
        for name, shape in inputs.items()
    ]


def _pairs(a: Attention, element: int) -> int:
    """Bytes of a tensor with one element a (query, key) pair: S, P, their gradients, the dropout mask."""
    return a.batch * a.heads_q * a.seqlen_q * a.seqlen_kv * element


def _per_head(a: Attention, *tensors: int) -> int:
    """A query head's share of tensors given by their bytes over all heads, rounded up."""
    return -(-sum(tensors) // (a.batch * a.heads_q))


def _read(kernel: str, tensor: str, moved: int, *, once: int | None = None, reuse: int = 0) -> Stream:
    return Stream(
        kernel=kernel,
        tensor=tensor,
        write=False,
        sm_bytes=moved,
        once_bytes=moved if once is None else once,
        spilled_bytes=moved,
        reuse_bytes=reuse,
    )


def _write(kernel: str, tensor: str, moved: int, *, once: int | None = None, reuse: int = 0) -> Stream:
    return replace(_read(kernel, tensor, moved, once=once, reuse=reuse), write=True)


def _traffic(a: Attention, forward: Callable[[], list[Stream]], backward: Callable[[], list[Stream]]) -> Traffic:
    """The streams of the problem's pass, without those that move nothing."""
    streams = [*(forward() if a.pass_ != "bwd" else []), *(backward() if a.pass_ != "fwd" else [])]
    return Traffic(heads=a.batch * a.heads_q, streams=tuple(s for s in streams if s.sm_bytes or s.spilled_bytes))


def _by_tensor(streams: Iterable[Stream]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for s in streams:
        if s.sm_bytes:
            totals[s.tensor] = totals.get(s.tensor, 0) + s.sm_bytes
    return totals


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1: change {name}")
