"""What the closed forms of traffic are held against: the kernels' loops written out, each load and store counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from flashsim.model.attention import PASSES, Attention
from flashsim.model.traffic import (
    Traffic,
)

Ledger = tuple[Counter[str], Counter[str]]


def ranges(rows: int, size: int) -> list[range]:
    return [range(start, min(start + size, rows)) for start in range(0, rows, size)]


def passes(a: Attention) -> list[str]:
    return [p for p in PASSES[:2] if p in a.pass_]


def head_visits(a: Attention, block_q: int, block_kv: int) -> Iterator[tuple[range, range]]:
    """(rows, keys) of each pair of blocks in which some row sees some key, K/V blocks outside."""
    for keys in ranges(a.seqlen_kv, block_kv):
        for rows in ranges(a.seqlen_q, block_q):
            if any(key < a.visible_keys(row) for row in rows for key in keys):
                yield rows, keys


def counted_fa1(a: Attention, block_q: int, block_kv: int, precompute_d: bool) -> Ledger:
    """Algorithms 2 and 4 walked block by block, for every head."""
    read, written, e = Counter[str](), Counter[str](), a.dtype_bytes
    d, dv, q_blocks = a.head_dim, a.head_dim_v, ranges(a.seqlen_q, block_q)
    pairs = set(head_visits(a, block_q, block_kv)) | {(rows, ranges(a.seqlen_kv, block_kv)[0]) for rows in q_blocks}
    for p in passes(a):
        for _ in range(a.batch * a.heads_q):
            if p == "bwd" and precompute_d:
                read.update(O=a.seqlen_q * dv * e, dO=a.seqlen_q * dv * e)
                written.update(D=a.seqlen_q * 4)
            for keys in ranges(a.seqlen_kv, block_kv):
                n = len(keys)
                read.update(K=n * d * e, V=n * dv * e)
                for rows in (rows for rows in q_blocks if (rows, keys) in pairs):
                    r = len(rows)
                    first = keys.start == 0
                    last = not any(rows == other and later.start > keys.start for other, later in pairs)
                    read.update(Q=r * d * e)
                    if p == "fwd":
                        scratch = {"O_partial": r * dv * 4, "m": r * 4, "l": r * 4}
                        final = {"O": r * dv * e, "LSE": r * 4}
                    else:
                        read.update(dO=r * dv * e, LSE=r * 4)
                        read.update(D=r * 4) if precompute_d else read.update(O=r * dv * e)
                        scratch, final = {"dQ_partial": r * d * 4}, {"dQ": r * d * e}
                    read.update({} if first else scratch)
                    written.update(final if last else scratch)
                if p == "bwd":
                    written.update(kv_gradients(a, n))
        if p == "bwd":
            group_sums(a, read, written)
    return read, written


def kv_gradients(a: Attention, keys: int) -> dict[str, int]:
    suffix = "" if a.heads_q == a.heads_kv else "_per_head"
    return {f"dK{suffix}": keys * a.head_dim * a.dtype_bytes, f"dV{suffix}": keys * a.head_dim_v * a.dtype_bytes}


def group_sums(a: Attention, read: Counter[str], written: Counter[str]) -> None:
    """Where query heads share a K/V head: read every head's gradient, write every K/V head's."""
    if a.heads_q > a.heads_kv:
        for name, size in kv_gradients(a, a.seqlen_kv).items():
            read[name] += size * a.batch * a.heads_q
            written[name.removesuffix("_per_head")] += size * a.batch * a.heads_kv


def counted_fa2(a: Attention, block_q: int, block_kv: int) -> Ledger:
    """A CTA a Q block forward, a CTA a K/V block backward; dQ by atomics between two small kernels."""
    read, written, e = Counter[str](), Counter[str](), a.dtype_bytes
    d, dv, whole = a.head_dim, a.head_dim_v, a.seqlen_q
    pairs = list(head_visits(a, block_q, block_kv))
    for p in passes(a):
        for _ in range(a.batch * a.heads_q):
            if p == "fwd":
                for rows in ranges(a.seqlen_q, block_q):
                    read.update(Q=len(rows) * d * e)
                    written.update(O=len(rows) * dv * e, LSE=len(rows) * 4)
                    for _, keys in (pair for pair in pairs if pair[0] == rows):
                        read.update(K=len(keys) * d * e, V=len(keys) * dv * e)
                continue
            read.update(O=whole * dv * e, dO=whole * dv * e)
            written.update(D=whole * 4, dQ_sum=whole * d * 4)
            for keys in ranges(a.seqlen_kv, block_kv):
                read.update(K=len(keys) * d * e, V=len(keys) * dv * e)
                for rows, _ in (pair for pair in pairs if pair[1] == keys):
                    r = len(rows)
                    read.update(Q=r * d * e, dO=r * dv * e, LSE=r * 4, D=r * 4)
                    written.update(dQ_sum=r * d * 4)
                written.update(kv_gradients(a, len(keys)))
            read.update(dQ_sum=whole * d * 4)
            written.update(dQ=whole * d * e)
        if p == "bwd":
            group_sums(a, read, written)
    return read, written


def counted_standard(a: Attention, tile: int, mask: str, dropout: bool) -> Ledger:
    """Kernel by kernel and tile by tile; X is rows (q) or keys (kv) wide, pair tensors are rows x keys."""
    read, written, e = Counter[str](), Counter[str](), a.dtype_bytes
    q, kv = {"Q": a.head_dim, "dO": a.head_dim_v, "dQ": a.head_dim}, {"K": a.head_dim, "V": a.head_dim_v}
    q_tiles, kv_tiles = ranges(a.seqlen_q, tile), ranges(a.seqlen_kv, tile)
    pair = a.seqlen_q * a.seqlen_kv

    def scores(q_name: str, kv_name: str, out: str) -> None:
        for rows in q_tiles:
            for keys in kv_tiles:
                read.update({q_name: len(rows) * q[q_name] * e, kv_name: len(keys) * kv[kv_name] * e})
                written.update({out: len(rows) * len(keys) * e})

    def over_keys(pairs: str, kv_name: str, out: str, columns: int) -> None:
        for rows in q_tiles:
            for keys in kv_tiles:
                read.update({pairs: len(rows) * len(keys) * e, kv_name: len(keys) * kv[kv_name] * e})
            written.update({out: len(rows) * columns * e})

    def over_rows(pairs: str, q_name: str, kv_name: str) -> None:
        suffix = "" if a.heads_q == a.heads_kv else "_per_head"
        for keys in kv_tiles:
            for rows in q_tiles:
                read.update({pairs: len(rows) * len(keys) * e, q_name: len(rows) * q[q_name] * e})
            written.update({f"d{kv_name}{suffix}": len(keys) * kv[kv_name] * e})

    for p in passes(a):
        for _ in range(a.batch * a.heads_q):
            if p == "fwd":
                scores("Q", "K", "S")
                if mask != "none":
                    read.update(S=pair * e)
                    written.update(S=pair * e)
                read.update(S=pair * e)
                written.update(P=pair * e)
                if dropout:
                    read.update(P=pair * e)
                    written.update(P=pair * e, keep=pair)
                over_keys("P", "V", "O", a.head_dim_v)
            else:
                over_rows("P", "dO", "V")
                scores("dO", "V", "dP")
                if dropout:
                    read.update(dP=pair * e, keep=pair)
                    written.update(dP=pair * e)
                read.update(P=pair * e, dP=pair * e)
                written.update(dS=pair * e)
                if mask == "fill":
                    read.update(dS=pair * e)
                    written.update(dS=pair * e)
                over_keys("dS", "K", "dQ", a.head_dim)
                over_rows("dS", "Q", "K")
        if p == "bwd":
            group_sums(a, read, written)
    return read, written


def ledger(t: Traffic) -> tuple[dict[str, int], dict[str, int]]:
    return t.reads, t.writes


def nonzero(counted: Ledger) -> tuple[dict[str, int], dict[str, int]]:
    return {k: v for k, v in counted[0].items() if v}, {k: v for k, v in counted[1].items() if v}
