"""Exact attention in float64: what every schedule's numbers are compared with.

Shapes: Q (batch, heads_q, rows_q, d), K (batch, heads_kv, rows_kv, d), V (batch, heads_kv, rows_kv, d_v). Query heads share K/V heads
in groups. Causal is aligned bottom-right; a row that sees no key gives O = 0 and LSE = -inf.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def _spread(x: Array, heads: int) -> Array:
    """Repeat each K/V head for its group of query heads."""
    return np.repeat(np.asarray(x, np.float64), heads // x.shape[1], axis=1)


def _scores(q: Array, k: Array, causal: bool, scale: float) -> Array:
    s: Array = scale * np.asarray(q, np.float64) @ _spread(k, q.shape[1]).swapaxes(-1, -2)
    if causal:
        rows, cols = s.shape[-2:]
        hidden = np.arange(cols)[None, :] > np.arange(rows)[:, None] + cols - rows
        s[..., hidden] = -np.inf
    return s


def forward(q: Array, k: Array, v: Array, *, causal: bool = False, scale: float | None = None) -> tuple[Array, Array]:
    """(O, LSE) in float64: O (batch, heads_q, rows_q, d_v), LSE = ln sum exp(scores) (batch, heads_q, rows_q)."""
    s = _scores(q, k, causal, q.shape[-1] ** -0.5 if scale is None else scale)
    m = s.max(axis=-1, keepdims=True)
    m = np.where(np.isneginf(m), 0.0, m)
    p = np.exp(s - m)
    total = p.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (m + np.log(total))[..., 0]
    return p / np.where(total > 0, total, 1.0) @ _spread(v, q.shape[1]), lse


def backward(
    q: Array, k: Array, v: Array, o: Array, lse: Array, do: Array, *, causal: bool = False, scale: float | None = None
) -> tuple[Array, Array, Array]:
    """(dQ, dK, dV) in float64 from O, LSE and dO (FA1 algorithm 4: P recomputed, D = rowsum(dO * O)); K/V groups are summed."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    heads = q.shape[1]
    seen = np.where(np.isneginf(lse), np.inf, lse)[..., None]  # a row with no key has no probabilities
    p = np.exp(_scores(q, k, causal, scale) - seen)
    do = np.asarray(do, np.float64)
    dv = p.swapaxes(-1, -2) @ do
    dp = do @ _spread(v, heads).swapaxes(-1, -2)
    ds = p * (dp - (do * np.asarray(o, np.float64)).sum(axis=-1, keepdims=True))
    dq = scale * ds @ _spread(k, heads)
    dk = scale * ds.swapaxes(-1, -2) @ np.asarray(q, np.float64)
    return dq, _grouped(dk, k.shape[1]), _grouped(dv, k.shape[1])


def _grouped(x: Array, heads_kv: int) -> Array:
    batch, heads, rows, d = x.shape
    out: Array = x.reshape(batch, heads_kv, heads // heads_kv, rows, d).sum(axis=2)
    return out


def _blocks(s: Array, v: Array, block_kv: int) -> Iterator[tuple[Array, Array]]:
    for start in range(0, s.shape[-1], block_kv):
        yield s[..., start : start + block_kv], v[..., start : start + block_kv, :]


def online_softmax(
    q: Array, k: Array, v: Array, *, block_kv: int, causal: bool = False, scale: float | None = None, deferred: bool = True
) -> tuple[Array, Array]:
    """(O, LSE) by the recurrence over K/V blocks of ``block_kv`` keys, in float64.

    ``deferred``: FA2's form (algorithm 1: O stays unscaled, one divide at the end); else FA1's, which divides in every step.
    """
    s = _scores(q, k, causal, q.shape[-1] ** -0.5 if scale is None else scale)
    values = _spread(v, q.shape[1])
    m = np.full(s.shape[:-1], -np.inf)
    l = np.zeros_like(m)
    o = np.zeros((*m.shape, v.shape[-1]))
    for block, v_block in _blocks(s, values, block_kv):
        top = np.maximum(m, block.max(axis=-1))
        safe = np.where(np.isneginf(top), 0.0, top)
        p = np.exp(block - safe[..., None])
        old = np.exp(m - safe)
        total = old * l + p.sum(axis=-1)
        if deferred:
            o = old[..., None] * o + p @ v_block
        else:
            o = ((old * l)[..., None] * o + p @ v_block) / np.where(total > 0, total, 1.0)[..., None]
        m, l = top, total
    if deferred:
        o = o / np.where(l > 0, l, 1.0)[..., None]
    with np.errstate(divide="ignore"):
        lse = np.where(l > 0, m, 0.0) + np.log(l)
    return o, lse


def round_bf16(x: Array) -> Array:
    """float32 values rounded to the nearest bf16, ties to even (8 bits of mantissa, float32's exponent range)."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    special = (bits & 0x7F800000) == 0x7F800000  # infinities and NaN keep their bits
    out: Array = np.where(special, bits, rounded).astype(np.uint32).view(np.float32)
    return out


def round_fp16(x: Array) -> Array:
    """float32 values rounded to the nearest fp16, ties to even."""
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float32).astype(np.float16).astype(np.float32)
