"""Closed-form IO of the papers' algorithms, in bytes: what a schedule's counted traffic is compared with.

Each form counts what the SMs request: no byte is shared between CTAs, and each of a group's query heads reads its
K/V head itself. ``reuse=True`` is the other end: each K/V block (and each block that a backward walks) leaves HBM once
per head, as if the L2 kept it. Rows past the end of a ragged block and tiles without a visible key cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .attention import LSE_BYTES, Attention

#: Unfinished O and dQ, row statistics m and l, and D = rowsum(dO * O) are kept in fp32.
SCRATCH_BYTES = 4
#: torch.dropout keeps one byte an element to say what it kept.
DROPOUT_MASK_BYTES = 1

Moves = dict[str, tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes read and written; ``by_tensor`` maps a tensor's name to its (read, written).

    Raises ValueError where the tensors do not add up to the two totals.
    """

    read_bytes: int
    write_bytes: int
    by_tensor: Mapping[str, tuple[int, int]]

    def __post_init__(self) -> None:
        summed = sum(r for r, _ in self.by_tensor.values()), sum(w for _, w in self.by_tensor.values())
        if summed != (self.read_bytes, self.write_bytes):
            raise ValueError(
                f"read_bytes, write_bytes are {(self.read_bytes, self.write_bytes)} and by_tensor adds up to {summed};"
                " they must be equal: change either"
            )

    @property
    def total_bytes(self) -> int:
        """Bytes read plus bytes written."""
        return self.read_bytes + self.write_bytes


def standard_bytes(attention: Attention, *, mask_pass: bool = False, dropout_pass: bool = False) -> Traffic:
    """IO of attention in separate kernels, S and P whole in global memory (FA1 paper, algorithms 0 and 3).

    Each kernel reads each operand once a query head. ``mask_pass``: a kernel reads and writes S (backward dS);
    ``dropout_pass``: a kernel reads P and writes it with one mask byte an element (backward: dP, the mask read).
    Causal changes nothing: S is computed whole. The mask tensor itself and an LSE (none is kept) are not counted.
    """
    t = _per_query_head(attention)
    scores = attention.batch * attention.heads_q * attention.seqlen_q * attention.seqlen_kv
    s, kept = scores * attention.dtype_bytes, scores * DROPOUT_MASK_BYTES
    masks, drops = int(mask_pass), int(dropout_pass)
    fwd: Moves = {
        "Q": (t["Q"], 0),
        "K": (t["K"], 0),
        "V": (t["V"], 0),
        "S": ((1 + masks) * s, (1 + masks) * s),
        "P": ((1 + drops) * s, (1 + drops) * s),
        "dropout": (0, drops * kept),
        "O": (0, t["O"]),
    }
    bwd: Moves = {
        "Q": (t["Q"], 0),
        "K": (t["K"], 0),
        "V": (t["V"], 0),
        "dO": (2 * t["O"], 0),  # for dV and for dP
        "P": (2 * s, 0),  # for dV and for dS
        "dP": ((1 + drops) * s, (1 + drops) * s),
        "dropout": (drops * kept, 0),
        "dS": ((2 + masks) * s, (1 + masks) * s),  # read for dQ and for dK
        "dQ": (0, t["Q"]),
        **_key_gradients(attention),
    }
    return _traffic(attention, fwd, bwd)


def fa1_bytes(attention: Attention, *, block_q: int, block_kv: int, reuse: bool = False) -> Traffic:
    """IO of FlashAttention-1: K/V blocks outside, Q blocks inside (FA1 paper, algorithms 1 and 4).

    Forward: a Q block is read in each outer step that shows it a key; its O (fp32), m and l go to scratch in each of
    these steps but the last, which writes O in its final dtype and LSE, and come back from the second on. Backward:
    Q, O, dO and LSE are read and dQ (fp32) goes to scratch likewise; dK and dV are written once. The first outer
    step takes every Q block, seen key or not: it is the one that starts O and dQ. ``reuse`` shares K and V within a
    group of query heads; O, dQ and Q still travel in each step. Raises ValueError for block sizes below 1.
    """
    walk = _walk(attention, block_q, block_kv, least=1)
    e, d, dv = attention.dtype_bytes, attention.head_dim, attention.head_dim_v
    heads = attention.batch * attention.heads_q
    t = attention.tensor_bytes
    kv = t if reuse else _per_query_head(attention)
    visits, again = heads * walk.q_rows, heads * (walk.q_rows - walk.live_rows)

    def scratch(cols: int) -> tuple[int, int]:
        return again * cols * SCRATCH_BYTES, again * cols * SCRATCH_BYTES

    fwd: Moves = {
        "Q": (visits * d * e, 0),
        "K": (kv["K"], 0),
        "V": (kv["V"], 0),
        "Otmp": scratch(dv),
        "m": scratch(1),
        "l": scratch(1),
        "O": (0, t["O"]),
        "LSE": (0, t["LSE"]),
    }
    bwd: Moves = {
        "Q": (visits * d * e, 0),
        "K": (kv["K"], 0),
        "V": (kv["V"], 0),
        "O": (visits * dv * e, 0),
        "dO": (visits * dv * e, 0),
        "LSE": (visits * LSE_BYTES, 0),
        "dQtmp": scratch(d),
        "dQ": (0, t["Q"]),
        **_key_gradients(attention),
    }
    return _traffic(attention, fwd, bwd)


def fa2_bytes(attention: Attention, *, block_q: int, block_kv: int, reuse: bool = False) -> Traffic:
    """IO of FlashAttention-2: a CTA a Q block forward, a CTA a K/V block backward (FA2 paper, algorithms 1 and 2).

    Forward: Q is read once, K and V by each Q block as far as it sees, O and LSE are written once; a Q block that
    sees no key writes only. Backward, three kernels as released (flash_bwd_preprocess_kernel.h): O and dO give D and
    dQ's fp32 sums are cleared; each K/V block reads the Q, dO, LSE and D it needs and adds into dQ's sums, an atomic
    add counting as a write; the sums are read and dQ written. ``reuse``: the walked blocks leave HBM once per head,
    and dQ's sums are fetched and written back once. Raises ValueError for block sizes below 1.
    """
    walk = _walk(attention, block_q, block_kv, least=0)
    e, d, dv = attention.dtype_bytes, attention.head_dim, attention.head_dim_v
    heads, t = attention.batch * attention.heads_q, attention.tensor_bytes
    live = heads * walk.live_rows
    visits = live if reuse else heads * walk.q_rows
    kv_rows = attention.batch * attention.heads_kv * attention.seqlen_kv if reuse else heads * walk.kv_rows
    kv = t if reuse else _per_query_head(attention)
    statistic = heads * attention.seqlen_q * SCRATCH_BYTES
    sums, added = statistic * d, visits * d * SCRATCH_BYTES
    fwd: Moves = {
        "Q": (live * d * e, 0),
        "K": (kv_rows * d * e, 0),
        "V": (kv_rows * dv * e, 0),
        "O": (0, t["O"]),
        "LSE": (0, t["LSE"]),
    }
    bwd: Moves = {
        "Q": (visits * d * e, 0),
        "K": (kv["K"], 0),
        "V": (kv["V"], 0),
        "O": (t["O"], 0),
        "dO": (t["O"] + visits * dv * e, 0),
        "LSE": (visits * LSE_BYTES, 0),
        "D": (visits * SCRATCH_BYTES, statistic),
        "dQsum": (sums + (added if reuse else 0), sums + added),
        "dQ": (0, t["Q"]),
        **_key_gradients(attention),
    }
    return _traffic(attention, fwd, bwd)


def io_lower_bound(n: int, d: int, m: int) -> float:
    """n^2 d^2 / m: the order, without its constant, of the elements one head must move with ``m`` elements on chip.

    No exact attention moves o(n^2 d^2 / m) for all d <= m <= n d (FA1 paper, proposition 3). ``n`` keys and queries of
    ``d`` elements. Raises ValueError for an m outside that range, where the statement is silent.
    """
    for name, value in (("n", n), ("d", d)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1: change {name}")
    if not d <= m <= n * d:
        raise ValueError(f"m is {m} elements; the bound holds from d = {d} to n d = {n * d}: change m")
    return n * n * d * d / m


@dataclass(frozen=True, kw_only=True)
class _Walk:
    """Rows of one query head that a walk over all tiles with a visible key touches.

    ``q_rows``: Q rows, a block once for each K/V block it meets; ``kv_rows``: K/V rows, a block once for each Q block
    it meets; ``live_rows``: rows of the Q blocks that meet any.
    """

    q_rows: int
    kv_rows: int
    live_rows: int


def _walk(attention: Attention, block_q: int, block_kv: int, *, least: int) -> _Walk:
    """One query head's tiles: a Q block meets the first K/V blocks, as far as its last row sees, at least ``least``."""
    for name, size in (("block_q", block_q), ("block_kv", block_kv)):
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1: change {name}")
    q_rows = kv_rows = live_rows = 0
    for start in range(0, attention.seqlen_q, block_q):
        end = min(start + block_q, attention.seqlen_q)
        met = max(-(-attention.visible_keys(end - 1) // block_kv), least)
        q_rows += met * (end - start)
        kv_rows += min(met * block_kv, attention.seqlen_kv)
        live_rows += (end - start) if met else 0
    return _Walk(q_rows=q_rows, kv_rows=kv_rows, live_rows=live_rows)


def _per_query_head(attention: Attention) -> dict[str, int]:
    """Bytes of the tensors with K and V counted once for each query head that reads them."""
    t = attention.tensor_bytes
    return {**t, "K": t["K"] * attention.group, "V": t["V"] * attention.group}


def _key_gradients(attention: Attention) -> Moves:
    """dK and dV written once; where heads share K/V, each query head's partial is first written and read back."""
    whole, partial = attention.tensor_bytes, _per_query_head(attention)
    moves: Moves = {"dK": (0, whole["K"]), "dV": (0, whole["V"])}
    if attention.group > 1:
        moves |= {"dKpart": (partial["K"], partial["K"]), "dVpart": (partial["V"], partial["V"])}
    return moves


def _traffic(attention: Attention, fwd: Moves, bwd: Moves) -> Traffic:
    """The moves of the problem's pass, tensor by tensor; those that move nothing are left out."""
    parts = {"fwd": (fwd,), "bwd": (bwd,), "fwd+bwd": (fwd, bwd)}[attention.pass_]
    total: Moves = {}
    for moves in parts:
        for name, (read, written) in moves.items():
            before = total.get(name, (0, 0))
            total[name] = (before[0] + read, before[1] + written)
    by_tensor = {name: moved for name, moved in total.items() if any(moved)}
    return Traffic(
        read_bytes=sum(r for r, _ in by_tensor.values()),
        write_bytes=sum(w for _, w in by_tensor.values()),
        by_tensor=by_tensor,
    )
